/* SPDX-License-Identifier: MIT */
/*
 * What test_transformers.py and test_families.py compare: the logits, the loss and the gradients of a checkpoint,
 * computed by vjp.
 *
 *     logits_probe DIR TOKENS BATCH CONTEXT OUT
 *
 * TOKENS is a file of BATCH rows of CONTEXT + 1 numbers, i32; OUT becomes a safetensors file with "logits", "loss" and
 * "grad.<name>" for each parameter that is trained: all of them, or the adapters.
 */
#include <stdio.h>

#include "model_run.h"

enum { BROKEN = 1, MISUSE = 2 };

static int32_t *read_rows(const char *path, size_t count, char *error) {
    FILE *file = fopen(path, "rb");
    int32_t *rows = malloc(count * sizeof *rows + 1);
    bool ok = file && rows && fread(rows, sizeof *rows, count, file) == count;
    if (file) fclose(file);
    if (ok) return rows;
    free(rows);
    train_fail(error, "%s cannot be opened, or has fewer than %zu tokens", path, count);
    return NULL;
}

static bool write_results(model_run *r, const char *out, char *error) {
    size_t all = 2 + (size_t)r->model.parameters, count = 0;
    safetensors_tensor *tensors = calloc(all, sizeof *tensors);
    char(*names)[MODEL_NAME + 8] = calloc(all, sizeof *names);
    bool ok = tensors && names;
    for (size_t i = 0; i < all && ok; i++) {
        if (!r->results[i]) continue;
        tensors[count] = model_run_result(r, i);
        if (i < 2)
            snprintf(names[count], sizeof names[count], "%s", i ? "loss" : "logits");
        else
            snprintf(names[count], sizeof names[count], "grad.%s", r->model.parameter[i - 2].name);
        tensors[count].name = names[count];
        ok = tensors[count++].data != NULL;
    }
    ok = ok ? safetensors_write(out, tensors, count, NULL, 0, error) : train_fail(error, "the results cannot be read");
    for (size_t i = 0; tensors && i < count; i++)
        free((void *)tensors[i].data);
    free(tensors);
    free(names);
    return ok;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: logits_probe DIR TOKENS BATCH CONTEXT OUT\n");
        return MISUSE;
    }
    char error[TRAIN_ERROR] = "";
    int64_t batch = atoll(argv[3]), context = atoll(argv[4]);
    int32_t *rows = read_rows(argv[2], (size_t)(batch * (context + 1)), error);
    model_run r = {0};
    bool ok = rows && model_run_open(&r, "cpu", argv[1], batch, context, error) && model_run_compute(&r, rows, error) &&
              write_results(&r, argv[5], error);
    if (!ok) fprintf(stderr, "logits_probe: %s\n", error);
    model_run_close(&r);
    free(rows);
    return ok ? 0 : BROKEN;
}
