/* SPDX-License-Identifier: MIT */
/*
 * What test_transformers.py compares: the logits and the loss of a checkpoint, computed by vjp.
 *
 *     logits_probe DIR TOKENS BATCH CONTEXT OUT
 *
 * TOKENS is a file of BATCH rows of CONTEXT + 1 numbers, i32; OUT becomes a safetensors file with "logits" and "loss".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/files/checkpoint.h"
#include "train/model/llama.h"

enum { BROKEN = 1, MISUSE = 2 };

static bool read_rows(const char *path, int64_t batch, int64_t context, int32_t *input, int32_t *target, char *error) {
    FILE *file = fopen(path, "rb");
    if (!file) return train_fail(error, "%s cannot be opened", path);
    bool ok = true;
    for (int64_t row = 0; row < batch && ok; row++) {
        int32_t first;
        ok = fread(&first, sizeof first, 1, file) == 1 &&
             fread(target + row * context, sizeof *target, (size_t)context, file) == (size_t)context;
        if (!ok) break;
        input[row * context] = first;
        memcpy(input + row * context + 1, target + row * context, (size_t)(context - 1) * sizeof *input);
    }
    fclose(file);
    return ok || train_fail(error, "%s has fewer than %lld rows", path, (long long)batch);
}

static bool load(const checkpoint *from, const train_model *model, vjp_program *program, char *error) {
    for (int i = 0; i < model->parameters; i++) {
        const safetensors_tensor *tensor = checkpoint_tensor(from, model->parameter[i].name);
        if (!tensor) return train_fail(error, "there is no %s", model->parameter[i].name);
        if (!model_load(model, program, model->parameter[i].value, tensor, error)) return false;
    }
    return true;
}

static bool compute(vjp_device *device, const train_model *model, vjp_program *program, const int32_t *input,
                    const int32_t *target, size_t bytes, const char *out, char *error) {
    vjp_tensor at = vjp_graph_describe(model->graph, model->logits);
    safetensors_tensor tensor[] = {{.name = "logits", .dtype = VJP_F32, .ndim = at.ndim},
                                   {.name = "loss", .dtype = VJP_F32}};
    memcpy(tensor[0].shape, at.shape, sizeof at.shape);
    size_t count = (size_t)(at.shape[0] * at.shape[1] * at.shape[2]);
    float loss, *logits = malloc(count * sizeof *logits);
    tensor[0].data = logits;
    tensor[1].data = &loss;
    bool ok = logits && vjp_program_write(program, model->input, input, bytes) == VJP_OK &&
              vjp_program_write(program, model->target, target, bytes) == VJP_OK &&
              vjp_program_run(program) == VJP_OK && vjp_synchronize(device) == VJP_OK &&
              vjp_program_read(program, model->logits, logits, count * sizeof *logits) == VJP_OK &&
              vjp_program_read(program, model->loss, &loss, sizeof loss) == VJP_OK;
    if (!ok) train_fail(error, "%s", vjp_error(device));
    ok = ok && safetensors_write(out, tensor, 2, NULL, 0, error);
    free(logits);
    return ok;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: logits_probe DIR TOKENS BATCH CONTEXT OUT\n");
        return MISUSE;
    }
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR] = "";
    const llama_options options = {.batch = atoll(argv[3]), .context = atoll(argv[4]), .dtype = VJP_F32};
    size_t bytes = (size_t)(options.batch * options.context) * sizeof(int32_t);
    checkpoint from = {0};
    llama_config config;
    train_model model = {0};
    vjp_device *device = NULL;
    vjp_program *program = NULL;
    int32_t *input = malloc(bytes + 1), *target = malloc(bytes + 1);
    bool ok = input && target && read_rows(argv[2], options.batch, options.context, input, target, error) &&
              checkpoint_open_newest(argv[1], path, &from, error) &&
              llama_config_read(from.config.root, &config, error);
    if (ok) {
        llama_build(&model, &config, &options);
        const vjp_value results[] = {model.logits, model.loss};
        ok = vjp_open("cpu", NULL, &device) == VJP_OK &&
             vjp_compile(device, model.graph, results, 2, NULL, &program) == VJP_OK;
        if (!ok) train_fail(error, "%s", vjp_error(device));
        ok = ok && load(&from, &model, program, error) &&
             compute(device, &model, program, input, target, bytes, argv[5], error);
    }
    if (!ok) fprintf(stderr, "logits_probe: %s\n", error);
    vjp_program_destroy(program);
    vjp_close(device);
    model_free(&model);
    checkpoint_close(&from);
    free(input);
    free(target);
    return ok ? 0 : BROKEN;
}
