/* SPDX-License-Identifier: MIT */
/*
 * The carrier for the memory of NVIDIA cards: libvjp-nccl. It uses NCCL's send and receive alone. NCCL's own sums add
 * in an order that depends on the number of processes, the size of the message and the algorithm that it chooses; here
 * two processes exchange blocks, and vjp adds them in its tree.
 *
 * The id of the group travels by the engine that brought the processes together, so that no server, file or port is
 * needed for it. A message runs on a stream of its own, which is polled, so that a broken link ends after the timeout.
 */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vjp_engine.h"

_Static_assert(sizeof(ncclUniqueId) <= VJP_CARRIER_ID_BYTES, "an id of NCCL fits that of a carrier");

typedef struct nccl_state {
    ncclComm_t comm;
    cudaStream_t stream;
    int card;
} nccl_state;

__attribute__((format(printf, 2, 3))) static vjp_status fail(vjp_engine_failure *failure, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->sentence, failure->bytes, format, arguments);
    va_end(arguments);
    return VJP_GROUP_FAILED;
}

static vjp_status result(vjp_engine_failure *failure, const char *what, ncclResult_t code) {
    if (code == ncclSuccess) return VJP_OK;
    return fail(failure, "NCCL: %s: %s", what, ncclGetErrorString(code));
}

static vjp_status cuda_result(vjp_engine_failure *failure, const char *what, cudaError_t code) {
    if (code == cudaSuccess) return VJP_OK;
    return fail(failure, "NCCL: %s: %s", what, cudaGetErrorString(code));
}

static vjp_status make_id(unsigned char id[VJP_CARRIER_ID_BYTES], vjp_engine_failure *failure) {
    ncclUniqueId unique;
    vjp_status status = result(failure, "it makes no id for the group", ncclGetUniqueId(&unique));
    if (status == VJP_OK) memcpy(id, &unique, sizeof unique);
    return status;
}

/* After a failure the others may be gone, and what is under way must not be waited for. */
static void leave(void *state, int32_t failed) {
    nccl_state *s = state;
    cudaSetDevice(s->card);
    if (s->comm && failed) ncclCommAbort(s->comm);
    if (s->comm && !failed) ncclCommDestroy(s->comm);
    if (s->stream && !failed) cudaStreamDestroy(s->stream);
    free(s);
}

/* "cuda:1" is card 1, "cuda" card 0. */
static vjp_status join(void **state, const unsigned char id[VJP_CARRIER_ID_BYTES], int32_t rank, int32_t size,
                       const char *device, vjp_engine_failure *failure) {
    ncclUniqueId unique;
    memcpy(&unique, id, sizeof unique);
    const char *colon = strchr(device, ':');
    nccl_state *s = calloc(1, sizeof *s);
    if (!s) {
        fail(failure, "NCCL: there is no memory for its state");
        return VJP_OUT_OF_MEMORY;
    }
    s->card = colon ? (int)strtol(colon + 1, NULL, 10) : 0;
    vjp_status status = cuda_result(failure, "the card cannot be used", cudaSetDevice(s->card));
    if (status == VJP_OK)
        status = cuda_result(failure, "there is no stream for it",
                             cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    if (status == VJP_OK) status = result(failure, "it does not begin", ncclCommInitRank(&s->comm, size, unique, rank));
    if (status == VJP_OK)
        *state = s;
    else
        leave(s, 0);
    return status;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static vjp_status wait_for(nccl_state *s, const vjp_message *m, double timeout, vjp_engine_failure *failure) {
    static const struct timespec nap = {0, 20000};
    double begin = now();
    cudaError_t code;
    while ((code = cudaStreamQuery(s->stream)) == cudaErrorNotReady) {
        ncclResult_t later = ncclSuccess;
        double waited = now() - begin;
        if (ncclCommGetAsyncError(s->comm, &later) != ncclSuccess || (later != ncclSuccess && later != ncclInProgress))
            return fail(failure, "NCCL: a message to or from rank %d failed: %s", (int)m->peer,
                        ncclGetErrorString(later));
        if (waited > timeout) return fail(failure, "NCCL: rank %d has not answered for %g s", (int)m->peer, timeout);
        if (waited > 1e-3) nanosleep(&nap, NULL); /* a shorter message is polled for */
    }
    return cuda_result(failure, "a message failed", code);
}

static vjp_status exchange(void *state, const vjp_message *m, double timeout, vjp_engine_failure *failure) {
    nccl_state *s = state;
    vjp_status status = cuda_result(failure, "the card cannot be used", cudaSetDevice(s->card));
    if (status != VJP_OK) return status;
    ncclResult_t code = ncclGroupStart();
    if (code == ncclSuccess && m->send_bytes)
        code = ncclSend(m->send, m->send_bytes, ncclUint8, m->peer, s->comm, s->stream);
    if (code == ncclSuccess && m->receive_bytes)
        code = ncclRecv(m->receive, m->receive_bytes, ncclUint8, m->peer, s->comm, s->stream);
    ncclResult_t end = ncclGroupEnd();
    status = result(failure, "a message cannot be sent", code == ncclSuccess ? end : code);
    return status == VJP_OK ? wait_for(s, m, timeout, failure) : status;
}

__attribute__((visibility("default"))) const vjp_carrier *vjp_carrier_entry(int32_t interface_version);

const vjp_carrier *vjp_carrier_entry(int32_t interface_version) {
    static const vjp_carrier carrier = {.struct_size = sizeof(vjp_carrier),
                                        .interface_version = VJP_ENGINE_INTERFACE,
                                        .version = VJP_VERSION,
                                        .kind = "cuda",
                                        .make_id = make_id,
                                        .join = join,
                                        .leave = leave,
                                        .exchange = exchange};
    return interface_version == VJP_ENGINE_INTERFACE ? &carrier : NULL;
}
