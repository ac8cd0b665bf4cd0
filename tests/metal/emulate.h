/* SPDX-License-Identifier: MIT */
/*
 * Runs compute kernels of .metal files, compiled as C++, on this processor. The threads of a threadgroup are fibers
 * that stop at barriers and at the simdgroup's functions; between two stops they run one after another, in the order
 * that the settings say. It reports, with the line:
 *
 *   a race      two threads touch the same threadgroup memory between two barriers, and one of them writes
 *   divergence  threads wait at different barriers, or some have ended
 *   nothing     threadgroup memory is read that no thread of the group has written
 *   outside     memory is touched that is in no buffer of the launch
 *
 * Kernels are compiled with the compiler's instrumentation of memory accesses (-fsanitize=thread), whose calls land
 * here: so a shader needs no special types.
 */
#ifndef VJP_TESTS_METAL_EMULATE_H
#define VJP_TESTS_METAL_EMULATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EMULATE_MAX_THREADS = 256, EMULATE_MAX_BUFFERS = 31, EMULATE_MESSAGE = 320 };

typedef enum emulate_order { EMULATE_FORWARD, EMULATE_REVERSE, EMULATE_SHUFFLED, EMULATE_IN_TURN } emulate_order;

typedef struct emulate_settings {
    emulate_order order; /* of groups and of threads; in turn: a different one with each launch */
    unsigned width;      /* of a simdgroup: any number from 1 on */
} emulate_settings;

extern emulate_settings emulate_with;

/* ---- Shaders, which register themselves --------------------------------------------------------------------- */

typedef struct emulate_constant {
    const char *name;
    unsigned index; /* of the function constant */
    unsigned *value;
} emulate_constant;

typedef struct emulate_kernel {
    const char *name;
    void (*run)(void *const *arguments); /* addresses of the arguments, in their order */
} emulate_kernel;

typedef struct emulate_shader {
    const char *name;
    const emulate_constant *constant; /* operands' types, then numbers */
    size_t constants;
    size_t operands; /* the first arguments of each kernel, buffers 0, 1, ... */
    const emulate_kernel *kernel;
    size_t kernels;
    struct emulate_shader *next;
} emulate_shader;

extern emulate_shader *emulate_shaders;

/* ---- Launches -------------------------------------------------------------------------------------------- */

typedef struct emulate_buffer {
    char *memory; /* NULL: not bound */
    size_t bytes, offset;
} emulate_buffer;

typedef struct emulate_launch {
    const emulate_shader *shader;
    const emulate_kernel *kernel;
    const unsigned *constant; /* values, as the shader lists them */
    emulate_buffer buffer[EMULATE_MAX_BUFFERS];
    unsigned grid[3], threads;
} emulate_launch;

/* False: `message` is the first error. */
bool emulate_run(const emulate_launch *launch, char message[EMULATE_MESSAGE]);

/* For shaders: where the threadgroup's memory is. */
void emulate_shared(void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
