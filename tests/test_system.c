/* SPDX-License-Identifier: MIT */
/*
 * The system layer (core/system.h) where no other test would notice a mistake, and the features of the processor
 * against what the compiler's own functions say. Files, folders and locks are tested through those who use them:
 * test_run_files, test_checkpoint, tests/stress.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/system.h"
#include "cpu/features.h"
#include "scratch.h"

static void features_are_those_of_the_compiler(void **state) {
    (void)state;
#if defined(__x86_64__) && !defined(__APPLE__)
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512cd");
    assert_int_equal(vjp_cpu_has_avx2(), v3);
    assert_int_equal(vjp_cpu_has_avx512(), v4);
#else
    assert_false(vjp_cpu_has_avx512() && !vjp_cpu_has_avx2());
#endif
}

static void memory_is_aligned(void **state) {
    (void)state;
    for (size_t alignment = 64; alignment <= 4096; alignment *= 2) {
        void *data = system_alloc(alignment, 3 * alignment);
        assert_non_null(data);
        assert_int_equal((uintptr_t)data % alignment, 0);
        memset(data, 1, 3 * alignment);
        system_free(data);
    }
}

static void time_passes(void **state) {
    (void)state;
    int64_t begin = system_nanoseconds();
    double seconds = system_seconds();
    system_sleep(20000000);
    int64_t passed = system_nanoseconds() - begin;
    assert_true(passed >= 20000000 && passed < 20000000000);
    assert_true(system_seconds() - seconds >= 0.02);
}

/* Reads in the middle, at the end and behind it, whatever the position of the file. */
static void bytes_are_read_at_an_offset(void **state) {
    (void)state;
    char path[256], got[8] = "";
    snprintf(path, sizeof path, "%s", path_of("file"));
    int file = system_create(path);
    assert_true(file >= 0);
    assert_int_equal(system_write(file, "0123\r\n\032", 7), 7);
    assert_true(system_sync(file) && system_close(file));
    assert_int_equal(system_create(path), -1);
    assert_int_equal(errno, EEXIST);
    file = system_open_to_read(path);
    assert_int_equal(system_read_at(file, got, sizeof got, 2), 5);
    assert_memory_equal(got, "23\r\n\032", 5);
    assert_int_equal(system_read_at(file, got, 1, 0), 1);
    assert_int_equal(got[0], '0');
    assert_int_equal(system_read_at(file, got, sizeof got, 7), 0);
    assert_true(system_close(file));

    FILE *stream = system_stream(path, "w"); /* text is not converted */
    assert_non_null(stream);
    assert_int_equal(fputs("a\n", stream), fputs("b\n", stream));
    assert_int_equal(fclose(stream), 0);
    system_status status;
    assert_true(system_status_of(path, &status));
    assert_int_equal(status.kind, SYSTEM_FILE);
    assert_int_equal(status.bytes, 4);
}

static void a_tree_is_removed(void **state) {
    (void)state;
    char folder[256], inner[300], path[320];
    system_status status;
    snprintf(folder, sizeof folder, "%s", path_of("folder"));
    assert_true(system_make_folder(folder));
    assert_false(system_make_folder(folder));
    assert_int_equal(errno, EEXIST);
    snprintf(inner, sizeof inner, "%s/inner", folder);
    assert_true(system_make_folder(inner));
    snprintf(path, sizeof path, "%s/file", inner);
    assert_true(system_close(system_create(path)));
    int names = 0;
    system_folder *entries = system_folder_open(inner);
    assert_non_null(entries);
    for (const char *name; (name = system_folder_next(entries));)
        names += strcmp(name, "file") == 0;
    system_folder_close(entries);
    assert_int_equal(names, 1);
    system_remove_tree(folder);
    assert_false(system_status_of(folder, &status));
    assert_int_equal(errno, ENOENT);
}

/* ---- Available memory -------------------------------------------------------------------------------- */

/* A machine of 1000 KiB, and what its control groups leave. */
static const struct {
    const char *groups;            /* /proc/self/cgroup */
    const char *file[4], *text[4]; /* under /sys/fs/cgroup */
    double bytes;
} machines[] = {
    {"", {0}, {0}, 1024000},
    {"0::/\n", {"memory.max", "memory.current"}, {"max\n", "500\n"}, 1024000},
    {"0::/\n", {"memory.max", "memory.current"}, {"9000\n", "500\n"}, 8500},
    {"0::/\n",
     {"memory.max", "memory.current", "memory.stat"},
     {"9000\n", "500\n", "anon 7\ninactive_file 300\n"},
     8800},
    {"0::/a/b\n", {"a/memory.max", "a/memory.current"}, {"7000\n", "7500\n"}, 1},
    {"0::/a/b\n",
     {"a/memory.max", "a/memory.current", "a/b/memory.max", "a/b/memory.current"},
     {"7000\n", "0\n", "5000\n", "400\n"},
     4600},
    {"3:cpu:/x\n2:memory:/x\n",
     {"memory/x/memory.limit_in_bytes", "memory/x/memory.usage_in_bytes"},
     {"6000\n", "0\n"},
     6000},
    {"2:memory:/elsewhere\n",
     {"memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"},
     {"6000\n", "1000\n"},
     5000},
};

static void available_memory_is_within_control_groups(void **state) {
    (void)state;
#ifdef __linux__
    for (size_t i = 0; i < sizeof machines / sizeof machines[0]; i++) {
        char root[32], name[128], command[512];
        snprintf(root, sizeof root, "machine-%zu", i);
        snprintf(command, sizeof command,
                 "cd '%s' && mkdir -p %s/proc/self %s/sys/fs/cgroup/memory/x %s/sys/fs/cgroup/a/b", scratch, root, root,
                 root);
        assert_int_equal(system(command), 0);
        snprintf(name, sizeof name, "%s/proc/meminfo", root);
        write_file(name, "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n", 43);
        snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
        write_file(name, machines[i].groups, strlen(machines[i].groups));
        for (int f = 0; f < 4 && machines[i].file[f]; f++) {
            snprintf(name, sizeof name, "%s/sys/fs/cgroup/%s", root, machines[i].file[f]);
            write_file(name, machines[i].text[f], strlen(machines[i].text[f]));
        }
        double bytes = system_available_bytes_of(path_of(root));
        if (bytes != machines[i].bytes) fail_msg("machine %zu: %g bytes instead of %g", i, bytes, machines[i].bytes);
    }
    assert_true(system_available_bytes() > 0);
#endif
    assert_true(system_available_bytes() <= system_memory_bytes());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(features_are_those_of_the_compiler),
        cmocka_unit_test(memory_is_aligned),
        cmocka_unit_test(time_passes),
        cmocka_unit_test(bytes_are_read_at_an_offset),
        cmocka_unit_test(a_tree_is_removed),
        cmocka_unit_test(available_memory_is_within_control_groups),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
