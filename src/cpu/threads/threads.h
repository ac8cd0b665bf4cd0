/* SPDX-License-Identifier: MIT */
/*
 * The threads of a CPU device: how many there should be, and the pool that runs tasks on them.
 */
#ifndef VJP_CPU_THREADS_H
#define VJP_CPU_THREADS_H

#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

typedef struct cpu_pool cpu_pool;

/*
 * Stack of the pool's threads. Optimised, every op was measured to need less than 192 KiB, which is also what a calling
 * thread must have (test_thread_pool.c checks it). Without optimisation and under a sanitizer a kernel's frame takes
 * over 1.5 MB, and the system's default may be small (musl: 128 KiB), so the size is set: address space, of which only
 * what is used takes memory.
 */
enum { CPU_STACK_BYTES = 8 << 20 };

/*
 * The pool: `threads` of them or as many as could be started, the calling thread being one. NULL: out of memory. A
 * process that was forked may use and destroy its copy; run() starts threads for it.
 */
cpu_pool *vjp_cpu_pool_create(int threads);
int vjp_cpu_pool_threads(const cpu_pool *pool);
void vjp_cpu_pool_destroy(cpu_pool *pool);
void vjp_cpu_pool_run(cpu_pool *pool, size_t count, vjp_task task, void *argument); /* count: at least 1 */

/* How many processors the process may use: those of its affinity mask, or fewer by the limit of its control groups. */
int64_t vjp_cpu_processors(void);

/*
 * How many processors the control groups of the process allow, at least 1, INT64_MAX without a limit. `root` is put
 * before the paths of the system's files: "", or a folder of copies in tests.
 */
int64_t vjp_cpu_group_limit(const char *root);

#endif
