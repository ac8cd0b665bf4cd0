/* SPDX-License-Identifier: MIT */
/*
 * Threads: the caller's own pool, devices in several threads at once, opening and closing again and again. Results are
 * compared by their bits with those of one thread. Written to be run under the thread sanitizer too.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "own_pool.h"
#include "sample.h"

static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16};

enum { STORAGES = sizeof storages / sizeof storages[0], MAX_HASHES = 512 };

/* The hashes of every output of every op, pass and storage type, one after the other; 0 on failure. */
static int hash_all(vjp_device *device, uint64_t *hashes, const char *only) {
    int count = 0;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
            for (int s = 0; s < STORAGES; s++) {
                const char *name = vjp_op_describe(vjp_op_at(op))->name;
                if (only && strcmp(only, name) != 0) continue;
                sample_types types = {storages[s], VJP_F32, VJP_I32};
                int outputs = sample_hash(device, sample_find_large(name), (vjp_pass)pass, types, 11, &hashes[count]);
                if (!outputs) {
                    print_error("%s\n", vjp_error(device));
                    return 0;
                }
                count += outputs;
            }
    return count;
}

static int hash_with(vjp_options options, uint64_t *hashes, const char *only) {
    options.struct_size = sizeof options;
    vjp_device *device;
    int count = 0;
    if (vjp_open("cpu", &options, &device) == VJP_OK)
        count = hash_all(device, hashes, only);
    else
        print_error("%s\n", vjp_error(device));
    vjp_close(device);
    return count;
}

static uint64_t expected[MAX_HASHES];
static int expected_count;

static int with_one_thread(void **state) {
    (void)state;
    expected_count = hash_with((vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}, expected, NULL);
    return expected_count > 0 ? 0 : -1;
}

static void assert_expected(const uint64_t *hashes, int count) {
    assert_int_equal(count, expected_count);
    assert_memory_equal(hashes, expected, (size_t)count * sizeof hashes[0]);
}

static void any_number_of_threads(void **state) {
    (void)state;
    static const int threads[] = {2, 3, 5, 8};
    uint64_t hashes[MAX_HASHES];
    for (int i = 0; i < 4; i++)
        assert_expected(
            hashes, hash_with((vjp_options){.struct_size = sizeof(vjp_options), .threads = threads[i]}, hashes, NULL));
}

/* ---- The caller's pool ------------------------------------------------------------------------------- */

static void callers_pool(void **state) {
    (void)state;
    own_pool pool = {.threads = 3, .order = LAST_TO_FIRST};
    uint64_t hashes[MAX_HASHES];
    vjp_options options = {
        .struct_size = sizeof(vjp_options), .parallel_for = own_parallel_for, .parallel_context = &pool};
    assert_expected(hashes, hash_with(options, hashes, NULL));
    /* It was used: every op of these sizes is more than one task, but for clip, which is three numbers. */
    assert_true(atomic_load(&pool.jobs) >= (sample_passes() - 1) * STORAGES);
    assert_true(atomic_load(&pool.tasks) >= 2 * (size_t)atomic_load(&pool.jobs));
}

static void forbidden_for(void *context, size_t count, vjp_task task, void *argument) {
    atomic_fetch_add((atomic_int *)context, 1);
    for (size_t i = 0; i < count; i++)
        task(argument, i);
}

/* Tiny work wakes no thread: it stays on the calling thread. */
static void small_work_stays(void **state) {
    (void)state;
    atomic_int used = 0;
    vjp_device *device;
    vjp_options options = {
        .struct_size = sizeof(vjp_options), .parallel_for = forbidden_for, .parallel_context = &used};
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++) {
            call made;
            const char *name = vjp_op_describe(vjp_op_at(op))->name;
            assert_true(call_make(&made, device, sample_find(name), (vjp_pass)pass,
                                  (sample_types){VJP_F32, VJP_F32, VJP_I32}, 11));
            assert_int_equal(call_run(device, &made), VJP_OK);
            if (atomic_load(&used)) print_error("%s pass %d asked for threads\n", name, pass);
            assert_int_equal(atomic_load(&used), 0);
            call_free(&made);
        }
    vjp_close(device);
}

/* ---- Several devices at once ------------------------------------------------------------------------- */

typedef struct user {
    vjp_options options;
    uint64_t hashes[MAX_HASHES];
    int count;
} user;

static void *use_device(void *pointer) {
    user *u = pointer;
    u->count = hash_with(u->options, u->hashes, NULL);
    return NULL;
}

static void devices_at_once(void **state) {
    (void)state;
    static own_pool pool = {.threads = 2};
    static user users[4] = {{.options = {.threads = 1}},
                            {.options = {.threads = 2}},
                            {.options = {.threads = 3}},
                            {.options = {.parallel_for = own_parallel_for, .parallel_context = &pool}}};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, use_device, &users[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++)
        assert_expected(users[i].hashes, users[i].count);
}

/* A device may go from thread to thread, as long as one uses it at a time. */
static void *use_given(void *pointer) {
    uint64_t hashes[MAX_HASHES];
    return hash_all(pointer, hashes, "layer_norm") > 0 ? pointer : NULL;
}

static void device_moves(void **state) {
    (void)state;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 3}, &device),
                     VJP_OK);
    for (int i = 0; i < 5; i++) {
        pthread_t thread;
        void *result;
        assert_int_equal(pthread_create(&thread, NULL, use_given, device), 0);
        pthread_join(thread, &result);
        assert_ptr_equal(result, device);
    }
    vjp_close(device);
}

/* ---- Opening and closing ----------------------------------------------------------------------------- */

static int count_threads(void) {
    DIR *folder = opendir("/proc/self/task");
    if (!folder) return 1;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static size_t bytes_in_use(void) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
#else
    return 0;
#endif
}

static void open_and_close(int times) {
    static const char *const names[] = {"cpu", "ref", "cpu", "nothing"};
    for (int i = 0; i < times; i++) {
        vjp_device *device;
        vjp_options options = {.struct_size = sizeof(vjp_options), .threads = 1 + i % 4, .workspace_bytes = 1 << 20};
        const char *name = names[i % 4];
        vjp_status status = vjp_open(name, &options, &device);
        assert_int_equal(status, strcmp(name, "nothing") == 0 ? VJP_NO_DEVICE : VJP_OK);
        if (status == VJP_OK) {
            call made;
            assert_true(call_make(&made, device, sample_find("rms_norm"), VJP_BACKWARD,
                                  (sample_types){VJP_F32, VJP_F32, VJP_I32}, 1));
            assert_int_equal(call_run(device, &made), VJP_OK);
            call_free(&made);
            assert_int_equal(vjp_reserve(device, 3 << 20), VJP_OK);
        }
        vjp_close(device);
    }
}

static void nothing_is_left(void **state) {
    (void)state;
    open_and_close(40); /* what is taken once and kept (a BLAS's buffers) is taken here */
    int threads = count_threads();
    size_t bytes = bytes_in_use();
    open_and_close(200);
    assert_int_equal(count_threads(), threads);
    /* 200 devices leave less behind than one device's handle. */
    if (bytes_in_use() >= bytes + 1024) print_error("%zu bytes, then %zu\n", bytes, bytes_in_use());
    assert_true(bytes_in_use() < bytes + 1024);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_threads), cmocka_unit_test(callers_pool), cmocka_unit_test(small_work_stays),
        cmocka_unit_test(devices_at_once),       cmocka_unit_test(device_moves), cmocka_unit_test(nothing_is_left),
    };
    return cmocka_run_group_tests_name("threads", tests, with_one_thread, NULL);
}
