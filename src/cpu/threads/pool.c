/* SPDX-License-Identifier: MIT */
/*
 * The thread pool.
 *
 * The tasks of a job are split into one contiguous range per thread, the same in every job of as many tasks, so that a
 * thread finds in its core's cache what it worked on before. The calling thread is thread 0. A thread takes tasks from
 * the front of its own range, and when that is empty from the back of the others'.
 *
 * A range is one atomic word that carries the number of its job. A thread that comes late, after its tasks were done by
 * others and another job began, finds another number and takes nothing. So the caller waits for tasks, never for
 * threads: if the others get no core, it does everything itself.
 *
 * Each thread watches its own range for the next job. Threads without tasks in a job are left alone. Sleeping threads
 * are woken as a tree: the caller wakes two, and each of them two more, if those still have tasks.
 *
 * Tasks may wait for tasks that were begun (vjp_cpu_wait()), and this cannot deadlock whatever the order in which tasks
 * are taken. A thread runs the tasks that it takes one after the other, each to its end. So a begun task is unfinished
 * only while some thread is inside it, and waiting threads give up their cores to that one. The kernels order their
 * waits (a matrix product's ticket waits for smaller tickets only, all of which were taken before), so of the begun
 * tasks at least one waits for nothing; when it ends, the same holds for the rest. A task that was not begun is never
 * waited for, so it may remain in a range for as long as the thread of that range, or a thief, is inside another.
 */
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/system.h"
#include "cpu/threads/threads.h"
#include "cpu/threads/wait.h"

/*
 * A range: the job's number in the upper 40 bits, then the first and the end of the units that are not taken,
 * counted from the range's own beginning. At one job per microsecond a number comes again after twelve days. A unit is
 * one task, or several where there are more than MAX_UNITS per thread.
 */
enum { UNIT_BITS = 12, MAX_UNITS = (1 << UNIT_BITS) - 1, JOB_BITS = 64 - 2 * UNIT_BITS };

/* Two lines of cache, which processors fetch as one. */
enum { SLOT_BYTES = 128 };

typedef struct slot {
    _Alignas(SLOT_BYTES) _Atomic uint64_t range;
    cpu_gate gate; /* 1: the thread sleeps */
    cpu_pool *pool;
    system_thread thread;
} slot;

struct cpu_pool {
    /* The job. Whoever has taken a unit and not reported it done may read these; the caller writes them between jobs.
     */
    vjp_task task;
    void *argument;
    int64_t count, unit_tasks, units, active;
    uint64_t job;
    int wanted, threads; /* threads: those that could be started, and the caller */
    unsigned forks;      /* how often the process had been forked when the threads were started */
    atomic_bool stop;
    _Alignas(SLOT_BYTES) cpu_gate left; /* units that are not done, and CALLER_SLEEPS */
    _Alignas(SLOT_BYTES) atomic_int sleepers;
    slot slots[];
};

static const uint32_t CALLER_SLEEPS = (uint32_t)1 << 31;

/* ---- Taking units ------------------------------------------------------------------------------------ */

static uint64_t job_of(uint64_t range) {
    return range >> (2 * UNIT_BITS);
}

static int64_t first_of(uint64_t range) {
    return range >> UNIT_BITS & MAX_UNITS;
}

static int64_t end_of(uint64_t range) {
    return range & MAX_UNITS;
}

static bool is_taken(uint64_t range, uint64_t job) {
    return job_of(range) != job || first_of(range) == end_of(range);
}

/* The first unit of thread t's range. */
static int64_t range_begin(const cpu_pool *pool, int64_t t) {
    return t * pool->units / pool->active;
}

/* Runs a unit of thread t's range, the first or the last one. False: there is none. */
static bool run_unit(cpu_pool *pool, int t, uint64_t job, bool first) {
    slot *from = &pool->slots[t];
    uint64_t range = atomic_load_explicit(&from->range, memory_order_acquire), rest;
    do {
        if (is_taken(range, job)) return false;
        rest = first ? range + ((uint64_t)1 << UNIT_BITS) : range - 1;
    } while (
        !atomic_compare_exchange_weak_explicit(&from->range, &range, rest, memory_order_acq_rel, memory_order_acquire));
    int64_t unit = range_begin(pool, t) + (first ? first_of(range) : end_of(range) - 1);
    int64_t end = vjp_min((unit + 1) * pool->unit_tasks, pool->count);
    for (int64_t i = unit * pool->unit_tasks; i < end; i++)
        pool->task(pool->argument, (size_t)i);
    return true;
}

/* Reports units as done, and tells how many are not. The caller may begin the next job as soon as there are none. */
static uint32_t report(cpu_pool *pool, uint32_t done) {
    uint32_t left = atomic_fetch_sub(&pool->left.word, done) - done;
    if (left == CALLER_SLEEPS) vjp_cpu_gate_wake(&pool->left);
    return left & ~CALLER_SLEEPS;
}

/*
 * Runs units until all are taken. Each range's are reported before the next range is looked at: to look at all of them
 * takes about as long as a small task, which the caller should not wait for.
 */
static void run_units(cpu_pool *pool, int own, uint64_t job) {
    for (int i = 0; i < pool->threads; i++) {
        uint32_t done = 0;
        while (run_unit(pool, (own + i) % pool->threads, job, i == 0))
            done++;
        if (done && report(pool, done) == 0) return;
    }
}

/* ---- Sleeping and waking ----------------------------------------------------------------------------- */

/*
 * A thread that falls asleep says so in its gate, counts itself, and then looks at its range once more; the caller
 * writes the ranges, and then changes the count by nothing. One of the two changes comes second, and that thread sees
 * what the other wrote before. Whoever takes the 1 out of the gate takes the thread out of the count. No job depends on
 * a wake-up: without it, the thread's tasks are done by others.
 */
static void wake_children(cpu_pool *pool, int parent, uint64_t job) {
    for (int t = 2 * parent + 1; t <= 2 * parent + 2 && t < pool->threads; t++) {
        slot *child = &pool->slots[t];
        uint64_t range = atomic_load_explicit(&child->range, memory_order_relaxed);
        if (is_taken(range, job) || !atomic_load_explicit(&child->gate.word, memory_order_relaxed)) continue;
        if (!atomic_exchange(&child->gate.word, 0)) continue;
        atomic_fetch_sub(&pool->sleepers, 1);
        vjp_cpu_gate_wake(&child->gate);
    }
}

/* Waits for a job other than `last`. */
static uint64_t wait_for_job(cpu_pool *pool, slot *own, uint64_t last) {
    cpu_spin spin = {0};
    uint64_t job;
    while ((job = job_of(atomic_load_explicit(&own->range, memory_order_acquire))) == last) {
        if (vjp_cpu_spin(&spin)) continue;
        atomic_store(&own->gate.word, 1);
        atomic_fetch_add(&pool->sleepers, 1);
        while (job_of(atomic_load(&own->range)) == last && atomic_load(&own->gate.word))
            vjp_cpu_gate_sleep(&own->gate, 1);
        if (atomic_exchange(&own->gate.word, 0)) atomic_fetch_sub(&pool->sleepers, 1);
        spin = (cpu_spin){0};
    }
    return job;
}

static void *thread_main(void *pointer) {
    slot *own = pointer;
    cpu_pool *pool = own->pool;
    int index = (int)(own - pool->slots);
    for (uint64_t job = 0;;) {
        job = wait_for_job(pool, own, job);
        if (atomic_load(&pool->stop)) return NULL;
        if (atomic_load(&pool->sleepers)) wake_children(pool, index, job);
        run_units(pool, index, job);
    }
}

static void wait_for_units(cpu_pool *pool) {
    cpu_spin spin = {0};
    uint32_t left;
    while ((left = atomic_load_explicit(&pool->left.word, memory_order_acquire)) & ~CALLER_SLEEPS) {
        if (left & CALLER_SLEEPS)
            vjp_cpu_gate_sleep(&pool->left, left);
        else if (!vjp_cpu_spin(&spin))
            atomic_compare_exchange_weak(&pool->left.word, &left, left | CALLER_SLEEPS);
    }
}

/* ---- Starting and stopping --------------------------------------------------------------------------- */

/*
 * The child of a fork has none of its parent's threads. It notices by this count, which only goes up in a child, and
 * starts threads of its own with the first job.
 */
static bool is_of_parent(const cpu_pool *pool) {
    return pool->forks != system_forks();
}

static void start_threads(cpu_pool *pool) {
    pool->forks = system_forks();
    pool->job = 0;
    atomic_init(&pool->sleepers, 0);
    vjp_cpu_gate_init(&pool->left);
    for (int t = 0; t < pool->wanted; t++) {
        atomic_init(&pool->slots[t].range, 0);
        vjp_cpu_gate_init(&pool->slots[t].gate);
        pool->slots[t].pool = pool;
    }
    int started = 1;
    /* `threads` is for the running threads to read, so it must be final before the first job; none runs before. */
    while (started < pool->wanted &&
           system_thread_start(&pool->slots[started].thread, CPU_STACK_BYTES, thread_main, &pool->slots[started]))
        started++;
    pool->threads = started;
}

cpu_pool *vjp_cpu_pool_create(int threads) {
    size_t bytes = sizeof(cpu_pool) + (size_t)threads * sizeof(slot);
    cpu_pool *pool = system_count_forks() ? system_alloc(SLOT_BYTES, bytes) : NULL;
    if (!pool) return NULL;
    memset(pool, 0, bytes);
    pool->wanted = threads;
    start_threads(pool);
    return pool;
}

int vjp_cpu_pool_threads(const cpu_pool *pool) {
    return pool->threads;
}

void vjp_cpu_pool_destroy(cpu_pool *pool) {
    if (!is_of_parent(pool)) {
        atomic_store(&pool->stop, true);
        for (int t = 1; t < pool->threads; t++) {
            slot *each = &pool->slots[t];
            atomic_store(&each->range, (pool->job + 1) << (2 * UNIT_BITS));
            atomic_store(&each->gate.word, 0);
            vjp_cpu_gate_wake(&each->gate);
            system_thread_join(each->thread);
        }
        for (int t = 0; t < pool->wanted; t++)
            vjp_cpu_gate_destroy(&pool->slots[t].gate);
        vjp_cpu_gate_destroy(&pool->left);
    }
    system_free(pool);
}

void vjp_cpu_pool_run(cpu_pool *pool, size_t count, vjp_task task, void *argument) {
    if (is_of_parent(pool)) start_threads(pool);
    uint64_t job = pool->job = (pool->job + 1) & (((uint64_t)1 << JOB_BITS) - 1);
    pool->task = task;
    pool->argument = argument;
    pool->count = (int64_t)count;
    pool->active = vjp_min(pool->count, pool->threads);
    pool->unit_tasks = vjp_divide_up(pool->count, pool->active * MAX_UNITS);
    pool->units = vjp_divide_up(pool->count, pool->unit_tasks);
    atomic_store_explicit(&pool->left.word, (uint32_t)pool->units, memory_order_relaxed);
    /* The last first: a parent that has seen its own range sees its children's. */
    for (int64_t t = pool->active - 1, end = pool->units; t >= 0; t--) {
        int64_t begin = range_begin(pool, t);
        uint64_t range = job << (2 * UNIT_BITS) | (uint64_t)(end - begin);
        atomic_store_explicit(&pool->slots[t].range, range, memory_order_release);
        end = begin;
    }
    if (atomic_fetch_add(&pool->sleepers, 0)) wake_children(pool, 0, job);
    run_units(pool, 0, job);
    wait_for_units(pool);
}
