/* SPDX-License-Identifier: MIT */
/* Merging adapters; see merge.h. One file of the base is in memory at a time. */
#include "train/job/merge.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/half.h"
#include "core/system.h"
#include "files/sync.h"
#include "train/files/checkpoint_names.h"
#include "train/files/input.h"
#include "train/job/fit.h"
#include "train/model/lora.h"
#include "train/model/model.h"

typedef struct merging {
    vjp_device *device;
    const checkpoint *from;
    const char *path; /* of the adapters */
    char folder[CHECKPOINT_PATH];
    lora_config lora;
    int64_t merged;
} merging;

/* ---- Weights ----------------------------------------------------------------------------------------- */

/* Reads a tensor as f32, which the caller frees. NULL: `error` says why. */
static float *read_floats(const safetensors_tensor *tensor, int64_t *rows, int64_t *columns, char *error) {
    vjp_tensor want = vjp_tensor_of(NULL, VJP_F32, tensor->ndim, tensor->shape);
    size_t bytes;
    *rows = tensor->shape[0];
    *columns = tensor->shape[1];
    float *numbers = vjp_mul_size((size_t)*rows, (size_t)*columns * sizeof *numbers, &bytes) ? malloc(bytes + 1) : NULL;
    if (!numbers) {
        train_fail(error, "there is no memory for %.96s", tensor->name);
        return NULL;
    }
    if (model_read(tensor, &want, numbers, error)) return numbers;
    free(numbers);
    return NULL;
}

/* product = B A. */
static bool multiply(merging *m, const float *b, const float *a, int64_t out, int64_t rank, int64_t in, float *product,
                     char *error) {
    const vjp_tensor y = vjp_tensor_of(product, VJP_F32, 2, (const int64_t[]){out, in});
    const vjp_tensor left = vjp_tensor_of((void *)b, VJP_F32, 2, (const int64_t[]){out, rank});
    const vjp_tensor right = vjp_tensor_of((void *)a, VJP_F32, 2, (const int64_t[]){rank, in});
    const vjp_linear_attributes plain = VJP_LINEAR_DEFAULTS;
    return vjp_linear_forward(m->device, &y, NULL, &left, &right, NULL, NULL, NULL, &plain) == VJP_OK ||
           train_fail(error, "%s", vjp_error(m->device));
}

/* Adds scale times the product to a weight, and writes the sum in the weight's own dtype. */
static void add_product(const merging *m, const float *weight, const float *product, int64_t count, vjp_dtype dtype,
                        void *to) {
    const float scale = (float)lora_scale(&m->lora);
    for (int64_t i = 0; i < count; i++) {
        float sum = weight[i] + scale * product[i];
        if (dtype == VJP_F32)
            ((float *)to)[i] = sum;
        else
            ((uint16_t *)to)[i] = dtype == VJP_BF16 ? vjp_f32_to_bf16(sum) : vjp_f32_to_f16(sum);
    }
}

static bool merge_weight(merging *m, const safetensors_tensor *tensor, const char *a_name, const char *b_name, void *to,
                         char *error) {
    int64_t out, in, rank, rows;
    float *weight = read_floats(tensor, &out, &in, error);
    float *a = weight ? read_floats(checkpoint_tensor(m->from, a_name), &rank, &rows, error) : NULL;
    float *b = a ? read_floats(checkpoint_tensor(m->from, b_name), &rows, &rank, error) : NULL;
    float *product = b ? malloc((size_t)(out * in) * sizeof *product + 1) : NULL;
    bool ok = product || (b && train_fail(error, "there is no memory for %.96s", tensor->name));
    ok = ok && multiply(m, b, a, out, rank, in, product, error);
    if (ok) add_product(m, weight, product, out * in, (vjp_dtype)tensor->dtype, to);
    m->merged += ok;
    free(weight);
    free(a);
    free(b);
    free(product);
    return ok;
}

/* One tensor of the model that is written. */
static bool fill_tensor(merging *m, const safetensors_tensor *from, safetensors_tensor *to, char *error) {
    char a[LLAMA_NAME], b[LLAMA_NAME];
    void *data = malloc(from->bytes + 1);
    *to = *from;
    to->file = NULL;
    to->data = data;
    if (!data) return train_fail(error, "there is no memory for %.96s", from->name);
    if (from->dtype < 0) return train_fail(error, "%.96s is %s; it must be F32, BF16 or F16", from->name, from->type);
    return lora_adapts(&m->lora, from->name, a, b) ? merge_weight(m, from, a, b, data, error)
                                                   : safetensors_fetch(from, 0, from->bytes, data, error);
}

static bool merge_file(merging *m, const checkpoint_file *file, char *error) {
    static const safetensors_pair metadata[] = {{"format", "pt"}};
    char path[CHECKPOINT_PATH];
    size_t count = file->tensors.count;
    safetensors_tensor *tensors = calloc(count + 1, sizeof *tensors);
    bool ok = tensors || train_fail(error, "there is no memory for the %zu tensors of %.96s", count, file->name);
    for (size_t i = 0; i < count && ok; i++)
        ok = fill_tensor(m, &file->tensors.tensors[i], &tensors[i], error);
    ok = ok && checkpoint_path(path, error, "%s/%s", m->folder, file->name) &&
         safetensors_write(path, tensors, count, metadata, 1, error);
    for (size_t i = 0; tensors && i < count; i++)
        free((void *)tensors[i].data);
    free(tensors);
    return ok;
}

/* ---- Files ------------------------------------------------------------------------------------------- */

/* Copies a file, if it is there. */
static bool copy_file(const merging *m, const char *folder, const char *name, bool *copied, char *error) {
    enum { MAX_BYTES = 1 << 30, CHUNK = 1 << 16 };
    char from[CHECKPOINT_PATH], to[CHECKPOINT_PATH], chunk[CHUNK];
    system_status status;
    int64_t bytes;
    *copied = false;
    if (!checkpoint_path(from, error, "%s/%s", folder, name) || !checkpoint_path(to, error, "%s/%s", m->folder, name))
        return false;
    if (!system_status_of(from, &status)) return true;
    FILE *in = input_stream(from, MAX_BYTES, &bytes, error);
    if (!in) return false;
    FILE *out = system_stream(to, "wbx");
    bool ok = out || train_fail(error, "%.300s: it cannot be created: %s", to, strerror(errno));
    for (size_t some; ok && (some = fread(chunk, 1, sizeof chunk, in));)
        ok = fwrite(chunk, 1, some, out) == some ||
             train_fail(error, "%.300s: it cannot be written: %s", to, strerror(errno));
    if (ok && ferror(in)) ok = train_fail(error, "%.300s: it cannot be read: %s", from, strerror(errno));
    if (ok && (fflush(out) != 0 || !system_sync(system_number_of(out))))
        ok = train_fail(error, "%.300s: it cannot be written: %s", to, strerror(errno));
    fclose(in);
    if (out && fclose(out) != 0 && ok) ok = train_fail(error, "%.300s: it cannot be written: %s", to, strerror(errno));
    *copied = ok;
    return ok;
}

/* The config, the list of files where there are several, and what makes tokens of text. */
static bool copy_files(const merging *m, char *error) {
    static const char *const of_model[] = {"config.json", "generation_config.json"};
    static const char *const of_tokenizer[] = {"tokenizer.json",    "tokenizer_config.json", "special_tokens_map.json",
                                               "added_tokens.json", "tokenizer.model",       "vocab.json",
                                               "merges.txt",        "chat_template.jinja"};
    bool ok = true, copied;
    for (size_t i = 0; i < sizeof of_model / sizeof of_model[0] && ok; i++)
        ok = copy_file(m, m->from->base, of_model[i], &copied, error);
    if (m->from->index.root) ok = ok && copy_file(m, m->from->base, "model.safetensors.index.json", &copied, error);
    for (size_t i = 0; i < sizeof of_tokenizer / sizeof of_tokenizer[0] && ok; i++) {
        ok = copy_file(m, m->path, of_tokenizer[i], &copied, error);
        if (ok && !copied) ok = copy_file(m, m->from->base, of_tokenizer[i], &copied, error);
    }
    return ok;
}

/* Whether the largest file fits into memory, beside f32 copies of a weight, its product, and A and B, which are
 * smaller. */
static bool check_memory(const merging *m, char *error) {
    double needed = 0;
    for (size_t i = 0; i < m->from->file_count; i++) {
        const safetensors_file *file = &m->from->files[i].tensors;
        double bytes = 0, largest = 0;
        for (size_t k = 0; k < file->count; k++) {
            const safetensors_tensor *tensor = &file->tensors[k];
            size_t size = tensor->dtype < 0 ? 1 : vjp_dtype_size((vjp_dtype)tensor->dtype);
            bytes += (double)tensor->bytes;
            largest = fmax(largest, (double)(tensor->bytes / size));
        }
        needed = fmax(needed, bytes + 3 * largest * sizeof(float));
    }
    return fit_bytes(m->device, needed, "merging these adapters", error);
}

static bool check(merging *m, const char *out, char *error) {
    llama_config config;
    system_status status;
    if (!m->from->adapter_config.root)
        return train_fail(error, "%.300s has no adapters: there is nothing to merge", m->path);
    if (system_status_of_link(out, &status))
        return train_fail(error, "%.300s is already there: choose another -o", out);
    return llama_config_read(m->from->config.root, &config, error) && llama_require_weights(&config, m->from, error) &&
           lora_of(m->from, &config, &m->lora, error) && check_memory(m, error);
}

int64_t merge_adapters(vjp_device *device, const checkpoint *from, const char *path, const char *out,
                       char error[TRAIN_ERROR]) {
    merging m = {.device = device, .from = from, .path = path};
    char target[CHECKPOINT_PATH];
    if (!checkpoint_path(target, error, "%s", out)) return -1;
    for (size_t end = strlen(target); end > 1 && system_is_separator(target[end - 1]); end--)
        target[end - 1] = 0;
    if (!check(&m, target, error) || !checkpoint_path(m.folder, error, "%s.merging.tmp", target)) return -1;
    system_remove_tree(m.folder); /* of a merge that was killed */
    bool ok = checkpoint_make_folders(m.folder, error) && copy_files(&m, error);
    for (size_t i = 0; i < from->file_count && ok; i++)
        ok = merge_file(&m, &from->files[i], error);
    ok = ok && file_sync_folder(m.folder, error) &&
         (system_rename(m.folder, target) ||
          train_fail(error, "%.300s: it cannot be renamed to this: %s", target, strerror(errno))) &&
         file_sync_parent(target, error);
    if (!ok) system_remove_tree(m.folder);
    return ok ? m.merged : -1;
}
