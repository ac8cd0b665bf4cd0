/*
 * Proof: every gradient of every op, held against an oracle that shares no code with the kernel. Used by `vjp check`
 * and by the tests; no part of the library.
 *
 *   compare      a device against `ref` in f64 on the same stored numbers, over the table of cases
 *   differences  `ref` against central differences in double
 *   invariants   what algebra says of the results, whatever the oracle says
 *   bits         the same bits for every thread count, pool and instruction set
 *   repeats      the same bits run after run, on a device that works by itself
 *
 * Each hands one row an output to the caller's sink. Memory that cannot be had ends the program: a proof has nothing
 * to save.
 */
#ifndef VJP_PROOF_H
#define VJP_PROOF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

typedef struct proof_row {
    const char *op, *pass, *output, *dtype, *device;
    const char *text;    /* the case, and after a semicolon which variant of the call */
    double error, bound; /* the check holds when error <= bound */
    bool ok;
    const char *why; /* of a failure: what the two numbers do not tell; "" otherwise */
} proof_row;

typedef struct proof_plan {
    const vjp_op *op; /* NULL: all */
    int dtype;        /* a vjp_dtype; -1: all that the device has */
    uint64_t seed;
    bool quick; /* only the rows of the table that are marked so */
    void (*row)(void *context, const proof_row *row);
    void *context;
} proof_plan;

void proof_compare(const proof_plan *plan, vjp_device *device);

/* One case of the caller's own instead of the table. */
struct proof_setup;
void proof_compare_setup(const proof_plan *plan, vjp_device *device, const struct proof_setup *setup);
void proof_differences(const proof_plan *plan);
void proof_invariants(const proof_plan *plan, vjp_device *device);

/* Opens the CPU devices it compares by itself. */
void proof_bits(const proof_plan *plan);
void proof_repeats(const proof_plan *plan, vjp_device *device);

#endif
