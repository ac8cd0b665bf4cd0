/* SPDX-License-Identifier: MIT */
/*
 * A step of training as one call: gradients, the scale that clips them, and for every parameter an optimiser's op with
 * its states. muon.c has Muon's step, which is many ops.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"
#include "graph/minimize.h"
#include "graph/program.h"

vjp_value vjp_graph_find(const vjp_graph *graph, const char *name) {
    const int32_t *value = graph && name ? names_find(&graph->value_names, name) : NULL;
    return value ? *value : 0;
}

vjp_value vjp_graph_clip_norm(vjp_graph *graph, const vjp_value *gradients, size_t count, double max_norm,
                              vjp_value *norm) {
    if (norm) *norm = 0;
    if (!graph || graph->status != VJP_OK) return 0;
    if (!gradients || !count) return graph_fail(graph, VJP_INVALID, NULL, "vjp_graph_clip_norm: no gradients");
    vjp_value squares = 0;
    for (size_t i = 0; i < count; i++) {
        vjp_value own = vjp_graph_sum_squares(graph, gradients[i]);
        squares = squares ? vjp_graph_accumulate(graph, squares, own) : own;
    }
    const vjp_clip_attributes clip = {.struct_size = sizeof clip, .max_norm = max_norm};
    vjp_value scale = vjp_graph_clip(graph, squares, &clip);
    if (scale && norm) *norm = vjp_graph_output(graph, scale, "norm");
    return scale;
}

/* ---- Parameters -------------------------------------------------------------------------------------- */

typedef struct minimizing {
    vjp_graph *graph;
    const vjp_minimize_options *options;
    vjp_value *parameter, *gradient; /* [count] */
    size_t count;
    vjp_value lr, step, scale;
} minimizing;

static void list_parameters(minimizing *m) {
    const vjp_minimize_options *o = m->options;
    for (size_t i = 0; i < o->count; i++)
        m->parameter[m->count++] = o->parameters[i];
    for (vjp_value v = 1; v < m->graph->values && !o->parameters; v++)
        if (m->graph->value[v].role == GRAPH_PARAMETER) m->parameter[m->count++] = v;
}

static bool check_parameters(minimizing *m) {
    for (size_t i = 0; i < m->count; i++) {
        if (!graph_is(m->graph, m->parameter[i], "a parameter to train")) return false;
        const graph_value *v = &m->graph->value[m->parameter[i]];
        if (v->role != GRAPH_PARAMETER || !graph_is_float(v->dtype)) {
            graph_fail(m->graph, VJP_INVALID, v->name, "it cannot be trained: it is not a parameter of a float type");
            return false;
        }
    }
    if (m->count) return true;
    graph_fail(m->graph, VJP_INVALID, NULL, "vjp_graph_minimize: there is no parameter to train");
    return false;
}

/* ---- Steps ------------------------------------------------------------------------------------------- */

/* The scalar input of that name, which an earlier call may have made. */
static vjp_value scalar_input(vjp_graph *graph, const char *name, vjp_dtype dtype) {
    vjp_value old = vjp_graph_find(graph, name);
    if (!old) return vjp_graph_input(graph, name, dtype, 0, NULL);
    const graph_value *v = &graph->value[old];
    if (v->role == GRAPH_INPUT && v->dtype == dtype && v->shape.ndim == 0) return old;
    return graph_fail(graph, VJP_INVALID, name, "it must be a scalar input of dtype %s", vjp_dtype_name(dtype));
}

static vjp_value add_state(vjp_graph *graph, vjp_value parameter, const char *kind, vjp_dtype dtype) {
    const graph_value *v = &graph->value[parameter];
    const vjp_shape shape = v->shape;
    if (v->dtype == VJP_F64) dtype = VJP_F64;
    size_t bytes = strlen(v->name) + strlen(kind) + 2;
    char *name = malloc(bytes);
    if (!name) return graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was built");
    snprintf(name, bytes, "%s.%s", v->name, kind);
    vjp_value state = vjp_graph_state(graph, name, dtype, shape.ndim, shape.size);
    free(name);
    return state;
}

/* What the caller's function says about a parameter. */
static bool choose(const minimizing *m, int (*choice)(void *, const char *, const vjp_tensor *), vjp_value parameter,
                   bool without) {
    if (!choice) return without;
    vjp_tensor tensor = graph_tensor(m->graph, parameter);
    return choice(m->options->context, m->graph->value[parameter].name, &tensor) != 0;
}

static bool decays(const minimizing *m, vjp_value parameter) {
    return choose(m, m->options->decays, parameter, m->graph->value[parameter].shape.ndim >= 2);
}

static bool uses_muon(const minimizing *m, vjp_value parameter) {
    const vjp_shape *shape = &m->graph->value[parameter].shape;
    bool matrix = shape->ndim == 2 && shape->size[0] && shape->size[1];
    return m->options->muon && matrix && choose(m, m->options->uses_muon, parameter, true);
}

/* The new value of parameter i. */
static vjp_value add_step(const minimizing *m, size_t i) {
    vjp_value w = m->parameter[i], g = m->gradient[i];
    if (uses_muon(m, w)) {
        const vjp_muon_options *muon = m->options->muon;
        const graph_muon_step step = {.w = w,
                                      .momentum = add_state(m->graph, w, "momentum", VJP_F32),
                                      .g = g,
                                      .lr = m->lr,
                                      .scale = m->scale,
                                      .weight_decay = decays(m, w) ? muon->weight_decay : 0};
        return graph_muon(m->graph, &step, muon);
    }
    if (m->options->sgd) {
        vjp_sgd_attributes sgd = *m->options->sgd;
        if (!decays(m, w)) sgd.weight_decay = 0;
        vjp_value momentum = sgd.beta != 0 ? add_state(m->graph, w, "momentum", VJP_F32) : 0;
        return vjp_graph_sgd(m->graph, w, momentum, g, m->lr, m->scale, &sgd);
    }
    vjp_adamw_attributes adamw = VJP_ADAMW_DEFAULTS;
    if (m->options->adamw) adamw = *m->options->adamw;
    if (!decays(m, w)) adamw.weight_decay = 0;
    vjp_dtype moments = (vjp_dtype)m->options->moments;
    vjp_value first = add_state(m->graph, w, "m", moments), second = add_state(m->graph, w, "v", moments);
    return vjp_graph_adamw(m->graph, w, first, second, g, m->lr, m->step, m->scale, &adamw);
}

/* Node names begin with the parameter's, whatever scope is open. */
static vjp_value add_named_step(const minimizing *m, size_t i) {
    char scope[GRAPH_SCOPE_BYTES];
    memcpy(scope, m->graph->scope, sizeof scope);
    snprintf(m->graph->scope, sizeof m->graph->scope, "%.200s", m->graph->value[m->parameter[i]].name);
    vjp_value made = add_step(m, i);
    memcpy(m->graph->scope, scope, sizeof scope);
    return made;
}

static void minimize(minimizing *m, vjp_value loss, vjp_value *results, vjp_minimize_result *made) {
    vjp_graph *graph = m->graph;
    list_parameters(m);
    if (!check_parameters(m) || (m->options->muon && !graph_check_muon(graph, m->options->muon))) return;
    if (m->options->gradients)
        memcpy(m->gradient, m->options->gradients, m->count * sizeof *m->gradient);
    else if (vjp_graph_grad(graph, loss, m->parameter, m->count, NULL, 0, m->gradient) != VJP_OK)
        return;
    m->scale = m->options->scale;
    if (!m->scale && m->options->max_norm != 0)
        m->scale = vjp_graph_clip_norm(graph, m->gradient, m->count, m->options->max_norm, &made->norm);
    made->loss = loss;
    m->lr = made->lr = scalar_input(graph, "lr", VJP_F32);
    bool any_adamw = false; /* only AdamW reads the number of the step */
    for (size_t i = 0; i < m->count; i++)
        any_adamw = any_adamw || (!m->options->sgd && !uses_muon(m, m->parameter[i]));
    m->step = m->options->step;
    if (any_adamw && !m->step) m->step = made->step = scalar_input(graph, "step", VJP_I64);
    if (loss) results[made->count++] = loss;
    if (made->norm) results[made->count++] = made->norm;
    for (size_t i = 0; i < m->count && graph->status == VJP_OK; i++)
        results[made->count++] = add_named_step(m, i);
}

/* The list of results belongs to the graph. */
static vjp_value *new_results(vjp_graph *graph, size_t count) {
    graph_list *list = calloc(1, sizeof *list + count * sizeof list->value[0]);
    if (!list) return NULL;
    list->next = graph->lists;
    graph->lists = list;
    return list->value;
}

vjp_status vjp_graph_minimize(vjp_graph *graph, vjp_value loss, const vjp_minimize_options *options,
                              vjp_minimize_result *result) {
    const vjp_minimize_options defaults = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    const char *name = "vjp_graph_minimize";
    if (!graph) return VJP_OUT_OF_MEMORY;
    if (!options) options = &defaults;
    vjp_minimize_result made = {.struct_size = sizeof made};
    if (!result || result->struct_size != sizeof *result || options->struct_size != sizeof *options)
        graph_fail(graph, VJP_INVALID, name, "%s is NULL or has another struct_size",
                   !result || result->struct_size != sizeof *result ? "result" : "options");
    else if ((options->count != 0) != (options->parameters != NULL) || (options->gradients && !options->parameters))
        graph_fail(graph, VJP_INVALID, name, "parameters and count must be given together, and with gradients");
    else if (options->moments != VJP_F32 && options->moments != VJP_BF16)
        graph_fail(graph, VJP_INVALID, name, "moments is %s; it must be f32 or bf16",
                   vjp_dtype_name((vjp_dtype)options->moments));
    else if (!options->gradients || loss)
        graph_is(graph, loss, "the loss");
    if (graph->status != VJP_OK) return graph->status;
    *result = made;
    size_t most = options->count ? options->count : (size_t)graph->values;
    minimizing m = {.graph = graph, .options = options, .parameter = calloc(2 * most, sizeof *m.parameter)};
    vjp_value *results = new_results(graph, most + 2);
    if (m.parameter && results) {
        m.gradient = m.parameter + most;
        minimize(&m, loss, results, &made);
    } else {
        graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was built");
    }
    free(m.parameter);
    made.results = results;
    if (graph->status == VJP_OK) *result = made;
    return graph->status;
}

/* ---- A step ------------------------------------------------------------------------------------------ */

static vjp_status read_loss(vjp_program *program, vjp_value value, double *loss) {
    vjp_tensor tensor;
    float single = 0;
    vjp_status status = vjp_program_tensor(program, value, &tensor);
    if (status != VJP_OK || tensor.dtype == VJP_F64)
        return status == VJP_OK ? vjp_program_read(program, value, loss, sizeof *loss) : status;
    if (tensor.dtype != VJP_F32)
        return vjp_fail(program->device, VJP_UNSUPPORTED, "vjp_program_step: the loss is %s; it must be f32 or f64",
                        vjp_dtype_name((vjp_dtype)tensor.dtype));
    status = vjp_program_read(program, value, &single, sizeof single);
    if (status == VJP_OK) *loss = single;
    return status;
}

vjp_status vjp_program_step(vjp_program *program, const vjp_minimize_result *training, double lr, int64_t step,
                            double *loss) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (!training || training->struct_size != sizeof *training)
        return vjp_fail(program->device, VJP_INVALID,
                        "vjp_program_step: training must be what vjp_graph_minimize() filled");
    if (loss && !training->loss)
        return vjp_fail(program->device, VJP_INVALID, "vjp_program_step: vjp_graph_minimize() was given no loss");
    const float rate = (float)lr;
    vjp_status status = vjp_program_write(program, training->lr, &rate, sizeof rate);
    if (status == VJP_OK && training->step) status = vjp_program_write(program, training->step, &step, sizeof step);
    if (status == VJP_OK) status = vjp_program_run(program);
    return status == VJP_OK && loss ? read_loss(program, training->loss, loss) : status;
}
