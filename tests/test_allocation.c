/* SPDX-License-Identifier: MIT */
/*
 * No call allocates. The allocator's functions are defined here, in the program, so that every allocation of the
 * process goes through the counter: the library's, BLAS's and the pool's as well, on whatever thread. Each op, pass and
 * storage type is called once to warm up and then counted. The first test shows that the counter counts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sample.h"

/* glibc exports its allocator under internal names; a sanitizer has its own allocator. */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CAN_COUNT 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#undef CAN_COUNT
#endif
#endif

static atomic_long allocations;

#ifdef CAN_COUNT
#define VISIBLE __attribute__((visibility("default")))

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

VISIBLE void *malloc(size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(bytes);
}

VISIBLE void *calloc(size_t count, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, bytes);
}

VISIBLE void *realloc(void *old, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, bytes);
}

VISIBLE void *memalign(size_t alignment, size_t bytes);
VISIBLE void *memalign(size_t alignment, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, bytes);
}

VISIBLE void *aligned_alloc(size_t alignment, size_t bytes) {
    return memalign(alignment, bytes);
}

VISIBLE int posix_memalign(void **data, size_t alignment, size_t bytes) {
    *data = memalign(alignment, bytes);
    return *data ? 0 : ENOMEM;
}

VISIBLE void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    atomic_fetch_add(&allocations, 1);
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}
#endif

static void counter_counts(void **state) {
    (void)state;
#ifndef CAN_COUNT
    skip();
#else
    void *volatile kept;
    void *data = NULL;
    long before = atomic_load(&allocations);
    kept = malloc(10);
    free(kept);
    kept = calloc(3, 10);
    kept = realloc(kept, 1000);
    free(kept);
    kept = aligned_alloc(64, 128);
    free(kept);
    assert_int_equal(posix_memalign(&data, 64, 100), 0);
    free(data);
    kept = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(kept, 4096);
    assert_int_equal(atomic_load(&allocations) - before, 6);

    /* And it sees what libraries do: the C library itself here, then a device that opens. */
    before = atomic_load(&allocations);
    kept = strdup("seen");
    free(kept);
    assert_int_equal(atomic_load(&allocations) - before, 1);
    before = atomic_load(&allocations);
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    vjp_close(device);
    assert_true(atomic_load(&allocations) - before >= 3);
#endif
}

/* Runs it once to warm up (a BLAS may take its buffers then), then counts. */
static int count_call(vjp_device *device, const sample *from, vjp_pass pass, sample_types types, const char *what) {
    call made;
    assert_true(call_make(&made, device, from, pass, types, 5));
    vjp_status status = call_run(device, &made);
    if (status != VJP_OK) print_error("%s\n", vjp_error(device));
    assert_int_equal(status, VJP_OK);
    long before = atomic_load(&allocations);
    status = call_run(device, &made);
    long counted = atomic_load(&allocations) - before;
    assert_int_equal(status, VJP_OK);
    /* Refused calls allocate nothing either, whether they fail early or late. */
    before = atomic_load(&allocations);
    made.tensor[0].dtype = 99;
    assert_int_equal(call_run(device, &made), VJP_INVALID);
    made.tensor[0].dtype = (int32_t)types.storage;
    made.tensor[0].data = NULL;
    if (call_bytes(&made.tensor[0])) assert_true(call_run(device, &made) != VJP_OK);
    long refused = atomic_load(&allocations) - before;
    if (counted || refused)
        print_error("%s.%s %s, %s: %ld allocations, %ld when refused\n", from->op,
                    pass == VJP_FORWARD ? "forward" : "backward", vjp_dtype_name(types.storage), what, counted,
                    refused);
    call_free(&made);
    return counted || refused;
}

static void every_call(const char *name, vjp_options options, const char *what) {
    vjp_device *device;
    vjp_status status = vjp_open(name, &options, &device);
    if (status == VJP_UNSUPPORTED) { /* built without BLAS */
        vjp_close(device);
        return;
    }
    assert_int_equal(status, VJP_OK);
    /* BLIS 0.9 allocates a few bytes in every product, which is why BLAS is an option and not the default. */
    bool blis = strstr(vjp_device_summary(device), "BLIS") != NULL;
    static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16, VJP_F64};
    int failed = 0, ran = 0;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
            for (int s = 0; s < 4; s++) {
                if (vjp_supports(device, vjp_op_at(op), (vjp_pass)pass, storages[s]) != VJP_OK) continue;
                const char *op_name = vjp_op_describe(vjp_op_at(op))->name;
                ran++;
                bool multiplies = strcmp(op_name, "linear") == 0 || strcmp(op_name, "conv2d") == 0 ||
                                  strcmp(op_name, "linear_cross_entropy") == 0;
                if (blis && multiplies) continue;
                sample_types types = {storages[s], s % 2 ? storages[s] : VJP_F32, s % 2 ? VJP_I64 : VJP_I32};
                failed += count_call(device, sample_find(op_name), (vjp_pass)pass, types, what);
                failed += count_call(device, sample_find_large(op_name), (vjp_pass)pass, types, what);
            }
    vjp_close(device);
    assert_int_equal(failed, 0);
    assert_true(ran >= sample_passes() * 3);
}

static void cpu_one_thread(void **state) {
    (void)state;
    every_call("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}, "1 thread");
}

static void cpu_threads(void **state) {
    (void)state;
    every_call("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 4}, "4 threads");
}

static void cpu_built_in_products(void **state) {
    (void)state;
    every_call("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 3, .matrix_products = "builtin"},
               "3 threads, built-in products");
}

static void cpu_amx_products(void **state) {
    (void)state;
    vjp_device *device;
    vjp_options options = {.struct_size = sizeof(vjp_options), .threads = 3, .matrix_products = "amx"};
    vjp_status status = vjp_open("cpu", &options, &device);
    vjp_close(device);
    if (status != VJP_OK) skip();
    every_call("cpu", options, "3 threads, AMX");
}

static void cpu_blas_products(void **state) {
    (void)state;
    every_call("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 3, .matrix_products = "blas"},
               "3 threads, BLAS");
}

static void ref_calls(void **state) {
    (void)state;
    every_call("ref", (vjp_options)VJP_OPTIONS_DEFAULTS, "ref");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counter_counts),   cmocka_unit_test(cpu_one_thread),
        cmocka_unit_test(cpu_threads),      cmocka_unit_test(cpu_built_in_products),
        cmocka_unit_test(cpu_amx_products), cmocka_unit_test(cpu_blas_products),
        cmocka_unit_test(ref_calls),
    };
    return cmocka_run_group_tests_name("allocation", tests, NULL, NULL);
}
