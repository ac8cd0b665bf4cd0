/* SPDX-License-Identifier: MIT */
/* The list of a model's parameters, and how they are loaded. */
#include "train/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/half.h"

vjp_value model_add(train_model *model, const char *name, double centre, double spread, bool decays, int ndim,
                    const int64_t *shape) {
    if (model->parameters == model->room) {
        int room = model->room ? 2 * model->room : 64;
        model_parameter *more = realloc(model->parameter, (size_t)room * sizeof *more);
        if (!more) return 0; /* the graph then reports a missing weight */
        model->parameter = more;
        model->room = room;
    }
    vjp_value value = vjp_graph_parameter(model->graph, name, model->parameter_type, ndim, shape);
    if (!value) return 0;
    model_parameter *p = &model->parameter[model->parameters++];
    *p = (model_parameter){.value = value, .spread = spread, .centre = centre, .decays = decays};
    snprintf(p->name, sizeof p->name, "%s", name);
    return value;
}

vjp_value model_linear(vjp_graph *graph, vjp_value x, vjp_value weight, vjp_value bias, vjp_activation activation) {
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.activation = activation;
    linear.transpose_b = 1;
    return vjp_graph_linear(graph, x, weight, bias, &linear);
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

int64_t model_size(const train_model *model) {
    int64_t size = 0;
    for (int i = 0; i < model->parameters; i++) {
        vjp_tensor tensor = vjp_graph_describe(model->graph, model->parameter[i].value);
        int64_t count = 1;
        for (int axis = 0; axis < tensor.ndim; axis++)
            count *= tensor.shape[axis];
        size += count;
    }
    return size;
}

int model_decays(void *model, const char *name, const vjp_tensor *parameter) {
    (void)parameter;
    const train_model *m = model;
    for (int i = 0; i < m->parameters; i++)
        if (strcmp(m->parameter[i].name, name) == 0) return m->parameter[i].decays;
    return 0;
}

static float element(const char *data, int dtype, int64_t i) {
    uint16_t half;
    memcpy(&half, data + 2 * i, sizeof half);
    return dtype == VJP_BF16 ? vjp_bf16_to_f32(half) : vjp_f16_to_f32(half);
}

bool model_load(const train_model *model, vjp_program *program, vjp_value value, const safetensors_tensor *tensor,
                char error[TRAIN_ERROR]) {
    vjp_tensor own = vjp_graph_describe(model->graph, value), place;
    bool same = own.ndim == tensor->ndim;
    int64_t count = 1;
    for (int i = 0; i < own.ndim && same; i++) {
        same = own.shape[i] == tensor->shape[i];
        count *= own.shape[i];
    }
    if (!same) return train_fail(error, "%s has another shape in the file than in the model", tensor->name);
    if (tensor->dtype != VJP_F32 && tensor->dtype != VJP_BF16 && tensor->dtype != VJP_F16)
        return train_fail(error, "%s is %s in the file; it must be F32, BF16 or F16", tensor->name, tensor->type);
    if (vjp_program_tensor(program, value, &place) != VJP_OK)
        return train_fail(error, "%s is not used by the model", tensor->name);
    float *copy = malloc((size_t)count * sizeof *copy + 1);
    if (!copy) return train_fail(error, "no memory for %s", tensor->name);
    /* 16-bit numbers are read into the upper half, where each is converted before its place is written. */
    size_t bytes = (size_t)count * vjp_dtype_size((vjp_dtype)tensor->dtype);
    char *data = (char *)copy + ((size_t)count * sizeof *copy - bytes);
    if (!safetensors_fetch(tensor, data, bytes, error)) {
        free(copy);
        return false;
    }
    for (int64_t i = 0; i < count && tensor->dtype != VJP_F32; i++)
        copy[i] = element(data, tensor->dtype, i);
    bool ok = vjp_program_write(program, value, copy, (size_t)count * sizeof *copy) == VJP_OK;
    if (!ok) train_fail(error, "%s cannot be written to the device", tensor->name);
    free(copy);
    return ok;
}
