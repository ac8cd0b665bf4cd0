/* SPDX-License-Identifier: MIT */
/*
 * Thread pools as callers might write them, for vjp_options.parallel_for: on the calling thread or on threads started
 * for every job, in any order, with pauses, on small stacks.
 */
#ifndef VJP_TESTS_OWN_POOL_H
#define VJP_TESTS_OWN_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

typedef enum own_order { FIRST_TO_LAST, LAST_TO_FIRST, SHUFFLED } own_order;

enum { OWN_POOL_MAX_THREADS = 8 };

typedef struct own_pool {
    int threads; /* 0: all tasks run on the calling thread */
    own_order order;
    int pause;          /* one task in `pause` waits a moment before it begins; 0: none does */
    size_t stack_bytes; /* of its threads; 0: the default */
    atomic_uint_fast64_t seed;
    atomic_int jobs; /* what it was used for */
    atomic_size_t tasks;
} own_pool;

/* A vjp_parallel_for; the context is an own_pool. */
void own_parallel_for(void *pool, size_t count, vjp_task task, void *argument);

#endif
