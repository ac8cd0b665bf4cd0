/* SPDX-License-Identifier: MIT */
/* The inside of a group: open.c makes it, group.c uses it. */
#ifndef VJP_COMM_STATE_H
#define VJP_COMM_STATE_H

#include <stdbool.h>

#include "core/core.h"
#include "vjp_engine.h"

/*
 * What travels at once. In the host's memory it is still in the second cache when it is added; a device's copies and
 * additions of that size would be shorter than their launches.
 */
enum { BLOCK_BYTES = 1 << 20, DEVICE_BLOCK_BYTES = 1 << 25, STAGES = 3 };

struct vjp_group {
    vjp_device *device;
    const vjp_engine *engine; /* NULL: one process alone */
    void *state;
    const vjp_carrier *carrier; /* NULL: a device's memory travels through the host's */
    void *carrier_state;
    vjp_device *second; /* of the same memory, with a queue of its own, for another thread; NULL: there is none */
    void *device_stage; /* [DEVICE_BLOCK_BYTES] of the device, for what a carrier receives */
    int32_t rank, size;
    int32_t levels;   /* 2^levels processes */
    int32_t reporter; /* of a failure */
    bool failed;
    bool beside;  /* another thread uses the device and its sentence */
    int64_t call; /* number of the current call, for the engine */
    double timeout;
    char *stage; /* [STAGES * BLOCK_BYTES] of host memory: to send, received, and a device's own block */
    char sentence[VJP_ERROR_BYTES];
};

/* Records that the communication has failed, with the group's sentence. */
vjp_status group_failed(vjp_group *group, vjp_status status);

/* Copies host memory from one process to all. */
vjp_status group_spread(vjp_group *group, int32_t root, void *host, size_t bytes);

#endif
