/* SPDX-License-Identifier: MIT */
/*
 * How far a stored result is from what it should be, and how far it may be.
 *
 *   result in   relative L2 error                                    in the adversarial set
 *   f32         2e-6; linear, conv2d 2e-6 sqrt(K)/8, K terms each;   1e-5
 *               1e-5 where the tensors are of 16 bits
 *   bf16        4e-3                                                 4e-3
 *   f16         5e-4                                                 5e-4
 *   f64         1e-12                                                1e-12
 *
 * An L2 norm over a million elements does not see one that is wrong in its third digit. So each element has its own
 * bound, too: half a unit in its last place, plus 16 times the f32 bound of the larger of its size and the root mean
 * square of all. (16: the worst of some million normally distributed errors is at 5 times their root mean square; the
 * rest is room for rows that are worse conditioned than their neighbours.) Where a device's products take 16-bit
 * operands (problem->narrow_operands), linear's dpre is rounded before it enters da and db, and y is act of the stored
 * pre: with an activation an element of da and db may be off by 4 half units of that size more, one of y by 2. The L2
 * bound is the same for all, but for linear_cross_entropy: there, its logits and their gradients are of the storage
 * type, so the bound of that type is the bound of its f32 results as well. And where the terms of its dx or dweight
 * nearly cancel, the error is relative to the L2 norm of the terms (terms.h): each was rounded, so no arithmetic on
 * them could be closer.
 *
 * Below the smallest normal number of its dtype a result has fewer digits the smaller it is: the half unit that
 * rounding costs there is left out of the L2 error. A device that may flush (problem->flushes) replaces numbers below
 * f32's smallest normal one by 0 wherever they appear, in sums too: an element may be off by 8 times that number.
 *
 * NaN must be where NaN should be and nowhere else, infinities with their sign; integers
 * must be equal.
 */
#ifndef VJP_PROOF_ERROR_H
#define VJP_PROOF_ERROR_H

#include "proof/problem.h"

enum { PROOF_WHY = 160 };

typedef struct proof_error {
    double relative;     /* L2; of integers: how many are wrong */
    char why[PROOF_WHY]; /* "" unless an element breaks its own rule */
} proof_error;

double proof_bound(const proof_problem *problem, vjp_pass pass, int slot);

proof_error proof_measure(const proof_problem *problem, vjp_pass pass, int slot, const void *stored,
                          const double *expected);

/* Elements whose bits differ. Two NaN are equal: which operand's NaN a sum returns is up to the hardware. */
int64_t proof_different(const void *one, const void *other, vjp_dtype dtype, int64_t count);

#endif
