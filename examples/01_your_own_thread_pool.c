/* SPDX-License-Identifier: MIT */
/*
 * Lesson 01: your own thread pool.
 *
 * An application that has a pool does not want a second one. Give vjp a parallel_for, and every kernel passes its
 * tasks to that function instead of starting threads. The contract is short: run task(argument, i) once for every i
 * below count, in any order, on any threads, and return when all are done.
 *
 * The pool below is very simple: a few POSIX threads for each job; thread t runs tasks t, t + 3, t + 6... Whatever a
 * pool does, the bits are the same, because the work was split before the pool got it. The lesson compares the result
 * with that of vjp's own pool, byte by byte.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vjp.h>

enum { THREADS = 3, ROWS = 4096, DIM = 1000 };

/* What the application keeps about its pool; vjp passes it back as `context`. */
typedef struct my_pool {
    size_t jobs, tasks;
} my_pool;

typedef struct my_share {
    size_t first, count;
    vjp_task task;
    void *argument;
} my_share;

static void *run_share(void *pointer) {
    const my_share *share = pointer;
    for (size_t i = share->first; i < share->count; i += THREADS)
        share->task(share->argument, i);
    return NULL;
}

static void my_parallel_for(void *context, size_t count, vjp_task task, void *argument) {
    my_pool *pool = context;
    pool->jobs++;
    pool->tasks += count;
    pthread_t thread[THREADS];
    my_share share[THREADS];
    int started[THREADS] = {0};
    for (size_t t = 0; t < THREADS; t++) {
        share[t] = (my_share){t, count, task, argument};
        /* The caller is a thread too: it takes the last share, and any that could not be started. */
        started[t] = t + 1 < THREADS && pthread_create(&thread[t], NULL, run_share, &share[t]) == 0;
    }
    for (size_t t = 0; t < THREADS; t++)
        if (!started[t]) run_share(&share[t]);
    for (size_t t = 0; t < THREADS; t++)
        if (started[t]) pthread_join(thread[t], NULL);
}

typedef struct gradients {
    float dx[ROWS * DIM], dgamma[DIM];
} gradients;

static float x[ROWS * DIM], dy[ROWS * DIM], gamma_values[DIM];

/* The same backward on a device with these options. */
static vjp_status differentiate(const vjp_options *options, gradients *result) {
    const int64_t shape[] = {ROWS, DIM};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 2, shape), tdy = vjp_tensor_of(dy, VJP_F32, 2, shape);
    vjp_tensor tdx = vjp_tensor_of(result->dx, VJP_F32, 2, shape);
    vjp_tensor tgamma = vjp_tensor_of(gamma_values, VJP_F32, 1, &shape[1]);
    vjp_tensor tdgamma = vjp_tensor_of(result->dgamma, VJP_F32, 1, &shape[1]);
    vjp_device *device;
    vjp_status status = vjp_open("cpu", options, &device);
    if (status == VJP_OK) printf("%s\n", vjp_device_summary(device));
    if (status == VJP_OK)
        status = vjp_rms_norm_backward(device, &tdx, &tdgamma, NULL, NULL, &tdy, &tx, &tgamma, NULL, NULL, NULL);
    if (status != VJP_OK) fprintf(stderr, "%s\n", vjp_error(device));
    vjp_close(device);
    return status;
}

int main(void) {
    for (int i = 0; i < ROWS * DIM; i++) {
        x[i] = (float)(rand() % 2001 - 1000) / 500;
        dy[i] = (float)(rand() % 2001 - 1000) / 1000;
    }
    for (int i = 0; i < DIM; i++)
        gamma_values[i] = 1 + (float)i / DIM;

    my_pool pool = {0};
    vjp_options with_my_pool = {.struct_size = sizeof(vjp_options),
                                .threads = THREADS,
                                .parallel_for = my_parallel_for,
                                .parallel_context = &pool};
    gradients *ours = calloc(1, sizeof *ours), *theirs = calloc(1, sizeof *theirs);
    if (!ours || !theirs) return 1;
    if (differentiate(&with_my_pool, ours) != VJP_OK || differentiate(NULL, theirs) != VJP_OK) return 1;

    int equal = memcmp(ours, theirs, sizeof *ours) == 0;
    printf("jobs for my pool: %zu, tasks: %zu; the %zu bytes of gradients are %s\n", pool.jobs, pool.tasks,
           sizeof *ours, equal ? "equal" : "DIFFERENT");
    free(ours);
    free(theirs);
    return !(equal && pool.jobs > 0);
}
