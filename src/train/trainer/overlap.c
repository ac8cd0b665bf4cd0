/* SPDX-License-Identifier: MIT */
/* Buckets of gradients, and the thread that exchanges them. */
#include "train/trainer/overlap.h"

#include <stdlib.h>

#include "comm/group.h"
#include "core/arithmetic.h"
#include "core/core.h"
#include "graph/program.h"
#include "op/op.h"

/*
 * A bucket has at least 4 MiB, or an eighth of all gradients where that is less. Smaller ones are exchanged earlier,
 * and each costs a wait for the slowest process on every level of the tree. On a GPU it costs launches and waits for
 * them, too, some 60 microseconds on each level: in 64 MiB they are less than half of the time at the rate of NVLink.
 */
enum { BUCKET_ELEMENTS = 1 << 20, GPU_BUCKET_ELEMENTS = 1 << 24, MIN_BUCKETS = 8 };

/* As much as a thread of the CPU has: the thread may compute, too, and a driver may need a lot. */
enum { STACK_BYTES = 8 << 20 };

/* ---- What is complete when --------------------------------------------------------------------------- */

static bool overlaps(const vjp_tensor *a, const vjp_tensor *b) {
    const char *one = (const char *)a->data + a->offset, *other = (const char *)b->data + b->offset;
    return one < other + program_bytes(b) && other < one + program_bytes(a);
}

/* The last call that writes the gradient; the program's last where none does. */
static int32_t last_write(const vjp_program *program, const vjp_tensor *gradient) {
    for (int32_t k = program->calls; k-- > 0;) {
        const vjp_work *work = &program->call[k].work;
        const vjp_pass_info *pass = &work->op->info.pass[work->pass];
        for (size_t slot = 0; slot < pass->outputs; slot++)
            if (work->tensor[slot] && work->tensor[slot]->data == gradient->data &&
                overlaps(work->tensor[slot], gradient))
                return k;
    }
    return program->calls - 1;
}

/* By insertion: the order is nearly that of the parameters, backwards. */
static void sort_by_call(overlap *o) {
    for (size_t i = 0; i < o->sum->gradients; i++) {
        int32_t own = (int32_t)(o->sum->gradients - 1 - i);
        size_t at = i;
        for (; at > 0 && o->call[o->order[at - 1]] > o->call[own]; at--)
            o->order[at] = o->order[at - 1];
        o->order[at] = own;
    }
}

static void choose_buckets(overlap *o) {
    size_t last = o->sum->gradients; /* the end of the bucket that is being filled */
    int64_t most = vjp_device_is_host(o->sum->device) ? BUCKET_ELEMENTS : GPU_BUCKET_ELEMENTS;
    int64_t least = vjp_min(most, o->begin[last] / MIN_BUCKETS);
    for (size_t i = last; i-- > 0;)
        if (i == 0 || o->begin[last] - o->begin[i] >= least) {
            o->first[o->buckets++] = i;
            last = i;
        }
}

static size_t end_of(const overlap *o, size_t bucket) {
    return bucket ? o->first[bucket - 1] : o->sum->gradients;
}

static size_t bucket_of(const overlap *o, size_t parameter) {
    size_t bucket = 0;
    while (parameter < o->first[bucket])
        bucket++;
    return bucket;
}

vjp_status overlap_create(overlap *o, shards *sum, vjp_program *program, const int64_t *bounds) {
    size_t count = sum->gradients;
    *o = (overlap){.sum = sum, .program = program, .bounds = bounds};
    o->first = calloc(count + 1, sizeof *o->first);
    o->begin = calloc(count + 1, sizeof *o->begin);
    o->order = calloc(count + 1, sizeof *o->order);
    o->call = calloc(count + 1, sizeof *o->call);
    o->missing = calloc(count + 1, sizeof *o->missing);
    o->event = calloc(count + 1, sizeof *o->event);
    if (!o->first || !o->begin || !o->order || !o->call || !o->missing || !o->event)
        return vjp_fail(sum->device, VJP_OUT_OF_MEMORY, "there is no memory for the buckets of %zu gradients", count);
    for (size_t i = 0; i < count; i++) {
        o->begin[i + 1] = o->begin[i] + sum->gradient[i].shape[0];
        o->call[i] = last_write(program, &sum->gradient[i]);
    }
    sort_by_call(o);
    choose_buckets(o);
    return vjp_group_reduce_prepare(sum->group);
}

void overlap_free(overlap *o) {
    free(o->first);
    free(o->begin);
    free(o->order);
    free(o->call);
    free(o->missing);
    free(o->event);
    *o = (overlap){0};
}

/* ---- A step ------------------------------------------------------------------------------------------ */

/* The gradients that a call has completed are summed over the own shards, and put where they are sent from. */
static void after_call(void *context, int32_t call) {
    overlap *o = context;
    for (; o->next < o->sum->gradients && o->call[o->order[o->next]] <= call && o->status == VJP_OK; o->next++) {
        size_t own = (size_t)o->order[o->next];
        o->status = shards_finish(o->sum, own);
        if (o->status == VJP_OK) o->missing[bucket_of(o, own)]--;
    }
    for (; o->complete < o->buckets && !o->missing[o->complete] && o->status == VJP_OK; o->complete++)
        if (!vjp_device_is_host(o->sum->device)) o->status = vjp_event_record(o->sum->device, &o->event[o->complete]);
    atomic_store_explicit(&o->ready, o->complete, memory_order_release);
}

static vjp_tensor everything(const overlap *o) {
    const int64_t elements = (int64_t)o->sum->elements;
    return vjp_tensor_of(o->sum->buffer[0], VJP_F32, 1, &elements);
}

static void *exchange_buckets(void *argument) {
    enum { NAP = 50000 }; /* nanoseconds */
    overlap *o = argument;
    const vjp_tensor all = everything(o);
    for (size_t b = 0; b < o->buckets && o->sent == VJP_OK; b++) {
        while (atomic_load_explicit(&o->ready, memory_order_acquire) <= b)
            system_sleep(NAP);
        if (o->event[b]) o->sent = vjp_group_reduce_await(o->sum->group, o->event[b]);
        if (o->sent != VJP_OK) break;
        double begin = system_seconds();
        o->sent = vjp_group_reduce_part(o->sum->group, &all, o->bounds, o->begin[o->first[b]], o->begin[end_of(o, b)]);
        o->busy += system_seconds() - begin;
    }
    return NULL;
}

vjp_status overlap_begin(overlap *o) {
    const vjp_tensor all = everything(o);
    o->next = o->complete = 0;
    o->busy = 0;
    o->status = o->sent = VJP_OK;
    for (size_t b = 0; b < o->buckets; b++)
        o->missing[b] = end_of(o, b) - o->first[b];
    atomic_store(&o->ready, 0);
    vjp_status status = vjp_group_reduce_begin(o->sum->group, &all, o->bounds);
    if (status != VJP_OK) return status;
    o->started = system_thread_start(&o->thread, STACK_BYTES, exchange_buckets, o);
    o->program->after = after_call;
    o->program->context = o;
    return VJP_OK;
}

vjp_status overlap_end(overlap *o, bool ok) {
    o->program->after = NULL;
    /* The host is ahead of a device with a queue: what travels until that is empty is hidden. */
    if (ok && o->status == VJP_OK && !vjp_device_is_host(o->sum->device)) o->status = vjp_synchronize(o->sum->device);
    double begin = system_seconds();
    /* What is missing is sent as it is: all processes learn of the failure before they use the sum. */
    atomic_store_explicit(&o->ready, o->buckets, memory_order_release);
    if (o->started)
        system_thread_join(o->thread);
    else
        exchange_buckets(o); /* there was no thread to be had: after the backward pass, then */
    vjp_group_reduce_end(o->sum->group);
    for (size_t b = 0; b < o->buckets; b++) {
        vjp_event_destroy(o->sum->device, o->event[b]);
        o->event[b] = NULL;
    }
    double waited = system_seconds() - begin;
    o->sum->seconds += waited;
    if (o->busy > waited) o->hidden += o->busy - waited;
    if (!ok || o->sent == VJP_OK) return o->status;
    return o->sent;
}
