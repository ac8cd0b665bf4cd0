/* SPDX-License-Identifier: MIT */
/* How far a result is from what it should be. The rules: error.h. */
#include "proof/error.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/arithmetic.h"
#include "op/op.h"
#include "proof/terms.h"
#include "proof/values.h"

/* A NaN prints as "nan", whatever its sign. */
static double unsigned_nan(double value) {
    return isnan(value) ? (double)NAN : value;
}

static const double ELEMENT_FACTOR = 16; /* see error.h */
static const double BF16_BOUND = 4e-3, F16_BOUND = 5e-4;

/* How many products are summed in an element of linear's result. */
static double linear_terms(const proof_problem *p, vjp_pass pass, int slot) {
    const vjp_linear_attributes *attributes = (const void *)p->setup.attributes.bytes;
    const vjp_tensor *a = NULL, *b = NULL;
    for (size_t i = 0; i < p->info->pass[pass].count; i++) {
        const proof_values *v = &p->slot[pass][i];
        if (strcmp(v->slot->name, "a") == 0) a = &v->tensor;
        if (strcmp(v->slot->name, "b") == 0) b = &v->tensor;
    }
    double k = (double)a->shape[a->ndim - 1];
    double n = (double)b->shape[b->ndim - (attributes->transpose_b ? 2 : 1)];
    double m = 1;
    for (int i = b->ndim - 2; i < a->ndim - 1; i++)
        m *= (double)a->shape[i];
    if (pass == VJP_FORWARD) return k;
    const char *name = p->slot[pass][slot].slot->name;
    return strcmp(name, "da") == 0 ? n : strcmp(name, "db") == 0 ? m : 64; /* dbias is not a product: the usual bound */
}

/* How many products are summed in an element of conv2d's result. */
static double conv2d_terms(const proof_problem *p, vjp_pass pass, int slot) {
    const vjp_conv2d_attributes *attributes = (const void *)p->setup.attributes.bytes;
    const proof_values *forward = p->slot[VJP_FORWARD];
    const char *name = p->slot[pass][slot].slot->name;
    double outs = (double)forward[CONV2D_WEIGHT].tensor.shape[0];
    double window = (double)forward[CONV2D_WEIGHT].count / fmax(outs, 1);
    if (pass == VJP_FORWARD) return window;
    if (strcmp(name, "dx") == 0) {
        const int64_t *weight = forward[CONV2D_WEIGHT].tensor.shape;
        double taps = attributes->layout == VJP_LAYOUT_CHANNELS_LAST ? (double)(weight[1] * weight[2])
                                                                     : (double)(weight[2] * weight[3]);
        return outs / (double)attributes->groups * taps;
    }
    return strcmp(name, "dweight") == 0 ? (double)forward[CONV2D_Y].count / fmax(outs, 1) : 64;
}

/*
 * linear with a gate multiplies pre, and makes its gradients from dpre, as they are stored by two ops: 16-bit results
 * are rounded twice.
 */
static bool is_gated(const proof_problem *p) {
    return p->setup.op->id == OP_ID(linear) && p->slot[VJP_FORWARD][LINEAR_GATE].present;
}

/* The bound of a result in f32. */
static double f32_bound(const proof_problem *p, vjp_pass pass, int slot) {
    if (p->setup.bound > 0) return p->setup.bound;
    bool narrow = p->storage == VJP_BF16 || p->storage == VJP_F16;
    /* The logits, or dpre, are rounded to the storage type, whatever type the results have. */
    if (narrow && ((p->narrow_operands && p->setup.op->id == OP_ID(linear_cross_entropy)) || is_gated(p)))
        return p->storage == VJP_BF16 ? BF16_BOUND : F16_BOUND;
    if (proof_is_adversarial(&p->setup) || narrow) return 1e-5;
    double terms = strcmp(p->info->name, "linear") == 0   ? linear_terms(p, pass, slot)
                   : strcmp(p->info->name, "conv2d") == 0 ? conv2d_terms(p, pass, slot)
                                                          : 64;
    return 2e-6 * sqrt(fmax(terms, 1)) / 8; /* no terms at all: the bias is rounded once */
}

double proof_bound(const proof_problem *p, vjp_pass pass, int slot) {
    int roundings = is_gated(p) && strcmp(p->slot[pass][slot].slot->name, "pre") != 0 ? 2 : 1;
    switch ((vjp_dtype)p->slot[pass][slot].tensor.dtype) {
    case VJP_F32: return f32_bound(p, pass, slot);
    case VJP_BF16: return roundings * BF16_BOUND;
    case VJP_F16: return roundings * F16_BOUND;
    case VJP_F64: return 1e-12;
    default: return 0;
    }
}

/* Half a unit in the last place, of a number of size 1, and of the smallest ones. */
static double half_unit(vjp_dtype dtype) {
    return dtype == VJP_BF16 ? 0x1p-8 : dtype == VJP_F16 ? 0x1p-11 : 0;
}

static double smallest_half_unit(vjp_dtype dtype) {
    return dtype == VJP_F16 ? 0x1p-25 : dtype == VJP_BF16 ? 0x1p-134 : dtype == VJP_F32 ? 0x1p-150 : 0;
}

enum { FLUSHED_TERMS = 8 }; /* rows at the bottom of the range have no more that matter */

/* How far an element may be off because it, or a term of it, is below the smallest normal number. */
typedef struct underflow {
    double normal, below, above; /* the smallest normal number, and what is allowed on its two sides */
} underflow;

static underflow underflow_of(const proof_problem *p, vjp_dtype dtype) {
    double flushed = FLUSHED_TERMS * proof_smallest(VJP_F32);
    if (p->flushes && dtype != VJP_F16) return (underflow){0, flushed, flushed};
    return (underflow){proof_smallest(dtype), smallest_half_unit(dtype), 0};
}

static double allowed(const underflow *u, double want) {
    return fabs(want) < u->normal ? u->below : u->above;
}

/* Of two numbers, neither of them NaN. */
static double larger(double a, double b) {
    return a > b ? a : b;
}

enum { CHUNK = 512 }; /* elements that are read at a time */

static void say(proof_error *e, int64_t i, double is, double should) {
    if (!e->why[0])
        snprintf(e->why, sizeof e->why, "element %lld is %.9g; it should be %.9g", (long long)i, unsigned_nan(is),
                 unsigned_nan(should));
}

/*
 * How much an element may change because a GPU rounds an operand of the op's own making to 16 bits for its tensor
 * cores: linear's pre or dpre, attention's weights and dS. A share of the element, of the root mean square of all, or
 * of its row: attention's first rows are averages of few values, and larger than the others.
 */
static double operand_slack(const proof_problem *p, vjp_pass pass, int slot) {
    const vjp_linear_attributes *linear = (const void *)p->setup.attributes.bytes;
    const char *op = p->info->name, *name = p->slot[pass][slot].slot->name;
    double half = half_unit((vjp_dtype)p->slot[pass][slot].tensor.dtype);
    if (is_gated(p)) return strcmp(name, "y") == 0 || strcmp(name, "dgate") == 0 ? 2 * half : 4 * half;
    if (!p->narrow_operands) return 0;
    if (strcmp(op, "linear") == 0 && linear->activation != VJP_ACTIVATION_NONE)
        return strcmp(name, "y") == 0 ? 2 * half : strcmp(name, "da") == 0 || strcmp(name, "db") == 0 ? 4 * half : 0;
    if (strcmp(op, "attention") == 0) return strcmp(name, "y") == 0 ? 2 * half : 4 * half;
    return 0;
}

/* The root mean square of the finite ones. */
static double rms_of(const double *values, int64_t count) {
    double sum = 0;
    int64_t finite = 0;
    for (int64_t i = 0; i < count; i++)
        if (isfinite(values[i])) sum += values[i] * values[i], finite++;
    return finite ? sqrt(sum / (double)finite) : 0;
}

proof_error proof_measure(const proof_problem *p, vjp_pass pass, int slot, const void *stored, const double *expected) {
    const proof_values *v = &p->slot[pass][slot];
    vjp_dtype dtype = (vjp_dtype)v->tensor.dtype;
    bool integer = v->slot->kind == VJP_KIND_ARGMAX;
    proof_error e = {0};
    double wrong = 0, off = 0, size = 0, norm, chunk[CHUNK];
    int64_t finite = 0;
    const underflow small = underflow_of(p, dtype);
    for (int64_t i = 0; i < v->count; i++) {
        if (i % CHUNK == 0) proof_read(stored, dtype, i, vjp_min(v->count - i, CHUNK), chunk);
        double want = expected[i], got = chunk[i % CHUNK];
        if (!isfinite(want) || !isfinite(got)) {
            /* A number that is too large for the dtype is stored as infinity. */
            double stays = proof_rounded(want, dtype);
            if (isnan(want) ? isnan(got) : got == stays) continue;
            say(&e, i, got, want);
            wrong++;
            continue;
        }
        if (integer && got != want) say(&e, i, got, want), wrong++;
        finite++;
        double error = larger(fabs(got - want) - allowed(&small, want), 0);
        off += error * error;
        size += want * want;
    }
    if (integer) {
        e.relative = wrong;
        return e;
    }
    /* Squares of numbers past 1e154 or so do not fit a double; no case has such a result. */
    norm = sqrt(size);
    double measure = off == 0 ? norm : norm * proof_cancellation(p, pass, slot);
    e.relative = wrong > 0 ? INFINITY : off == 0 ? 0 : measure > 0 ? sqrt(off) / measure : INFINITY;
    double rms = finite ? norm / sqrt((double)finite) : 0;
    double unit = half_unit(dtype);
    double slack = operand_slack(p, pass, slot);
    double rest = ELEMENT_FACTOR * (dtype == VJP_F64 ? 1e-12 : f32_bound(p, pass, slot));
    int64_t width = v->tensor.ndim ? v->tensor.shape[v->tensor.ndim - 1] : 1;
    double row = 0;
    for (int64_t i = 0; i < v->count && !e.why[0]; i++) {
        if (i % CHUNK == 0) proof_read(stored, dtype, i, vjp_min(v->count - i, CHUNK), chunk);
        double want = expected[i], got = chunk[i % CHUNK];
        if (slack > 0 && i % width == 0) row = rms_of(expected + i, width);
        if (!isfinite(want) || !isfinite(got)) continue;
        double own = larger(fabs(want), rms);
        if (!(fabs(got - want) <= unit * fabs(want) + rest * own + slack * larger(own, row) + allowed(&small, want)))
            say(&e, i, got, want);
    }
    return e;
}

int64_t proof_different(const void *one, const void *other, vjp_dtype dtype, int64_t count) {
    size_t size = vjp_dtype_size(dtype);
    if (!count || memcmp(one, other, (size_t)count * size) == 0) return 0;
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++) {
        if (memcmp((const char *)one + (size_t)i * size, (const char *)other + (size_t)i * size, size) == 0) continue;
        bool both = isnan(proof_get(one, dtype, i)) && isnan(proof_get(other, dtype, i));
        different += !both;
    }
    return different;
}
