/* SPDX-License-Identifier: MIT */
/* A model of a checkpoint on a device: its logits, its loss and the gradients of the loss. */
#ifndef VJP_TESTS_MODEL_RUN_H
#define VJP_TESTS_MODEL_RUN_H

#include <stdlib.h>
#include <string.h>

#include "train/files/checkpoint.h"
#include "train/model/llama.h"

typedef struct model_run {
    vjp_device *device;
    checkpoint from;
    llama_config config;
    train_model model;
    vjp_value *results; /* [2 + parameters]: logits, loss, gradients; 0: the parameter is frozen */
    vjp_program *program;
} model_run;

static inline bool model_run_load(model_run *r, char *error) {
    for (int i = 0; i < r->model.parameters; i++) {
        const model_parameter *p = &r->model.parameter[i];
        const safetensors_tensor *tensor = checkpoint_tensor(&r->from, p->name);
        if (!tensor) return train_fail(error, "there is no %s", p->name);
        if (!model_load(&r->model, r->program, p->value, tensor, error)) return false;
    }
    return true;
}

/* Close it in any case. */
static inline bool model_run_open(model_run *r, const char *device, const char *dir, int64_t batch, int64_t context,
                                  char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    *r = (model_run){0};
    llama_options options = {.batch = batch, .context = context, .dtype = VJP_F32};
    if (!checkpoint_open_newest(dir, path, &r->from, error) || !checkpoint_open_base(&r->from, NULL, error) ||
        !llama_config_read(r->from.config.root, &r->config, error) ||
        !llama_require_weights(&r->config, &r->from, error) || !lora_of(&r->from, &r->config, &options.lora, error))
        return false;
    llama_build(&r->model, &r->config, &options);
    size_t count = (size_t)r->model.parameters;
    vjp_value *wrt = calloc(count + 1, sizeof *wrt), *made = calloc(count + 2, sizeof *made);
    r->results = calloc(count + 2, sizeof *r->results);
    bool ok = wrt && made && r->results;
    size_t trained = 0;
    for (size_t i = 0; ok && i < count; i++)
        if (!r->model.parameter[i].frozen) wrt[trained++] = r->model.parameter[i].value;
    if (ok) {
        r->results[0] = made[0] = r->model.logits;
        r->results[1] = made[1] = r->model.loss;
        vjp_graph_grad(r->model.graph, r->model.loss, wrt, trained, NULL, 0, made + 2);
        for (size_t i = 0, k = 2; i < count; i++)
            if (!r->model.parameter[i].frozen) r->results[2 + i] = made[k++];
    }
    ok = ok && vjp_open(device, NULL, &r->device) == VJP_OK &&
         vjp_compile(r->device, r->model.graph, made, trained + 2, NULL, &r->program) == VJP_OK;
    free(wrt);
    free(made);
    if (!ok) return train_fail(error, "%s", r->device ? vjp_error(r->device) : "there is no memory");
    return model_run_load(r, error);
}

/* `rows` has context + 1 tokens per row of the batch. */
static inline bool model_run_compute(model_run *r, const int32_t *rows, char error[TRAIN_ERROR]) {
    size_t batch = (size_t)r->model.batch, context = (size_t)r->model.context, bytes = batch * context * sizeof *rows;
    int32_t *input = malloc(bytes), *target = malloc(bytes);
    bool ok = input && target;
    for (size_t row = 0; row < batch && ok; row++) {
        memcpy(input + row * context, rows + row * (context + 1), context * sizeof *rows);
        memcpy(target + row * context, rows + row * (context + 1) + 1, context * sizeof *rows);
    }
    ok = ok && vjp_program_write(r->program, r->model.input, input, bytes) == VJP_OK &&
         vjp_program_write(r->program, r->model.target, target, bytes) == VJP_OK &&
         vjp_program_run(r->program) == VJP_OK && vjp_synchronize(r->device) == VJP_OK;
    free(input);
    free(target);
    return ok || train_fail(error, "%s", vjp_error(r->device));
}

/* Result `i` as a tensor whose data the caller must free. NULL data: it cannot be read. */
static inline safetensors_tensor model_run_result(model_run *r, size_t i) {
    vjp_tensor at = vjp_graph_describe(r->model.graph, r->results[i]);
    safetensors_tensor tensor = {.dtype = VJP_F32, .ndim = at.ndim};
    size_t count = 1;
    for (int axis = 0; axis < at.ndim; axis++)
        count *= (size_t)(tensor.shape[axis] = at.shape[axis]);
    tensor.bytes = count * sizeof(float);
    void *data = malloc(tensor.bytes);
    if (data && vjp_program_read(r->program, r->results[i], data, tensor.bytes) != VJP_OK) {
        free(data);
        data = NULL;
    }
    tensor.data = data;
    return tensor;
}

static inline void model_run_close(model_run *r) {
    vjp_program_destroy(r->program);
    vjp_close(r->device);
    model_free(&r->model);
    checkpoint_close(&r->from);
    free(r->results);
}

#endif
