/* SPDX-License-Identifier: MIT */
/*
 * One valid call of every op and pass, in memory with guards around every tensor, which the tests then break, count,
 * repeat or hash. A sample gives the shapes of the forward's inputs; a required one that it does not name has the shape
 * of one with the same shape text in the table, and "[]" is a scalar. All others come from vjp_infer() and the naming
 * rule of vjp_op_info (dx is shaped like x, dy like y).
 */
#ifndef VJP_TESTS_SAMPLE_H
#define VJP_TESTS_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/core.h"

enum { SAMPLE_INPUTS = 4, SAMPLE_ATTRIBUTE_BYTES = 256, SAMPLE_GUARD = 64 };

typedef struct sample {
    const char *op;
    const char *attributes; /* "groups=2 layout=channels_last" */
    struct {
        const char *name;
        int ndim;
        int64_t shape[VJP_MAX_DIMS];
    } input[SAMPLE_INPUTS]; /* the forward's inputs that shapes come from, and optional ones that are present */
    int64_t index_limit;    /* indices, positions and argmax are drawn from [0, index_limit) */
} sample;

/* A call under test: tensors by slot, each inside `block`, between guards. */
typedef struct call {
    const vjp_op *op;
    const vjp_op_info *info;
    vjp_pass pass;
    size_t count;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *pointer[VJP_MAX_SLOTS];
    int64_t attributes[SAMPLE_ATTRIBUTE_BYTES / 8];
    unsigned char *block;
    size_t block_bytes;
} call;

/* A small sample for each op, with every optional input present. */
const sample *sample_find(const char *op);

/* How many passes all ops have together. */
int sample_passes(void);

/* One that is split into many tasks, so that threads have work. */
const sample *sample_find_large(const char *op);

typedef struct sample_types {
    vjp_dtype storage, parameter, index;
} sample_types;

/* Fills `made`; false if the op's table and the sample contradict each other. `device` is for vjp_infer() alone. */
bool call_make(call *made, vjp_device *device, const sample *from, vjp_pass pass, sample_types types, uint64_t seed);
void call_free(call *made);

vjp_status call_run(vjp_device *device, const call *made);

/*
 * Puts the rows of a slot `gap` elements apart, into new memory at the end of the block, NaN between them. False, and
 * nothing is changed, where the slot takes no such rows or has none.
 */
bool call_spread(call *made, size_t slot, int64_t gap);

/* Sets the strides for rows that lie `step` elements apart. */
void call_set_step(vjp_tensor *tensor, int64_t step);

/* The slot of that name, or -1. */
int call_slot(const call *made, const char *name);

/* Sets "name=value"; false if the op has no such attribute. */
bool call_set_attribute(call *made, const char *name, const char *value);

/* FNV-1a of all bytes of a slot's tensor, which must be packed; 0 where the call has none. */
uint64_t call_hash(const call *made, size_t slot);
size_t call_bytes(const vjp_tensor *tensor);

/* Makes a call, runs it and hashes its outputs in their order. Returns how many there are; 0: it failed. */
int sample_hash(vjp_device *device, const sample *from, vjp_pass pass, sample_types types, uint64_t seed,
                uint64_t hash[VJP_MAX_SLOTS]);

/* Writes a number as the dtype holds it. */
void call_put(const vjp_tensor *tensor, int64_t element, double value);
double call_get(const vjp_tensor *tensor, int64_t element);

#endif
