/* SPDX-License-Identifier: MIT */
/*
 * A case as tensors: for both passes of an op every tensor as it is stored, and the same numbers as doubles, which
 * `ref` computes with. And functions that run it: on `ref` in f64, and on the device under test with guards around
 * every buffer.
 */
#ifndef VJP_PROOF_PROBLEM_H
#define VJP_PROOF_PROBLEM_H

#include "proof/cases.h"
#include "proof/proof.h"

/* Ends the program with the sentence of a device that failed to open; NULL: there was no memory for it. */
_Noreturn void proof_give_up(const vjp_device *failed);

/* The oracle. */
vjp_device *proof_open_ref(void);

/* Whether the device has kernels for every pass of the op. */
bool proof_supports(vjp_device *device, const vjp_op *op, vjp_dtype storage);

/* Whether the plan, on this device, includes this row, which is then read into `setup`. */
bool proof_plan_takes(const proof_plan *plan, const vjp_device *device, const proof_case *row, proof_setup *setup);

/* One tensor. Inputs have their numbers; outputs have what `ref` says (with all inputs given). */
typedef struct proof_values {
    const vjp_slot *slot;
    vjp_tensor tensor; /* dtype and shape; no data */
    int64_t count;
    bool present;  /* false: the case leaves it out */
    void *stored;  /* an input in its dtype */
    double *exact; /* the same numbers, or ref's result; integers too */
} proof_values;

typedef struct proof_problem {
    proof_setup setup;
    const vjp_op_info *info;
    vjp_dtype storage;
    proof_values slot[VJP_PASS_COUNT][VJP_MAX_SLOTS];
    uint32_t saved;       /* one bit per slot of the backward that the forward saves (mean, rstd, pre, argmax) */
    uint32_t without;     /* inputs of the backward that are not needed when those are present */
    bool narrow_operands; /* the device's matrix products take operands in the storage type: see error.h */
    bool flushes;         /* the device may replace numbers below f32's smallest normal one by 0: see error.h */
} proof_problem;

/* False: the case does not make sense, and `error` says why. */
bool proof_problem_make(proof_problem *problem, vjp_device *ref, const proof_setup *setup, vjp_dtype storage,
                        uint64_t seed, char error[TEXT_ERROR]);
void proof_problem_free(proof_problem *problem);

/* The same in two steps, without ref's results: shapes and dtypes, then the numbers of an input. */
bool proof_problem_shape(proof_problem *problem, vjp_device *ref, const proof_setup *setup, vjp_dtype storage,
                         char error[TEXT_ERROR]);
void proof_problem_fill(proof_problem *problem, vjp_pass pass, int slot, uint64_t seed);

/* The bits of all slots that the case has. */
uint32_t proof_present(const proof_problem *problem, vjp_pass pass);

/* Runs a pass on ref in f64 with the inputs of `present`. result[i] of each output in it: doubles to free(). */
vjp_status proof_reference(const proof_problem *problem, vjp_device *ref, vjp_pass pass, uint32_t present,
                           double *result[VJP_MAX_SLOTS]);

/* The number of the slot of that name, or -1. */
int proof_find_slot(const vjp_pass_info *pass, const char *name);

/* Where the rows of the slots with VJP_SLOT_ROWS lie. */
typedef enum proof_rows {
    PROOF_PACKED,
    PROOF_ROWS_APART,   /* gaps that keep every row's alignment to 16 bytes, different ones for each slot */
    PROOF_ROWS_ODD,     /* gaps of odd numbers of elements */
    PROOF_ROWS_TOGETHER /* those of all inputs in one buffer, as q, k and v are slices of one tensor; outputs too */
} proof_rows;

/* Whether the device's kernel takes slots whose rows lie apart; false also where the pass has none. */
bool proof_takes_rows(const vjp_device *device, const vjp_op *op, vjp_pass pass);

/* How to run a pass on the device under test. */
typedef struct proof_call {
    vjp_pass pass;
    uint32_t present;              /* slots that are given */
    void *const *initial;          /* accumulate onto these, where the slot can; NULL: overwrite poison */
    int alias_output, alias_input; /* this output uses the memory of that input; both 0: none */
    proof_rows rows;
    int shift;     /* each tensor begins this many elements after a 64-byte boundary */
    bool recorded; /* recorded once and replayed, on a device that can (vjp_backend.measure) */
} proof_call;

enum { PROOF_FAULT = 256 };

/*
 * Uploads the inputs, fills outputs and workspace with NaN, puts guards on both sides of every buffer, calls,
 * downloads. result[i] of each output that is present: its stored bytes, to free(). `fault` says what was touched that
 * should not have been: a guard, an input; "" if nothing was.
 */
vjp_status proof_run(const proof_problem *problem, vjp_device *device, const proof_call *call,
                     void *result[VJP_MAX_SLOTS], char fault[PROOF_FAULT]);

#endif
