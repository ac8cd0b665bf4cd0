/* SPDX-License-Identifier: MIT */
/*
 * Calls of every op on callers' thread pools and on small stacks, against the library's own pool: the same bits. A call
 * is drawn at random (op, pass, dtypes, size, seed of its numbers) and repeated on each pool, on the stacks that
 * docs/reliability.md promises to be enough, and inside tasks of a pool that its devices use, too. Prints a line
 * "COUNT WHAT" for each thing that it counted, and a line "FAILED SENTENCE" for each failure.
 *
 *     stress_pools SECONDS SEED
 *
 * All of it runs in a child, so that the parent can name the call that ended it by a signal.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "own_pool.h"
#include "sample.h"

enum { SMALLEST_STACK = 192 << 10, LARGER_STACK = 1 << 20, HANG_SECONDS = 60, MISUSE = 2 };

/* What the parent sees of the child. */
static struct progress {
    char doing[160];
    long calls, tasks, stacks, nested, failures;
} * progress;

static uint64_t random_state;

static uint64_t random_below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

static void fail(const char *why) {
    progress->failures++;
    printf("FAILED %s: %s\n", progress->doing, why);
}

/* ---- A call, and its bits ------------------------------------------------------------------------------ */

typedef struct drawn {
    const sample *from;
    vjp_pass pass;
    sample_types types;
    uint64_t seed;
    call made;
    int outputs;
    uint64_t hash[VJP_MAX_SLOTS]; /* of the outputs, as the library's own pool computes them */
} drawn;

static drawn draw(void) {
    static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16}, indices[] = {VJP_I32, VJP_I64, VJP_F32};
    const vjp_op_info *info = vjp_op_describe(vjp_op_at((size_t)random_below(vjp_op_count())));
    drawn d = {.from = random_below(3) ? sample_find_large(info->name) : sample_find(info->name),
               .pass = (vjp_pass)random_below((uint64_t)vjp_passes(info)),
               .seed = random_below(1 << 20)};
    d.types.storage = storages[random_below(3)];
    d.types.parameter = random_below(2) ? d.types.storage : VJP_F32;
    d.types.index = indices[random_below(2)];
    return d;
}

/* Runs the call and hashes its outputs, which hold something else before. */
static bool run_call(vjp_device *device, const drawn *d, uint64_t *hash) {
    for (int i = 0; i < d->outputs; i++)
        memset(d->made.tensor[i].data, 0x5a, call_bytes(&d->made.tensor[i]));
    if (call_run(device, &d->made) != VJP_OK) return false;
    for (int i = 0; i < d->outputs; i++)
        hash[i] = call_hash(&d->made, (size_t)i);
    return true;
}

static void compare(vjp_device *device, const drawn *d, const char *where) {
    uint64_t hash[VJP_MAX_SLOTS];
    snprintf(progress->doing, sizeof progress->doing, "%s.%s, %s and %s, seed %llu, %s", d->from->op,
             d->pass == VJP_FORWARD ? "forward" : "backward", vjp_dtype_name(d->types.storage),
             vjp_dtype_name(d->types.parameter), (unsigned long long)d->seed, where);
    alarm(HANG_SECONDS);
    progress->calls++;
    if (!run_call(device, d, hash)) {
        fail(vjp_error(device));
        return;
    }
    for (int i = 0; i < d->outputs; i++)
        if (hash[i] != d->hash[i]) {
            char why[64];
            snprintf(why, sizeof why, "other bits in %s", d->made.info->pass[d->pass].slots[i].name);
            fail(why);
        }
}

/* ---- Pools ------------------------------------------------------------------------------------------------ */

static struct pool {
    const char *name;
    own_pool pool;
    vjp_device *device;
} pools[] = {
    {"in order, on the calling thread", {.threads = 0}, NULL},
    {"from the last task, on the calling thread", {.threads = 0, .order = LAST_TO_FIRST}, NULL},
    {"shuffled, on the calling thread", {.threads = 0, .order = SHUFFLED}, NULL},
    {"on one other thread", {.threads = 1, .order = SHUFFLED}, NULL},
    {"shuffled, on 3 threads", {.threads = 3, .order = SHUFFLED}, NULL},
    {"from the last task, on 8 threads", {.threads = 8, .order = LAST_TO_FIRST}, NULL},
    {"with pauses, on 5 threads", {.threads = 5, .order = SHUFFLED, .pause = 7}, NULL},
    {"on 3 threads with small stacks", {.threads = 3, .stack_bytes = SMALLEST_STACK}, NULL},
};

enum { POOLS = sizeof pools / sizeof pools[0], OWN_THREADS = 6, INNER = 3 };

static vjp_device *own[OWN_THREADS]; /* with the library's pool, of 1, 2, ... threads */
static vjp_device *inner[INNER];     /* used by tasks of the pool that they use themselves */
static own_pool shared = {.threads = 2, .order = SHUFFLED};

static vjp_device *open_cpu(vjp_options options) {
    vjp_device *device;
    options.struct_size = sizeof options;
    options.workspace_bytes = 16 << 20;
    if (vjp_open("cpu", &options, &device) == VJP_OK) return device;
    printf("FAILED opening the cpu: %s\n", device ? vjp_error(device) : "no memory");
    exit(1);
}

static vjp_device *open_pool(own_pool *pool) {
    return open_cpu((vjp_options){.parallel_for = own_parallel_for, .parallel_context = pool});
}

static void open_all(void) {
    for (int i = 0; i < POOLS; i++)
        pools[i].device = open_pool(&pools[i].pool);
    for (int i = 0; i < OWN_THREADS; i++)
        own[i] = open_cpu((vjp_options){.threads = i + 1});
    for (int i = 0; i < INNER; i++)
        inner[i] = open_pool(&shared);
}

static void close_all(void) {
    for (int i = 0; i < POOLS; i++)
        vjp_close(pools[i].device);
    for (int i = 0; i < OWN_THREADS; i++)
        vjp_close(own[i]);
    for (int i = 0; i < INNER; i++)
        vjp_close(inner[i]);
}

/* ---- Inside tasks, and on small stacks ---------------------------------------------------------------------- */

static int nested_outputs[INNER];
static uint64_t nested_hash[INNER][VJP_MAX_SLOTS];

static void nested_task(void *argument, size_t index) {
    const drawn *d = argument;
    nested_outputs[index] = sample_hash(inner[index], d->from, d->pass, d->types, d->seed, nested_hash[index]);
}

static void compare_nested(drawn *d) {
    snprintf(progress->doing, sizeof progress->doing, "%s pass %d, inside tasks of its pool", d->from->op, d->pass);
    own_parallel_for(&shared, INNER, nested_task, d);
    for (int i = 0; i < INNER; i++) {
        progress->nested++;
        if (nested_outputs[i] != d->outputs ||
            memcmp(nested_hash[i], d->hash, (size_t)d->outputs * sizeof d->hash[0]) != 0)
            fail(nested_outputs[i] ? "other bits" : vjp_error(inner[i]));
    }
}

static void *compare_on_stack(void *argument) {
    compare(own[0], argument, "on a small stack"); /* one thread: the caller runs every task itself */
    return NULL;
}

static void compare_with_stack(drawn *d, size_t bytes) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    if (pthread_attr_setstacksize(&attributes, bytes) || pthread_create(&thread, &attributes, compare_on_stack, d))
        fail("no thread with that stack can be started");
    else
        pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    progress->stacks++;
}

/* ---- Rounds ------------------------------------------------------------------------------------------------------ */

static void run_round(void) {
    drawn d = draw();
    snprintf(progress->doing, sizeof progress->doing, "%s pass %d", d.from->op, d.pass);
    if (!call_make(&d.made, own[1], d.from, d.pass, d.types, d.seed)) {
        fail("there is no such sample");
        return;
    }
    d.outputs = (int)d.made.info->pass[d.pass].outputs;
    if (!run_call(own[1], &d, d.hash)) fail(vjp_error(own[1]));
    for (int i = 0; i < POOLS; i++)
        compare(pools[i].device, &d, pools[i].name);
    compare(own[random_below(OWN_THREADS)], &d, "on the library's own pool");
    compare_nested(&d);
    compare_with_stack(&d, SMALLEST_STACK);
    compare_with_stack(&d, LARGER_STACK);
    call_free(&d.made);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void run_rounds(double seconds) {
    open_all();
    for (double end = now() + seconds; now() < end;)
        run_round();
    for (int i = 0; i < POOLS; i++)
        progress->tasks += (long)atomic_load(&pools[i].pool.tasks);
    close_all();
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: stress_pools SECONDS SEED\n");
        return MISUSE;
    }
    progress = mmap(NULL, sizeof *progress, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (progress == MAP_FAILED) return MISUSE;
    random_state = strtoull(argv[2], NULL, 10);
    pid_t child = fork();
    if (child < 0) return MISUSE;
    if (child == 0) {
        run_rounds(strtod(argv[1], NULL));
        return 0;
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
        progress->failures++;
        printf("FAILED %s: %s by signal %d\n", progress->doing, WTERMSIG(status) == SIGALRM ? "hung, ended" : "ended",
               WTERMSIG(status));
    } else if (WEXITSTATUS(status) != 0) {
        progress->failures++;
    }
    printf("%ld calls\n%ld tasks on callers' pools\n%ld calls inside tasks\n%ld calls on small stacks\n",
           progress->calls, progress->tasks, progress->nested, progress->stacks);
    return progress->failures > 0;
}
