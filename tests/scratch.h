/* SPDX-License-Identifier: MIT */
/* A temporary folder for a test, and files in it. Include it after cmocka.h. */
#ifndef VJP_TESTS_SCRATCH_H
#define VJP_TESTS_SCRATCH_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char scratch[64];

static inline int make_scratch(void **unused) {
    (void)unused;
    snprintf(scratch, sizeof scratch, "/tmp/vjp-test-XXXXXX");
    return mkdtemp(scratch) == NULL;
}

static inline int remove_scratch(void **unused) {
    (void)unused;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

static inline const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    return path;
}

static inline void write_file(const char *name, const void *bytes, size_t count) {
    FILE *file = fopen(path_of(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

#endif
