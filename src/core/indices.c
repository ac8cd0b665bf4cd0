/* SPDX-License-Identifier: MIT */
/*
 * Checks all indices of a call before anything is written. A saved argmax has as many numbers as an output, so this
 * runs on all threads of the device, in chunks whose loops compile to vector code; only a chunk with a bad index is
 * searched one by one. The first bad index is reported, whichever thread finds one first.
 */
#include <math.h>
#include <stdatomic.h>

#include "core/core.h"

/*
 * A chunk is read as four streams side by side, 64 numbers of each in turn: one core of a Sapphire Rapids reads 15 GB/s
 * from memory with four and 8 with one, since the processor prefetches each stream.
 */
enum { CHUNK = 1 << 14, STREAMS = 4, STEP = 64 };

typedef struct index_scan {
    const void *data;
    vjp_dtype dtype;
    int64_t count, limit;
    bool excepts; /* `except` is allowed too */
    int64_t except;
    _Atomic int64_t first_bad; /* count if there is none */
} index_scan;

bool vjp_index_at(const void *data, vjp_dtype dtype, int64_t k, int64_t *index, double *value) {
    switch (dtype) {
    case VJP_I32: *index = ((const int32_t *)data)[k]; break;
    case VJP_I64: *index = ((const int64_t *)data)[k]; break;
    default: {
        /* Past 2^24 neighbouring integers round to the same f32: the index may be a rounded one. */
        float f = ((const float *)data)[k];
        *value = f;
        if (!(fabsf(f) <= 16777216.0f) || f != truncf(f)) return false;
        *index = (int64_t)f;
        break;
    }
    }
    *value = (double)*index;
    return true;
}

static bool is_good(const index_scan *scan, int64_t k) {
    int64_t index;
    double value;
    return vjp_index_at(scan->data, scan->dtype, k, &index, &value) &&
           ((index >= 0 && index < scan->limit) || (scan->excepts && index == scan->except));
}

/*
 * Whether all of [begin, end) are good. Where the dtype allows it, by sign bits: an index outside [0, last] is
 * negative, or last - index is. With comparisons GCC does not vectorise the loop, and the check takes as long as the
 * whole of maxpool2d's backward.
 */
static bool all_good(const index_scan *scan, int64_t begin, int64_t end) {
    if (scan->dtype == VJP_I32) {
        const int32_t *index = scan->data;
        uint32_t last = scan->limit > INT32_MAX ? INT32_MAX : (uint32_t)scan->limit - 1, bad = 0;
        if (scan->excepts && scan->except == (int32_t)scan->except) {
            uint32_t except = (uint32_t)scan->except;
            for (int64_t k = begin; k < end; k++) {
                uint32_t i = (uint32_t)index[k], other = i ^ except;
                bad |= (i | (last - i)) & (other | -other);
            }
        } else {
            for (int64_t k = begin; k < end; k++)
                bad |= (uint32_t)index[k] | (last - (uint32_t)index[k]);
        }
        return !(bad >> 31);
    }
    if (scan->dtype == VJP_I64) {
        const int64_t *index = scan->data;
        uint64_t last = (uint64_t)scan->limit - 1, except = (uint64_t)scan->except, bad = 0;
        if (scan->excepts) {
            for (int64_t k = begin; k < end; k++) {
                uint64_t i = (uint64_t)index[k], other = i ^ except;
                bad |= (i | (last - i)) & (other | -other);
            }
        } else {
            for (int64_t k = begin; k < end; k++)
                bad |= (uint64_t)index[k] | (last - (uint64_t)index[k]);
        }
        return !(bad >> 63);
    }
    for (int64_t k = begin; k < end; k++)
        if (!is_good(scan, k)) return false;
    return true;
}

static bool chunk_good(const index_scan *scan, int64_t begin, int64_t end) {
    int64_t each = (end - begin) / (STREAMS * STEP) * STEP;
    bool good = true;
    for (int64_t k = begin; k < begin + each; k += STEP)
        for (int64_t from = k; from < k + STREAMS * each; from += each)
            good &= all_good(scan, from, from + STEP);
    return good && all_good(scan, begin + STREAMS * each, end);
}

static void scan_chunk(void *argument, size_t chunk) {
    index_scan *scan = argument;
    int64_t begin = (int64_t)chunk * CHUNK, end = begin + CHUNK < scan->count ? begin + CHUNK : scan->count;
    if (chunk_good(scan, begin, end)) return;
    int64_t bad = begin;
    while (is_good(scan, bad))
        bad++;
    int64_t first = atomic_load(&scan->first_bad);
    while (bad < first && !atomic_compare_exchange_weak(&scan->first_bad, &first, bad))
        ;
}

static vjp_status check_indices(const vjp_work *work, int slot, int64_t limit, const char *axis, bool excepts,
                                int64_t except, const char *except_name) {
    const vjp_shape *shape = &work->shape[slot];
    index_scan scan = {.data = vjp_data(work, slot),
                       .dtype = vjp_type(work, slot),
                       .count = vjp_shape_product(shape, 0, shape->ndim),
                       .limit = limit,
                       .excepts = excepts,
                       .except = except};
    atomic_init(&scan.first_bad, scan.count);
    size_t chunks = (size_t)((scan.count + CHUNK - 1) / CHUNK);
    if (work->device->backend->parallel && chunks > 1)
        work->device->backend->parallel(work->device, chunks, scan_chunk, &scan);
    else
        for (size_t chunk = 0; chunk < chunks; chunk++)
            scan_chunk(&scan, chunk);

    int64_t bad = atomic_load(&scan.first_bad), index;
    if (bad == scan.count) return VJP_OK;
    const char *name = vjp_slot_at(work, slot)->name;
    double value;
    bool whole = vjp_index_at(scan.data, scan.dtype, bad, &index, &value);
    if (whole && excepts)
        return vjp_refuse(work, VJP_INVALID, "%s[%lld] is %lld, outside [0, %lld), the %s, and not the %s, %lld", name,
                          (long long)bad, (long long)index, (long long)limit, axis, except_name, (long long)except);
    if (whole)
        return vjp_refuse(work, VJP_INVALID, "%s[%lld] is %lld, outside [0, %lld), the %s", name, (long long)bad,
                          (long long)index, (long long)limit, axis);
    return vjp_refuse(work, VJP_INVALID, "%s[%lld] is %.9g, which is not an integer that f32 holds exactly", name,
                      (long long)bad, value);
}

vjp_status vjp_check_indices(const vjp_work *work, int slot, int64_t limit, const char *axis) {
    return check_indices(work, slot, limit, axis, false, 0, "");
}

vjp_status vjp_check_indices_except(const vjp_work *work, int slot, int64_t limit, const char *axis, int64_t except,
                                    const char *name) {
    return check_indices(work, slot, limit, axis, true, except, name);
}
