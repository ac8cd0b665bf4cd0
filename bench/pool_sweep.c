/* SPDX-License-Identifier: MIT */
/*
 * Times memory-bound forward passes, from 16 KiB to 1 GiB, with one kind of thread pool: bench/pool_sweep builds this
 * and runs it once for each.
 *
 * usage: pool_sweep THREADS SECONDS STEP PAUSE_US [LIBRARY]
 *   SECONDS: for each measurement; STEP: factor from size to size; PAUSE_US: sleep before each call
 *   LIBRARY: path of libpthreadpool.so; its threads are used instead of the library's own
 *
 * Prints one line per op and size: the op, the bytes that a call moves, the microseconds of a call (the best of several
 * batches).
 */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vjp.h"

enum { DIM = 1024, BATCHES = 5, WARM = 3, MAX_CALLS = 100000 };

static const int64_t smallest = 16 << 10, largest = (int64_t)1 << 30;

/* ---- pthreadpool, by its binary interface: neither its header nor its library is needed to build this ---- */

typedef void *(*pool_create)(size_t threads);
typedef void (*pool_run)(void *pool, vjp_task task, void *argument, size_t count, uint32_t flags);

typedef struct other_pool {
    void *pool;
    pool_run run;
} other_pool;

static void run_other(void *context, size_t count, vjp_task task, void *argument) {
    other_pool *other = context;
    other->run(other->pool, task, argument, count, 0);
}

static int open_other(other_pool *other, const char *path, size_t threads) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    pool_create create;
    if (!library) return 0;
    *(void **)&create = dlsym(library, "pthreadpool_create");
    *(void **)&other->run = dlsym(library, "pthreadpool_parallelize_1d");
    if (!create || !other->run) return 0;
    other->pool = create(threads);
    return other->pool != NULL;
}

/* ---- The calls --------------------------------------------------------------------------------------- */

typedef struct pass {
    const char *op;
    int64_t bytes_per_row; /* that a call moves; a row is DIM elements of x */
} pass;

static const pass passes[] = {
    {"layer_norm", 8 * DIM},
    {"add", 12 * DIM},
    {"gather", 8 * DIM},
    {"cast", 6 * DIM},
};

static vjp_tensor matrix(void *data, vjp_dtype dtype, int64_t rows) {
    return vjp_tensor_of(data, dtype, 2, (int64_t[]){rows, DIM});
}

/* Finds a slot by name, so that the order of the table does not matter. */
static void put(const vjp_tensor **slots, const vjp_op *op, const char *name, const vjp_tensor *tensor) {
    const vjp_pass_info *info = &vjp_op_describe(op)->pass[VJP_FORWARD];
    for (size_t i = 0; i < info->count; i++)
        if (strcmp(info->slots[i].name, name) == 0) slots[i] = tensor;
}

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

typedef struct timing {
    vjp_device *device;
    const vjp_op *op;
    const vjp_tensor *const *slots;
    struct timespec pause;
} timing;

/* Seconds per call, or a negative number. */
static double time_calls(const timing *t, int calls) {
    double total = 0, begin = seconds();
    size_t count = vjp_op_describe(t->op)->pass[VJP_FORWARD].count;
    for (int i = 0; i < calls; i++) {
        double before = begin;
        if (t->pause.tv_nsec) {
            nanosleep(&t->pause, NULL);
            before = seconds();
        }
        if (vjp_call(t->device, t->op, VJP_FORWARD, t->slots, count, NULL) != VJP_OK) return -1;
        if (t->pause.tv_nsec) total += seconds() - before;
    }
    return (t->pause.tv_nsec ? total : seconds() - begin) / calls;
}

static double measure(const timing *t, double budget) {
    double once = time_calls(t, WARM);
    if (once < 0) return once;
    once = fmin(once, time_calls(t, WARM));
    int calls = (int)fmin(MAX_CALLS, fmax(1, budget / BATCHES / (once + 1e-9 * (double)t->pause.tv_nsec)));
    double best = INFINITY;
    for (int i = 0; i < BATCHES; i++)
        best = fmin(best, time_calls(t, calls));
    return best;
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: pool_sweep THREADS SECONDS STEP PAUSE_US [LIBRARY]\n");
        return 2;
    }
    vjp_options options = {.struct_size = sizeof options, .threads = atoi(argv[1])};
    double budget = atof(argv[2]);
    int step = atoi(argv[3]) > 1 ? atoi(argv[3]) : 2;
    other_pool other;
    if (argc > 5) {
        if (!open_other(&other, argv[5], (size_t)options.threads)) {
            fprintf(stderr, "pool_sweep: %s has no pthreadpool\n", argv[5]);
            return 1;
        }
        options.parallel_for = run_other;
        options.parallel_context = &other;
    }
    timing t = {.pause = {.tv_nsec = 1000 * atol(argv[4])}};
    if (vjp_open("cpu", &options, &t.device) != VJP_OK) {
        fprintf(stderr, "pool_sweep: %s\n", vjp_error(t.device));
        return 1;
    }
    fprintf(stderr, "pool_sweep: %s\n", vjp_device_summary(t.device));
    /* One block for all: as much as the largest call reads and writes. */
    char *block = aligned_alloc(4096, (size_t)largest + (64 << 20));
    if (!block) {
        fprintf(stderr, "pool_sweep: no memory\n");
        return 1;
    }
    memset(block, 0, (size_t)largest + (64 << 20));
    static float ones[DIM];
    for (int i = 0; i < DIM; i++)
        ones[i] = 1;
    for (size_t p = 0; p < sizeof passes / sizeof passes[0]; p++)
        for (int64_t bytes = smallest; bytes <= largest; bytes *= step) {
            int64_t rows = bytes / passes[p].bytes_per_row > 0 ? bytes / passes[p].bytes_per_row : 1;
            t.op = vjp_op_find(passes[p].op);
            char *index_data = block, *x_data = block + (4 << 20), *b_data = x_data + rows * DIM * 4;
            int32_t *index = (int32_t *)(void *)index_data;
            for (int64_t i = 0; i < rows; i++)
                index[i] = (int32_t)(i * 7919 % rows); /* far apart, and each once unless rows is a multiple of it */
            vjp_tensor x = matrix(x_data, VJP_F32, rows), b = matrix(b_data, VJP_F32, rows);
            vjp_tensor y = matrix(b_data, VJP_F32, rows), third = matrix(b_data + rows * DIM * 4, VJP_F32, rows);
            vjp_tensor narrow = matrix(b_data, VJP_BF16, rows);
            vjp_tensor gamma = vjp_tensor_of(ones, VJP_F32, 1, (int64_t[]){DIM});
            vjp_tensor places = vjp_tensor_of(index, VJP_I32, 1, (int64_t[]){rows});
            const vjp_tensor *slots[VJP_MAX_SLOTS] = {NULL};
            put(slots, t.op, "x", &x);
            put(slots, t.op, "a", &x);
            put(slots, t.op, "table", &x);
            put(slots, t.op, "b", &b);
            put(slots, t.op, "index", &places);
            put(slots, t.op, "gamma", &gamma);
            put(slots, t.op, "beta", &gamma);
            put(slots, t.op, "y",
                strcmp(passes[p].op, "cast") == 0  ? &narrow
                : strcmp(passes[p].op, "add") == 0 ? &third
                                                   : &y);
            t.slots = slots;
            double time = measure(&t, budget);
            if (time < 0) {
                fprintf(stderr, "pool_sweep: %s\n", vjp_error(t.device));
                return 1;
            }
            printf("%s %lld %.2f\n", passes[p].op, (long long)bytes, 1e6 * time);
            fflush(stdout);
        }
    free(block);
    vjp_close(t.device);
    return 0;
}
