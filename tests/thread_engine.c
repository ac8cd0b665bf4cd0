/* SPDX-License-Identifier: MIT */
/*
 * An engine whose processes are threads of one process, VJP_TEST_RANKS of them, for test_comm.c, and a carrier for the
 * memory of CPU devices. It is built as libvjp-threads against the installed headers alone, and also serves as the
 * shortest example of both.
 */
#define _DEFAULT_SOURCE /* clock_gettime() */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vjp_engine.h"

enum { MAX_RANKS = 16 };

typedef struct box {
    const void *data; /* NULL: empty */
    size_t bytes;
} box;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static box boxes[MAX_RANKS][MAX_RANKS]; /* [from][to] */
static int joined, left, ranks[MAX_RANKS];

static vjp_status join(void **state, int32_t *rank, int32_t *size, vjp_engine_failure *failure) {
    const char *text = getenv("VJP_TEST_RANKS");
    *size = text ? atoi(text) : 0;
    if (*size < 1 || *size > MAX_RANKS) {
        snprintf(failure->sentence, failure->bytes, "threads: VJP_TEST_RANKS is not 1 to %d", MAX_RANKS);
        return VJP_NO_DEVICE;
    }
    pthread_mutex_lock(&mutex);
    if (!joined) memset(boxes, 0, sizeof boxes);
    *rank = ranks[joined] = joined;
    *state = &ranks[joined++];
    pthread_mutex_unlock(&mutex);
    return VJP_OK;
}

static void leave(void *state, int32_t failed) {
    (void)state, (void)failed;
    pthread_mutex_lock(&mutex);
    if (++left == joined) left = joined = 0;
    pthread_mutex_unlock(&mutex);
}

/* Waits until the box is full, or empty again. */
static int wait_for(const box *b, int full, const struct timespec *until) {
    int code = 0;
    while (!code && (b->data != NULL) != full)
        code = pthread_cond_timedwait(&changed, &mutex, until);
    return code;
}

static vjp_status exchange(void *state, const vjp_message *m, double timeout, vjp_engine_failure *failure) {
    int rank = *(int *)state, code = 0;
    box *out = &boxes[rank][m->peer], *in = &boxes[m->peer][rank];
    struct timespec until;
    vjp_status status = VJP_OK;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)timeout + 1;
    pthread_mutex_lock(&mutex);
    if (m->send_bytes) *out = (box){m->send, m->send_bytes};
    pthread_cond_broadcast(&changed);
    if (m->receive_bytes) code = wait_for(in, 1, &until);
    if (!code && m->receive_bytes) {
        if (in->bytes == m->receive_bytes)
            memcpy(m->receive, in->data, in->bytes);
        else
            status = VJP_GROUP_FAILED;
        *in = (box){0};
        pthread_cond_broadcast(&changed);
    }
    if (!code && m->send_bytes) code = wait_for(out, 0, &until);
    pthread_mutex_unlock(&mutex);
    if (code) status = VJP_GROUP_FAILED;
    if (status != VJP_OK)
        snprintf(failure->sentence, failure->bytes, "rank %d %s", (int)m->peer,
                 code ? "has not answered" : "sent another size");
    return status;
}

static void abort_all(void *state, int32_t status) {
    (void)state;
    exit(status);
}

static int32_t any_thread(const void *state) {
    (void)state;
    return 1;
}

const vjp_engine *vjp_engine_entry(int32_t interface_version);

const vjp_engine *vjp_engine_entry(int32_t interface_version) {
    static const vjp_engine engine = {.struct_size = sizeof(vjp_engine),
                                      .interface_version = VJP_ENGINE_INTERFACE,
                                      .join = join,
                                      .leave = leave,
                                      .exchange = exchange,
                                      .abort = abort_all,
                                      .any_thread = any_thread};
    return interface_version == VJP_ENGINE_INTERFACE ? &engine : NULL;
}

/* ---- The carrier ------------------------------------------------------------------------------------- */

static const char mark[] = "threads";

static vjp_status make_id(unsigned char id[VJP_CARRIER_ID_BYTES], vjp_engine_failure *failure) {
    (void)failure;
    memcpy(id, mark, sizeof mark);
    return VJP_OK;
}

static vjp_status join_carrier(void **state, const unsigned char id[VJP_CARRIER_ID_BYTES], int32_t rank, int32_t size,
                               const char *device, vjp_engine_failure *failure) {
    if (memcmp(id, mark, sizeof mark) != 0 || size > MAX_RANKS || strcmp(device, "cpu") != 0) {
        snprintf(failure->sentence, failure->bytes, "threads: rank %d of %d has another id", (int)rank, (int)size);
        return VJP_GROUP_FAILED;
    }
    *state = &ranks[rank];
    return VJP_OK;
}

static void leave_carrier(void *state, int32_t failed) {
    (void)state, (void)failed;
}

const vjp_carrier *vjp_carrier_entry(int32_t interface_version);

const vjp_carrier *vjp_carrier_entry(int32_t interface_version) {
    static const vjp_carrier carrier = {.struct_size = sizeof(vjp_carrier),
                                        .interface_version = VJP_ENGINE_INTERFACE,
                                        .kind = "cpu",
                                        .make_id = make_id,
                                        .join = join_carrier,
                                        .leave = leave_carrier,
                                        .exchange = exchange};
    return interface_version == VJP_ENGINE_INTERFACE ? &carrier : NULL;
}
