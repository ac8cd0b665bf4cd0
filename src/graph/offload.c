/* SPDX-License-Identifier: MIT */
/*
 * Which intermediates wait in the host's memory. One that is not used for long around the moment at which most memory
 * is in use is copied there after its last use before that moment, and back before its first use after it. Between the
 * two copies its place in the arena is free. The copies run beside the calls, so they cost next to nothing while they
 * take no longer than those; an intermediate that would have to be waited for stays where it is. As estimates are never
 * quite right, copies begin early and may end late by a part of the run, as large a part as the limit allows.
 *
 * How long calls take is estimated from the bytes that they move and their operations, and how long copies take, from
 * two ratios that the backend states.
 */
#include <stdlib.h>

#include "core/arithmetic.h"
#include "graph/compile.h"

enum {
    MIN_SHARE = 4096, /* smaller values than this share of the peak are not worth a copy */
    MAX_ROUNDS = 64
};

/* Times are groups of calls, and one beyond the last. */
typedef struct offloading {
    compilation *c;
    int32_t groups;
    int32_t *group_of;       /* [calls + 1] */
    size_t *live;            /* [groups + 2]: bytes in use */
    double *clock;           /* [groups + 1]: when the group begins, in bytes moved */
    int32_t *before, *after; /* [values]: of storages, the uses next to the peak; -1: none */
    bool *at_peak;           /* [values] */
    vjp_value *candidate;
    double spare;                /* how much later a copy may end than estimated, where there is time for it */
    double out_free, back_until; /* when the bus is free again, and from when on it is taken by copies back */
} offloading;

/* The bytes of a range in the arena; their sum has been checked. */
static size_t aligned(size_t bytes) {
    size_t result = 0;
    return vjp_align_size(bytes, PLAN_ALIGNMENT, &result) ? result : SIZE_MAX;
}

static bool has_range(const compilation *c, vjp_value v) {
    return c->first[v] >= 0 && !is_persistent(c, v) && graph_storage(c->graph, v) == v && c->merged[v] == v;
}

static void read_clock(offloading *o) {
    const vjp_program *program = o->c->program;
    o->clock[0] = 0;
    for (int32_t g = 0; g < o->groups; g++) {
        const program_group *group = &program->group[g];
        double bytes = 0, flops = 0;
        for (int32_t k = group->first; k < group->first + group->count; k++) {
            o->group_of[k] = g;
            bytes += program->call[k].cost.bytes;
            flops += program->call[k].cost.flops;
        }
        double product = flops / o->c->device->backend->flops_per_byte;
        o->clock[g + 1] = o->clock[g] + (bytes > product ? bytes : product);
    }
    o->group_of[program->calls] = o->groups;
}

/* From the changes at each group, modulo 2^64, whose number does not grow with how long values live. */
static void read_live(offloading *o) {
    const compilation *c = o->c;
    for (vjp_value v = 1; v < c->graph->values; v++) {
        if (!has_range(c, v)) continue;
        o->live[o->group_of[c->first[v]]] += aligned(c->graph->value[v].bytes);
        o->live[o->group_of[c->last[v]] + 1] -= aligned(c->graph->value[v].bytes);
    }
    for (int32_t k = 0; k < c->program->calls; k++) {
        o->live[o->group_of[k]] += aligned(c->scratch[k]);
        o->live[o->group_of[k] + 1] -= aligned(c->scratch[k]);
    }
    for (int32_t g = 1; g <= o->groups; g++)
        o->live[g] += o->live[g - 1];
}

/* The uses of every storage next to group `peak`. */
static void find_uses(offloading *o, int32_t peak) {
    const compilation *c = o->c;
    for (vjp_value v = 0; v < c->graph->values; v++) {
        o->before[v] = o->after[v] = -1;
        o->at_peak[v] = false;
    }
    for (int32_t k = 0; k < c->program->calls; k++) {
        const graph_node *node = node_of(c, k);
        int32_t g = o->group_of[k];
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            vjp_value value = slot_value(c, node, i), storage = value ? merged_storage(c, value) : 0;
            if (!storage) continue;
            if (g < peak) o->before[storage] = g;
            if (g == peak) o->at_peak[storage] = true;
            if (g > peak && o->after[storage] < 0) o->after[storage] = g;
        }
    }
}

/* Plans both copies of a storage around the peak. False: the calls would have to wait for one of them. */
static bool place_copies(offloading *o, vjp_value v, int32_t peak, offloaded *item) {
    double cost = (double)o->c->graph->value[v].bytes * o->c->device->backend->copy_cost;
    double begin = o->clock[o->before[v] + 1], end = o->clock[o->after[v]];
    double out = (begin > o->out_free ? begin : o->out_free) + cost;
    double back = (end < o->back_until ? end : o->back_until) - cost;
    if (out > o->clock[peak] || back < o->clock[peak + 1]) return false;
    double latest = out + o->spare, earliest = back - o->spare;
    int32_t freed = o->before[v] + 1, fetched = o->after[v];
    while (freed < peak && o->clock[freed] < latest)
        freed++;
    while (fetched > peak + 1 && o->clock[fetched] > earliest)
        fetched--;
    const program_group *group = o->c->program->group;
    *item = (offloaded){.storage = v,
                        .out = group[o->before[v] + 1].first,
                        .freed = group[freed].first,
                        .fetched = group[fetched].first,
                        .back = group[o->after[v]].first,
                        .range = -1};
    o->out_free = out;
    o->back_until = back;
    for (int32_t g = freed; g < fetched; g++)
        o->live[g] -= aligned(o->c->graph->value[v].bytes);
    return true;
}

static int32_t find_peak(const offloading *o) {
    int32_t peak = 0;
    for (int32_t g = 1; g < o->groups; g++)
        if (o->live[g] > o->live[peak]) peak = g;
    return peak;
}

/*
 * Whether a is chosen before b: the larger one, since places of one size can be used again without gaps; then by the
 * last use before the peak, and after a use in common the one needed last.
 */
static bool goes_first(const offloading *o, vjp_value a, vjp_value b) {
    const graph_value *value = o->c->graph->value;
    if (value[a].bytes != value[b].bytes) return value[a].bytes > value[b].bytes;
    if (o->before[a] != o->before[b]) return o->before[a] < o->before[b];
    return o->after[a] > o->after[b];
}

/*
 * Those that are out of use at the peak, in the order in which they are chosen. All of them are in memory then, so
 * there are MIN_SHARE at most.
 */
static int32_t list_candidates(offloading *o, int32_t peak) {
    const compilation *c = o->c;
    int32_t count = 0;
    for (vjp_value v = 1; v < c->graph->values; v++) {
        if (!has_range(c, v) || c->away_of[v] >= 0 || o->at_peak[v]) continue;
        if (o->before[v] < 0 || o->after[v] < 0 || c->graph->value[v].bytes < o->live[peak] / MIN_SHARE) continue;
        int32_t at = count++;
        for (; at > 0 && goes_first(o, v, o->candidate[at - 1]); at--)
            o->candidate[at] = o->candidate[at - 1];
        o->candidate[at] = v;
    }
    return count;
}

static void choose(offloading *o, size_t limit) {
    compilation *c = o->c;
    bool more = true;
    for (int round = 0; round < MAX_ROUNDS && more; round++) {
        int32_t peak = find_peak(o);
        if (o->live[peak] <= limit) return;
        find_uses(o, peak);
        int32_t count = list_candidates(o, peak);
        more = false;
        for (int32_t i = 0; i < count && o->live[peak] > limit; i++) {
            vjp_value v = o->candidate[i];
            if (!place_copies(o, v, peak, &c->away[c->aways])) continue;
            c->away_of[v] = c->aways++;
            more = true;
        }
    }
}

bool choose_offloaded(compilation *c, size_t limit, double spare) {
    size_t values = (size_t)c->graph->values, calls = (size_t)c->program->calls, groups = (size_t)c->program->groups;
    offloading o = {.c = c, .groups = c->program->groups, .out_free = 0, .back_until = 1e300};
    for (int32_t i = 0; i < c->aways; i++)
        c->away_of[c->away[i].storage] = -1;
    c->aways = 0;
    o.group_of = malloc((calls + 1) * sizeof *o.group_of);
    o.live = calloc(groups + 2, sizeof *o.live);
    o.clock = malloc((groups + 1) * sizeof *o.clock);
    o.before = malloc(2 * values * sizeof *o.before);
    o.at_peak = malloc(values * sizeof *o.at_peak);
    o.candidate = malloc(values * sizeof *o.candidate);
    bool ok = o.group_of && o.live && o.clock && o.before && o.at_peak && o.candidate;
    if (ok) {
        o.after = o.before + values;
        read_clock(&o);
        o.spare = spare * o.clock[o.groups];
        read_live(&o);
        choose(&o, limit);
    }
    free(o.group_of);
    free(o.live);
    free(o.clock);
    free(o.before);
    free(o.at_peak);
    free(o.candidate);
    return ok;
}

/* ---- The copies of a program ------------------------------------------------------------------------- */

static int earlier_first(const void *a, const void *b) {
    const program_move *x = a, *y = b;
    if (x->call != y->call) return x->call < y->call ? -1 : 1;
    if (x->what != y->what) return x->what < y->what ? -1 : 1;
    if (x->until != y->until) return x->until < y->until ? -1 : 1;
    return x->ticket < y->ticket ? -1 : x->ticket > y->ticket;
}

vjp_status make_moves(compilation *c) {
    vjp_program *program = c->program;
    if (!c->aways) return VJP_OK;
    program->move = calloc(4 * (size_t)c->aways, sizeof *program->move);
    if (!program->move) return vjp_fail(c->device, VJP_OUT_OF_MEMORY, "no memory for %d copies", c->aways);
    vjp_status status = c->device->backend->alloc_host(c->device, program->report.host_bytes, &program->host);
    if (status != VJP_OK) return status;
    size_t used = 0;
    for (int32_t i = 0; i < c->aways; i++) {
        const offloaded *item = &c->away[i];
        const int32_t call[] = {item->out, item->freed, item->fetched, item->back};
        for (int what = MOVE_OUT; what <= MOVE_BACK; what++) {
            bool out = what <= MOVE_FREED;
            int32_t range = out ? c->range[item->storage] : item->range;
            program->move[program->moves++] = (program_move){.call = call[what],
                                                             .until = call[out ? MOVE_FREED : MOVE_BACK],
                                                             .what = (program_moving)what,
                                                             .ticket = 2 * i + !out,
                                                             .host = (char *)program->host + used,
                                                             .device = (char *)program->arena + c->plan[range].offset,
                                                             .bytes = c->graph->value[item->storage].bytes};
        }
        used += aligned(c->graph->value[item->storage].bytes);
    }
    qsort(program->move, (size_t)program->moves, sizeof *program->move, earlier_first);
    return VJP_OK;
}

/* ---- A run ------------------------------------------------------------------------------------------- */

static vjp_status do_move(const vjp_program *program, const program_move *move) {
    const vjp_backend *backend = program->device->backend;
    switch (move->what) {
    case MOVE_OUT: return backend->copy_begin(program->device, move->host, move->device, move->bytes, 1, move->ticket);
    case MOVE_FETCH:
        return backend->copy_begin(program->device, move->device, move->host, move->bytes, 0, move->ticket);
    default: return backend->copy_wait(program->device, move->ticket);
    }
}

vjp_status program_move_before(const vjp_program *program, int32_t call, int32_t *done) {
    for (; *done < program->moves && program->move[*done].call <= call; ++*done) {
        vjp_status status = do_move(program, &program->move[*done]);
        if (status != VJP_OK) return status;
    }
    return VJP_OK;
}

void program_end_moves(const vjp_program *program, int32_t done) {
    for (int32_t i = done; i < program->moves; i++) {
        const program_move *wait = &program->move[i];
        bool begun = false;
        for (int32_t b = 0; b < done && !begun; b++)
            begun = program->move[b].ticket == wait->ticket;
        if (begun) program->device->backend->copy_wait(program->device, wait->ticket);
    }
}
