/* SPDX-License-Identifier: MIT */
/*
 * A stand-in for macOS: the Objective-C runtime's few functions and the objects of Metal that the device sends messages
 * to. Pipelines are the emulator's kernels. Work is done when it is waited for and no sooner, so that
 * reading too early is seen; objects count their references; what would be a fault on a real system is recorded.
 */
#ifndef VJP_TESTS_METAL_STAND_IN_H
#define VJP_TESTS_METAL_STAND_IN_H

#include <stdbool.h>

#include "gpu/metal/objc.h"

extern const objc_system stand_in_system;

typedef struct stand_in_state {
    /* What the test makes fail. */
    bool no_device, old_system;                                          /* old: before the modes of mathematics */
    const char *fail_library, *fail_function, *fail_pipeline, *fail_run; /* the message of the error; NULL: none */
    bool fail_queue, fail_buffer, fail_commands, fail_encoder;
    unsigned long max_threads, max_bytes;
    bool no_matrices; /* of simdgroups: a GPU that is older than Apple's family 7, or not Apple's */

    /* What happened. */
    int objects;                                          /* alive */
    int pools;                                            /* open */
    int libraries, pipelines, committed, launches, waits; /* made, or done, so far */
    unsigned long grid[2];                                /* of the last launch */
    char misuse[256];                                     /* the first fault on a real system; "": none */
} stand_in_state;

extern stand_in_state stand_in;

/* A system that works, with all counts 0. */
void stand_in_reset(void);

#endif
