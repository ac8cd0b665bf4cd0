/*
 * The library pthreadpool in the place of our pool (pool.c), where the build asks for it.
 */
#ifdef VJP_HAVE_PTHREADPOOL

#include <pthreadpool.h>

#include "cpu/threads/threads.h"

const char *vjp_cpu_pool_name(void) {
    return "pthreadpool";
}

cpu_pool *vjp_cpu_pool_create(int threads) {
    return (cpu_pool *)pthreadpool_create((size_t)threads);
}

int vjp_cpu_pool_threads(const cpu_pool *pool) {
    return (int)pthreadpool_get_threads_count((pthreadpool_t)pool);
}

void vjp_cpu_pool_destroy(cpu_pool *pool) {
    pthreadpool_destroy((pthreadpool_t)pool);
}

void vjp_cpu_pool_run(cpu_pool *pool, size_t count, vjp_task task, void *argument) {
    pthreadpool_parallelize_1d((pthreadpool_t)pool, task, argument, count, 0);
}

#else
typedef int vjp_no_pthreadpool; /* C has no empty files */
#endif
