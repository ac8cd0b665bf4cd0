/* SPDX-License-Identifier: MIT */
/*
 * The engine of MPI, compiled once for each MPI that is installed: libvjp-openmpi and libvjp-mpich, whose binary
 * interfaces differ.
 *
 * A process that waits tests its requests and offers its core to others in between: MPI's own waiting may spin, and
 * there can be more processes than cores. A process that has waited for half of the timeout tells all others so. When
 * the timeout is over, the processes that have not done this are the ones that hang: the others wait, directly or
 * through each other, for them.
 */
#include <mpi.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vjp_engine.h"

enum { DATA_TAG = 1, NOTE_TAG = 2 };

typedef struct mpi_state {
    MPI_Comm world, notes; /* own copies: messages do not meet those of the program */
    int rank, size;
    bool began;        /* MPI_Init() was ours */
    int threads;       /* the level of threads that MPI provides */
    int64_t note;      /* the call that is waited for, as others are told */
    int64_t *reported; /* [size]: the last call that this process was told that rank waits for */
} mpi_state;

__attribute__((format(printf, 3, 4))) static vjp_status fail(vjp_engine_failure *failure, vjp_status status,
                                                             const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->sentence, failure->bytes, format, arguments);
    va_end(arguments);
    return status;
}

static vjp_status mpi_fails(vjp_engine_failure *failure, const char *what, int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return fail(failure, VJP_GROUP_FAILED, "MPI: %s: %.300s", what, text);
}

/* ---- Joining and leaving ----------------------------------------------------------------------------- */

static void leave(void *state, int32_t failed) {
    mpi_state *s = state;
    if (!failed) {
        MPI_Comm_free(&s->world);
        MPI_Comm_free(&s->notes);
        if (s->began) MPI_Finalize(); /* after a failure it would wait for the processes that are gone */
    }
    free(s->reported);
    free(s);
}

static vjp_status join(void **state, int32_t *rank, int32_t *size, vjp_engine_failure *failure) {
    int initialized = 0, finalized = 0, provided, code;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized) return fail(failure, VJP_NO_DEVICE, "MPI: it has ended in this process and cannot begin again");
    mpi_state *s = calloc(1, sizeof *s);
    if (!s) return fail(failure, VJP_OUT_OF_MEMORY, "MPI: there is no memory for its state");
    s->began = !initialized;
    code = s->began ? MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) : MPI_SUCCESS;
    if (code == MPI_SUCCESS) code = MPI_Query_thread(&s->threads);
    if (code == MPI_SUCCESS) {
        code = MPI_Comm_dup(MPI_COMM_WORLD, &s->world);
        if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &s->notes);
    }
    if (code != MPI_SUCCESS) {
        free(s);
        return mpi_fails(failure, "it does not begin", code);
    }
    MPI_Comm_set_errhandler(s->world, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(s->notes, MPI_ERRORS_RETURN);
    MPI_Comm_rank(s->world, &s->rank);
    MPI_Comm_size(s->world, &s->size);
    s->reported = calloc((size_t)s->size, sizeof *s->reported);
    if (!s->reported) {
        fail(failure, VJP_OUT_OF_MEMORY, "MPI: there is no memory for %d ranks", s->size);
        leave(s, 0);
        return VJP_OUT_OF_MEMORY;
    }
    *state = s;
    *rank = s->rank;
    *size = s->size;
    return VJP_OK;
}

static void abort_all(void *state, int32_t status) {
    const mpi_state *s = state;
    fflush(stderr);
    MPI_Abort(s->world, status);
}

static int32_t any_thread(const void *state) {
    return ((const mpi_state *)state)->threads >= MPI_THREAD_SERIALIZED;
}

/* ---- Who hangs --------------------------------------------------------------------------------------- */

/* The requests are not waited for: a process that hangs never receives. */
static void tell_others(mpi_state *s, int64_t call) {
    s->note = call;
    for (int rank = 0; rank < s->size; rank++) {
        MPI_Request request;
        if (rank != s->rank &&
            MPI_Isend(&s->note, sizeof s->note, MPI_BYTE, rank, NOTE_TAG, s->notes, &request) == MPI_SUCCESS)
            MPI_Request_free(&request);
    }
}

static void read_notes(mpi_state *s) {
    int found = 0;
    MPI_Status from;
    while (MPI_Iprobe(MPI_ANY_SOURCE, NOTE_TAG, s->notes, &found, &from) == MPI_SUCCESS && found) {
        int64_t call;
        if (MPI_Recv(&call, sizeof call, MPI_BYTE, from.MPI_SOURCE, NOTE_TAG, s->notes, MPI_STATUS_IGNORE) ==
            MPI_SUCCESS)
            s->reported[from.MPI_SOURCE] = call;
    }
}

/* Names the ranks that do not wait. A rank may be one call ahead or behind where calls need not meet. */
static vjp_status timed_out(mpi_state *s, const vjp_message *message, double timeout, vjp_engine_failure *failure) {
    int hanging = -1, more = 0;
    read_notes(s);
    failure->reporter = s->rank;
    for (int rank = s->size - 1; rank >= 0; rank--) {
        if (rank == s->rank) continue;
        if (s->reported[rank] + 1 >= message->call) {
            if (rank < failure->reporter) failure->reporter = rank;
        } else {
            more += hanging >= 0;
            hanging = rank;
        }
    }
    char others[48] = "";
    if (more) snprintf(others, sizeof others, " (nor have %d others)", more);
    return fail(failure, VJP_GROUP_FAILED, "rank %d of %d has not answered for %g s%s",
                hanging < 0 ? (int)message->peer : hanging, s->size, timeout, others);
}

/* ---- Messages ---------------------------------------------------------------------------------------- */

static bool finished(MPI_Request request[2], MPI_Status status[2], int *code) {
    int done = 0;
    *code = MPI_Testall(2, request, &done, status);
    return done || *code != MPI_SUCCESS;
}

/* For the first millisecond a waiting process only offers its core; then it sleeps, 50 microseconds at a time. */
static void pause_after(double waited) {
    static const struct timespec nap = {0, 50000};
    if (waited < 1e-3)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

static vjp_status exchange(void *state, const vjp_message *m, double timeout, vjp_engine_failure *failure) {
    mpi_state *s = state;
    MPI_Request request[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    MPI_Status status[2];
    int code = MPI_SUCCESS, received = 0;
    if (m->send_bytes > INT32_MAX || m->receive_bytes > INT32_MAX)
        return fail(failure, VJP_INVALID, "MPI: a message of %zu bytes is too long", m->send_bytes);
    if (m->receive_bytes)
        code = MPI_Irecv(m->receive, (int)m->receive_bytes, MPI_BYTE, m->peer, DATA_TAG, s->world, &request[0]);
    if (code == MPI_SUCCESS && m->send_bytes)
        code = MPI_Isend(m->send, (int)m->send_bytes, MPI_BYTE, m->peer, DATA_TAG, s->world, &request[1]);
    if (code != MPI_SUCCESS) return mpi_fails(failure, "a message cannot be sent", code);
    double begin = MPI_Wtime();
    bool told = false;
    while (!finished(request, status, &code)) {
        double waited = MPI_Wtime() - begin;
        if (waited > timeout) return timed_out(s, m, timeout, failure);
        if (!told && waited > timeout / 2) {
            tell_others(s, m->call);
            told = true;
        }
        pause_after(waited);
    }
    if (code == MPI_SUCCESS && m->receive_bytes) code = MPI_Get_count(&status[0], MPI_BYTE, &received);
    if (code == MPI_SUCCESS && (size_t)received != m->receive_bytes)
        return fail(failure, VJP_GROUP_FAILED, "rank %d sent %d bytes where %zu were expected", (int)m->peer, received,
                    m->receive_bytes);
    if (code == MPI_SUCCESS) return VJP_OK;
    char what[64];
    snprintf(what, sizeof what, "a message to or from rank %d failed", (int)m->peer);
    return mpi_fails(failure, what, code);
}

/* ---- The table --------------------------------------------------------------------------------------- */

__attribute__((visibility("default"))) const vjp_engine *vjp_engine_entry(int32_t interface_version);

const vjp_engine *vjp_engine_entry(int32_t interface_version) {
    static const vjp_engine engine = {.struct_size = sizeof(vjp_engine),
                                      .interface_version = VJP_ENGINE_INTERFACE,
                                      .version = VJP_VERSION,
                                      .join = join,
                                      .leave = leave,
                                      .exchange = exchange,
                                      .abort = abort_all,
                                      .any_thread = any_thread};
    return interface_version == VJP_ENGINE_INTERFACE ? &engine : NULL;
}
