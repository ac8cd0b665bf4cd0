/* SPDX-License-Identifier: MIT */
/*
 * Compiling a graph, in the order of this file: which nodes the results need, how long each intermediate lives, its
 * offset, and the resolved calls. group.c decides which calls a device runs as one, offload.c which intermediates wait
 * in the host's memory.
 *
 * An intermediate lives from the call that writes it first to the last that reads it or adds to it. An output takes
 * over the memory of an input that is not used after the same call, where the op allows it to be computed in place. A
 * call's scratch is a range that lives for that call alone. Calls that run as one all live from the first of them to
 * the last.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "graph/compile.h"
#include "op/op.h"

/* ---- What is needed ---------------------------------------------------------------------------------- */

static bool find_needed(compilation *c, const vjp_value *results, size_t count) {
    return graph_find_needed(c->graph, results, count, c->needed, c->result, c->maker, c->call_node,
                             &c->program->calls);
}

/* ---- Lives ------------------------------------------------------------------------------------------- */

vjp_value merged_storage(const compilation *c, vjp_value value) {
    vjp_value storage = graph_storage(c->graph, value);
    for (; c->merged[storage] != storage; storage = c->merged[storage])
        c->merged[storage] = c->merged[c->merged[storage]]; /* halves the chain, which can be as long as the graph */
    return storage;
}

static void find_lives(compilation *c) {
    for (vjp_value v = 0; v < c->graph->values; v++)
        c->first[v] = c->last[v] = -1;
    const program_group *group = c->program->group;
    for (int32_t k = 0; k < c->program->calls; k++) {
        const graph_node *node = node_of(c, k);
        while (k >= group->first + group->count)
            group++;
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            vjp_value value = slot_value(c, node, i);
            if (!value) continue;
            /* An intermediate that is made in a state is used where the state is. */
            const vjp_value storages[] = {graph_storage(c->graph, value), merged_storage(c, value)};
            for (int s = 0; s < 2; s++) {
                if (c->first[storages[s]] < 0) c->first[storages[s]] = group->first;
                c->last[storages[s]] = group->first + group->count - 1;
            }
        }
    }
    for (vjp_value v = 1; v < c->graph->values; v++)
        if (c->result[v] && c->first[graph_storage(c->graph, v)] >= 0)
            c->last[graph_storage(c->graph, v)] = c->program->calls;
}

/* Whether output `out` of call k may take over input `in`, whose storage is `from`. */
static bool may_take(const compilation *c, int32_t k, const graph_node *node, size_t out, size_t in, vjp_value from) {
    const vjp_pass_info *pass = pass_of(node);
    const graph_value *output = &c->graph->value[node->value[out]], *input = &c->graph->value[node->value[in]];
    if (!(pass->slots[out].aliases >> in & 1) || is_persistent(c, from) || c->last[from] != k) return false;
    if (output->bytes != input->bytes || output->dtype != input->dtype) return false;
    if (graph_is_slice(c->graph, node->value[out]) || graph_is_slice(c->graph, node->value[in])) return false;
    for (size_t i = 0; i < pass->count; i++) {
        vjp_value other = i == in || i == out ? 0 : slot_value(c, node, i);
        if (!other || merged_storage(c, other) != from) continue;
        if (i < pass->outputs || !(pass->slots[out].aliases >> i & 1)) return false;
    }
    return true;
}

static void compute_in_place(compilation *c) {
    for (int32_t g = 0; g < c->program->groups; g++) {
        const program_group *group = &c->program->group[g];
        if (group->count > 1 && !group->pair) continue; /* its calls may run in any order */
        int32_t k = group->first + group->pair;         /* of a pair only the second */
        const graph_node *node = node_of(c, k);
        const vjp_pass_info *pass = pass_of(node);
        for (size_t out = 0; out < pass->outputs; out++) {
            vjp_value value = slot_value(c, node, out);
            if (!value || node->adds >> out & 1) continue;
            vjp_value storage = graph_storage(c->graph, value);
            if (is_persistent(c, storage) || c->first[storage] != group->first || c->merged[storage] != storage)
                continue;
            for (size_t in = pass->outputs; in < pass->count; in++) {
                vjp_value input = slot_value(c, node, in), from = input ? merged_storage(c, input) : 0;
                if (!input || !may_take(c, k, node, out, in, from)) continue;
                if (group->pair && call_reads(c, node_of(c, group->first), from)) continue;
                c->merged[storage] = from;
                c->last[from] = c->last[storage];
                break;
            }
        }
    }
}

/* ---- Scratch, and the plan --------------------------------------------------------------------------- */

/* An address for questions about sizes; it is never read or written. */
static void *const SOMEWHERE = (void *)(uintptr_t)PLAN_ALIGNMENT;

/* The tensors of a call, with `place` giving each its memory. */
static void fill_tensors(const compilation *c, const graph_node *node, vjp_tensor *tensor, const vjp_tensor **present,
                         vjp_tensor (*place)(const compilation *c, vjp_value value)) {
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        vjp_value value = slot_value(c, node, i);
        present[i] = NULL;
        if (!value) continue;
        tensor[i] = place(c, value);
        if (node->adds >> i & 1) tensor[i].flags = VJP_ACCUMULATE;
        present[i] = &tensor[i];
    }
}

static vjp_tensor place_anywhere(const compilation *c, vjp_value value) {
    vjp_tensor tensor = graph_tensor(c->graph, value);
    tensor.data = SOMEWHERE;
    return tensor;
}

/* The device's sentence, with the node's name before it. */
static vjp_status fail_at(vjp_device *device, vjp_status status, const char *node) {
    char why[VJP_ERROR_BYTES];
    snprintf(why, sizeof why, "%s", device->error);
    return vjp_fail(device, status, "%s: %s", node, why);
}

static vjp_status ask_sizes(compilation *c) {
    for (int32_t k = 0; k < c->program->calls; k++) {
        const graph_node *node = node_of(c, k);
        vjp_tensor tensor[VJP_MAX_SLOTS];
        const vjp_tensor *present[VJP_MAX_SLOTS];
        fill_tensors(c, node, tensor, present, place_anywhere);
        vjp_status status = vjp_workspace_size(c->device, node->op, node->pass, present, pass_of(node)->count,
                                               node->attributes, &c->scratch[k]);
        if (status == VJP_OK && c->scratch[k] == SIZE_MAX)
            status = vjp_fail(c->device, VJP_INVALID, "its scratch is larger than memory can be");
        if (status == VJP_OK)
            status = vjp_min_cost(c->device, node->op, node->pass, present, pass_of(node)->count, node->attributes,
                                  &c->program->call[k].cost);
        if (status != VJP_OK) return fail_at(c->device, status, node->name);
        c->program->report.cost.bytes += c->program->call[k].cost.bytes;
        c->program->report.cost.flops += c->program->call[k].cost.flops;
    }
    return VJP_OK;
}

static vjp_status too_large(vjp_device *device, const char *what) {
    return vjp_fail(device, VJP_INVALID, "the sum of the bytes of all %s does not fit size_t", what);
}

static vjp_status sum_intermediates(compilation *c) {
    size_t *sum = &c->program->report.intermediate_bytes;
    bool ok = true;
    for (vjp_value v = 1; v < c->graph->values && ok; v++)
        if (c->first[v] >= 0 && !is_persistent(c, v) && graph_storage(c->graph, v) == v)
            ok = vjp_add_size(*sum, c->graph->value[v].bytes, sum);
    for (int32_t k = 0; k < c->program->calls && ok; k++)
        ok = vjp_add_size(*sum, c->scratch[k], sum);
    return ok ? VJP_OK : too_large(c->device, "intermediates");
}

/* The ranges of all storages, of those that come back a second one, and of the calls' scratch, in this order. */
static void list_ranges(compilation *c) {
    const vjp_program *program = c->program;
    c->ranges = 0;
    for (vjp_value v = 1; v < c->graph->values; v++) {
        if (c->first[v] < 0 || is_persistent(c, v) || graph_storage(c->graph, v) != v) continue;
        if (c->merged[v] != v && !c->options->unplanned) continue;
        int32_t last = c->away_of[v] < 0 ? c->last[v] : c->away[c->away_of[v]].freed - 1;
        c->range[v] = c->ranges;
        c->plan[c->ranges++] = (plan_range){.bytes = c->graph->value[v].bytes, .first = c->first[v], .last = last};
    }
    for (int32_t i = 0; i < c->aways; i++) {
        vjp_value v = c->away[i].storage;
        c->away[i].range = c->ranges;
        c->plan[c->ranges++] =
            (plan_range){.bytes = c->graph->value[v].bytes, .first = c->away[i].fetched, .last = c->last[v]};
    }
    const program_group *group = program->group;
    for (int32_t k = 0; k < program->calls; k++) {
        while (k >= group->first + group->count)
            group++;
        int32_t last = group->first + group->count - 1;
        if (c->scratch[k])
            c->plan[c->ranges++] = (plan_range){.bytes = c->scratch[k], .first = group->first, .last = last};
    }
}

static vjp_status place_ranges(compilation *c) {
    vjp_program *program = c->program;
    if (!plan_sizes_fit(c->plan, c->ranges)) return too_large(c->device, "intermediates");
    bool ok = plan_live_bytes(c->plan, c->ranges, &program->report.live_bytes);
    for (int32_t i = 0; i < c->ranges && c->options->unplanned; i++) {
        c->plan[i].first = 0;
        c->plan[i].last = program->calls;
    }
    ok = ok && plan_arena(c->plan, c->ranges, &c->arena_bytes);
    return ok ? VJP_OK : vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory to plan %d ranges", c->ranges);
}

static bool can_offload(const compilation *c) {
    const vjp_backend *backend = c->device->backend;
    return c->options->arena_limit && !c->options->unplanned && backend->copy_begin && backend->copy_wait &&
           backend->flops_per_byte > 0 && backend->alloc_host && backend->free_host;
}

/* A limit's target after a plan that was over it: less by at least this share. */
enum { MIN_STEP = 64 };

static size_t next_target(const compilation *c, size_t target) {
    size_t limit = c->options->arena_limit, over = c->arena_bytes > limit ? c->arena_bytes - limit : 0;
    if (over < limit / MIN_STEP) over = limit / MIN_STEP;
    return over < target ? target - over : 0;
}

/*
 * Chooses what waits in the host's memory until the arena is within its limit, with as much time to spare as possible.
 * An arena is a little larger than what is in use at once: then less is asked for, a few times.
 */
static vjp_status offload(compilation *c) {
    enum { TRIES = 4 };
    static const double spares[] = {0.2, 0.1, 0.05, 0.03};
    const size_t limit = c->options->arena_limit;
    vjp_status status = VJP_OK;
    for (size_t s = 0; s < sizeof spares / sizeof spares[0] && c->arena_bytes > limit; s++) {
        size_t target = limit;
        bool more = true; /* than the last try moved */
        for (int i = 0; i < TRIES && more && c->arena_bytes > limit && status == VJP_OK; i++) {
            int32_t before = i ? c->aways : -1;
            if (!choose_offloaded(c, target, spares[s]))
                return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory to plan %d ranges", c->ranges);
            if (!c->aways) return VJP_OK; /* nothing can move */
            more = c->aways > before;
            list_ranges(c);
            status = place_ranges(c);
            target = next_target(c, target);
        }
    }
    return status;
}

static vjp_status make_plan(compilation *c) {
    vjp_program *program = c->program;
    vjp_status status = sum_intermediates(c);
    if (status == VJP_OK) {
        list_ranges(c);
        status = place_ranges(c);
    }
    if (status == VJP_OK && c->rewritten.recomputes_all && can_offload(c)) status = offload(c);
    int32_t pair[2];
    if (status == VJP_OK && !plan_find_overlap(c->plan, c->ranges, pair))
        status = vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory to check %d ranges", c->ranges);
    if (status != VJP_OK) return status;
    if (pair[0] >= 0)
        return vjp_fail(c->device, VJP_INVALID, "the plan puts two live ranges, %d and %d, in one place", pair[0],
                        pair[1]);
    program->report.arena_bytes = c->arena_bytes;
    for (int32_t i = 0; i < c->aways; i++) {
        size_t own;
        if (!vjp_align_size(c->graph->value[c->away[i].storage].bytes, PLAN_ALIGNMENT, &own) ||
            !vjp_add_size(program->report.host_bytes, own, &program->report.host_bytes))
            return too_large(c->device, "intermediates");
    }
    return VJP_OK;
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

enum { ZEROS = 4 << 20 }; /* bytes that are uploaded at once: a GPU may wait for each upload */

static vjp_status fill_persistent(compilation *c, vjp_value v, const char *zeros) {
    const graph_value *value = &c->graph->value[v];
    const vjp_tensor *tensor = &c->program->value[v].tensor;
    if (value->data) return vjp_upload(c->device, tensor->data, tensor->offset, value->data, value->bytes);
    vjp_status status = VJP_OK;
    for (size_t done = 0; done < value->bytes && status == VJP_OK; done += ZEROS)
        status = vjp_upload(c->device, tensor->data, tensor->offset + done, zeros,
                            value->bytes - done < ZEROS ? value->bytes - done : ZEROS);
    return status;
}

static bool is_used(const compilation *c, vjp_value v) {
    return is_persistent(c, v) && (c->needed[v] || c->first[v] >= 0);
}

/* All that the other program keeps, whether or not this one uses it: a third program may share it in turn. */
static vjp_status take_shared(compilation *c, const vjp_program *share) {
    for (vjp_value v = 1; share && v < share->values && v < c->program->values; v++) {
        const program_value *from = &share->value[v];
        program_value *to = &c->program->value[v];
        if (!from->name || !graph_is_persistent(from->role)) continue;
        *to = *from;
        to->name = strdup(from->name);
        if (!to->name) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for the name of a value");
    }
    return VJP_OK;
}

/* Offsets of the values that no shared program has, and the bytes that they need. */
static vjp_status plan_persistent(compilation *c, size_t *bytes) {
    vjp_program *program = c->program;
    *bytes = 0;
    for (vjp_value v = 1; v < c->graph->values; v++) {
        if (!is_used(c, v)) continue;
        size_t own = c->graph->value[v].bytes, *sum = &program->report.persistent_bytes;
        if (!vjp_add_size(*sum, own, sum)) return too_large(c->device, "inputs, parameters and states");
        if (program->value[v].name) continue;
        program->value[v].tensor = graph_tensor(c->graph, v);
        program->value[v].tensor.offset = *bytes;
        if (!vjp_align_size(own, PLAN_ALIGNMENT, &own) || !vjp_add_size(*bytes, own, bytes))
            return too_large(c->device, "inputs, parameters and states");
    }
    return VJP_OK;
}

static vjp_status place_persistent(compilation *c, const vjp_program *share) {
    vjp_program *program = c->program;
    size_t bytes = 0;
    vjp_status status = take_shared(c, share);
    if (status == VJP_OK) status = plan_persistent(c, &bytes);
    char *zeros = calloc(1, ZEROS);
    if (!zeros && status == VJP_OK) status = vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for %d zeros", ZEROS);
    if (status == VJP_OK) status = vjp_alloc(c->device, bytes ? bytes : PLAN_ALIGNMENT, &program->persistent);
    for (vjp_value v = 1; v < c->graph->values && status == VJP_OK; v++) {
        if (!is_used(c, v) || program->value[v].name) continue;
        program->value[v].tensor.data = program->persistent;
        status = fill_persistent(c, v, zeros);
    }
    free(zeros);
    return status;
}

static vjp_tensor place_of(const compilation *c, vjp_value value) {
    vjp_tensor tensor = graph_tensor(c->graph, value);
    vjp_value storage = c->options->unplanned ? graph_storage(c->graph, value) : merged_storage(c, value);
    if (is_persistent(c, storage)) {
        tensor.data = c->program->value[storage].tensor.data;
        tensor.offset += c->program->value[storage].tensor.offset;
    } else {
        int32_t away = c->away_of[storage];
        bool back = away >= 0 && c->resolving >= c->away[away].back;
        tensor.data = c->program->arena;
        tensor.offset += c->plan[back ? c->away[away].range : c->range[storage]].offset;
    }
    return tensor;
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

static vjp_status resolve_calls(compilation *c) {
    vjp_program *program = c->program;
    int32_t scratch_range = c->ranges;
    for (int32_t k = 0; k < program->calls; k++)
        scratch_range -= c->scratch[k] > 0;
    for (int32_t k = 0; k < program->calls; k++) {
        const graph_node *node = node_of(c, k);
        program_call *call = &program->call[k];
        const vjp_tensor *present[VJP_MAX_SLOTS];
        memcpy(call->attributes, node->attributes, sizeof call->attributes);
        c->resolving = k;
        fill_tensors(c, node, call->tensor, present, place_of);
        call->name = strdup(node->name);
        if (!call->name) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for the name of a node");
        char *scratch = NULL;
        if (c->scratch[k]) scratch = (char *)program->arena + c->plan[scratch_range++].offset;
        vjp_status status = vjp_resolve(&call->work, &call->kernel, c->device, node->op, node->pass, present,
                                        pass_of(node)->count, call->attributes, scratch, c->scratch[k]);
        if (status != VJP_OK) return fail_at(c->device, status, node->name);
    }
    return program_warm(program);
}

/* An interrupted run must not leave some parameters or moments changed and others not. */
static int32_t first_change(const compilation *c) {
    for (int32_t k = 0; k < c->program->calls; k++) {
        const vjp_op *op = node_of(c, k)->op;
        if (op == &vjp_op_adamw || op == &vjp_op_sgd) return k; /* what it changes may be a state only */
        for (size_t i = 0; i < pass_of(node_of(c, k))->outputs; i++) {
            vjp_value value = slot_value(c, node_of(c, k), i);
            if (value && c->graph->value[graph_storage(c->graph, value)].role == GRAPH_PARAMETER) return k;
        }
    }
    return c->program->calls;
}

static vjp_status name_values(compilation *c) {
    c->resolving = c->program->calls;
    for (vjp_value v = 1; v < c->graph->values; v++) {
        vjp_value origin = c->graph->value[v].origin;
        bool result = c->result[origin] && (is_used(c, origin) || c->first[graph_storage(c->graph, v)] >= 0);
        program_value *value = &c->program->value[v];
        if ((!result && !is_used(c, v)) || value->name) continue;
        if (!value->tensor.data) value->tensor = place_of(c, v);
        value->role = c->graph->value[v].role;
        value->halves =
            c->graph->value[graph_storage(c->graph, v)].halves == GRAPH_HALVES && c->graph->value[v].dtype == VJP_F32;
        value->name = strdup(c->graph->value[v].name);
        if (!value->name) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for the name of a value");
    }
    return VJP_OK;
}

/* ---- The whole --------------------------------------------------------------------------------------- */

static bool allocate(compilation *c) {
    size_t values = (size_t)c->graph->values, nodes = (size_t)c->graph->nodes + 1;
    c->needed = calloc(2 * values, sizeof *c->needed);
    c->first = malloc(2 * values * sizeof *c->first);
    c->merged = calloc(values, sizeof *c->merged);
    c->range = calloc(values, sizeof *c->range);
    c->maker = malloc(values * sizeof *c->maker);
    c->call_node = calloc(nodes, sizeof *c->call_node);
    c->scratch = calloc(nodes, sizeof *c->scratch);
    c->plan = calloc(2 * values + nodes, sizeof *c->plan);
    c->away = calloc(values, sizeof *c->away);
    c->away_of = malloc(values * sizeof *c->away_of);
    c->program->value = calloc(values, sizeof *c->program->value);
    c->program->values = (int32_t)values;
    if (!c->maker || !c->needed || !c->first || !c->merged || !c->range || !c->call_node || !c->scratch || !c->plan ||
        !c->away || !c->away_of || !c->program->value)
        return false;
    c->result = c->needed + values;
    c->last = c->first + values;
    for (size_t v = 0; v < values; v++) {
        c->range[v] = c->maker[v] = c->away_of[v] = -1;
        c->merged[v] = (vjp_value)v;
    }
    return true;
}

static vjp_status check_results(const compilation *c, const vjp_value *results, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (results[i] < 1 || results[i] >= c->given->values)
            return vjp_fail(c->device, VJP_INVALID, "result %zu is %d, which is not a value of this graph", i,
                            results[i]);
    return VJP_OK;
}

/*
 * Everything that needs no memory of the device: which calls, and where each intermediate goes. live_limit: as
 * graph_rewriting has it.
 */
static vjp_status plan(compilation *c, const vjp_value *results, size_t count, size_t live_limit) {
    vjp_program *program = c->program;
    vjp_status status = graph_rewrite_all(c->device, c->given, results, count, c->options, live_limit, &c->rewritten);
    if (status != VJP_OK) return status;
    c->graph = c->rewritten.graph ? c->rewritten.graph : c->given;
    if (!allocate(c) || !find_needed(c, results, count))
        return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory to compile the graph");
    program->call = calloc((size_t)program->calls + 1, sizeof *program->call);
    program->group = calloc((size_t)program->calls + 1, sizeof *program->group);
    if (!program->call || !program->group)
        return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for %d calls", program->calls);
    bool ok = order_calls(c) && find_groups(c);
    if (ok) find_lives(c);
    /* Without a plan nothing changes its place. */
    if (ok && !c->options->unplanned && drop_copies(c)) {
        ok = find_groups(c);
        if (ok) find_lives(c);
    }
    if (!ok) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory to order %d calls", program->calls);
    if (!c->options->unplanned) compute_in_place(c);
    status = ask_sizes(c);
    program->report.calls = (size_t)program->calls;
    return status == VJP_OK ? make_plan(c) : status;
}

static void release(compilation *c) {
    graph_rewritten_free(c->rewritten.graph);
    free(c->needed);
    free(c->first);
    free(c->merged);
    free(c->range);
    free(c->maker);
    free(c->call_node);
    free(c->scratch);
    free(c->plan);
    free(c->away);
    free(c->away_of);
}

static vjp_status make_program(compilation *c) {
    c->program = calloc(1, sizeof *c->program);
    if (!c->program) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for a program");
    c->program->device = c->device;
    c->program->graph_id = c->given->id;
    return VJP_OK;
}

/* Makes a plan again from the beginning. */
static vjp_status start_again(compilation *c) {
    release(c);
    vjp_program_destroy(c->program);
    *c = (compilation){.device = c->device, .given = c->given, .options = c->options};
    return make_program(c);
}

/* Recomputes only as much as the limit asks for; an arena is larger than what is alive, so that takes a few plans. */
static vjp_status plan_within_limit(compilation *c, const vjp_value *results, size_t count) {
    enum { PLANS = 8 };
    const size_t limit = c->options->arena_limit;
    size_t target = limit;
    vjp_status status = plan(c, results, count, target);
    for (int i = 1; status == VJP_OK && !c->rewritten.recomputes_all && c->arena_bytes > limit; i++) {
        target = i < PLANS ? next_target(c, target) : 0;
        status = start_again(c);
        if (status == VJP_OK) status = plan(c, results, count, target);
    }
    return status;
}

/* The arena of the program to share with, or one of its own. */
static vjp_status place_arena(compilation *c) {
    vjp_program *program = c->program;
    const vjp_program *share = c->options->share_arena ? c->options->share : NULL;
    size_t asked = c->options->arena_bytes, room = c->arena_bytes > asked ? c->arena_bytes : asked;
    if (share && room <= share->arena_room) {
        program->arena = share->arena;
        program->arena_room = share->arena_room;
        return VJP_OK;
    }
    program->arena_room = room > PLAN_ALIGNMENT ? room : PLAN_ALIGNMENT;
    program->owns_arena = true;
    return vjp_alloc(c->device, program->arena_room, &program->arena);
}

static vjp_status compile(compilation *c, const vjp_value *results, size_t count) {
    vjp_status status = plan_within_limit(c, results, count);
    if (status != VJP_OK) return status;
    vjp_program *program = c->program;
    status = place_persistent(c, c->options->share);
    if (status == VJP_OK) status = place_arena(c);
    if (status == VJP_OK) status = resolve_calls(c);
    if (status == VJP_OK) status = make_moves(c);
    if (status == VJP_OK) status = name_values(c);
    program->commits = first_change(c);
    program->range = c->plan;
    program->ranges = c->ranges;
    c->plan = NULL;
    return status;
}

/* Checks what the caller gave, and makes an empty program. */
static vjp_status begin(compilation *c, const char *function, const vjp_value *results, size_t count) {
    vjp_device *device = c->device;
    const vjp_program_options *options = c->options;
    if (count && !results) return vjp_fail(device, VJP_INVALID, "%s: results is NULL", function);
    if (options->struct_size != sizeof *options)
        return vjp_fail(device, VJP_INVALID,
                        "%s: options.struct_size is %llu; it must be %zu: start from VJP_PROGRAM_OPTIONS_DEFAULTS",
                        function, (unsigned long long)options->struct_size, sizeof *options);
    if (vjp_graph_status(c->given) != VJP_OK)
        return vjp_fail(device, vjp_graph_status(c->given), "%s", vjp_graph_error(c->given));
    if (options->share && (options->share->graph_id != c->given->id || options->share->device != device))
        return vjp_fail(device, VJP_INVALID, "%s: the program to share with is of another graph or device", function);
    if (options->share_arena && !options->share)
        return vjp_fail(device, VJP_INVALID, "%s: options.share_arena needs a program to share with", function);
    vjp_status status = check_results(c, results, count);
    if (status != VJP_OK) return status;
    return make_program(c);
}

vjp_status vjp_compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                       const vjp_program_options *options, vjp_program **program) {
    const vjp_program_options defaults = VJP_PROGRAM_OPTIONS_DEFAULTS;
    compilation c = {.device = device, .given = graph, .options = options ? options : &defaults};
    if (program) *program = NULL;
    if (!device || !device->backend) return VJP_NO_DEVICE;
    device->error[0] = 0;
    if (!program) return vjp_fail(device, VJP_INVALID, "vjp_compile: program is NULL");
    vjp_status status = begin(&c, "vjp_compile", results, count);
    if (status != VJP_OK) return status;
    status = compile(&c, results, count);
    release(&c);
    if (status == VJP_OK)
        *program = c.program;
    else
        vjp_program_destroy(c.program);
    return status;
}

vjp_status vjp_plan(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                    const vjp_program_options *options, vjp_program_report *report) {
    const vjp_program_options defaults = VJP_PROGRAM_OPTIONS_DEFAULTS;
    compilation c = {.device = device, .given = graph, .options = options ? options : &defaults};
    if (!device || !device->backend) return VJP_NO_DEVICE;
    device->error[0] = 0;
    if (!report || report->struct_size != sizeof *report)
        return vjp_fail(device, VJP_INVALID, "vjp_plan: report is NULL or has another struct_size");
    vjp_status status = begin(&c, "vjp_plan", results, count);
    if (status != VJP_OK) return status;
    size_t bytes;
    status = plan_within_limit(&c, results, count);
    if (status == VJP_OK) status = plan_persistent(&c, &bytes);
    if (status == VJP_OK) {
        *report = c.program->report;
        report->struct_size = sizeof *report;
    }
    release(&c);
    vjp_program_destroy(c.program);
    return status;
}

void vjp_program_destroy(vjp_program *program) {
    if (!program) return;
    if (program->recording) program->device->backend->forget(program->device, program->recording);
    if (program->owns_arena) vjp_free(program->device, program->arena);
    vjp_free(program->device, program->persistent);
    if (program->host) program->device->backend->free_host(program->device, program->host);
    free(program->move);
    for (int32_t k = 0; k < program->calls && program->call; k++)
        free(program->call[k].name);
    for (int32_t v = 0; v < program->values && program->value; v++)
        free(program->value[v].name);
    free(program->call);
    free(program->group);
    free(program->value);
    free(program->range);
    free(program);
}
