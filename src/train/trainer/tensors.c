/* SPDX-License-Identifier: MIT */
/* The tensors of a checkpoint: listed, each with its data in the process that writes it, and loaded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/program.h"
#include "train/trainer/state.h"

static const char TRAINED[] = ".trained";

/* A list of tensors being made, with the memory that is left for copies. */
typedef struct listing {
    size_t count;
    float *copy;
    bool writes; /* only the data that this process writes */
} listing;

/* How many floats hold so many bytes. */
static size_t floats_for(size_t bytes) {
    return (bytes + sizeof(float) - 1) / sizeof(float);
}

/* Adds a tensor of a parameter to the list: host memory as it is, device memory and halves copied. */
static bool list_tensor(trainer *t, listing *list, vjp_program *program, vjp_value value, const char *name,
                        const char *kind, size_t parameter) {
    vjp_tensor tensor = vjp_graph_describe(t->model->graph, value);
    size_t at = list->count++;
    const void *data = NULL;
    if (!list->writes || split_owns(&t->writers, parameter)) {
        size_t bytes = (size_t)count_of(&tensor) * vjp_dtype_size((vjp_dtype)tensor.dtype);
        const program_value *place;
        if (program_find(program, value, &place) != VJP_OK) return false;
        tensor = place->tensor;
        data = (const char *)tensor.data + tensor.offset;
        if (!vjp_device_is_host(t->device) || place->halves) {
            if (vjp_program_read(program, value, list->copy, bytes) != VJP_OK) return false;
            data = list->copy;
            list->copy += floats_for(bytes);
        }
    }
    snprintf(t->name[at], sizeof t->name[at], "%s%s", name, kind);
    t->tensor[at] = (safetensors_tensor){.name = t->name[at], .dtype = tensor.dtype, .ndim = tensor.ndim, .data = data};
    memcpy(t->tensor[at].shape, tensor.shape, sizeof tensor.shape);
    return true;
}

/* The weights of the model, then what the optimiser keeps; `models` is how many the first are. */
static bool list_all(trainer *t, listing *list, size_t *models) {
    bool ok = true;
    for (size_t i = 0; i < t->count && ok; i++)
        ok = t->share ? list_tensor(t, list, updating(t), t->track[i].average, t->trained[i]->name, "", i)
                      : list_tensor(t, list, t->first, t->values[i], t->trained[i]->name, "", i);
    *models = list->count;
    for (size_t i = 0; i < t->count && ok; i++) {
        const char *name = t->trained[i]->name;
        for (int k = 0; k < KINDS && ok; k++)
            if (t->track[i].state[k])
                ok = list_tensor(t, list, updating(t), t->track[i].state[k], name, trainer_kinds[k].file, i);
        if (t->share) ok = ok && list_tensor(t, list, t->first, t->values[i], name, TRAINED, i);
    }
    for (int i = 0; i < LOSS_SCALE_STATES && t->options.loss_scale != 0 && ok; i++)
        ok = list_tensor(t, list, updating(t), t->scaling.state[i], loss_scale_names[i], "", 0);
    return ok;
}

bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]) {
    listing list = {.copy = t->copy, .writes = true};
    *model_count = 0;
    if (t->swapped) return train_fail(error, "a validation failed and left weights and averages exchanged");
    bool ok = list_all(t, &list, model_count) || device_failed(t, error);
    *model = t->tensor;
    *optimiser = t->tensor + *model_count;
    *optimiser_count = list.count - *model_count;
    return ok;
}

bool trainer_common_tensors(trainer *t, const safetensors_tensor **tensors, size_t *count, char error[TRAIN_ERROR]) {
    listing list = {.copy = t->copy};
    size_t ignored;
    bool ok = true;
    if (!t->split.group) ok = list_all(t, &list, &ignored);
    for (size_t i = 0; t->split.group && ok && i < t->count; i++)
        ok = list_tensor(t, &list, t->first, t->values[i], t->trained[i]->name, "", i);
    *tensors = t->tensor;
    *count = list.count;
    return ok || device_failed(t, error);
}

bool trainer_state_name(const trainer *t, size_t index, char name[TRAINER_NAME]) {
    for (size_t i = 0; i < t->count; i++)
        for (int k = 0; k <= KINDS; k++) {
            bool is_kept = k < KINDS ? t->track[i].state[k] != 0 : t->share != 0;
            if (!is_kept || index--) continue;
            snprintf(name, TRAINER_NAME, "%s%s", t->trained[i]->name, k < KINDS ? trainer_kinds[k].file : TRAINED);
            return true;
        }
    if (t->options.loss_scale == 0 || index >= LOSS_SCALE_STATES) return false;
    snprintf(name, TRAINER_NAME, "%s", loss_scale_names[index]);
    return true;
}

/* The value of that name in a checkpoint, a program that holds it, and whether this process does. 0: there is none. */
static vjp_value find(trainer *t, const char *name, vjp_program **program, bool *held) {
    *program = t->first;
    *held = true;
    for (int i = 0; i < t->model->parameters; i++)
        if (strcmp(name, t->model->parameter[i].name) == 0) return t->model->parameter[i].value;
    for (size_t i = 0; i < t->count; i++) {
        const char *own = t->trained[i]->name;
        size_t length = strlen(own);
        if (strncmp(name, own, length) != 0) continue;
        if (strcmp(name + length, TRAINED) == 0) return t->trained[i]->value;
        *program = updating(t);
        *held = split_owns(&t->split, (size_t)i);
        for (int k = 0; k < KINDS; k++)
            if (strcmp(name + length, trainer_kinds[k].file) == 0) return t->track[i].state[k];
    }
    *program = updating(t);
    for (int i = 0; i < LOSS_SCALE_STATES && t->options.loss_scale != 0; i++)
        if (strcmp(name, loss_scale_names[i]) == 0) return t->scaling.state[i];
    return 0;
}

bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]) {
    vjp_program *program;
    bool held;
    vjp_value value = find(t, tensor->name, &program, &held);
    if (value && !held) return true;
    if (!value) return train_fail(error, "the model has no tensor %s", tensor->name);
    vjp_tensor own = vjp_graph_describe(t->model->graph, value);
    bool is_moment = program == updating(t) && own.dtype != tensor->dtype;
    for (int i = 0; i < t->model->parameters && is_moment; i++)
        is_moment = value != t->model->parameter[i].value;
    if (is_moment)
        return train_fail(error, "%s is %s in the file, and the run keeps it in %s: its settings were changed",
                          tensor->name, tensor->type, vjp_dtype_name((vjp_dtype)own.dtype));
    return model_load(t->model, program, value, tensor, error);
}
