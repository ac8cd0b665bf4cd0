/* SPDX-License-Identifier: MIT */
/* How long both passes of an op take on a device, and how long they would take at its limit, in one interleaved run. */
#ifndef VJP_PROOF_TIMING_H
#define VJP_PROOF_TIMING_H

#include "proof/problem.h"
#include "proof/yardstick.h"

typedef struct proof_timing {
    double seconds[VJP_PASS_COUNT];
    double limit[VJP_PASS_COUNT]; /* NaN: the device has no yardstick */
    double copy_rate;             /* bytes per second, read and written */
    double product_rate;          /* flops per second of the raw products; 0: none */
} proof_timing;

/*
 * Best of repeated rounds, each of which runs every part once; at least three rounds, then until `budget` seconds have
 * passed. False: it cannot be run, and `error` says why.
 */
bool proof_time(vjp_device *device, proof_yardstick *yardstick, const proof_setup *setup, vjp_dtype storage,
                double budget, proof_timing *timing, char error[TEXT_ERROR]);

/* The minimum bytes that the last pass of this case (usually the backward) moves; negative after a failure. */
double proof_min_bytes(vjp_device *device, const proof_setup *setup, vjp_dtype storage, char error[TEXT_ERROR]);

/*
 * The side of the square product that a device's rate is measured with. Other devices than the host and CUDA may bind
 * no more than 128 MiB at once, and may be software.
 */
int64_t proof_square_side(const vjp_device *device);

#endif
