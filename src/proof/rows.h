/* SPDX-License-Identifier: MIT */
/*
 * Buffers whose slots have rows that lie apart (VJP_SLOT_ROWS), as a call of a proof asks for: where each row is, and
 * the content of each buffer with all rows in it. Between the rows of inputs there is NaN, between those of outputs
 * there are guards.
 */
#ifndef VJP_PROOF_ROWS_H
#define VJP_PROOF_ROWS_H

#include "proof/problem.h"

/* One buffer, of one slot or of several whose rows follow each other in turn. */
typedef struct rows_buffer {
    unsigned char *image; /* NULL: not a buffer of rows */
    size_t bytes;
} rows_buffer;

/* Of a slot, in bytes from the beginning of the buffer's content. */
typedef struct rows_place {
    bool apart; /* false: packed, and nothing here says where */
    int buffer; /* the number of the first slot in its buffer */
    size_t begin, rows, row, step;
} rows_place;

typedef struct rows_layout {
    rows_place place[VJP_MAX_SLOTS];
    rows_buffer buffer[VJP_MAX_SLOTS];
} rows_layout;

enum { ROWS_POISON_BYTE = 0xff, ROWS_GUARD_BYTE = 0xa5 };

/* `content`: what each slot holds before the call; NULL: poison. */
void rows_make(rows_layout *layout, const proof_problem *problem, const proof_call *call,
               const void *const content[VJP_MAX_SLOTS]);
void rows_free(rows_layout *layout);

/* Puts a slot that lies apart into its tensor: strides, and the offset in its buffer. */
void rows_describe(const rows_place *place, vjp_tensor *tensor);

/* The rows of a slot as a packed tensor, to free(); in `now`, a copy of the buffer, they get their content before the
 * call back, so that `now` is the image again if nothing else has changed. */
void *rows_take(const rows_layout *layout, int slot, unsigned char *now);

#endif
