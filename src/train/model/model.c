/* SPDX-License-Identifier: MIT */
/* The list of a model's parameters, and how they are loaded. */
#include "train/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/half.h"
#include "graph/program.h"

vjp_value model_out_of_memory(train_model *model, const char *what) {
    if (model->graph) graph_fail(model->graph, VJP_OUT_OF_MEMORY, NULL, "there is no memory for %s", what);
    return 0;
}

static vjp_value add(train_model *model, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape,
                     model_parameter parameter) {
    if (model->parameters == model->room) {
        int room = model->room ? 2 * model->room : 64;
        model_parameter *more = realloc(model->parameter, (size_t)room * sizeof *more);
        if (!more) return model_out_of_memory(model, name);
        model->parameter = more;
        model->room = room;
    }
    parameter.value = vjp_graph_parameter(model->graph, name, dtype, ndim, shape);
    if (!parameter.value) return 0;
    snprintf(parameter.name, sizeof parameter.name, "%s", name);
    model->parameter[model->parameters++] = parameter;
    return parameter.value;
}

vjp_value model_add(train_model *model, const char *name, double centre, double spread, bool decays, int ndim,
                    const int64_t *shape) {
    return add(model, name, model->parameter_type, ndim, shape,
               (model_parameter){.spread = spread, .centre = centre, .decays = decays});
}

vjp_value model_add_uniform(train_model *model, const char *name, double bound, int64_t out, int64_t in) {
    return add(model, name, model->parameter_type, 2, (const int64_t[]){out, in},
               (model_parameter){.spread = bound, .uniform = true, .decays = true});
}

vjp_value model_add_frozen(train_model *model, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape) {
    return add(model, name, dtype, ndim, shape, (model_parameter){.frozen = true});
}

vjp_value model_linear(vjp_graph *graph, vjp_value x, vjp_value weight, vjp_value bias, vjp_activation activation) {
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.activation = activation;
    linear.transpose_b = 1;
    return vjp_graph_linear(graph, x, weight, bias, 0, 0, &linear);
}

vjp_value model_loss(vjp_graph *graph, vjp_value logits, vjp_value target, double label_smoothing) {
    vjp_cross_entropy_attributes loss = VJP_CROSS_ENTROPY_DEFAULTS;
    loss.label_smoothing = label_smoothing;
    return vjp_graph_cross_entropy(graph, logits, target, &loss);
}

void model_free(train_model *model) {
    vjp_graph_destroy(model->graph);
    free(model->parameter);
    *model = (train_model){0};
}

static int64_t size_of(const train_model *model, bool frozen) {
    int64_t size = 0;
    for (int i = 0; i < model->parameters; i++) {
        if (model->parameter[i].frozen && !frozen) continue;
        vjp_tensor tensor = vjp_graph_describe(model->graph, model->parameter[i].value);
        int64_t count = 1;
        for (int axis = 0; axis < tensor.ndim; axis++)
            count *= tensor.shape[axis];
        size += count;
    }
    return size;
}

int64_t model_size(const train_model *model) {
    return size_of(model, true);
}

int64_t model_trained_size(const train_model *model) {
    return size_of(model, false);
}

static model_parameter *find(const train_model *model, const char *name) {
    for (int i = 0; i < model->parameters; i++)
        if (strcmp(model->parameter[i].name, name) == 0) return &model->parameter[i];
    return NULL;
}

int model_decays(void *model, const char *name, const vjp_tensor *parameter) {
    (void)parameter;
    const model_parameter *p = find(model, name);
    return p && p->decays;
}

void model_mark_outer(train_model *model, const char *name) {
    model_parameter *p = find(model, name);
    if (p) p->outer = true;
}

int model_is_hidden(void *model, const char *name, const vjp_tensor *parameter) {
    (void)parameter;
    const model_parameter *p = find(model, name);
    return p && !p->outer;
}

/* ---- Loading ----------------------------------------------------------------------------------------- */

/* Numbers that are read and converted at a time: no tensor is in memory twice. */
enum { LOAD_NUMBERS = 1 << 18 };

static void widen(const uint16_t *from, int dtype, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++)
        to[i] = dtype == VJP_BF16 ? vjp_bf16_to_f32(from[i]) : vjp_f16_to_f32(from[i]);
}

/* Whether the file's tensor has the shape of the model's, and numbers that can be read. */
static bool check_tensor(const vjp_tensor *own, const safetensors_tensor *tensor, int64_t *count, char *error) {
    bool same = own->ndim == tensor->ndim;
    *count = 1;
    for (int i = 0; i < own->ndim && same; i++) {
        same = own->shape[i] == tensor->shape[i];
        *count *= own->shape[i];
    }
    if (!same) return train_fail(error, "%s has another shape in the file than in the model", tensor->name);
    if (tensor->dtype != VJP_F32 && tensor->dtype != VJP_BF16 && tensor->dtype != VJP_F16)
        return train_fail(error, "%s is %s in the file; it must be F32, BF16 or F16", tensor->name, tensor->type);
    return true;
}

/* NULL: `error` says so. It holds LOAD_NUMBERS numbers in f32, and after them as many in 16 bits. */
static float *new_buffer(const safetensors_tensor *tensor, char *error) {
    float *buffer = malloc(LOAD_NUMBERS * (sizeof *buffer + sizeof(uint16_t)));
    if (!buffer) train_fail(error, "no memory for %s", tensor->name);
    return buffer;
}

/* Reads numbers [at, at + count) of a tensor as f32. */
static bool read_part(const safetensors_tensor *tensor, int64_t at, int64_t count, float *buffer, char *error) {
    size_t size = vjp_dtype_size((vjp_dtype)tensor->dtype);
    bool wide = tensor->dtype == VJP_F32;
    uint16_t *narrow = (uint16_t *)(void *)(buffer + LOAD_NUMBERS);
    if (!safetensors_fetch(tensor, (size_t)at * size, (size_t)count * size, wide ? (void *)buffer : narrow, error))
        return false;
    if (!wide) widen(narrow, tensor->dtype, count, buffer);
    return true;
}

/* Writes f32 numbers as another float type. */
static void narrow(const float *from, vjp_dtype dtype, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i < count; i++)
        to[i] = dtype == VJP_BF16 ? vjp_f32_to_bf16(from[i]) : vjp_f32_to_f16(from[i]);
}

bool model_load(const train_model *model, vjp_program *program, vjp_value value, const safetensors_tensor *tensor,
                char error[TRAIN_ERROR]) {
    vjp_tensor own = vjp_graph_describe(model->graph, value);
    const program_value *place;
    int64_t count;
    if (!check_tensor(&own, tensor, &count, error)) return false;
    if (program_find(program, value, &place) != VJP_OK)
        return train_fail(error, "%s is not used by the model", tensor->name);
    vjp_dtype dtype = (vjp_dtype)place->tensor.dtype;
    bool same = (int)dtype == tensor->dtype; /* copied as they are */
    if (dtype != VJP_F32 && dtype != VJP_BF16 && dtype != VJP_F16)
        return train_fail(error, "%s is %s in the model; only f32, bf16 and f16 are loaded", tensor->name,
                          vjp_dtype_name(dtype));
    float *buffer = new_buffer(tensor, error);
    bool ok = buffer != NULL;
    uint16_t *narrowed = (uint16_t *)(void *)(buffer + LOAD_NUMBERS);
    const void *from = same || dtype == VJP_F32 ? (const void *)buffer : narrowed;
    size_t size = vjp_dtype_size(dtype);
    for (int64_t at = 0; at < count && ok; at += LOAD_NUMBERS) {
        int64_t some = vjp_min(LOAD_NUMBERS, count - at);
        ok = same ? safetensors_fetch(tensor, (size_t)at * size, (size_t)some * size, buffer, error)
                  : read_part(tensor, at, some, buffer, error);
        if (ok && !same && dtype != VJP_F32) narrow(buffer, dtype, some, narrowed);
        ok = ok && (program_upload(program, place, (size_t)at, from, (size_t)some) == VJP_OK ||
                    train_fail(error, "%s cannot be written to the device", tensor->name));
    }
    free(buffer);
    return ok;
}

bool model_read(const safetensors_tensor *tensor, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]) {
    int64_t count;
    if (!check_tensor(want, tensor, &count, error)) return false;
    if (tensor->dtype == want->dtype)
        return safetensors_fetch(tensor, 0, (size_t)count * vjp_dtype_size((vjp_dtype)want->dtype), to, error);
    float *buffer = new_buffer(tensor, error);
    bool ok = buffer != NULL;
    for (int64_t at = 0; at < count && ok; at += LOAD_NUMBERS) {
        int64_t some = vjp_min(LOAD_NUMBERS, count - at);
        ok = read_part(tensor, at, some, buffer, error);
        if (ok && want->dtype == VJP_F32)
            memcpy((float *)to + at, buffer, (size_t)some * sizeof *buffer);
        else if (ok)
            narrow(buffer, (vjp_dtype)want->dtype, some, (uint16_t *)to + at);
    }
    free(buffer);
    return ok;
}
