/* SPDX-License-Identifier: MIT */
/* Callers' thread pools; see own_pool.h. */
#include "own_pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct own_job {
    own_pool *pool;
    vjp_task task;
    void *argument;
    size_t count, begin, step; /* task i of the order is (begin + i * step) % count */
    atomic_size_t next;
} own_job;

static size_t greatest_common_divisor(size_t a, size_t b) {
    return b ? greatest_common_divisor(b, a % b) : a;
}

static void choose_order(own_job *job, own_order order, uint64_t random) {
    job->step = 1;
    if (order == LAST_TO_FIRST) {
        job->begin = job->count - 1;
        job->step = job->count - 1;
    }
    if (order != SHUFFLED) return;
    /* A step without a common divisor reaches every task once. */
    job->begin = (size_t)(random >> 32) % job->count;
    job->step = (size_t)(random & 0xffff) % job->count;
    while (greatest_common_divisor(job->step, job->count) != 1)
        job->step++;
}

static void *own_worker(void *pointer) {
    own_job *job = pointer;
    for (size_t i; (i = atomic_fetch_add(&job->next, 1)) < job->count;) {
        if (job->pool->pause && i % (size_t)job->pool->pause == 0) usleep(100);
        job->task(job->argument, (job->begin + i * job->step) % job->count);
    }
    return NULL;
}

void own_parallel_for(void *context, size_t count, vjp_task task, void *argument) {
    own_pool *pool = context;
    own_job job = {.pool = pool, .task = task, .argument = argument, .count = count};
    choose_order(&job, pool->order, atomic_fetch_add(&pool->seed, 0x9e3779b97f4a7c15u));
    atomic_fetch_add(&pool->jobs, 1);
    atomic_fetch_add(&pool->tasks, count);
    if (pool->threads == 0) own_worker(&job);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (pool->stack_bytes && pthread_attr_setstacksize(&attributes, pool->stack_bytes) != 0) abort();
    pthread_t threads[OWN_POOL_MAX_THREADS];
    for (int i = 0; i < pool->threads; i++)
        if (pthread_create(&threads[i], &attributes, own_worker, &job) != 0) abort();
    for (int i = 0; i < pool->threads; i++)
        pthread_join(threads[i], NULL);
    pthread_attr_destroy(&attributes);
}
