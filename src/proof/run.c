/* SPDX-License-Identifier: MIT */
/*
 * Runs a pass on the device under test through the public API alone, so that any device can be tested. Guards surround
 * every buffer, and outputs and workspace hold NaN before the call, which shows what a kernel leaves out, reads too
 * early or writes out of bounds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "proof/rows.h"
#include "proof/values.h"

/* All bits set is a NaN in every float type and -1 in every integer. */
enum { GUARD = 128, GUARD_BYTE = ROWS_GUARD_BYTE, POISON_BYTE = ROWS_POISON_BYTE };

typedef struct guarded {
    void *data; /* the device's: guard, content, guard */
    size_t before, bytes;
    const void *content; /* what was uploaded; NULL: poison */
} guarded;

/* Uploads and comparisons go through blocks: a second copy of every large tensor would cost more than the call. */
enum { BLOCK = 256 << 10 };

static vjp_status upload_byte(vjp_device *device, void *data, size_t offset, int byte, size_t bytes) {
    unsigned char *block = proof_memory(bytes < BLOCK ? bytes : BLOCK);
    memset(block, byte, bytes < BLOCK ? bytes : BLOCK);
    vjp_status status = VJP_OK;
    for (size_t at = 0; at < bytes && status == VJP_OK; at += BLOCK)
        status = vjp_upload(device, data, offset + at, block, bytes - at < BLOCK ? bytes - at : BLOCK);
    free(block);
    return status;
}

static vjp_status guarded_make(guarded *g, vjp_device *device, size_t bytes, size_t before, const void *content) {
    *g = (guarded){.before = before, .bytes = bytes, .content = content};
    vjp_status status = vjp_alloc(device, before + bytes + GUARD, &g->data);
    if (status == VJP_OK) status = upload_byte(device, g->data, 0, GUARD_BYTE, before);
    if (status == VJP_OK) status = upload_byte(device, g->data, before + bytes, GUARD_BYTE, GUARD);
    if (status != VJP_OK || !bytes) return status;
    if (!content) return upload_byte(device, g->data, before, POISON_BYTE, bytes);
    return vjp_upload(device, g->data, before, content, bytes);
}

/* Whether memory on the device still holds `content`, or that byte all over. */
static bool still_holds(vjp_device *device, const void *data, size_t offset, size_t bytes, const void *content,
                        int byte) {
    unsigned char *now = proof_memory(bytes < BLOCK ? bytes : BLOCK);
    bool same = true;
    for (size_t at = 0; at < bytes && same; at += BLOCK) {
        size_t length = bytes - at < BLOCK ? bytes - at : BLOCK;
        same = vjp_download(device, now, data, offset + at, length) == VJP_OK;
        if (content) same = same && memcmp(now, (const unsigned char *)content + at, length) == 0;
        for (size_t i = 0; !content && same && i < length; i++)
            same = now[i] == byte;
    }
    free(now);
    return same;
}

/* False if a guard (or, of an input, anything) has changed. An output is brought back. */
static bool guarded_check(const guarded *g, vjp_device *device, bool input, void **content) {
    bool good = still_holds(device, g->data, 0, g->before, NULL, GUARD_BYTE) &&
                still_holds(device, g->data, g->before + g->bytes, GUARD, NULL, GUARD_BYTE);
    if (input) good = good && still_holds(device, g->data, g->before, g->bytes, g->content, 0);
    if (!content) return good;
    *content = proof_memory(g->bytes);
    return vjp_download(device, *content, g->data, g->before, g->bytes) == VJP_OK && good;
}

typedef struct run_state {
    guarded slot[VJP_MAX_SLOTS], workspace;
    rows_layout rows;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS];
} run_state;

static bool is_aliased(const proof_call *call, size_t slot) {
    return call->alias_input && (int)slot == call->alias_output;
}

static vjp_status make_buffer(run_state *s, vjp_device *device, const proof_call *call, const proof_values *v, size_t i,
                              const void *content) {
    const rows_place *place = &s->rows.place[i];
    size_t size = vjp_dtype_size((vjp_dtype)v->tensor.dtype), before = GUARD + (size_t)call->shift * size;
    const rows_buffer *rows = &s->rows.buffer[i];
    vjp_status status = VJP_OK;
    if (!place->apart)
        status = guarded_make(&s->slot[i], device, (size_t)v->count * size, before, content);
    else if (place->buffer == (int)i)
        status = guarded_make(&s->slot[i], device, rows->bytes, before, rows->image);
    const guarded *buffer = &s->slot[place->apart ? (size_t)place->buffer : i];
    s->tensor[i].data = buffer->data;
    s->tensor[i].offset = buffer->before;
    if (place->apart) rows_describe(place, &s->tensor[i]);
    return status;
}

static vjp_status make_buffers(run_state *s, const proof_problem *p, vjp_device *device, const proof_call *call) {
    const vjp_pass_info *info = &p->info->pass[call->pass];
    const void *content[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < info->count; i++) {
        const proof_values *v = &p->slot[call->pass][i];
        if (!(call->present >> i & 1)) continue;
        s->tensor[i] = v->tensor;
        s->tensors[i] = &s->tensor[i];
        bool adds = i < info->outputs && call->initial && (v->slot->flags & VJP_SLOT_ACCUMULATES);
        if (adds) s->tensor[i].flags = VJP_ACCUMULATE;
        content[i] = adds ? call->initial[i] : v->stored; /* an output has nothing stored: poison */
    }
    rows_make(&s->rows, p, call, content);
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < info->count && status == VJP_OK; i++)
        if (s->tensors[i] && !is_aliased(call, i))
            status = make_buffer(s, device, call, &p->slot[call->pass][i], i, content[i]);
    if (call->alias_input) s->tensor[call->alias_output] = s->tensor[call->alias_input];
    return status;
}

/* Exactly the workspace that the pass requires, filled with NaN, and a guard after it (a handle cannot have one
 * before). */
static vjp_status make_workspace(run_state *s, const proof_problem *p, vjp_device *device, const proof_call *call) {
    size_t bytes = 0, count = p->info->pass[call->pass].count;
    vjp_status status =
        vjp_workspace_size(device, p->setup.op, call->pass, s->tensors, count, &p->setup.attributes, &bytes);
    if (status != VJP_OK || !bytes) return status;
    status = guarded_make(&s->workspace, device, bytes, 0, NULL);
    if (status != VJP_OK) return status;
    return vjp_set_workspace(device, s->workspace.data, bytes);
}

/* The same of the rows in a buffer: brings back those that the call writes, and compares everything else. */
static bool rows_check(const run_state *s, vjp_device *device, int buffer, void **const content[VJP_MAX_SLOTS]) {
    void *now;
    bool good = guarded_check(&s->slot[buffer], device, false, &now);
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        if (s->rows.place[i].apart && s->rows.place[i].buffer == buffer && content[i])
            *content[i] = rows_take(&s->rows, i, now);
    good = good && memcmp(now, s->rows.buffer[buffer].image, s->slot[buffer].bytes) == 0;
    free(now);
    return good;
}

static void collect(run_state *s, const proof_problem *p, vjp_device *device, const proof_call *call,
                    void *result[VJP_MAX_SLOTS], char fault[PROOF_FAULT]) {
    const vjp_pass_info *info = &p->info->pass[call->pass];
    void **content[VJP_MAX_SLOTS] = {0}; /* where what the call wrote goes; NULL: an input */
    for (size_t i = 0; i < info->outputs; i++)
        if (!is_aliased(call, i)) content[i] = &result[i];
    if (call->alias_input) content[call->alias_input] = &result[call->alias_output];
    for (size_t i = 0; i < info->count; i++) {
        if (!s->slot[i].data) continue;
        bool input = !content[i];
        bool good = s->rows.place[i].apart ? rows_check(s, device, (int)i, content)
                                           : guarded_check(&s->slot[i], device, input, content[i]);
        if (!good && !fault[0])
            snprintf(fault, PROOF_FAULT,
                     input ? "%s, an input, or memory beside it was changed" : "memory beside %s was written",
                     info->slots[i].name);
    }
    if (s->workspace.data && !guarded_check(&s->workspace, device, false, NULL) && !fault[0])
        snprintf(fault, PROOF_FAULT, "memory beside the %zu bytes of workspace was written", s->workspace.bytes);
}

typedef struct enqueued {
    const proof_problem *p;
    vjp_device *device;
    const proof_call *call;
    const vjp_tensor *const *tensors;
} enqueued;

static vjp_status enqueue(void *argument) {
    const enqueued *e = argument;
    size_t count = e->p->info->pass[e->call->pass].count;
    return vjp_call(e->device, e->p->setup.op, e->call->pass, e->tensors, count, &e->p->setup.attributes);
}

/* Recorded and replayed, which runs it twice: the result is the last run's. */
static vjp_status replay(enqueued *e) {
    double seconds;
    return e->device->backend->measure(e->device, enqueue, e, 1, &seconds);
}

vjp_status proof_run(const proof_problem *p, vjp_device *device, const proof_call *call, void *result[VJP_MAX_SLOTS],
                     char fault[PROOF_FAULT]) {
    size_t count = p->info->pass[call->pass].count;
    run_state s;
    memset(&s, 0, sizeof s);
    memset(result, 0, VJP_MAX_SLOTS * sizeof result[0]);
    fault[0] = 0;
    vjp_status status = make_buffers(&s, p, device, call);
    if (status == VJP_OK) status = make_workspace(&s, p, device, call);
    enqueued e = {p, device, call, s.tensors};
    if (status == VJP_OK) status = call->recorded ? replay(&e) : enqueue(&e);
    if (status == VJP_OK) status = vjp_synchronize(device);
    if (status == VJP_OK)
        collect(&s, p, device, call, result, fault);
    else
        snprintf(fault, PROOF_FAULT, "%s", vjp_error(device));
    vjp_set_workspace(device, NULL, 0);
    for (size_t i = 0; i < count; i++)
        vjp_free(device, s.slot[i].data);
    vjp_free(device, s.workspace.data);
    rows_free(&s.rows);
    return status;
}
