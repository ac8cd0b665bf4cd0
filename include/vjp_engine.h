/* SPDX-License-Identifier: MIT */
/*
 * The interface for engines that carry messages between the processes of a group. vjp_group_open(device, "name") loads
 * libvjp-name.so (or .dylib) from the usual places and calls
 *
 *     const vjp_engine *vjp_engine_entry(int32_t interface_version);
 *
 * which returns the engine's table, or NULL for an interface that it was not made for. The library needs these headers
 * and nothing else. An engine moves bytes of host memory; everything that decides the bits of a sum is in vjp.
 */
#ifndef VJP_ENGINE_H
#define VJP_ENGINE_H

#include "vjp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented when a change of this file requires engines to be recompiled. */
enum { VJP_ENGINE_INTERFACE = 2 };

/* A message to one process, and one from it, at the same time; at most INT32_MAX bytes each, 0: there is none. */
typedef struct vjp_message {
    int32_t peer;
    int32_t reserved;
    int64_t call; /* which call of the group it belongs to: the same number in all processes */
    const void *send;
    size_t send_bytes;
    void *receive;
    size_t receive_bytes;
} vjp_message;

/* How an engine reports a failure. */
typedef struct vjp_engine_failure {
    char *sentence;
    size_t bytes;     /* of `sentence` */
    int32_t reporter; /* the lowest rank that is known to have noticed the failure; -1: only this one */
    int32_t reserved;
} vjp_engine_failure;

typedef struct vjp_engine {
    uint64_t struct_size; /* sizeof(vjp_engine) */
    int32_t interface_version;
    int32_t reserved;
    const char *version; /* VJP_VERSION of the headers it was compiled with; NULL: any */

    /* Joins the group of all processes that were launched together; called once. */
    vjp_status (*join)(void **state, int32_t *rank, int32_t *size, vjp_engine_failure *failure);

    /* Leaves it. `failed`: other processes may be gone, so that nothing may be waited for. */
    void (*leave)(void *state, int32_t failed);

    /* Returns when the message was sent and the other received; fails after `timeout` seconds. */
    vjp_status (*exchange)(void *state, const vjp_message *message, double timeout, vjp_engine_failure *failure);

    /* Ends all processes, this one with the status. */
    void (*abort)(void *state, int32_t status);

    /* Whether any thread may call exchange(), one at a time; NULL: only the one that has joined. */
    int32_t (*any_thread)(const void *state);
} vjp_engine;

/*
 * A carrier moves the memory of a device between processes that an engine has brought together, without a detour
 * through the host. vjp_group_open(device, "engine+name") loads it from libvjp-name as it does an engine, and calls
 *
 *     const vjp_carrier *vjp_carrier_entry(int32_t interface_version);
 *
 * It is used by one thread at a time. Hanging processes are found by the engine: two processes exchange a byte by it
 * first.
 */
enum { VJP_CARRIER_ID_BYTES = 256 };

typedef struct vjp_carrier {
    uint64_t struct_size; /* sizeof(vjp_carrier) */
    int32_t interface_version;
    int32_t reserved;
    const char *version; /* VJP_VERSION of the headers it was compiled with; NULL: any */
    const char *kind;    /* of the devices whose memory it moves: "cuda" */

    /* In rank 0: what identifies the group; all others get it. */
    vjp_status (*make_id)(unsigned char id[VJP_CARRIER_ID_BYTES], vjp_engine_failure *failure);

    /* Joins with the memory of a device, by its name: "cuda:0". */
    vjp_status (*join)(void **state, const unsigned char id[VJP_CARRIER_ID_BYTES], int32_t rank, int32_t size,
                       const char *device, vjp_engine_failure *failure);

    /* As those of an engine, but of the device's memory, in which nothing is pending on either side. */
    void (*leave)(void *state, int32_t failed);
    vjp_status (*exchange)(void *state, const vjp_message *message, double timeout, vjp_engine_failure *failure);
} vjp_carrier;

#ifdef __cplusplus
}
#endif

#endif
