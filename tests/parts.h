/* SPDX-License-Identifier: MIT */
/*
 * Tables of which a test compares only a part where that takes minutes: VJP_TEST_PART, a number, leaves one of `parts`
 * rows, another with each number. Without it all are compared.
 */
#ifndef VJP_TESTS_PARTS_H
#define VJP_TESTS_PARTS_H

#include <stdbool.h>
#include <stdlib.h>

static inline bool only_a_part(void) {
    return getenv("VJP_TEST_PART") != NULL;
}

/* Whether row i of a table is compared now. */
static inline bool in_part(size_t i, size_t parts) {
    return !only_a_part() || i % parts == strtoul(getenv("VJP_TEST_PART"), NULL, 10) % parts;
}

/* Where sanitizers make that slow: a quarter, four rows in a row. */
static inline bool in_sanitized_part(size_t i) {
    return sizeof VJP_SANITIZE == 1 || in_part(i / 4, 4);
}

#endif
