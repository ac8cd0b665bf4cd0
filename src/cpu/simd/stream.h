/* SPDX-License-Identifier: MIT */
/*
 * The store policy: an output is written plainly, past the caches, or added to what is there. The choice is made once
 * per call from the size of the outputs and the machine; it changes the time, never a bit.
 */
#ifndef VJP_CPU_STREAM_H
#define VJP_CPU_STREAM_H

#include "cpu/cpu.h"
#include "cpu/simd/vec.h"

typedef enum write_mode { WRITE_PLAIN, WRITE_STREAM, WRITE_ADD } write_mode;

/*
 * Outputs of at least this share of the last-level cache are streamed past it: a smaller one may still be there when it
 * is read, a larger one evicts the inputs that share the cache with it.
 */
enum { STREAM_CACHE_SHARE = 4 };

/*
 * `bytes`: of all outputs of the call. `aligned`: every whole vector that the kernel will write starts at a multiple of
 * its size. `in_place`: the output has the memory of an input, and is in the caches when it is written.
 */
static inline write_mode write_mode_of(const vjp_work *work, int slot, int64_t bytes, bool aligned, bool in_place) {
    if (vjp_accumulates(work, slot)) return WRITE_ADD;
    bool large = (size_t)bytes >= cpu_state_of(work)->cache_bytes / STREAM_CACHE_SHARE;
    return large && aligned && !in_place ? WRITE_STREAM : WRITE_PLAIN;
}

INLINE void vf_write(write_mode mode, vjp_dtype dtype, void *to, int64_t i, vf a) {
    if (mode == WRITE_STREAM) {
        vf_stream(dtype, to, i, a);
        return;
    }
    if (mode == WRITE_ADD) a = vf_add(vf_load(dtype, to, i), a);
    vf_store(dtype, to, i, a);
}

/* The first n lanes, n < 16 or more. */
INLINE void vf_write_part(write_mode mode, vjp_dtype dtype, void *to, int64_t i, int64_t n, vf a) {
    if (n >= LANES) {
        vf_write(mode, dtype, to, i, a);
        return;
    }
    if (mode == WRITE_ADD) a = vf_add(vf_load_part(dtype, to, i, n), a);
    vf_store_part(dtype, to, i, n, a);
}

INLINE void f32_write(write_mode mode, vjp_dtype dtype, void *to, int64_t i, float value) {
    f32_store(dtype, to, i, mode == WRITE_ADD ? f32_load(dtype, to, i) + value : value);
}

/* Elements before the first address that can be streamed to, at most n; 0 where nothing is streamed. */
INLINE int64_t write_head(write_mode mode, vjp_dtype dtype, const void *to, int64_t n) {
    if (mode != WRITE_STREAM) return 0;
    int64_t head = (int64_t)(-((uintptr_t)to / dtype_bytes(dtype)) % LANES);
    return head < n ? head : n;
}

/* The address of element i of an array of f32, bf16 or f16. */
INLINE const void *at(vjp_dtype dtype, const void *from, int64_t i) {
    return (const char *)from + i * (int64_t)dtype_bytes(dtype);
}

INLINE void *at_mutable(vjp_dtype dtype, void *to, int64_t i) {
    return (char *)to + i * (int64_t)dtype_bytes(dtype);
}

/* Prefetches the lines of [from, from + bytes) into the first-level cache or the second-level one. */
enum { CACHE_LINE_BYTES = 64 };

INLINE void prefetch_first_level(const void *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += CACHE_LINE_BYTES)
        __builtin_prefetch((const char *)from + line, 0, 3);
}

INLINE void prefetch_second_level(const void *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += CACHE_LINE_BYTES)
        __builtin_prefetch((const char *)from + line, 0, 2);
}

#endif
