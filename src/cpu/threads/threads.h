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
 * Stack of the pool's threads. Every op was measured to need less than 192 KiB, which is also what a calling thread
 * must have (test_thread_pool.c holds this); the rest is for thread-local variables, which take their room from the
 * stack, and for a BLAS. The system's default may be too small (musl: 128 KiB) or large enough to fail under `ulimit
 * -v`.
 */
enum { CPU_STACK_BYTES = 1 << 20 };

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
