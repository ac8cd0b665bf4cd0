/* SPDX-License-Identifier: MIT */
/*
 * Proof: compares every gradient of every op with an oracle that shares no code with the kernel. Used by `vjp check`
 * and by the tests; not part of the library.
 *
 *   compare      a device with `ref` in f64 on the same stored numbers, over the table of cases
 *   differences  `ref` with central differences in double
 *   invariants   algebraic properties of the results, independent of the oracle
 *   bits         the same bits for every thread count, pool and instruction set
 *   repeats      the same bits run after run, on a GPU
 *
 * Each passes one row per output to the caller's sink. The program exits when memory runs out: a proof has nothing to
 * save.
 */
#ifndef VJP_PROOF_H
#define VJP_PROOF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

typedef struct proof_row {
    const char *op, *pass, *output, *dtype, *device;
    const char *text;    /* the case, and after a semicolon the variant of the call */
    double error, bound; /* the check holds when error <= bound */
    bool ok;
    const char *why; /* of a failure: what the two numbers do not show; "" otherwise */
} proof_row;

typedef struct proof_plan {
    const vjp_op *op; /* NULL: all */
    int dtype;        /* a vjp_dtype; -1: all that the device has */
    uint64_t seed;
    bool quick; /* only the rows of the table that are marked so */
    bool brief; /* proof_compare(): of each op only the first of these rows, and only its plain call and the += of it:
                   for devices that compile every variant of a call for seconds */
    void (*row)(void *context, const proof_row *row);
    void *context;
} proof_plan;

void proof_compare(const proof_plan *plan, vjp_device *device);

/* The caller's case instead of the table. */
struct proof_setup;
void proof_compare_setup(const proof_plan *plan, vjp_device *device, const struct proof_setup *setup);
void proof_differences(const proof_plan *plan);
void proof_invariants(const proof_plan *plan, vjp_device *device);

/* Opens the CPU devices that it compares. */
void proof_bits(const proof_plan *plan);
void proof_repeats(const proof_plan *plan, vjp_device *device);

/*
 * All of them that the device has, one after the other: what `vjp check` does. begin() gets the name of the proof that
 * follows and one line about it, end() is called after its last row; both get the plan's context.
 */
void proof_all(const proof_plan *plan, vjp_device *device,
               void (*begin)(void *context, const char *proof, const char *about), void (*end)(void *context));

#endif
