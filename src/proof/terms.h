/* SPDX-License-Identifier: MIT */
/* The size of the terms that a result is the sum of. */
#ifndef VJP_PROOF_TERMS_H
#define VJP_PROOF_TERMS_H

#include "proof/problem.h"

/*
 * How many times the L2 norm of all terms of all elements of a result is that of the result, where the device rounds
 * each term to 16 bits before it adds them: dx and dweight of linear_cross_entropy. 1 where the terms are smaller, for
 * other results, and where there are too many terms to count.
 */
double proof_cancellation(const proof_problem *problem, vjp_pass pass, int slot);

#endif
