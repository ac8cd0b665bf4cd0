/*
 * Kernels that make each element of an output from the same element of their inputs, and are as fast as memory: the
 * walk over elements [begin, end) of one output, in vectors, with the store that suits its size (stream.h). What an
 * element's value is, the kernel says by a function that is inlined here.
 *
 * A result depends on its own inputs alone, so the cut into tasks and the first aligned address change no bit.
 */
#ifndef VJP_CPU_ELEMENTWISE_H
#define VJP_CPU_ELEMENTWISE_H

#include "cpu/simd/stream.h"

/* Elements are cut into tasks in units of this many: whole vectors, and whole lines of cache in every storage type. */
enum { ELEMENT_UNIT = 256 };

typedef struct element_cut {
    cpu_cut units;
    int64_t count;
} element_cut;

/*
 * Two tasks are made one: what moves less than 128 KiB is in the core's cache more often than not, and done there in
 * the time that a second thread needs to begin and to report.
 */
static inline element_cut element_cut_of(int64_t count, size_t bytes_each) {
    int64_t units = (count + ELEMENT_UNIT - 1) / ELEMENT_UNIT;
    cpu_cut cut = vjp_cpu_cut_items(units, ELEMENT_UNIT * (int64_t)bytes_each, CPU_MOST_TASKS);
    if (cut.count == 2) cut = (cpu_cut){.count = 1, .size = units, .items = units};
    return (element_cut){cut, count};
}

static inline int64_t element_begin(const element_cut *cut, size_t task) {
    return cpu_cut_begin(&cut->units, task) * ELEMENT_UNIT;
}

static inline int64_t element_end(const element_cut *cut, size_t task) {
    int64_t end = cpu_cut_end(&cut->units, task) * ELEMENT_UNIT;
    return end < cut->count ? end : cut->count;
}

/* What is known when a kernel is compiled: the storage type, that of another operand, and which op it is. */
typedef struct element_variant {
    vjp_dtype dtype, other;
    bool product;
} element_variant;

/* Elements [i, i + n) of the output; j is where they lie in the row that the walk is in. Lanes past n are zero. */
typedef vf (*element_value)(const void *call, element_variant v, int64_t i, int64_t j, int64_t n);

INLINE void element_walk_as(write_mode mode, vjp_dtype out, element_value value, const void *call, element_variant v,
                            void *y, int64_t begin, int64_t end, int64_t row) {
    int64_t i = begin;
    uintptr_t past = (uintptr_t)at(out, y, begin) % (LANES * dtype_bytes(out));
    if (mode == WRITE_STREAM && past) { /* up to the first address that a streaming store may have */
        int64_t head = (int64_t)((LANES * dtype_bytes(out) - past) / dtype_bytes(out));
        head = head < end - begin ? head : end - begin;
        vf_write_part(WRITE_PLAIN, out, y, i, head, value(call, v, i, i - row, head));
        i += head;
    }
    for (; i + LANES <= end; i += LANES)
        vf_write(mode, out, y, i, value(call, v, i, i - row, LANES));
    if (i < end) vf_write_part(mode, out, y, i, end - i, value(call, v, i, i - row, end - i));
}

/* Writes elements [begin, end) of y, whose storage type is `out`; `row` is the first element of the row they lie in. */
INLINE void element_walk(write_mode mode, vjp_dtype out, element_value value, const void *call, element_variant v,
                         void *y, int64_t begin, int64_t end, int64_t row) {
    switch (mode) {
    case WRITE_STREAM: element_walk_as(WRITE_STREAM, out, value, call, v, y, begin, end, row); break;
    case WRITE_ADD: element_walk_as(WRITE_ADD, out, value, call, v, y, begin, end, row); break;
    default: element_walk_as(WRITE_PLAIN, out, value, call, v, y, begin, end, row); break;
    }
}

/* The mode for an output that element_walk() writes. */
static inline write_mode element_mode(const vjp_work *work, int slot, int64_t count, bool in_place) {
    int64_t bytes = count * (int64_t)dtype_bytes(vjp_type(work, slot));
    return write_mode_of(work, slot, bytes, true, in_place);
}

#endif
