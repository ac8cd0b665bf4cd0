/* SPDX-License-Identifier: MIT */
/* The trainer: its programs, one step, and the tensors of a checkpoint. */
#include "train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

/* The gradient and the moments of one parameter. */
typedef struct tracked {
    vjp_value gradient, m, v;
    int64_t count;
} tracked;

struct trainer {
    vjp_device *device;
    train_model *model;
    trainer_options options;
    tracked *track;    /* [parameters] */
    vjp_value *values; /* [2 * parameters]: the parameters, then their gradients */
    vjp_value rate, step, norm, scale;
    vjp_program *first, *more; /* loss and gradients: written, or added to what is there */
    vjp_program *forward;      /* the loss alone */
    vjp_program *measure, *update;
    void *input;
    int32_t *target;
    size_t input_bytes, target_bytes;
    /* The results of trainer_tensors(). */
    safetensors_tensor *tensor; /* [3 * parameters]: weights, then moments */
    char (*name)[MODEL_NAME + 16];
    float *copy; /* all of them if the device's memory is not the host's, else as large as the largest parameter */
};

static bool device_failed(const trainer *t, char error[TRAIN_ERROR]) {
    return train_fail(error, "%s", vjp_error(t->device));
}

static int64_t count_of(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

double trainer_rate(const trainer_options *options, int64_t step) {
    if (step <= options->warmup) return options->rate * (double)step / (double)options->warmup;
    double done = (double)(step - options->warmup) / fmax(1, (double)(options->steps - options->warmup));
    double falls = 0.5 * (1 + cos(3.14159265358979323846 * fmin(done, 1)));
    return options->rate * (options->last_rate + (1 - options->last_rate) * falls);
}

/* ---- Programs ---------------------------------------------------------------------------------------- */

static vjp_value add_gradient(trainer *t, int parameter) {
    char name[MODEL_NAME + 16];
    const model_parameter *p = &t->model->parameter[parameter];
    vjp_tensor shape = vjp_graph_describe(t->model->graph, p->value);
    snprintf(name, sizeof name, "%s.grad", p->name);
    return vjp_graph_state(t->model->graph, name, VJP_F32, shape.ndim, shape.shape);
}

/* A moment that vjp_graph_minimize() added. */
static vjp_value find_state(const trainer *t, size_t parameter, const char *kind) {
    char name[MODEL_NAME + 16];
    snprintf(name, sizeof name, "%s.%s", t->model->parameter[parameter].name, kind);
    return vjp_graph_find(t->model->graph, name);
}

/* The gradients of the loss into states, and the program that computes both. */
static bool compile_gradients(trainer *t, vjp_value loss, int add, vjp_program **program) {
    size_t count = (size_t)t->model->parameters;
    vjp_value *results = calloc(count + 1, sizeof *results);
    if (!results) return vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory for %zu gradients", count) == VJP_OK;
    vjp_graph_grad(t->model->graph, loss, t->values, count, t->values + count, add, results);
    results[count] = t->model->loss;
    const vjp_program_options options = {.struct_size = sizeof(vjp_program_options), .share = t->first};
    vjp_status status = vjp_compile(t->device, t->model->graph, results, count + 1, &options, program);
    free(results);
    return status == VJP_OK;
}

/* A program that measures the norm of all gradients and stores the scale that clips them. */
static bool compile_measure(trainer *t) {
    vjp_graph *graph = t->model->graph;
    size_t count = (size_t)t->model->parameters;
    vjp_value scale = vjp_graph_clip_norm(graph, t->values + count, count, t->options.max_norm, &t->norm);
    t->scale = vjp_graph_state(graph, "trainer.scale", VJP_F32, 0, NULL);
    const vjp_value results[] = {t->norm, vjp_graph_assign(graph, t->scale, scale)};
    const vjp_program_options options = {.struct_size = sizeof(vjp_program_options), .share = t->first};
    return vjp_compile(t->device, graph, results, 2, &options, &t->measure) == VJP_OK;
}

/* A step of AdamW for every parameter. */
static bool compile_update(trainer *t) {
    vjp_graph *graph = t->model->graph;
    size_t count = (size_t)t->model->parameters;
    const vjp_adamw_attributes adamw = {.struct_size = sizeof adamw,
                                        .beta1 = t->options.beta1,
                                        .beta2 = t->options.beta2,
                                        .eps = t->options.eps,
                                        .weight_decay = t->options.weight_decay};
    const vjp_minimize_options minimize = {.struct_size = sizeof minimize,
                                           .parameters = t->values,
                                           .gradients = t->values + count,
                                           .count = count,
                                           .scale = t->scale,
                                           .adamw = &adamw,
                                           .decays = model_decays,
                                           .context = t->model};
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_graph_minimize(graph, 0, &minimize, &made);
    t->rate = made.lr;
    t->step = made.step;
    for (size_t i = 0; i < count; i++) {
        t->track[i].m = find_state(t, i, "m");
        t->track[i].v = find_state(t, i, "v");
    }
    const vjp_program_options options = {.struct_size = sizeof(vjp_program_options), .share = t->measure};
    return vjp_compile(t->device, graph, made.results, made.count, &options, &t->update) == VJP_OK;
}

static bool compile_all(trainer *t) {
    vjp_graph *graph = t->model->graph;
    for (int i = 0; i < t->model->parameters; i++) {
        vjp_tensor shape = vjp_graph_describe(graph, t->model->parameter[i].value);
        t->track[i] = (tracked){.gradient = add_gradient(t, i), .count = count_of(&shape)};
        t->values[i] = t->model->parameter[i].value;
        t->values[t->model->parameters + i] = t->track[i].gradient;
    }
    /* The mean over the parts of a batch. */
    vjp_value loss = t->model->loss;
    vjp_scale_attributes share = VJP_SCALE_DEFAULTS;
    share.factor = 1 / (double)t->options.accumulate;
    if (t->options.accumulate > 1) loss = vjp_graph_scale(graph, loss, &share);
    if (!compile_gradients(t, loss, 0, &t->first)) return false;
    if (t->options.accumulate > 1 && !compile_gradients(t, loss, 1, &t->more)) return false;
    return compile_measure(t) && compile_update(t);
}

static bool fill_initial_values(trainer *t) {
    for (int i = 0; i < t->model->parameters; i++) {
        const model_parameter *p = &t->model->parameter[i];
        if (vjp_program_init_normal(t->first, p->value, p->centre, p->spread, t->options.seed) != VJP_OK) return false;
    }
    return true;
}

/* How many numbers `copy` holds: all tensors of a checkpoint, or the initial values of one parameter. */
static size_t copy_count(vjp_device *device, const train_model *model) {
    if (!vjp_device_is_host(device)) return 3 * (size_t)model_size(model);
    size_t max = 0;
    for (int i = 0; i < model->parameters; i++) {
        vjp_tensor tensor = vjp_graph_describe(model->graph, model->parameter[i].value);
        if ((size_t)count_of(&tensor) > max) max = (size_t)count_of(&tensor);
    }
    return max;
}

static size_t bytes_of(const train_model *model, vjp_value value) {
    vjp_tensor tensor = vjp_graph_describe(model->graph, value);
    return (size_t)count_of(&tensor) * vjp_dtype_size((vjp_dtype)tensor.dtype);
}

trainer *trainer_create(vjp_device *device, train_model *model, const trainer_options *options,
                        char error[TRAIN_ERROR]) {
    if (vjp_graph_status(model->graph) != VJP_OK) {
        train_fail(error, "%s", vjp_graph_error(model->graph));
        return NULL;
    }
    trainer *t = calloc(1, sizeof *t);
    if (!t) {
        train_fail(error, "there is no memory for a trainer");
        return NULL;
    }
    size_t count = (size_t)model->parameters;
    *t = (trainer){.device = device, .model = model, .options = *options};
    t->input_bytes = bytes_of(model, model->input);
    t->target_bytes = bytes_of(model, model->target);
    t->track = calloc(count + 1, sizeof *t->track);
    t->values = calloc(2 * count + 1, sizeof *t->values);
    t->tensor = calloc(3 * count + 1, sizeof *t->tensor);
    t->name = calloc(3 * count + 1, sizeof *t->name);
    t->copy = malloc(copy_count(device, model) * sizeof *t->copy + 1);
    t->input = malloc(t->input_bytes + 1);
    t->target = malloc(t->target_bytes + 1);
    bool ok = t->track && t->values && t->tensor && t->name && t->copy && t->input && t->target;
    if (!ok)
        train_fail(error, "there is no memory for a model of %lld parameters", (long long)model_size(model));
    else if (!compile_all(t) || !fill_initial_values(t)) {
        device_failed(t, error);
        ok = false;
    }
    if (ok) return t;
    trainer_destroy(t);
    return NULL;
}

void trainer_destroy(trainer *t) {
    if (!t) return;
    vjp_program_destroy(t->update);
    vjp_program_destroy(t->measure);
    vjp_program_destroy(t->forward);
    vjp_program_destroy(t->more);
    vjp_program_destroy(t->first);
    free(t->track);
    free(t->values);
    free(t->tensor);
    free(t->name);
    free(t->copy);
    free(t->input);
    free(t->target);
    free(t);
}

vjp_program *trainer_gradients(trainer *t) {
    return t->first;
}

vjp_program *trainer_measure(trainer *t) {
    return t->measure;
}

vjp_program *trainer_update(trainer *t) {
    return t->update;
}

void trainer_interrupt(trainer *t) {
    vjp_program_interrupt(t->first);
    vjp_program_interrupt(t->more);
}

/* ---- Steps ------------------------------------------------------------------------------------------- */

/* Fills a program's input and target. */
static bool feed(trainer *t, vjp_program *program, const train_source *source, bool validation, uint64_t part) {
    source->fill(source->context, validation, part, t->input, t->target);
    return vjp_program_write(program, t->model->input, t->input, t->input_bytes) == VJP_OK &&
           vjp_program_write(program, t->model->target, t->target, t->target_bytes) == VJP_OK;
}

static bool run_part(trainer *t, vjp_program *program, const train_source *source, bool validation, uint64_t part,
                     double *loss) {
    float value = 0;
    bool ok = feed(t, program, source, validation, part) && vjp_program_run(program) == VJP_OK &&
              vjp_synchronize(t->device) == VJP_OK &&
              vjp_program_read(program, t->model->loss, &value, sizeof value) == VJP_OK;
    *loss = value;
    return ok;
}

/* A part's program: the first writes the gradients, the others add to them. */
static vjp_program *program_of(trainer *t, int64_t part) {
    return part ? t->more : t->first;
}

static uint64_t number_of(const trainer *t, int64_t step, int64_t part) {
    return (uint64_t)((step - 1) * t->options.accumulate + part);
}

static bool clear_gradients(trainer *t) {
    for (int i = 0; i < t->model->parameters; i++) {
        size_t bytes = (size_t)t->track[i].count * sizeof *t->copy;
        memset(t->copy, 0, bytes);
        if (vjp_program_write(t->first, t->track[i].gradient, t->copy, bytes) != VJP_OK) return false;
    }
    return true;
}

/*
 * Finds where a number that is not finite came from: runs the parts up to this one again, call by call, then the norm.
 * The gradients are cleared first, because they already hold it.
 */
static bool explain(trainer *t, const train_source *source, int64_t step, int64_t last, const char *what, double value,
                    char error[TRAIN_ERROR]) {
    char found[TRAIN_ERROR / 2] = "";
    if (!clear_gradients(t)) return device_failed(t, error);
    for (int64_t part = 0; part <= last && !found[0]; part++)
        if (!feed(t, program_of(t, part), source, false, number_of(t, step, part)) ||
            vjp_program_trace(program_of(t, part), found, sizeof found) != VJP_OK)
            return device_failed(t, error);
    if (!found[0] && vjp_program_trace(t->measure, found, sizeof found) != VJP_OK) return device_failed(t, error);
    if (!found[0]) snprintf(found, sizeof found, "it did not appear when the step was run again");
    if (isnan(value)) value = NAN; /* printf() would show a NaN's sign */
    return train_fail(error, "step %lld: the %s is %g; where it first appears: %s", (long long)step, what, value,
                      found);
}

bool trainer_step(trainer *t, const train_source *source, int64_t step, trainer_step_result *result,
                  char error[TRAIN_ERROR]) {
    int64_t parts = t->options.accumulate;
    double sum = 0;
    for (int64_t part = 0; part < parts; part++) {
        double loss;
        if (!run_part(t, program_of(t, part), source, false, number_of(t, step, part), &loss))
            return device_failed(t, error);
        if (!isfinite(loss)) return explain(t, source, step, part, "loss", loss, error);
        sum += loss;
    }
    float rate = (float)trainer_rate(&t->options, step), norm = 0;
    if (vjp_program_run(t->measure) != VJP_OK || vjp_synchronize(t->device) != VJP_OK ||
        vjp_program_read(t->measure, t->norm, &norm, sizeof norm) != VJP_OK)
        return device_failed(t, error);
    if (!isfinite(norm)) return explain(t, source, step, parts - 1, "norm of the gradients", norm, error);
    if (vjp_program_write(t->update, t->rate, &rate, sizeof rate) != VJP_OK ||
        vjp_program_write(t->update, t->step, &step, sizeof step) != VJP_OK || vjp_program_run(t->update) != VJP_OK ||
        vjp_synchronize(t->device) != VJP_OK)
        return device_failed(t, error);
    *result = (trainer_step_result){.loss = sum / (double)parts, .norm = norm, .rate = rate};
    return true;
}

bool trainer_evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, char error[TRAIN_ERROR]) {
    if (!t->forward) {
        const vjp_program_options options = {.struct_size = sizeof(vjp_program_options), .share = t->first};
        if (vjp_compile(t->device, t->model->graph, &t->model->loss, 1, &options, &t->forward) != VJP_OK)
            return device_failed(t, error);
    }
    if (parts > source->validation_parts) parts = source->validation_parts;
    double sum = 0;
    for (int64_t part = 0; part < parts; part++) {
        double own;
        if (!run_part(t, t->forward, source, true, (uint64_t)part, &own)) return device_failed(t, error);
        sum += own;
    }
    *loss = parts ? sum / (double)parts : NAN;
    return true;
}

/* ---- Checkpoints ------------------------------------------------------------------------------------- */

/* Adds a tensor to the list: host memory as it is, device memory copied to *free_place, which is advanced. */
static bool list_tensor(trainer *t, vjp_program *program, vjp_value value, const char *name, const char *kind,
                        size_t at, float **free_place) {
    vjp_tensor tensor;
    if (vjp_program_tensor(program, value, &tensor) != VJP_OK) return false;
    const void *data = (const char *)tensor.data + tensor.offset;
    if (!vjp_device_is_host(t->device)) {
        if (vjp_program_read(program, value, *free_place, (size_t)count_of(&tensor) * sizeof(float)) != VJP_OK)
            return false;
        data = *free_place;
        *free_place += count_of(&tensor);
    }
    snprintf(t->name[at], sizeof t->name[at], "%s%s", name, kind);
    t->tensor[at] = (safetensors_tensor){.name = t->name[at], .dtype = VJP_F32, .ndim = tensor.ndim, .data = data};
    memcpy(t->tensor[at].shape, tensor.shape, sizeof tensor.shape);
    return true;
}

bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]) {
    size_t count = (size_t)t->model->parameters;
    float *copy = t->copy;
    for (size_t i = 0; i < count; i++) {
        const model_parameter *p = &t->model->parameter[i];
        const tracked *own = &t->track[i];
        if (!list_tensor(t, t->first, p->value, p->name, "", i, &copy) ||
            !list_tensor(t, t->update, own->m, p->name, TRAINER_FIRST_MOMENT, count + 2 * i, &copy) ||
            !list_tensor(t, t->update, own->v, p->name, TRAINER_SECOND_MOMENT, count + 2 * i + 1, &copy))
            return device_failed(t, error);
    }
    *model = t->tensor;
    *model_count = count;
    *optimiser = t->tensor + count;
    *optimiser_count = 2 * count;
    return true;
}

/* The value of that name in a checkpoint, and a program that holds it. 0: there is none. */
static vjp_value find(trainer *t, const char *name, vjp_program **program) {
    *program = t->first;
    for (int i = 0; i < t->model->parameters; i++) {
        const char *own = t->model->parameter[i].name;
        size_t length = strlen(own);
        if (strncmp(name, own, length) != 0) continue;
        if (!name[length]) return t->model->parameter[i].value;
        *program = t->update;
        if (strcmp(name + length, TRAINER_FIRST_MOMENT) == 0) return t->track[i].m;
        if (strcmp(name + length, TRAINER_SECOND_MOMENT) == 0) return t->track[i].v;
    }
    return 0;
}

bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]) {
    vjp_program *program;
    vjp_value value = find(t, tensor->name, &program);
    if (!value) return train_fail(error, "the model has no tensor %s", tensor->name);
    return model_load(t->model, program, value, tensor, error);
}
