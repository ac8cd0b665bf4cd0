/* SPDX-License-Identifier: MIT */
/*
 * The pool of threads (src/cpu/threads): every task once, waits between tasks that offer their cores, no lost wake-up,
 * threads that cannot be started, forks, one core for many threads, and how many processors a process may use.
 */
#define _GNU_SOURCE /* sched_setaffinity() */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cpu/cpu.h"
#include "cpu/threads/threads.h"
#include "cpu/threads/wait.h"
#include "sample.h"
#include "scratch.h"

/* A test that hangs is ended by this alarm, and so are its children. */
enum { ALARM_SECONDS = 250 };

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
/* It stops children of a process with threads that start threads, unless asked not to. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
    return "die_after_fork=0";
}
#endif
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t random_state = 1;

static uint64_t random_below(uint64_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % limit;
}

/* ---- Tasks ------------------------------------------------------------------------------------------- */

enum { MAX_TASKS = 40000 };

typedef struct job {
    atomic_int runs[MAX_TASKS];
    _Atomic int64_t next, finished; /* tickets */
    size_t count;
    int pauses;
} job;

static job shared;

static void count_task(void *argument, size_t index) {
    job *j = argument;
    atomic_fetch_add_explicit(&j->runs[index], 1, memory_order_relaxed);
    for (volatile int i = 0; i < j->pauses; i++) {
    }
}

/* As matrix products do: takes tickets until there are none, and each waits for the one before. */
static void ticket_task(void *argument, size_t index) {
    job *j = argument;
    int64_t ticket;
    while ((ticket = atomic_fetch_add(&j->next, 1)) < (int64_t)j->count) {
        count_task(j, (size_t)ticket);
        vjp_cpu_wait(&j->finished, ticket);
        atomic_fetch_add(&j->finished, 1);
    }
    (void)index;
}

static void run_job(cpu_pool *pool, size_t count, bool tickets) {
    for (size_t i = 0; i < count; i++)
        atomic_store_explicit(&shared.runs[i], 0, memory_order_relaxed);
    atomic_store(&shared.next, 0);
    atomic_store(&shared.finished, 0);
    shared.count = count;
    shared.pauses = (int)random_below(3) * 100;
    if (tickets)
        vjp_cpu_pool_run(pool, 1 + random_below(10), ticket_task, &shared);
    else
        vjp_cpu_pool_run(pool, count, count_task, &shared);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(atomic_load_explicit(&shared.runs[i], memory_order_relaxed), 1);
}

/* Random jobs at random distances, so that the threads are found awake, falling asleep and asleep. */
static void every_task_once(void **state) {
    (void)state;
    enum { POOLS = 8, JOBS = 100 };
    static const size_t limits[] = {4, 40, 4000, MAX_TASKS};
    double per_pool = 0.5;
    int jobs = 0;
    for (int threads = 1; threads <= POOLS; threads++) {
        cpu_pool *pool = vjp_cpu_pool_create(threads);
        assert_non_null(pool);
        assert_int_equal(vjp_cpu_pool_threads(pool), threads);
        double end = seconds() + per_pool;
        for (int least = jobs + JOBS; jobs < least || seconds() < end; jobs++) {
            size_t most = limits[random_below(100) ? random_below(2) : random_below(4)];
            run_job(pool, 1 + random_below(most), random_below(4) == 0);
            if (random_below(50) == 0) usleep((useconds_t)random_below(1500));
        }
        run_job(pool, MAX_TASKS, false); /* more than fit in the ranges one by one */
        vjp_cpu_pool_destroy(pool);
    }
    print_message("%d jobs\n", jobs);
}

/* ---- Ranges and wake-ups ----------------------------------------------------------------------------- */

enum { THREADS = 8, ROUNDS = 300 };

typedef struct meeting {
    _Atomic int64_t arrived;
    pthread_t thread[THREADS];
    int64_t count;
} meeting;

/* Ends when all are there. No thread is free to steal, so this ends only if each thread is woken, for its own task. */
static void meet_task(void *argument, size_t index) {
    meeting *m = argument;
    m->thread[index] = pthread_self();
    atomic_fetch_add(&m->arrived, 1);
    vjp_cpu_wait(&m->arrived, m->count);
}

static void every_thread_wakes_for_its_own(void **state) {
    (void)state;
    cpu_pool *pool = vjp_cpu_pool_create(THREADS);
    meeting first = {.count = THREADS};
    vjp_cpu_pool_run(pool, THREADS, meet_task, &first);
    for (int i = 0; i < ROUNDS; i++) {
        meeting again = {.count = i % 2 ? THREADS : 1 + (int64_t)random_below(THREADS)};
        if (random_below(4) == 0) usleep(500 + (useconds_t)random_below(500)); /* about when they fall asleep */
        vjp_cpu_pool_run(pool, (size_t)again.count, meet_task, &again);
        for (int64_t t = 0; t < again.count; t++)
            assert_true(pthread_equal(first.thread[t], again.thread[t]));
    }
    vjp_cpu_pool_destroy(pool);
}

typedef struct visitors {
    pthread_t allowed[2];
    atomic_int others;
} visitors;

static void visit_task(void *argument, size_t index) {
    visitors *v = argument;
    pthread_t self = pthread_self();
    if (!pthread_equal(self, v->allowed[0]) && !pthread_equal(self, v->allowed[1])) atomic_fetch_add(&v->others, 1);
    (void)index;
}

/* Two tasks are for two threads, whether the others sleep or look for work. */
static void few_tasks_wake_few_threads(void **state) {
    (void)state;
    cpu_pool *pool = vjp_cpu_pool_create(THREADS);
    meeting first = {.count = THREADS};
    vjp_cpu_pool_run(pool, THREADS, meet_task, &first);
    visitors v = {.allowed = {first.thread[0], first.thread[1]}};
    for (int i = 0; i < 2000; i++) {
        if (i % 500 == 0) usleep(2000);
        vjp_cpu_pool_run(pool, 2, visit_task, &v);
    }
    assert_int_equal(atomic_load(&v.others), 0);
    vjp_cpu_pool_destroy(pool);
}

/* ---- How threads wait -------------------------------------------------------------------------------- */

#ifdef VJP_WRAPPED
/* The test stands between a wait and the system: it counts the offers of the core, and can play the clock. */
static _Thread_local struct {
    bool plays;          /* the clock below is shown in the place of the system's */
    int64_t clock, cost; /* nanoseconds; what an offer of the core takes */
    int offers;
    bool watched; /* its next offer is counted below */
} waiting;
static _Atomic int64_t watched_offers;

int64_t __real_system_nanoseconds(void);
int64_t __wrap_system_nanoseconds(void);
void __real_system_yield(void);
void __wrap_system_yield(void);

int64_t __wrap_system_nanoseconds(void) {
    return waiting.plays ? waiting.clock : __real_system_nanoseconds();
}

void __wrap_system_yield(void) {
    waiting.offers++;
    if (waiting.watched) atomic_fetch_add(&watched_offers, 1);
    waiting.watched = false;
    waiting.clock += waiting.cost;
    if (!waiting.plays) __real_system_yield();
}

/* Looks until the core is offered, or until it is time to sleep. */
static int looks_until_offer(cpu_spin *spin, bool *goes_on) {
    int before = waiting.offers, looks = 0;
    do {
        *goes_on = vjp_cpu_spin(spin);
        looks++;
    } while (*goes_on && waiting.offers == before && looks < 100000);
    return looks;
}

/* After 128 looks a thread offers its core, and then after every 16, until it is time to sleep. */
static void a_wait_offers_its_core(void **state) {
    (void)state;
    enum { FIRST = 128, NEXT = 16 };
    static const struct {
        int64_t cost; /* of an offer, in nanoseconds */
        int offers;   /* until the thread sleeps */
    } cases[] = {
        {1000, 500},  /* no other thread wants it: half a millisecond of them */
        {10000, 50},  /* tasks of the kernel ran */
        {29999, 17},  /* about as long as two of those take */
        {30000, 1},   /* another thread ran: this one sleeps at once */
        {4000000, 1}, /* for its whole time slice */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpu_spin spin = {0};
        waiting.plays = true;
        waiting.clock = 1;
        waiting.cost = cases[i].cost;
        waiting.offers = 0;
        bool goes_on = true;
        while (goes_on) {
            int looks = looks_until_offer(&spin, &goes_on);
            assert_int_equal(looks, waiting.offers == 1 ? FIRST : NEXT);
        }
        assert_int_equal(waiting.offers, cases[i].offers);
        waiting.plays = false;
    }
}

typedef struct patience {
    _Atomic int64_t begun, ended;
    bool others_wait; /* for the patient task; otherwise they end before it */
    bool seen;
} patience;

/* The last task ends when every other thread has offered its core, or after many seconds, which is a failure. */
static void patient_task(void *argument, size_t index) {
    patience *p = argument;
    atomic_fetch_add(&p->begun, 1);
    vjp_cpu_wait(&p->begun, THREADS); /* so each thread has one task */
    if (index < THREADS - 1) {
        waiting.watched = true;
        if (p->others_wait) vjp_cpu_wait(&p->ended, 1);
        return;
    }
    for (int i = 0; i < 20000 && atomic_load(&watched_offers) < THREADS - 1; i++)
        usleep(1000);
    p->seen = atomic_load(&watched_offers) == THREADS - 1;
    atomic_store(&p->ended, 1);
}

/* Threads that wait for a task, the caller that waits for the last one, and threads without a job. */
static void whoever_waits_offers_its_core(void **state) {
    (void)state;
    cpu_pool *pool = vjp_cpu_pool_create(THREADS);
    for (int i = 0; i < 10; i++) {
        patience p = {.others_wait = i % 2};
        atomic_store(&watched_offers, 0);
        vjp_cpu_pool_run(pool, THREADS, patient_task, &p);
        assert_true(p.seen);
    }
    vjp_cpu_pool_destroy(pool);
}
#endif

/* ---- Devices ----------------------------------------------------------------------------------------- */

/* The bits of a backward pass that is many tasks, and of a matrix product. 0: it failed. */
static uint64_t hash_on(vjp_device *device) {
    static const char *const ops[] = {"layer_norm", "linear"};
    uint64_t sum = 1;
    for (int i = 0; i < 2; i++) {
        uint64_t hash[VJP_MAX_SLOTS];
        int outputs = sample_hash(device, sample_find_large(ops[i]), VJP_BACKWARD,
                                  (sample_types){VJP_F32, VJP_F32, VJP_I32}, 3, hash);
        if (!outputs) return 0;
        for (int s = 0; s < outputs; s++)
            sum = sum * 31 + hash[s];
    }
    return sum;
}

static vjp_device *open_threads(int threads) {
    vjp_device *device;
    vjp_options options = {.struct_size = sizeof options, .threads = threads};
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    return device;
}

static uint64_t expected;

static int with_one_thread(void **state) {
    vjp_device *device = open_threads(1);
    expected = hash_on(device);
    vjp_close(device);
    return expected && make_scratch(state) == 0 ? 0 : -1;
}

/* ---- Threads that cannot be started ------------------------------------------------------------------ */

#ifdef VJP_WRAPPED
static int failing_create; /* 1: the next one fails, 2: the one after that, and so on; 0: none */

typedef void *(*thread_start)(void *);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_start start, void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_start start, void *argument);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_start start, void *argument) {
    if (failing_create > 0 && --failing_create == 0) {
        failing_create = 1;
        return EAGAIN;
    }
    return __real_pthread_create(thread, attributes, start, argument);
}

static void fewer_threads_than_asked_for(void **state) {
    (void)state;
    static const char *const summaries[] = {", 1 of 4 threads", ", 2 of 4 threads", ", 3 of 4 threads", ", 4 threads"};
    for (int k = 1; k <= 4; k++) {
        failing_create = k;
        vjp_device *device = open_threads(4);
        failing_create = 0;
        if (!strstr(vjp_device_summary(device), summaries[k - 1])) fail_msg("%s", vjp_device_summary(device));
        assert_int_equal(hash_on(device), expected);
        vjp_close(device);
    }
}
#endif

/* ---- Forks ------------------------------------------------------------------------------------------- */

enum { FORK_THREADS = 4 };

/* How many threads the process has; 0: not known. */
static int thread_count(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return count;
}

static bool child_succeeds(bool (*in_child)(vjp_device *), vjp_device *device) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(30);
        _exit(in_child(device) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (status) print_error("child: status %x\n", (unsigned)status);
    return status == 0;
}

static bool only_closes(vjp_device *device) {
    vjp_close(device);
    return true;
}

/* With threads of its own: without them the results would be the same. */
static bool computes_with(vjp_device *device, int threads) {
    bool right = hash_on(device) == expected && hash_on(device) == expected;
    int count = thread_count();
    vjp_close(device);
    return right && (count == 0 || count == threads);
}

static bool computes(vjp_device *device) {
    return computes_with(device, FORK_THREADS);
}

static bool has_a_child(vjp_device *device) {
    return child_succeeds(computes, device) && computes(device);
}

static bool computes_then_has_a_child(vjp_device *device) {
    return hash_on(device) == expected && has_a_child(device);
}

#ifdef VJP_WRAPPED
static bool gets_one_more_thread(vjp_device *device) {
    failing_create = 2;
    return computes_with(device, 2);
}
#endif

static void forked(void **state) {
    (void)state;
    static bool (*const children[])(vjp_device *) = {
        only_closes,          computes, has_a_child, computes_then_has_a_child,
#ifdef VJP_WRAPPED
        gets_one_more_thread,
#endif
    };
    enum { NEVER_USED, JUST_USED, IDLE, SITUATIONS };
    for (size_t i = 0; i < sizeof children / sizeof children[0]; i++)
        for (int situation = 0; situation < SITUATIONS; situation++) {
            vjp_device *device = open_threads(FORK_THREADS);
            if (situation != NEVER_USED) assert_int_equal(hash_on(device), expected);
            if (situation == IDLE) usleep(5000);
            assert_true(child_succeeds(children[i], device));
            assert_int_equal(hash_on(device), expected);
            vjp_close(device);
        }
}

/* ---- Many threads on one core ------------------------------------------------------------------------ */

#ifdef __linux__
static bool use_one_core(void) {
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return false;
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
}

static bool runs_every_task_on_one_core(vjp_device *unused) {
    (void)unused;
    if (!use_one_core()) return false;
    for (int threads = 2; threads <= THREADS; threads *= 2) {
        cpu_pool *pool = vjp_cpu_pool_create(threads);
        for (int i = 0; i < 100; i++)
            run_job(pool, 16, i % 2);
        vjp_cpu_pool_destroy(pool);
    }
    return true;
}

/* A thread that waits for a thread without a core must not wait forever. What it costs: tests/stress, part limits. */
static void one_core_for_many_threads(void **state) {
    (void)state;
    assert_true(child_succeeds(runs_every_task_on_one_core, NULL));
}

/* ---- How many processors ----------------------------------------------------------------------------- */

static bool default_is_one_thread(vjp_device *unused) {
    (void)unused;
    vjp_device *device;
    unsetenv("VJP_THREADS");
    if (!use_one_core() || vjp_open("cpu", NULL, &device) != VJP_OK) return false;
    bool one = strstr(vjp_device_summary(device), ", 1 thread (") != NULL;
    vjp_close(device);
    return one;
}

static void affinity_decides(void **state) {
    (void)state;
    assert_true(child_succeeds(default_is_one_thread, NULL));
}

/* Writes a file below `root`, and the folders that it is in. */
static void put_file(const char *root, const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    mkdir(root, 0700);
    for (char *slash = strchr(path + strlen(root), '/'); (slash = strchr(slash + 1, '/'));) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void control_groups_decide(void **state) {
    (void)state;
    assert_true(vjp_cpu_group_limit("/nowhere") == INT64_MAX);
    static const struct {
        const char *group;      /* the text of /proc/self/cgroup */
        const char *file[3][2]; /* below /sys/fs/cgroup: name and text */
        int64_t limit;          /* 0: none */
    } cases[] = {
        {"0::/\n", {{"cpu.max", "max 100000\n"}}, 0},
        {"0::/\n", {{"cpu.max", "100000 100000\n"}}, 1},
        {"0::/\n", {{"cpu.max", "100001 100000\n"}}, 2},
        {"0::/\n", {{"cpu.max", "1000 100000\n"}}, 1},
        {"0::/a/b\n", {{"cpu.max", "max 100000\n"}, {"a/cpu.max", "100000 100000"}, {"a/b/cpu.max", "max 100000"}}, 1},
        {"0::/a/b\n", {{"a/b/cpu.max", "50000 100000\n"}, {"a/cpu.max", "900000 100000"}}, 1},
        {"0::/a/b\n", {{"a/c/cpu.max", "50000 100000\n"}}, 0}, /* another group's */
        {"0::/of/the/host\n", {{"cpu.max", "150000 100000\n"}}, 2},
        {"4:memory:/\n1:cpu,cpuacct:/\n",
         {{"cpu,cpuacct/cpu.cfs_quota_us", "-1\n"}, {"cpu,cpuacct/cpu.cfs_period_us", "100000\n"}},
         0},
        {"1:cpuacct,cpu:/x\n",
         {{"cpu,cpuacct/x/cpu.cfs_quota_us", "70000\n"}, {"cpu,cpuacct/x/cpu.cfs_period_us", "70000\n"}},
         1},
        {"1:cpu:/\n0::/\n", {{"cpu/cpu.cfs_quota_us", "200000\n"}, {"cpu/cpu.cfs_period_us", "100000\n"}}, 2},
        {"1:cpuset:/\n", {{"cpuset/cpu.cfs_quota_us", "100000\n"}, {"cpuset/cpu.cfs_period_us", "100000\n"}}, 0},
        {"1:cpu:/\n", {{"cpu/cpu.cfs_quota_us", "100000\n"}}, 0}, /* without a period */
        {"1:cpu:/\n", {{"cpu/cpu.cfs_quota_us", "100000\n"}, {"cpu/cpu.cfs_period_us", "0\n"}}, 0},
        {"nonsense\n:\n0:\n0::/\n", {{"cpu.max", "nonsense\n"}}, 0},
        {"0::/\n", {{"cpu.max", "100000\n"}}, 0},
        {"", {{"cpu.max", "100000 100000\n"}}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char root[96], name[128];
        snprintf(root, sizeof root, "%s/%zu", scratch, i);
        put_file(root, "proc/self/cgroup", cases[i].group);
        for (int f = 0; f < 3 && cases[i].file[f][0]; f++) {
            snprintf(name, sizeof name, "sys/fs/cgroup/%s", cases[i].file[f][0]);
            put_file(root, name, cases[i].file[f][1]);
        }
        if (vjp_cpu_group_limit(root) != (cases[i].limit ? cases[i].limit : INT64_MAX)) fail_msg("case %zu", i);
    }
}
#endif

/* ---- Stacks ------------------------------------------------------------------------------------------ */

#ifndef SANITIZED
/* A thread whose stack is ours to look at: how much of it was used. */
enum { STACK = 4 << 20, PAINT = 0x5a };

typedef struct painted {
    void (*run)(void *argument);
    void *argument;
} painted;

static void *painted_main(void *pointer) {
    painted *p = pointer;
    p->run(p->argument);
    return NULL;
}

static size_t stack_used(void (*run)(void *argument), void *argument) {
    unsigned char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(stack != MAP_FAILED);
    memset(stack, PAINT, STACK);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    assert_int_equal(pthread_attr_setstack(&attributes, stack, STACK), 0);
    painted p = {run, argument};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, &attributes, painted_main, &p), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    size_t unused = 0;
    while (unused < STACK && stack[unused] == PAINT)
        unused++;
    munmap(stack, STACK);
    return STACK - unused;
}

static void run_all_ops(void *argument) {
    vjp_device *device = argument;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
            for (int storage = VJP_F32; storage <= VJP_BF16; storage += VJP_BF16 - VJP_F32) {
                call made;
                const char *name = vjp_op_describe(vjp_op_at(op))->name;
                assert_true(call_make(&made, device, sample_find_large(name), (vjp_pass)pass,
                                      (sample_types){(vjp_dtype)storage, VJP_F32, VJP_I32}, 5));
                assert_int_equal(call_run(device, &made), VJP_OK);
                call_free(&made);
            }
}

/* With one thread the caller runs every task itself, so this is what a thread of the pool needs, and more. */
static void stacks_are_large_enough(void **state) {
    (void)state;
    vjp_device *device = open_threads(1);
    size_t used = stack_used(run_all_ops, device);
    print_message("stack: %zu KiB of %d\n", used >> 10, CPU_STACK_BYTES >> 10);
    assert_true(used <= 192 << 10); /* threads.h says so */
    vjp_close(device);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_once),
        cmocka_unit_test(every_thread_wakes_for_its_own),
        cmocka_unit_test(few_tasks_wake_few_threads),
#ifdef VJP_WRAPPED
        cmocka_unit_test(a_wait_offers_its_core),
        cmocka_unit_test(whoever_waits_offers_its_core),
        cmocka_unit_test(fewer_threads_than_asked_for),
#endif
        cmocka_unit_test(forked),
#ifdef __linux__
        cmocka_unit_test(one_core_for_many_threads),
        cmocka_unit_test(affinity_decides),
        cmocka_unit_test(control_groups_decide),
#endif
#ifndef SANITIZED
        cmocka_unit_test(stacks_are_large_enough),
#endif
    };
    alarm(ALARM_SECONDS);
    return cmocka_run_group_tests_name("thread pool", tests, with_one_thread, remove_scratch);
}
