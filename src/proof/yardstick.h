/* SPDX-License-Identifier: MIT */
/*
 * What a device is measured against: the rate at which it can copy memory, measured in the same run, with the same
 * threads, over arrays larger than any cache. One implementation for each kind of device.
 */
#ifndef VJP_PROOF_YARDSTICK_H
#define VJP_PROOF_YARDSTICK_H

#include <stddef.h>

#include "vjp.h"

typedef struct proof_yardstick proof_yardstick;

/* For arrays of `bytes` in all, half of them read and half written. NULL: this kind of device has no yardstick. */
proof_yardstick *proof_yardstick_open(vjp_device *device, size_t bytes);
void proof_yardstick_close(proof_yardstick *yardstick);

/* Copies once with each kind of store; returns bytes read and written per second of the fastest. */
double proof_yardstick_copy(proof_yardstick *yardstick);

/* Reads one of the arrays once; returns bytes per second. 0: this kind of device cannot say. */
double proof_yardstick_read(proof_yardstick *yardstick);

#endif
