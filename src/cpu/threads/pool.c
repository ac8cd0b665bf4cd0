/*
 * The thread pool: pthreadpool where it was found, else a small one on POSIX threads. Both run tasks in any order on
 * any thread, which no result depends on.
 */
#include <sched.h>
#include <stdlib.h>

#include "cpu/cpu.h"

/* How often a thread looks before it sleeps: some 20 us, so that calls in a row find the workers awake. */
enum { SPINS = 4000 };

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Where there are more threads than cores, the one that is waited for may need this one's. */
void vjp_cpu_wait(const _Atomic int64_t *count, int64_t least) {
    for (int i = 0; atomic_load_explicit(count, memory_order_acquire) < least; i++)
        if (i < SPINS)
            pause_briefly();
        else
            sched_yield();
}

#ifdef VJP_HAVE_PTHREADPOOL

#include <pthreadpool.h>

const char *vjp_cpu_pool_name(void) {
    return "pthreadpool";
}

cpu_pool *vjp_cpu_pool_create(int threads) {
    return (cpu_pool *)pthreadpool_create((size_t)threads);
}

void vjp_cpu_pool_destroy(cpu_pool *pool) {
    pthreadpool_destroy((pthreadpool_t)pool);
}

void vjp_cpu_pool_run(cpu_pool *pool, size_t count, vjp_task task, void *argument) {
    pthreadpool_parallelize_1d((pthreadpool_t)pool, task, argument, count, 0);
}

#else

#include <pthread.h>

struct cpu_pool {
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    vjp_task task;
    void *argument;
    size_t count;
    atomic_size_t next;     /* the next task to take */
    atomic_uint generation; /* goes up with every job; under the mutex where it is written */
    atomic_int working;     /* workers that have not finished the current job */
    atomic_bool stop;
    int workers;
    pthread_t threads[];
};

static void take_tasks(cpu_pool *pool) {
    size_t i;
    while ((i = atomic_fetch_add(&pool->next, 1)) < pool->count)
        pool->task(pool->argument, i);
}

static void *worker_main(void *pointer) {
    cpu_pool *pool = pointer;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool->generation) == seen; i++)
            pause_briefly();
        /* Who is awake takes no lock: sixteen threads that hand one on begin one after the other. */
        if (atomic_load(&pool->generation) == seen) {
            pthread_mutex_lock(&pool->mutex);
            while (atomic_load(&pool->generation) == seen && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            pthread_mutex_unlock(&pool->mutex);
        }
        seen = atomic_load(&pool->generation);
        if (atomic_load(&pool->stop)) return NULL;
        take_tasks(pool);
        if (atomic_fetch_sub(&pool->working, 1) == 1) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

const char *vjp_cpu_pool_name(void) {
    return "built-in pool";
}

cpu_pool *vjp_cpu_pool_create(int threads) {
    cpu_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->threads[0]);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (; pool->workers < threads - 1; pool->workers++) /* the caller is one of the threads */
        if (pthread_create(&pool->threads[pool->workers], NULL, worker_main, pool) != 0) {
            vjp_cpu_pool_destroy(pool);
            return NULL;
        }
    return pool;
}

void vjp_cpu_pool_destroy(cpu_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->workers; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void vjp_cpu_pool_run(cpu_pool *pool, size_t count, vjp_task task, void *argument) {
    pthread_mutex_lock(&pool->mutex);
    pool->task = task;
    pool->argument = argument;
    pool->count = count;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->working, pool->workers);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    take_tasks(pool);
    for (int i = 0; i < SPINS && atomic_load(&pool->working) > 0; i++)
        pause_briefly();
    if (atomic_load(&pool->working) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->working) > 0)
        pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

#endif
