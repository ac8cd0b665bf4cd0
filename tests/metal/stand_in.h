/*
 * A stand-in for macOS: the Objective-C runtime's few functions and the objects of Metal that the device sends messages
 * to. Pipelines are the emulator's kernels. Work is done when it is waited for and no sooner, so that who reads too
 * early sees it; objects count their references; what a real system would punish is noted.
 */
#ifndef VJP_TESTS_METAL_STAND_IN_H
#define VJP_TESTS_METAL_STAND_IN_H

#include <stdbool.h>

#include "gpu/metal/objc.h"

extern const objc_system stand_in_system;

typedef struct stand_in_state {
    /* What goes wrong on purpose. */
    bool no_device, old_system;                                          /* old: before the modes of mathematics */
    const char *fail_library, *fail_function, *fail_pipeline, *fail_run; /* the words of the error; NULL: none */
    bool fail_queue, fail_buffer, fail_commands, fail_encoder;
    unsigned long max_threads, max_bytes;

    /* What was seen. */
    int objects;                                          /* that live */
    int pools;                                            /* that are open */
    int libraries, pipelines, committed, launches, waits; /* made, or done, so far */
    unsigned long grid[2];                                /* of the last launch */
    char misuse[256]; /* the first thing that a real system would punish; "": nothing */
} stand_in_state;

extern stand_in_state stand_in;

/* A system as it should be, with nothing seen. */
void stand_in_reset(void);

#endif
