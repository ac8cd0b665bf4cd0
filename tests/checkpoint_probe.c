/* SPDX-License-Identifier: MIT */
/*
 * vjp's side of test_transformers.py:
 *
 *     checkpoint_probe write DIR f32|bf16 tied|untied     saves a small Llama whose weights follow a rule
 *     checkpoint_probe read DIR                           prints the config and each weight's sum as JSON
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/half.h"
#include "train/files/checkpoint.h"
#include "train/model/llama_config.h"

enum { BROKEN = 1, MISUSE = 2 };

static int complain(const char *error) {
    fprintf(stderr, "checkpoint_probe: %s\n", error);
    return BROKEN;
}

static int64_t elements_of(int ndim, const int64_t *shape) {
    int64_t count = 1;
    for (int i = 0; i < ndim; i++)
        count *= shape[i];
    return count;
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

/* Element `i` of weight `w`; bf16 holds it exactly. test_transformers.py has the same rule. */
static float rule(int64_t w, int64_t i) {
    return (float)((w * 31 + i * 7) % 101 - 50) / 64;
}

static void *fill(const llama_weight *weight, int64_t w, vjp_dtype dtype) {
    int64_t count = elements_of(weight->ndim, weight->shape);
    void *data = malloc((size_t)count * vjp_dtype_size(dtype));
    for (int64_t i = 0; data && i < count; i++)
        if (dtype == VJP_BF16)
            ((uint16_t *)data)[i] = vjp_f32_to_bf16(rule(w, i));
        else
            ((float *)data)[i] = rule(w, i);
    return data;
}

static int write_model(const char *dir, vjp_dtype dtype, bool tied) {
    const llama_config config = {.vocab_size = 256,
                                 .hidden_size = 32,
                                 .intermediate_size = 88,
                                 .layers = 2,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 16,
                                 .max_positions = 64,
                                 .rope_theta = 50000,
                                 .norm_eps = 1e-5,
                                 .tied = tied,
                                 .dtype = dtype,
                                 .begin_token = -1};
    size_t count = (size_t)llama_weight_count(&config);
    llama_weight *weights = calloc(count, sizeof *weights);
    safetensors_tensor *tensors = calloc(count, sizeof *tensors);
    char *text = llama_config_write(&config), error[TRAIN_ERROR] = "there is no memory";
    bool ok = weights && tensors && text;
    for (size_t i = 0; ok && i < count; i++) {
        weights[i] = llama_weight_at(&config, (int64_t)i);
        tensors[i] = (safetensors_tensor){.name = weights[i].name, .dtype = dtype, .ndim = weights[i].ndim};
        memcpy(tensors[i].shape, weights[i].shape, sizeof weights[i].shape);
        tensors[i].data = fill(&weights[i], (int64_t)i, dtype);
        ok = tensors[i].data != NULL;
    }
    const checkpoint_content content = {
        .step = 100, .config = text, .trainer = "{\"step\": 100}\n", .model = tensors, .model_count = count};
    ok = ok && checkpoint_save(dir, 1, &content, error);
    for (size_t i = 0; tensors && i < count; i++)
        free((void *)tensors[i].data);
    free(tensors);
    free(weights);
    free(text);
    return ok ? 0 : complain(error);
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

static double sum_of(const safetensors_tensor *tensor) {
    double sum = 0;
    size_t size = vjp_dtype_size((vjp_dtype)tensor->dtype);
    char *data = malloc(tensor->bytes + 1), error[TRAIN_ERROR];
    if (!data || !safetensors_fetch(tensor, 0, tensor->bytes, data, error)) return NAN;
    for (size_t i = 0; i < tensor->bytes / size; i++) {
        const char *at = data + i * size;
        uint16_t bits;
        float number;
        memcpy(&bits, at, sizeof bits);
        if (tensor->dtype == VJP_F32)
            memcpy(&number, at, sizeof number);
        else
            number = tensor->dtype == VJP_BF16 ? vjp_bf16_to_f32(bits) : vjp_f16_to_f32(bits);
        sum += number;
    }
    free(data);
    return sum;
}

static bool put_weights(json_writer *w, const checkpoint *c, const llama_config *config, char *error) {
    json_put_object(w, "weights");
    for (int64_t i = 0, count = llama_weight_count(config); i < count; i++) {
        llama_weight weight = llama_weight_at(config, i);
        const safetensors_tensor *t = checkpoint_tensor(c, weight.name);
        if (!t) return train_fail(error, "there is no %s", weight.name);
        if (t->ndim != weight.ndim || memcmp(t->shape, weight.shape, (size_t)t->ndim * sizeof *t->shape) != 0)
            return train_fail(error, "%s has another shape", weight.name);
        json_put_array(w, weight.name);
        json_put_text(w, NULL, t->type);
        json_put_real(w, NULL, sum_of(t));
        json_put_array_end(w);
    }
    json_put_object_end(w);
    json_put_integer(w, "tensors", (int64_t)c->model_count);
    json_put_integer(w, "files", (int64_t)c->file_count);
    return true;
}

static int read_model(const char *dir) {
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR];
    checkpoint c;
    llama_config config;
    if (!checkpoint_open_newest(dir, path, &c, error)) return complain(error);
    json_writer w = {0};
    json_put_object(&w, NULL);
    bool ok = llama_config_read(c.config.root, &config, error) && put_weights(&w, &c, &config, error);
    json_put_integer(&w, "head_dim", config.head_dim);
    json_put_real(&w, "rope_theta", config.rope_theta);
    json_put_real(&w, "norm_eps", config.norm_eps);
    json_put_text(&w, "dtype", vjp_dtype_name(config.dtype));
    json_put_object_end(&w);
    char *text = json_take(&w);
    if (ok && text) fputs(text, stdout);
    free(text);
    checkpoint_close(&c);
    return ok ? 0 : complain(error);
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "write") == 0)
        return write_model(argv[2], strcmp(argv[3], "bf16") == 0 ? VJP_BF16 : VJP_F32, strcmp(argv[4], "tied") == 0);
    if (argc == 3 && strcmp(argv[1], "read") == 0) return read_model(argv[2]);
    fprintf(stderr, "usage: checkpoint_probe write DIR f32|bf16 tied|untied | read DIR\n");
    return MISUSE;
}
