/* SPDX-License-Identifier: MIT */
/*
 * The inside of the CPU backend: a device's state, how work is split into tasks, and the names of what is compiled once
 * per instruction set.
 *
 * Every kernel file is compiled several times with CPU_ISA_<SET> defined; CPU_NAME(x) is a different name in each.
 * Results never depend on the number of threads: vjp_cpu_split_items() looks at the problem alone, and a task writes
 * only its own outputs or its own partial sum; the partials are added afterwards, in order.
 */
#ifndef VJP_CPU_H
#define VJP_CPU_H

#include <stdatomic.h>

#include "core/core.h"

#if defined(CPU_ISA_AMX)
#define CPU_NAME(name) vjp_cpu_##name##_amx
#elif defined(CPU_ISA_AVX512)
#define CPU_NAME(name) vjp_cpu_##name##_avx512
#elif defined(CPU_ISA_AVX2)
#define CPU_NAME(name) vjp_cpu_##name##_avx2
#elif defined(CPU_ISA_NEON)
#define CPU_NAME(name) vjp_cpu_##name##_neon
#elif defined(CPU_ISA_WASM)
#define CPU_NAME(name) vjp_cpu_##name##_wasm
#else
#define CPU_NAME(name) vjp_cpu_##name##_plain
#endif

typedef struct cpu_state {
    int threads, threads_wanted; /* those there are, and those that were to be started */
    struct cpu_pool *pool;       /* NULL with one thread or with the caller's parallel_for */
    vjp_parallel_for parallel_for;
    void *parallel_context;
    const vjp_kernel *const *kernels; /* by op id: the table of the chosen instruction set */
    const char *isa;
    bool blas;          /* matrix products through BLAS; false: the built-in kernel */
    bool bf16;          /* the FMA of vjp_cpu_has_bf16() may be used */
    bool tiles;         /* the built-in kernel has AMX for 16-bit operands */
    bool fixed_rows;    /* bits of a product's row do not depend on the number of rows */
    size_t cache_bytes; /* last-level cache; chooses ordinary or streaming stores, never bits */
} cpu_state;

static inline const cpu_state *cpu_state_of(const vjp_work *work) {
    return work->device->state;
}

/* ---- Tasks ------------------------------------------------------------------------------------------- */

/*
 * Runs task(argument, i) for i in [0, count) on the device's threads; a single task runs on the calling thread. Tasks
 * are begun in any order.
 */
void vjp_cpu_for(const vjp_work *work, int64_t count, vjp_task task, void *argument);

/* Waits for another task that was begun: until `count`, which only grows, is at least `min`. */
void vjp_cpu_wait(const _Atomic int64_t *count, int64_t min);

/*
 * The fewest bytes that are worth a task of their own: at some 10 GB/s per core, 64 KiB take 6 us, about what it costs
 * to hand a task to another thread and to wait for its end. Less work is one task and stays on the calling thread.
 */
enum { CPU_GRAIN_BYTES = 64 << 10 };

enum { CACHE_LINE = 64 }; /* bytes */

/* Task i of `count` has items [i * size, min((i + 1) * size, items)). */
typedef struct cpu_split {
    int64_t count, size, items;
} cpu_split;

/* Splits items of `bytes_each` into at most `max` tasks of at least CPU_GRAIN_BYTES. Depends on the problem alone. */
cpu_split vjp_cpu_split_items(int64_t items, int64_t bytes_each, int64_t max);

static inline int64_t cpu_split_begin(const cpu_split *split, size_t task) {
    return (int64_t)task * split->size;
}

static inline int64_t cpu_split_end(const cpu_split *split, size_t task) {
    int64_t end = ((int64_t)task + 1) * split->size;
    return end < split->items ? end : split->items;
}

/* The maximum for independent tasks (balance) and for tasks with a partial sum each (memory: tasks x dim floats). */
enum { CPU_MAX_TASKS = 1024, CPU_MAX_PARTIALS = 128 };

#endif
