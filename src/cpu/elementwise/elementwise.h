/* SPDX-License-Identifier: MIT */
/*
 * Elementwise ops on the CPU: each op is its formula.
 *
 * An op lists its operands and gives a formula for one vector of elements. Everything else is done here: splitting into
 * tasks, the constants for each storage type, whole vectors and the part of one at an end, optional operands, an
 * operand that is one row used for every row, and the stores (plain, past the caches, added to what is there). All of y
 * = a + b:
 *
 *     INLINE void sum(const void *unused, element_vectors *e) {
 *         (void)unused;
 *         e->out[0] = vf_add(e->in[0], e->in[1]);
 *     }
 *
 *     static const element_op op = {.inputs = 2, .in = {{ADD_A, STORED}, {ADD_B, OTHER}},
 *                                   .outputs = 1, .out = {{ADD_Y, STORED}}};
 *
 *     static void task(void *call, size_t i) {
 *         element_task(sum, &op, call, i);
 *     }
 *
 *     static vjp_status forward(const vjp_work *work) {
 *         return element_run(work, &op, task, NULL);
 *     }
 *
 * All inputs of a vector are read before its outputs are written, so an output may have the memory of any input. A
 * result depends on its own inputs alone: neither the split nor the kind of store changes a bit.
 *
 * The formula and the description are arguments of always-inline functions, so that the compiler sees constants.
 *
 * The shape of it is the same for every backend: a list of operands (slot, type, row or not, optional or not), a
 * formula from the inputs of an element to its outputs, and parameters that are the same for all elements.
 */
#ifndef VJP_CPU_ELEMENTWISE_H
#define VJP_CPU_ELEMENTWISE_H

#include "core/arithmetic.h"
#include "cpu/dispatch.h"
#include "op/op.h"

enum { ELEMENT_INPUTS = 4, ELEMENT_OUTPUTS = 3 };

/*
 * What is fixed about an operand. An op has one OTHER type: f32 or the storage type, also bf16 with `or_bf16`, or any
 * type with `any_other`.
 */
enum {
    STORED = 0, /* the storage type of the call */
    SINGLE = 1, /* f32 */
    OTHER = 2,  /* a constant for the compiler, as the storage type is */
    EITHER = 3, /* f32 or the storage type, looked up for each vector: where OTHER is taken */
    NARROW = 4, /* bf16 */
    TYPE_MASK = 7,
    ROW = 8,      /* an input that is one row of the outputs */
    OPTIONAL = 16 /* an input that is 0 where absent; outputs may always be absent */
};

typedef struct element_operand {
    int slot, kind;
} element_operand;

typedef struct element_op {
    int inputs, outputs;
    element_operand in[ELEMENT_INPUTS], out[ELEMENT_OUTPUTS];
    bool any_other, or_bf16;
    bool whole_vectors; /* the formula needs i to be a multiple of LANES */
} element_op;

/* Elements [i, i + LANES) of every operand. */
typedef struct element_vectors {
    int64_t i;
    vf in[ELEMENT_INPUTS], out[ELEMENT_OUTPUTS];
} element_vectors;

typedef void (*element_formula)(const void *parameters, element_vectors *e);

/* ALL_PLAIN, ALL_STREAM: the mode of every output, known when compiling. */
typedef enum element_stores { ALL_PLAIN, ALL_STREAM, EACH_ITS_OWN } element_stores;

typedef struct element_call {
    const void *parameters;
    const void *in[ELEMENT_INPUTS];
    void *out[ELEMENT_OUTPUTS];
    write_mode mode[ELEMENT_OUTPUTS];
    vjp_dtype storage, other, out_type[ELEMENT_OUTPUTS];
    const struct column_sums *columns; /* not NULL: the last output is summed over the rows (reduce/sums.h) */
    bool streams;                      /* any output does */
    int64_t phase;   /* elements from the last aligned address to element 0 of the outputs that are streamed */
    int64_t width;   /* of a row */
    size_t bytes;    /* moved for each element */
    cpu_split split; /* of elements */
} element_call;

typedef struct element_types {
    vjp_dtype storage, other;
} element_types;

/* ---- One vector -------------------------------------------------------------------------------------- */

INLINE vjp_dtype element_type(int kind, element_types t) {
    kind &= TYPE_MASK;
    return kind == STORED ? t.storage : kind == OTHER ? t.other : kind == NARROW ? VJP_BF16 : VJP_F32;
}

INLINE vf element_load(const element_op *op, element_types t, const element_call *c, int k, int64_t i, int64_t row,
                       int64_t n) {
    int kind = op->in[k].kind;
    if (kind & OPTIONAL && !c->in[k]) return vf_zero();
    return vf_load_part(element_type(kind, t), c->in[k], kind & ROW ? i - row : i, n);
}

/* Elements [i, i + n) of all outputs, n up to LANES; `row` is the first element of their row. */
INLINE element_vectors element_compute(element_formula formula, const element_op *op, element_types t,
                                       const element_call *c, int64_t i, int64_t row, int64_t n) {
    element_vectors e;
    e.i = i;
    if (op->inputs > 0) e.in[0] = element_load(op, t, c, 0, i, row, n);
    if (op->inputs > 1) e.in[1] = element_load(op, t, c, 1, i, row, n);
    if (op->inputs > 2) e.in[2] = element_load(op, t, c, 2, i, row, n);
    if (op->inputs > 3) e.in[3] = element_load(op, t, c, 3, i, row, n);
    formula(c->parameters, &e);
    return e;
}

INLINE void element_store(const element_op *op, element_types t, const element_call *c, element_stores stores, int k,
                          int64_t i, int64_t n, vf value) {
    if (op->outputs > 1 && !c->out[k]) return;
    write_mode mode = stores == ALL_PLAIN ? WRITE_PLAIN : stores == ALL_STREAM ? WRITE_STREAM : c->mode[k];
    int kind = op->out[k].kind;
    if (kind == EITHER && c->out_type[k] == t.storage)
        vf_write_part(mode, t.storage, c->out[k], i, n, value);
    else
        vf_write_part(mode, element_type(kind, t), c->out[k], i, n, value);
}

INLINE void element_step(element_formula formula, const element_op *op, element_types t, const element_call *c,
                         element_stores stores, int64_t i, int64_t row, int64_t n) {
    element_vectors e = element_compute(formula, op, t, c, i, row, n);
    element_store(op, t, c, stores, 0, i, n, e.out[0]);
    if (op->outputs > 1) element_store(op, t, c, stores, 1, i, n, e.out[1]);
    if (op->outputs > 2) element_store(op, t, c, stores, 2, i, n, e.out[2]);
}

/* Stores all outputs but the last, which the caller sums (reduce/sums.h). */
INLINE vf element_summand(element_formula formula, const element_op *op, element_types t, const element_call *c,
                          int64_t i, int64_t row, int64_t n) {
    element_vectors e = element_compute(formula, op, t, c, i, row, n);
    if (op->outputs > 1) element_store(op, t, c, EACH_ITS_OWN, 0, i, n, e.out[0]);
    return e.out[op->outputs - 1];
}

/* ---- Many -------------------------------------------------------------------------------------------- */

/* The whole vectors from element i of a row on; the first element after them. */
INLINE int64_t element_span(element_formula formula, const element_op *op, element_types t, const element_call *c,
                            element_stores stores, int64_t i, int64_t end, int64_t row) {
    for (; i + LANES <= end; i += LANES)
        element_step(formula, op, t, c, stores, i, row, LANES);
    return i;
}

/* Elements [begin, end). vf_stream_done() must follow if any output is streamed. */
INLINE void element_range(element_formula formula, const element_op *op, element_types t, const element_call *c,
                          int64_t begin, int64_t end) {
    bool plain = !ONE_VARIANT, stream = !ONE_VARIANT;
    for (int k = 0; k < op->outputs; k++) {
        plain = plain && (!c->out[k] || c->mode[k] == WRITE_PLAIN);
        stream = stream && (!c->out[k] || c->mode[k] == WRITE_STREAM);
    }
    for (int64_t row = begin / c->width * c->width; row < end; row += c->width) {
        int64_t i = vjp_max(begin, row), to = vjp_min(row + c->width, end);
        /* A part of a vector first, up to an aligned address, where outputs are streamed; then a part at the end. */
        int64_t part = c->streams ? vjp_min(-(c->phase + i) & (LANES - 1), to - i) : 0;
        if (ONE_VARIANT && part == 0) part = vjp_min(LANES, to - i);
        while (i < to) {
            if (part) element_step(formula, op, t, c, EACH_ITS_OWN, i, row, part);
            i += part;
            if (plain)
                i = element_span(formula, op, t, c, ALL_PLAIN, i, to, row);
            else if (stream)
                i = element_span(formula, op, t, c, ALL_STREAM, i, to, row);
            else if (!ONE_VARIANT)
                i = element_span(formula, op, t, c, EACH_ITS_OWN, i, to, row);
            part = vjp_min(LANES, to - i);
        }
    }
}

/* What a task does with its elements, for constant types. */
typedef void (*element_body)(element_formula formula, const element_op *op, element_types t, const element_call *c,
                             size_t task);

INLINE void element_body_range(element_formula formula, const element_op *op, element_types t, const element_call *c,
                               size_t task) {
    element_range(formula, op, t, c, cpu_split_begin(&c->split, task), cpu_split_end(&c->split, task));
    if (c->streams) vf_stream_done();
}

INLINE bool element_has_other(const element_op *op) {
    return (op->in[0].kind & TYPE_MASK) == OTHER || (op->in[1].kind & TYPE_MASK) == OTHER ||
           (op->in[2].kind & TYPE_MASK) == OTHER;
}

INLINE void element_with_types(vjp_dtype other, vjp_dtype storage, element_body body, element_formula formula,
                               const element_op *op, const element_call *c, size_t task) {
    body(formula, op, (element_types){storage, other}, c, task);
}

INLINE void element_with_storage(vjp_dtype storage, element_body body, element_formula formula, const element_op *op,
                                 const element_call *c, size_t task) {
    if (op->any_other)
        BY_DTYPE(c->other, element_with_types, storage, body, formula, op, c, task);
    else if (op->or_bf16 && storage != VJP_BF16 && c->other == VJP_BF16)
        element_with_types(VJP_BF16, storage, body, formula, op, c, task);
    else if (storage == VJP_F32 || !element_has_other(op) || c->other == storage)
        element_with_types(storage, storage, body, formula, op, c, task);
    else
        element_with_types(VJP_F32, storage, body, formula, op, c, task);
}

/* Takes a copy of the call, of which the compiler knows that no store changes it. */
INLINE void element_dispatch(element_body body, element_formula formula, const element_op *op, const void *call,
                             size_t task) {
    const element_call c = *(const element_call *)call;
    BY_DTYPE(c.storage, element_with_storage, body, formula, op, &c, task);
}

/* The task of an elementwise op. */
INLINE void element_task(element_formula formula, const element_op *op, const void *call, size_t task) {
    element_dispatch(element_body_range, formula, op, call, task);
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/*
 * Tasks begin at multiples of this many elements: whole vectors in the same alignment, whole batches of random numbers
 * (simd/philox.h), and 128 bytes of 16-bit numbers, so that no two tasks share a line.
 */
enum { ELEMENT_UNIT = 64 };

/* Splits `count` elements, each of which moves `bytes` over all tensors. */
static inline cpu_split element_split(int64_t count, size_t bytes, int64_t max_tasks) {
    cpu_split split = vjp_cpu_split_items(vjp_divide_up(count, ELEMENT_UNIT), ELEMENT_UNIT * (int64_t)bytes, max_tasks);
    return (cpu_split){.count = split.count, .size = split.size * ELEMENT_UNIT, .items = count};
}

/*
 * Chooses the stores of `count` elements. All streamed outputs reach an aligned address after the same number of
 * elements; sums over rows begin no row with a part of a vector.
 */
static inline void element_set_stores(element_call *c, const vjp_work *work, const element_op *op, int64_t count) {
    bool whole = op->whole_vectors || c->columns, rows_fit = !c->columns || c->width % LANES == 0;
    int64_t bytes = 0;
    for (int k = 0; k < op->outputs; k++)
        if (c->out[k]) bytes += count * (int64_t)dtype_bytes(c->out_type[k]);
    for (int k = 0; k < op->outputs; k++) {
        if (!c->out[k]) continue;
        bool in_place = false;
        for (int j = 0; j < op->inputs; j++)
            in_place = in_place || c->in[j] == c->out[k];
        int64_t phase = (int64_t)((uintptr_t)c->out[k] / dtype_bytes(c->out_type[k]) % LANES);
        bool aligned = (!c->streams || phase == c->phase) && (phase == 0 || !whole) && rows_fit;
        c->mode[k] = write_mode_of(work, op->out[k].slot, bytes, aligned, in_place);
        if (c->mode[k] != WRITE_STREAM) continue;
        c->streams = true;
        c->phase = phase;
    }
}

/* A call over the elements of the first output, all one row. `bytes` does not count a row that is used again. */
static inline element_call element_call_of(const vjp_work *work, const element_op *op, const void *parameters) {
    element_call c = {.parameters = parameters, .storage = work->storage, .other = work->storage};
    for (int k = 0; k < op->inputs; k++) {
        vjp_dtype type = vjp_type(work, op->in[k].slot);
        c.in[k] = vjp_data(work, op->in[k].slot);
        if ((op->in[k].kind & TYPE_MASK) == OTHER) c.other = type;
        if (c.in[k] && !(op->in[k].kind & ROW)) c.bytes += dtype_bytes(type);
    }
    for (int k = 0; k < op->outputs; k++) {
        c.out[k] = vjp_data(work, op->out[k].slot);
        c.out_type[k] = vjp_type(work, op->out[k].slot);
        if (op->out[k].kind == OTHER) c.other = c.out_type[k];
        if (c.out[k]) c.bytes += dtype_bytes(c.out_type[k]);
    }
    c.width = vjp_elements(work, op->out[0].slot);
    return c;
}

static inline void element_start(const vjp_work *work, const element_op *op, element_call *c, int64_t count,
                                 vjp_task task) {
    element_set_stores(c, work, op, count);
    c->split = element_split(count, c->bytes, CPU_MAX_TASKS);
    /*
     * Two tasks are made one: less than 128 KiB is in the core's cache more often than not, and done there in the time
     * that a second thread needs to start and to report.
     */
    if (c->split.count == 2) c->split = (cpu_split){.count = 1, .size = count, .items = count};
    vjp_cpu_for(work, c->split.count, task, c);
}

/* All of an op without rows. `task` calls element_task(). */
static inline vjp_status element_run(const vjp_work *work, const element_op *op, vjp_task task,
                                     const void *parameters) {
    element_call c = element_call_of(work, op, parameters);
    if (c.width > 0 && (c.out[0] || c.out[1] || c.out[2])) element_start(work, op, &c, c.width, task);
    return VJP_OK;
}

#endif
