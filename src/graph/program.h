/* SPDX-License-Identifier: MIT */
/* The inside of a compiled program: its memory, and an array of calls with nothing left to look up. */
#ifndef VJP_GRAPH_PROGRAM_H
#define VJP_GRAPH_PROGRAM_H

#include <stdatomic.h>

#include "graph/graph.h"

typedef struct program_call {
    vjp_work work;
    const vjp_kernel *kernel;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    int64_t attributes[VJP_MAX_ATTRIBUTE_BYTES / 8];
    char *name;
    vjp_cost cost;
    double seconds;
    int64_t runs;
} program_call;

/*
 * Calls [first, first + count) of a program, which the device runs as one where there are several: calls of one op that
 * do not depend on each other, or a pair, of which the second reads what the first writes.
 */
typedef struct program_group {
    int32_t first, count;
    bool pair;
} program_group;

/*
 * A copy between the arena and the host's memory, or the wait for its end. Of those before one call, what frees memory
 * comes first.
 */
typedef enum program_moving { MOVE_OUT, MOVE_FREED, MOVE_FETCH, MOVE_BACK } program_moving;

typedef struct program_move {
    int32_t call; /* before which it happens */
    int32_t
        until; /* the call before which the copy must have ended: of those that begin at once the first goes first */
    program_moving what;
    int ticket;
    void *host, *device;
    size_t bytes;
} program_move;

/* A value that the caller can read or write. name NULL: this program does not have it. */
typedef struct program_value {
    vjp_tensor tensor;
    graph_role role;
    bool halves; /* f32 that lie in halves (core/half.h) */
    char *name;
} program_value;

typedef enum program_running { PROGRAM_IDLE, PROGRAM_RUNS, PROGRAM_INTERRUPTED } program_running;

struct vjp_program {
    vjp_device *device;
    uint64_t graph_id;
    program_call *call;
    int32_t calls;
    program_group *group; /* [groups]: all calls, in their order */
    int32_t groups;
    int32_t commits; /* the first call that changes a parameter; all that follow run even if the run is interrupted */
    program_value *value; /* [values]: persistent ones and results */
    int32_t values;
    void *arena, *persistent; /* persistent: without the values of a shared program */
    size_t arena_room;        /* bytes at `arena`: other programs may have needed more */
    bool owns_arena;
    void *host;         /* where intermediates wait; NULL: none do */
    program_move *move; /* [moves], in their order */
    int32_t moves;
    vjp_program_report report;
    plan_range *range; /* [ranges]: the plan, kept for tests */
    int32_t ranges;
    atomic_int running; /* a program_running */
    bool profiling;
    int64_t runs;
    void (*after)(void *context, int32_t call); /* called after each call of a run; NULL: nothing is */
    void *context;
    void *recording; /* of a device that can replay a run */
    bool unrecordable;
};

/* The value that the caller can read or write; refused where the program does not have it. */
vjp_status program_find(const vjp_program *program, vjp_value value, const program_value **found);

/*
 * Copies elements [first, first + count) of a value from or to the host's memory, in which they are whole: access.c.
 */
vjp_status program_upload(const vjp_program *program, const program_value *to, size_t first, const void *host,
                          size_t count);
vjp_status program_download(const vjp_program *program, const program_value *from, size_t first, void *host,
                            size_t count);

vjp_status program_is_null(const vjp_program *program, const char *function, const char *what);

/*
 * Offload.c: does what comes before a call. *done is 0 before the first one. Where a run ends early, the last function
 * lets later calls wait for the copies that have begun.
 */
vjp_status program_move_before(const vjp_program *program, int32_t call, int32_t *done);
void program_end_moves(const vjp_program *program, int32_t done);

/* Compiles what the calls need, as they will run: alone or merged. */
vjp_status program_warm(const vjp_program *program);

/* vjp_program_trace() of the first `calls` calls. */
vjp_status program_trace(vjp_program *program, int32_t calls, char *found, size_t bytes);

size_t program_bytes(const vjp_tensor *tensor);

#endif
