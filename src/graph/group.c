/* SPDX-License-Identifier: MIT */
/*
 * The order of a program's calls, and which of them a device runs as one.
 *
 * A step of training has hundreds of short calls of the same op: an optimizer's step for each parameter, a sum of
 * squares for each gradient, a cast for each weight. On a device where starting a call costs as much as the call, the
 * backend can merge them (vjp_backend.merges): adjacent calls of such an op are a group, unless one of them reads what
 * another one writes. Sums that are added to one output may be in a group; the backend keeps their order.
 *
 * Casts of weights are scattered over the forward pass, each before the call that needs it. Where the program has a
 * backward pass, which needs most of them until its end, they are moved to the beginning: that costs no memory at the
 * peak.
 *
 * Two adjacent calls of which the second reads what the first writes can be one, too, where the backend has a kernel
 * for both (vjp_backend.pairs), such as a product that ends with the op which reads its result.
 *
 * Nothing is reordered or grouped for a device that does neither, nor in a program without a plan, which tests compare
 * others with.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/compile.h"
#include "op/op.h"

static bool merges_any(const compilation *c) {
    return c->device->backend->merges && !c->options->unplanned;
}

static bool merges(const compilation *c, const graph_node *node) {
    return merges_any(c) && c->device->backend->merges(c->device, node->op, node->pass);
}

/* ---- Copies ------------------------------------------------------------------------------------------ */

/*
 * The intermediate that call k copies into a state that nothing has used before, where it ends its life and could have
 * been made in the state itself; 0: call k is not such a copy.
 */
static vjp_value copied(const compilation *c, int32_t k, vjp_value *state) {
    const graph_node *node = node_of(c, k);
    if (node->op != &vjp_op_scale || node->pass != VJP_FORWARD || node->adds) return 0;
    if (((const vjp_scale_attributes *)(const void *)node->attributes)->factor != 1) return 0;
    vjp_value x = slot_value(c, node, SCALE_X), y = slot_value(c, node, SCALE_Y);
    if (!x || !y) return 0;
    vjp_value from = graph_storage(c->graph, x);
    *state = graph_storage(c->graph, y);
    const graph_value *to = &c->graph->value[*state], *own = &c->graph->value[from];
    bool whole = own->bytes == to->bytes && own->dtype == to->dtype && c->graph->value[x].bytes == own->bytes;
    bool free = c->last[from] == k && c->merged[from] == from && c->first[*state] == k;
    return to->role == GRAPH_STATE && !is_persistent(c, from) && whole && free ? from : 0;
}

int32_t drop_copies(compilation *c) {
    int32_t kept = 0, calls = c->program->calls;
    for (int32_t k = 0; k < calls; k++) {
        vjp_value state, from = copied(c, k, &state);
        if (from)
            c->merged[from] = state;
        else
            c->call_node[kept++] = c->call_node[k];
    }
    c->program->calls = kept;
    return calls - kept;
}

/* ---- Order ------------------------------------------------------------------------------------------- */

/*
 * Whether a call may run before all others: it reads only what is kept and not `written` yet, and makes a new value, or
 * a slice of one, which nothing else writes.
 */
static bool may_come_first(const compilation *c, const graph_node *node, const bool *written) {
    if (node->pass != VJP_FORWARD || node->adds || !merges(c, node)) return false;
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        vjp_value value = slot_value(c, node, i);
        if (!value) continue;
        vjp_value storage = graph_storage(c->graph, value);
        bool output = i < pass_of(node)->outputs;
        if (is_persistent(c, storage) == output) return false;
        if (written[storage] && !(output && graph_is_slice(c->graph, value))) return false;
    }
    return true;
}

bool order_calls(compilation *c) {
    int32_t calls = c->program->calls, first = 0, others = 0, forward = 0;
    while (forward < calls && node_of(c, forward)->pass == VJP_FORWARD)
        forward++;
    if (!merges_any(c) || forward == calls) return true;
    int32_t *order = malloc(((size_t)forward + 1) * sizeof *order);
    bool *written = calloc((size_t)c->graph->values, sizeof *written);
    bool ok = order && written;
    for (int32_t k = 0; k < forward && ok; k++) {
        const graph_node *node = node_of(c, k);
        if (may_come_first(c, node, written))
            c->call_node[first++] = c->call_node[k];
        else
            order[others++] = c->call_node[k];
        for (size_t i = 0; i < pass_of(node)->outputs; i++)
            if (node->value[i]) written[graph_storage(c->graph, node->value[i])] = true;
    }
    if (ok && others) memcpy(c->call_node + first, order, (size_t)others * sizeof *order);
    free(order);
    free(written);
    return ok;
}

/* ---- Groups ------------------------------------------------------------------------------------------ */

/* The last group that read or wrote each storage, counted from 1. */
typedef struct uses {
    int32_t *read, *written;
} uses;

/* Whether a slice shares memory with anything that the calls of a group use, not only a storage. */
static bool meets(const compilation *c, const program_group *group, vjp_value slice) {
    const graph_value *own = &c->graph->value[slice];
    for (int32_t k = group->first; k < group->first + group->count; k++)
        for (size_t i = 0; i < pass_of(node_of(c, k))->count; i++) {
            vjp_value value = slot_value(c, node_of(c, k), i);
            if (!value || merged_storage(c, value) != merged_storage(c, slice)) continue;
            const graph_value *other = &c->graph->value[value];
            if (!graph_is_slice(c->graph, value) || other->origin != own->origin || other->offset == own->offset)
                return true;
        }
    return false;
}

static bool may_join(const compilation *c, const graph_node *node, const uses *u, int32_t group) {
    const vjp_pass_info *pass = pass_of(node);
    for (size_t i = 0; i < pass->count; i++) {
        vjp_value value = slot_value(c, node, i), storage = value ? merged_storage(c, value) : 0;
        if (!value) continue;
        bool output = i < pass->outputs, adds = node->adds >> i & 1;
        if (!(u->written[storage] == group && !adds) && !(u->read[storage] == group && output)) continue;
        if (!graph_is_slice(c->graph, value) || meets(c, &c->program->group[group - 1], value)) return false;
    }
    return true;
}

static void note_uses(const compilation *c, const graph_node *node, uses *u, int32_t group) {
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        vjp_value value = slot_value(c, node, i);
        if (value) (i < pass_of(node)->outputs ? u->written : u->read)[merged_storage(c, value)] = group;
    }
}

/* ---- Pairs ------------------------------------------------------------------------------------------- */

/* Of each storage the last call that uses it; `calls` where it is a result or kept. */
static void find_last_uses(const compilation *c, int32_t *last) {
    for (int32_t k = 0; k < c->program->calls; k++)
        for (size_t i = 0; i < pass_of(node_of(c, k))->count; i++) {
            vjp_value value = slot_value(c, node_of(c, k), i);
            if (value) last[merged_storage(c, value)] = k;
        }
    for (vjp_value v = 1; v < c->graph->values; v++)
        if (c->result[v] || is_persistent(c, merged_storage(c, v))) last[merged_storage(c, v)] = c->program->calls;
}

/* A call without memory: its tensors have the same data where they have the same storage. */
static bool describe_call(const compilation *c, const graph_node *node, vjp_tensor *tensor, vjp_work *work) {
    const vjp_tensor *present[VJP_MAX_SLOTS];
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        vjp_value value = slot_value(c, node, i);
        present[i] = value ? &tensor[i] : NULL;
        if (!value) continue;
        tensor[i] = graph_tensor(c->graph, value);
        tensor[i].data = (void *)((uintptr_t)PLAN_ALIGNMENT * ((uintptr_t)merged_storage(c, value) + 1));
        if (node->adds >> i & 1) tensor[i].flags = VJP_ACCUMULATE;
    }
    return vjp_describe_work(work, c->device, node->op, node->pass, present, pass_of(node)->count, node->attributes) ==
           VJP_OK;
}

bool call_reads(const compilation *c, const graph_node *node, vjp_value storage) {
    for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++) {
        vjp_value value = slot_value(c, node, i);
        if (value && merged_storage(c, value) == storage) return true;
    }
    return false;
}

/* Whether the device runs call k and the one before it as one. */
static bool is_pair(const compilation *c, int32_t k, const int32_t *last) {
    const graph_node *first = node_of(c, k - 1), *second = node_of(c, k);
    uint32_t unread = 0;
    bool depends = false;
    for (size_t i = 0; i < pass_of(first)->outputs; i++) {
        vjp_value value = slot_value(c, first, i), storage = value ? merged_storage(c, value) : 0;
        if (!value || !call_reads(c, second, storage)) continue;
        depends = true;
        if (last[storage] == k) unread |= 1u << i;
    }
    vjp_tensor tensor[2][VJP_MAX_SLOTS];
    vjp_work work[2];
    return depends && describe_call(c, first, tensor[0], &work[0]) && describe_call(c, second, tensor[1], &work[1]) &&
           c->device->backend->pairs(&work[0], &work[1], unread);
}

bool find_groups(compilation *c) {
    vjp_program *program = c->program;
    size_t values = (size_t)c->graph->values;
    program->groups = 0;
    int32_t *memory = merges_any(c) || c->rewritten.pairs ? calloc(3 * values, sizeof *memory) : NULL;
    uses u = {memory, memory ? memory + values : NULL};
    if ((merges_any(c) || c->rewritten.pairs) && !memory) return false;
    int32_t *last = memory ? memory + 2 * values : NULL;
    if (memory) find_last_uses(c, last);
    for (int32_t k = 0; k < program->calls; k++) {
        const graph_node *node = node_of(c, k), *before = k ? node_of(c, k - 1) : NULL;
        program_group *group = program->groups ? &program->group[program->groups - 1] : NULL;
        bool joins = before && !group->pair && before->op == node->op && before->pass == node->pass &&
                     merges(c, node) && may_join(c, node, &u, program->groups);
        bool pair = before && !joins && group->count == 1 && c->rewritten.pairs && is_pair(c, k, last);
        if (joins || pair) {
            group->count++;
            group->pair = pair;
        } else {
            program->group[program->groups++] = (program_group){.first = k, .count = 1};
        }
        if (memory) note_uses(c, node, &u, program->groups);
    }
    free(memory);
    return true;
}
