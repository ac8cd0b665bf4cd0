/*
 * How a kernel that treats each element by itself is cut into tasks: in runs of whole blocks, so that every vector
 * but the last starts where the tensor's own alignment puts it.
 */
#ifndef VJP_CPU_ELEMENTS_H
#define VJP_CPU_ELEMENTS_H

#include "cpu/cpu.h"

/* A block is 128 bytes of 16-bit numbers: no two tasks share a line. */
enum { ELEMENT_BLOCK = 64 };

/* `bytes_each`: what an element moves, over all tensors. */
static inline cpu_cut cpu_cut_elements(int64_t count, int64_t bytes_each, int64_t most) {
    int64_t blocks = count / ELEMENT_BLOCK + (count % ELEMENT_BLOCK > 0);
    cpu_cut cut = vjp_cpu_cut_items(blocks, ELEMENT_BLOCK * bytes_each, most);
    return (cpu_cut){.count = cut.count, .size = cut.size * ELEMENT_BLOCK, .items = count};
}

#endif
