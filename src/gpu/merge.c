/* SPDX-License-Identifier: MIT */
/*
 * One launch for those of many calls. A step of training has hundreds of short calls of one op (an optimizer's step for
 * each parameter, a sum of squares for each gradient, a cast for each weight); each dispatch waits for the one before,
 * because they use the same buffers.
 *
 * The launches of the calls are gathered as their ops enqueue them. Those that differ in places and numbers alone
 * become one: its parameters are a table with a row for each, and its windows hold the operands of all. Where a device
 * cannot bind so much at once, the launches are divided. Calls are independent of each other, so stages of all calls
 * follow each other; launches that add to one output come last, in the order of the calls.
 */
#include <stdlib.h>
#include <string.h>

#include "gpu/merge.h"

struct gpu_gathered {
    gpu_launch launch;
    int64_t groups;
    int call, stage;
    bool done;
};

int gpu_merges_calls(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    int id = (int)op->id;
    (void)device;
    return pass == VJP_FORWARD &&
           (id == OP_ID(adamw) || id == OP_ID(sgd) || id == OP_ID(sum_squares) || id == OP_ID(cast));
}

static bool grow(gpu_merger *m) {
    int room = m->room ? 2 * m->room : 64;
    gpu_gathered *gathered = realloc(m->gathered, (size_t)room * sizeof *gathered);
    if (gathered) m->gathered = gathered;
    gpu_row *rows = gathered ? realloc(m->rows, (size_t)room * sizeof *rows) : NULL;
    if (!rows) return false;
    m->rows = rows;
    m->room = room;
    return true;
}

void gpu_merger_close(gpu_merger *merger) {
    free(merger->gathered);
    free(merger->rows);
}

vjp_status gpu_gather_launch(vjp_device *device, gpu_merger *merger, const gpu_launch *l, int64_t groups) {
    vjp_status status = gpu_launch_counts(device, l, groups);
    if (status != VJP_OK) return status;
    if (merger->count == merger->room && !grow(merger))
        return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory to merge launches", device->name);
    merger->gathered[merger->count++] = (gpu_gathered){*l, groups, merger->call, merger->stage++, false};
    return VJP_OK;
}

/* ---- Which launches are one -------------------------------------------------------------------------- */

static bool same_operand(const gpu_operand *a, const gpu_operand *b) {
    return strcmp(a->name, b->name) == 0 && a->form == b->form && a->dtype == b->dtype && a->present == b->present &&
           a->output == b->output && a->paired == b->paired && a->fours == b->fours;
}

static bool alike(const gpu_launch *a, const gpu_launch *b) {
    bool same = a->merge == b->merge && strcmp(a->shader, b->shader) == 0 && strcmp(a->kernel, b->kernel) == 0 &&
                a->constants == b->constants && a->operands == b->operands && a->limit == b->limit;
    for (int i = 0; i < a->constants && same; i++)
        same = a->constant[i].value == b->constant[i].value;
    for (int i = 0; i < a->operands && same; i++)
        same = same_operand(&a->operand[i], &b->operand[i]);
    return same;
}

/* ---- One launch -------------------------------------------------------------------------------------- */

/* The rows' launch, with operands that reach from the first row's place in memory to the last one's. */
static gpu_launch united(const gpu_row *row, int rows) {
    gpu_launch all = *row[0].launch;
    for (int i = 0; i < all.operands; i++) {
        gpu_operand *o = &all.operand[i];
        if (!o->present) continue;
        const char *end = o->address + o->bytes;
        for (int k = 1; k < rows; k++) {
            const gpu_operand *own = &row[k].launch->operand[i];
            if (own->address < o->address) o->address = own->address;
            if (own->address + own->bytes > end) end = own->address + own->bytes;
        }
        o->bytes = (uint64_t)(end - o->address);
    }
    return all;
}

/* One dispatch for all rows, or as few as the device can. */
static vjp_status encode_rows(vjp_device *device, const gpu_merger *m, gpu_row *row, int rows) {
    vjp_status status = VJP_OK;
    uint64_t groups = 0;
    if (rows == 1) return m->enqueue(device, row->launch, row->groups);
    gpu_launch all = united(row, rows);
    for (int k = 0; k < rows; k++) {
        row[k].first = (uint32_t)groups;
        groups += row[k].groups;
    }
    uint32_t wanted = all.merge == GPU_BESIDE ? (uint32_t)groups : 1;
    if (groups <= INT32_MAX && m->together(device, &all, row, rows, wanted, &status)) return status;
    status = encode_rows(device, m, row, rows / 2);
    return status == VJP_OK ? encode_rows(device, m, row + rows / 2, rows - rows / 2) : status;
}

/* ---- All of them ------------------------------------------------------------------------------------- */

/* Launch i and those like it from there on, of the same stage; of those in order, only the ones that follow it. */
static vjp_status encode_from(vjp_device *device, const gpu_merger *m, int i) {
    gpu_gathered *first = &m->gathered[i];
    bool in_order = first->launch.merge == GPU_IN_ORDER;
    int rows = 0;
    for (int k = i; k < m->count; k++) {
        gpu_gathered *g = &m->gathered[k];
        if (g->done || (in_order && g->launch.merge != GPU_IN_ORDER)) continue;
        bool joins = k == i || (first->launch.merge != GPU_ALONE && (in_order || g->stage == first->stage) &&
                                alike(&first->launch, &g->launch) && (!in_order || first->groups == 1));
        if (joins && in_order && g->groups > 1) joins = k == i;
        if (!joins && in_order) break;
        if (!joins) continue;
        g->done = true;
        m->rows[rows++] = (gpu_row){.launch = &g->launch, .groups = (uint32_t)g->groups};
    }
    return encode_rows(device, m, m->rows, rows);
}

vjp_status gpu_merge_calls(gpu_merger *merger, const vjp_work *const *works, size_t count, gpu_mode mode) {
    vjp_device *device = works[0]->device;
    vjp_status status = VJP_OK;
    int stages = 0;
    merger->count = 0;
    for (size_t w = 0; w < count && status == VJP_OK; w++) {
        merger->call = (int)w;
        merger->stage = 0;
        status = gpu_rehearse(works[w], merger->mode, GPU_GATHER);
        if (merger->stage > stages) stages = merger->stage;
    }
    *merger->mode = mode;
    for (int stage = 0; stage < stages && status == VJP_OK; stage++)
        for (int i = 0; i < merger->count && status == VJP_OK; i++) {
            const gpu_gathered *g = &merger->gathered[i];
            if (!g->done && g->stage == stage && g->launch.merge != GPU_IN_ORDER)
                status = encode_from(device, merger, i);
        }
    for (int i = 0; i < merger->count && status == VJP_OK; i++)
        if (!merger->gathered[i].done) status = encode_from(device, merger, i);
    *merger->mode = GPU_RUN;
    return status;
}
