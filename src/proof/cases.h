/* SPDX-License-Identifier: MIT */
/*
 * The table of cases, one line of text each. A line has the shapes of the inputs that shapes come from, attributes, and
 * what is unusual about the case:
 *
 *   x=[7,65]           shape of an input; all others follow from the op table
 *   eps=1e-5           an attribute
 *   -gamma             an absent optional input, or an output that the forward does not save (-argmax)
 *   gamma=f32          dtype of a slot, of either pass; param=f32: of every slot that may be T or f32
 *   data=offset        what kind of numbers (proof_data)
 *   top=x              a float input near the largest number of its dtype, and top=x/64 a 64th of that (proof_end)
 *   bottom=x           one near the smallest normal number, and bottom=x*64 times that
 *   only=f32,bf16      storage types it is run for; default: all
 *   bound=1e-6         for f32 results, instead of the table in error.h
 *
 * Rows are in src/op/<op>.def. Sizes to have: 1, 2, 3 (less than a vector), 63, 64, 65, 127 (around a vector and a
 * workgroup), 1000, 1025 (many vectors and a tail), over 65,535 rows (more than a grid dimension holds), few huge rows,
 * no rows. Where a row to normalise has two or fewer elements eps is large: with a small one dx is the difference of
 * two nearly equal numbers, whose digits f32 does not hold.
 */
#ifndef VJP_PROOF_CASES_H
#define VJP_PROOF_CASES_H

#include "proof/text.h"
#include "vjp.h"

enum {
    PROOF_QUICK = 1,   /* part of `vjp check --quick` */
    PROOF_BITS = 2,    /* part of the comparison of bits */
    PROOF_ON_HOST = 4, /* only where the device's memory is the host's: what GPUs do not compute */
    PROOF_ON_CUDA = 8  /* only on CUDA: sizes that choose a kernel there and would take others long */
};

typedef struct proof_case {
    const char *op;
    uint32_t marks;
    const char *text;
} proof_case;

extern const proof_case proof_cases[];
extern const size_t proof_case_count;

/*
 * What `vjp bench` times: shapes from real training. On the host @ grows until the backward moves several times what
 * the last-level cache holds; a GPU has its own sizes, larger than its cache; a small one shows the cost of a call.
 */
enum { PROOF_HOST = 1, PROOF_CARD = 2, PROOF_SMALL = 4 };

typedef struct proof_shape {
    const char *op;
    int kind;
    const char *text;
} proof_shape;

extern const proof_shape proof_shapes[];
extern const size_t proof_shape_count;

/*
 * Numbers are normal with mean 0.25 unless the row says otherwise; `source` is the op's first input, or the gradient g
 * of an optimiser's step.
 */
typedef enum proof_data {
    PROOF_NORMAL,
    PROOF_OFFSET,    /* source: 1000 + normal */
    PROOF_EQUAL,     /* everything 0.1; indices all the same */
    PROOF_EQUAL_DY,  /* dy 0.1 */
    PROOF_ONES,      /* everything 1 */
    PROOF_TINY,      /* source x 1e-20 (f16: 1e-3) */
    PROOF_HUGE,      /* source x 1e20 (f16: 1e3) */
    PROOF_MIXED,     /* source: rows x 1e-20, 1, 1e20 in turn */
    PROOF_TIES,      /* source: -0, 0, 1 or 2 */
    PROOF_NAN,       /* source: one in 29 a NaN */
    PROOF_INF,       /* source: one in 29 infinite */
    PROOF_MINUS_INF, /* source: mostly -inf */
    PROOF_WIDE,      /* source: where activations are easily wrong, from 0 to 1e30 */
    PROOF_WIDE_NAN,  /* the same with NaN among them */
    PROOF_REPEAT,    /* indices: one row for all */
    PROOF_RUNS,      /* indices: long runs of a few rows, as padding in text makes */
    PROOF_FIRST,     /* a step's averages are 0, as before the first step */
    PROOF_NAN_SCALE, /* a step's scale is NaN */
    PROOF_INF_SCALE, /* it is infinite */
    PROOF_ZERO,      /* source 0, and a step's averages too */
    PROOF_SKEWED,    /* indices: row i as often as 1/(i + 1), as words in text are */
    PROOF_DISTINCT,  /* source: no two within 0.05 */
    PROOF_IGNORED,   /* indices: one in four the attribute ignore_index */
    PROOF_ALL_IGNORED
} proof_data;

/*
 * The ends of the range, for any input that the row names. Sizes are evenly distributed; three of four are positive, so
 * that a mean does not cancel (of averages of squares all). The divisor keeps a sum of many terms in range.
 */
typedef enum proof_end {
    PROOF_TOP,   /* 1/32 to 1/8 of the largest number of the slot's dtype */
    PROOF_BOTTOM /* 32 to 128 times its smallest normal number */
} proof_end;

typedef struct proof_extreme {
    const char *slot;
    proof_end end;
    double share; /* what the numbers are divided (top) or multiplied (bottom) by */
} proof_extreme;

enum { PROOF_MAX_CHOICES = 16, PROOF_MAX_EXTREMES = 4 };

typedef struct proof_choice {
    const char *name;
    bool absent, shaped;
    int dtype; /* -1: the usual one */
    int ndim;
    int64_t shape[VJP_MAX_DIMS];
} proof_choice;

/* A row, read. */
typedef struct proof_setup {
    const vjp_op *op;
    const char *text;
    text_values attributes;
    proof_data data;
    uint32_t only; /* one bit per storage type */
    double bound;  /* 0: the usual one */
    proof_choice choice[PROOF_MAX_CHOICES];
    int choices;
    proof_extreme extreme[PROOF_MAX_EXTREMES];
    int extremes;
} proof_setup;

bool proof_setup_read(proof_setup *setup, const vjp_op *op, const char *text, char error[TEXT_ERROR]);

/* What the row says about a slot; NULL: nothing. */
const proof_choice *proof_choice_of(const proof_setup *setup, const vjp_slot *slot);

/* The end of the range that the row puts this input at; NULL: none. */
const proof_extreme *proof_extreme_of(const proof_setup *setup, const vjp_slot *slot);

/* The case belongs to the adversarial set of the accuracy table. */
bool proof_is_adversarial(const proof_setup *setup);

#endif
