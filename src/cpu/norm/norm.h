/* SPDX-License-Identifier: MIT */
/*
 * Shared by the CPU's three norms: the statistics of a run of elements, the folded constants that turn each result into
 * a chain of FMAs, parameters of either storage type, and column sums over very many rows.
 *
 * Three rules keep the numbers accurate for every input:
 * - A sum stays in f32 for NORM_BLOCK elements, then moves into a double, so no f32 chain grows with the problem.
 * - Variance is summed around a pilot close to the mean, so that an offset of 1000 with a spread of 1 costs nothing.
 *   Where f32 squares leave their range (rows of 1e20 or 1e-20), or the pilot was far off, the run is measured again in
 *   double.
 * - xh = x * rstd - mean * rstd as one FMA, with mean * rstd in two floats (`shift` and `rest`): a mean rounded to
 *   f32 would cost 3e-5 at that offset. Without FMA the product would round, so there it is (x - mean) * rstd.
 *
 * Where these constants leave the range of f32 (a constant row of 1e36: mean * rstd is past it) although the result may
 * not, and where the input has an Inf or NaN, a run is computed an element at a time in double. Every NaN that is
 * written is NAN itself, so that its sign does not depend on the instruction set.
 */
#ifndef VJP_CPU_NORM_H
#define VJP_CPU_NORM_H

#include <float.h>
#include <math.h>

#include "core/arithmetic.h"
#include "cpu/dispatch.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

/* Each lane then adds 32 terms in a chain: at most 32/2 roundings of 2^-24, 1e-6 of the sum even if all terms agree. */
enum { NORM_BLOCK = 32 * LANES };

/* The same bound for sums down a column: rows added in a chain before norm_flush(). */
enum { NORM_FLUSH_ROWS = 32 };

/* Columns of one task where sums down the columns are finished, and of one task of a wide row. */
enum { NORM_COLUMNS = 1024 };

/* Takes `bytes` of the workspace, in multiples of a cache line. With a NULL workspace it only counts them. */
static inline void *norm_take(void *workspace, size_t *used, size_t bytes) {
    void *taken = workspace ? (char *)workspace + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return taken;
}

INLINE native_f native_load(vjp_dtype dtype, const void *from, int64_t i) {
    if (dtype == VJP_BF16) return native_load_bf16((const uint16_t *)from + i);
    if (dtype == VJP_F16) return native_load_f16((const uint16_t *)from + i);
    native_f r;
    memcpy(&r, (const float *)from + i, sizeof r);
    return r;
}

/* ---- Statistics --------------------------------------------------------------------------------------- */

typedef struct norm_statistics {
    double mean, rstd;
} norm_statistics;

#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2) || defined(CPU_ISA_NEON) || defined(__FP_FAST_FMAF) ||            \
    defined(__ARM_FEATURE_FMA) || defined(CPU_ISA_WASM)
enum { NORM_FMA = 1 };
#else
enum { NORM_FMA = 0 };
#endif

/* xh = (x * rstd + shift) + rest; without FMA, xh = (x - shift) * rstd + rest. */
typedef struct norm_scale {
    float rstd, shift, rest;
    norm_statistics exact; /* what they are made of */
} norm_scale;

static inline norm_scale norm_scale_of(norm_statistics s) {
    norm_scale scale = {.rstd = (float)s.rstd, .exact = s};
    double rstd = (double)scale.rstd, shift = NORM_FMA ? -s.mean * rstd : s.mean;
    scale.shift = (float)shift;
    double rest = shift - (double)scale.shift;
    scale.rest = (float)(NORM_FMA ? rest : -rest * rstd);
    return scale;
}

/* False where a run has to be computed in double. rstd is 0 where the elements are infinite. */
static inline bool norm_scale_fits(norm_scale s) {
    return s.rstd >= FLT_MIN && s.rstd <= FLT_MAX && fabsf(s.shift) <= FLT_MAX;
}

static inline double norm_xh_exact(norm_scale s, float x) {
    return ((double)x - s.exact.mean) * s.exact.rstd;
}

/*
 * rstd as y uses it in double: without a mean as it is saved, so that a backward that has only that gives y again with
 * the same bits. An rstd that f32 does not hold stays.
 */
static inline double norm_rstd_of_y(bool centered, double rstd) {
    float saved = (float)rstd;
    return centered || !(saved > 0 && saved <= FLT_MAX) ? rstd : (double)saved;
}

static inline double norm_y_exact(bool centered, norm_statistics s, double x, float gamma, float beta) {
    return (x - s.mean) * norm_rstd_of_y(centered, s.rstd) * (double)gamma + (double)beta;
}

/* xh without its rest. */
INLINE native_f norm_xh_native(native_f x, native_f rstd, native_f shift) {
    return NORM_FMA ? native_fma(x, rstd, shift) : (x - shift) * rstd;
}

INLINE vf norm_xh(vf x, vf rstd, vf shift) {
    EACH_PART x.v[p] = norm_xh_native(x.v[p], rstd.v[p], shift.v[p]);
    return x;
}

/* Sums of x - pilot and of its square. */
typedef struct norm_moments {
    double sum, squares;
} norm_moments;

/*
 * A pilot keeps 12 bits: x - pilot is then exact for most 16-bit x. With all 24, every difference would round off the
 * same last bits of the pilot, the same way, and the mean would inherit it.
 */
INLINE float norm_pilot_of(float near) {
    return vjp_bits_to_f32(vjp_f32_to_bits(near) & 0xfffff000u);
}

INLINE float norm_pilot_typed(vjp_dtype dtype, const void *x, int64_t n) {
    if (n < LANES) return norm_pilot_of(vf_sum(vf_load_part(dtype, x, 0, n)) / (float)n);
    vf sum = vf_load(dtype, x, 0);
    int64_t i = LANES;
    for (; i + LANES <= vjp_min(n, 4 * LANES); i += LANES)
        sum = vf_add(sum, vf_load(dtype, x, i));
    return norm_pilot_of(vf_sum(sum) / (float)i);
}

/* A value near the mean of n elements: the mean of the first 64. 0 where no mean is subtracted. */
OUTLINE float norm_pilot(vjp_dtype dtype, bool centered, const void *x, int64_t n) {
    return centered ? BY_DTYPE(dtype, norm_pilot_typed, x, n) : 0;
}

INLINE norm_moments norm_measure_typed(vjp_dtype dtype, bool centered, const void *x, int64_t n, float pilot) {
    norm_moments m = {0, 0};
    vf shift = vf_set(pilot);
    for (int64_t block = 0; block < n; block += NORM_BLOCK) {
        int64_t end = vjp_min(block + NORM_BLOCK, n), i = block;
        vf sum[2] = {vf_zero(), vf_zero()}, squares[2] = {vf_zero(), vf_zero()};
        for (; i + 2 * LANES <= end; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                vf d = vf_load(dtype, x, i + k * LANES);
                if (centered) {
                    d = vf_sub(d, shift);
                    sum[k] = vf_add(sum[k], d);
                }
                squares[k] = vf_fma(d, d, squares[k]);
            }
        for (int k = 0; i < end; i += LANES, k++) {
            int64_t count = vjp_min(LANES, end - i);
            vf d = vf_load_part(dtype, x, i, count);
            if (centered) { /* a lane past the end counts as the pilot itself */
                d = vf_select(vi_first(count), vf_sub(d, shift), vf_zero());
                sum[k] = vf_add(sum[k], d);
            }
            squares[k] = vf_fma(d, d, squares[k]);
        }
        if (centered) m.sum += (double)vf_sum(vf_add(sum[0], sum[1]));
        m.squares += (double)vf_sum(vf_add(squares[0], squares[1]));
    }
    return m;
}

OUTLINE norm_moments norm_measure(vjp_dtype dtype, bool centered, const void *x, int64_t n, float pilot) {
    return centered ? BY_DTYPE(dtype, norm_measure_typed, true, x, n, pilot)
                    : BY_DTYPE(dtype, norm_measure_typed, false, x, n, pilot);
}

/* The moments of consecutive parts, added in order. */
static inline norm_moments norm_moments_total(const norm_moments *parts, int64_t count) {
    norm_moments total = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        total.sum += parts[i].sum;
        total.squares += parts[i].squares;
    }
    return total;
}

/*
 * Turns the moments of n elements into statistics. False where they cannot be trusted: squares past f32's range or
 * below it, or a pilot more than two deviations from the mean, where the subtraction below would cancel.
 */
static inline bool norm_finish(norm_moments m, float pilot, int64_t n, double eps, bool centered, norm_statistics *s) {
    static const double smallest = 1e-30, far = 4; /* squares below 1e-38 lose digits: 1e-8 of the smallest mean */
    double offset = centered ? m.sum / (double)n : 0, square = m.squares / (double)n;
    double variance = square - offset * offset;
    if (!(square <= 3e38) || (square < smallest && eps < smallest * 1e8)) return false;
    if (centered && offset * offset > far * (variance + eps)) return false;
    s->mean = (double)pilot + offset;
    s->rstd = 1 / sqrt(variance + eps);
    return true;
}

/* The sum over i of x[i], or of (x[i] - mean)^2, in double. Eight chains, so that it keeps up with memory. */
INLINE double norm_sum_exact(vjp_dtype dtype, const void *x, int64_t n, double mean, bool square) {
    double sum[8] = {0};
    for (int64_t i = 0; i < n; i += 8)
        for (int64_t k = 0; k < vjp_min(8, n - i); k++) {
            double d = (double)f32_load(dtype, x, i + k) - mean;
            sum[k] += square ? d * d : d;
        }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

OUTLINE norm_statistics norm_statistics_exact(vjp_dtype dtype, bool centered, const void *x, int64_t n, double eps) {
    double mean = centered ? BY_DTYPE(dtype, norm_sum_exact, x, n, 0, false) / (double)n : 0;
    double square = BY_DTYPE(dtype, norm_sum_exact, x, n, mean, true) / (double)n;
    return (norm_statistics){mean, 1 / sqrt(square + eps)};
}

/* Statistics of the n elements at x from their moments around `pilot`. */
static inline norm_statistics norm_conclude(vjp_dtype dtype, bool centered, const void *x, int64_t n, double eps,
                                            float pilot, norm_moments m) {
    norm_statistics s;
    if (norm_finish(m, pilot, n, eps, centered, &s)) return s;
    return norm_statistics_exact(dtype, centered, x, n, eps);
}

/* Statistics of the n elements at x. */
static inline norm_statistics norm_statistics_of(vjp_dtype dtype, bool centered, const void *x, int64_t n, double eps) {
    float pilot = norm_pilot(dtype, centered, x, n);
    return norm_conclude(dtype, centered, x, n, eps, pilot, norm_measure(dtype, centered, x, n, pilot));
}

/* ---- Reading and writing ------------------------------------------------------------------------------- */

/*
 * n elements in a row whose y, or with dy whose dx, is written to `out`, and beside dx perhaps y. `ahead`: the distance
 * in elements to what is read next and prefetched meanwhile, or 0.
 */
typedef struct norm_run {
    const void *x, *dy;
    void *out, *y;
    bool add_y;
    int64_t n, ahead;
} norm_run;

INLINE void norm_prefetch(vjp_dtype dtype, bool backward, const norm_run *run, int64_t i) {
    __builtin_prefetch(at(dtype, run->x, i + run->ahead));
    if (backward) __builtin_prefetch(at(dtype, run->dy, i + run->ahead));
}

/* How an output of `elements` is written. Each run's ends are written apart, so its vectors are aligned. */
static inline write_mode norm_write_mode(const vjp_work *work, int64_t elements, bool in_place) {
    return write_mode_of(work, 0, elements * (int64_t)dtype_bytes(work->storage), true, in_place);
}

/* n elements as doubles, and back: for runs too short for vectors. */
static inline void norm_read_doubles(vjp_dtype dtype, const void *from, int64_t first, int64_t n, double *values) {
    for (int64_t i = 0; i < n; i++)
        values[i] = (double)f32_load(dtype, from, first + i);
}

/* One NaN for all, so that its bits are the same for every instruction set. */
static inline float norm_round(double value) {
    return value == value ? (float)value : NAN;
}

static inline void norm_write_doubles(vjp_dtype dtype, bool accumulate, void *to, int64_t first, int64_t n,
                                      const double *values) {
    for (int64_t i = 0; i < n; i++) {
        double old = accumulate ? (double)f32_load(dtype, to, first + i) : 0;
        f32_store(dtype, to, first + i, norm_round(values[i] + old));
    }
}

/* ---- Parameters ---------------------------------------------------------------------------------------- */

/* A parameter as the caller gave it: T or f32, or absent. */
typedef struct norm_parameter {
    void *data;
    vjp_dtype dtype;
    bool accumulate; /* of an output */
} norm_parameter;

INLINE norm_parameter norm_parameter_of(const vjp_work *work, int slot) {
    return (norm_parameter){vjp_data(work, slot), vjp_type(work, slot), vjp_accumulates(work, slot)};
}

/* Does the parameter have to be converted before its elements can be used as floats? */
INLINE bool norm_parameter_converts(norm_parameter p) {
    return !p.data || p.dtype != VJP_F32;
}

/* Elements [from, from + n) as floats: where they are, or converted into `buffer` (absent: the value `absent`). */
static inline const float *norm_parameter_read(norm_parameter p, int64_t from, int64_t n, float absent, float *buffer) {
    if (!norm_parameter_converts(p)) return (const float *)p.data + from;
    for (int64_t i = 0; i < n; i += LANES) {
        vf value = p.data ? BY_DTYPE(p.dtype, vf_load_part, p.data, from + i, n - i) : vf_set(absent);
        vf_store_part(VJP_F32, buffer, i, n - i, value);
    }
    return buffer;
}

/* Writes elements [from, from + n) of a parameter's gradient, or adds to them. */
static inline void norm_parameter_write(norm_parameter p, int64_t from, int64_t n, const double *values) {
    if (p.dtype == VJP_F32 && !p.accumulate)
        for (int64_t i = 0; i < n; i++)
            ((float *)p.data)[from + i] = norm_round(values[i]);
    else
        norm_write_doubles(p.dtype, p.accumulate, p.data, from, n, values);
}

/* ---- Sums of the backward ------------------------------------------------------------------------------ */

/* Sums of a gradient, dy or g = dy * gamma, and of its products with xh. */
typedef struct norm_sums {
    double sum, sum_xh;
    bool exact; /* summed in double, as f32 cannot hold every term */
} norm_sums;

/* The sums of consecutive parts, added in order. */
static inline norm_sums norm_sums_total(const norm_sums *parts, int64_t count) {
    norm_sums total = {0};
    for (int64_t i = 0; i < count; i++) {
        total.sum += parts[i].sum;
        total.sum_xh += parts[i].sum_xh;
        total.exact = total.exact || parts[i].exact;
    }
    return total;
}

static inline bool norm_sums_fit(norm_sums s) {
    return !s.exact && fabs(s.sum) <= DBL_MAX && fabs(s.sum_xh) <= DBL_MAX;
}

/* dx in double. */
static inline double norm_dx_exact(norm_scale s, double g, double xh, norm_sums sums, int64_t n) {
    return s.exact.rstd * (g - sums.sum / (double)n - xh * (sums.sum_xh / (double)n));
}

/* dx = rstd * g + (slope * xh + level), xh without its rest: that is in `level`. */
typedef struct norm_line {
    float slope, level;
} norm_line;

/* From the sums of g and g * xh over n elements. */
static inline norm_line norm_line_of(norm_scale scale, norm_sums g, int64_t n) {
    double rstd = (double)scale.rstd, slope = -rstd * (g.sum_xh / (double)n);
    return (norm_line){(float)slope, (float)(-rstd * (g.sum / (double)n) + slope * (double)scale.rest)};
}

/* False where slope * xh + level may leave the range of f32; |xh| is at most sqrt(n), below 1e8. */
static inline bool norm_line_fits(norm_line line) {
    return fabsf(line.slope) <= 1e30f && fabsf(line.level) <= 1e38f;
}

/*
 * A task's column sum is two rows of floats: `recent`, the chain of the last rows, and `older`, all before. Flushing
 * adds recent to older and leaves in recent exactly what that addition rounded away, so the pair is as good as a
 * double and no chain is longer than NORM_FLUSH_ROWS.
 */
static inline void norm_flush(float *recent, float *older, int64_t padded) {
    for (int64_t i = 0; i < padded; i += LANES) {
        vf a = vf_load(VJP_F32, older, i), b = vf_load(VJP_F32, recent, i);
        vf sum = vf_add(a, b), part = vf_sub(sum, a);
        vf lost = vf_add(vf_sub(a, vf_sub(sum, part)), vf_sub(b, part));
        lost = vf_select(vf_equal(lost, lost), lost, vf_zero()); /* an Inf stays Inf */
        vf_store(VJP_F32, older, i, sum);
        vf_store(VJP_F32, recent, i, lost);
    }
}

/* Adds columns [0, n) of `count` rows of floats that are `stride` apart to sum, in order. */
static inline void norm_add_columns(double *sum, const float *rows, int64_t count, int64_t stride, int64_t n) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < n; i++)
            sum[i] += (double)rows[row * stride + i];
}

#endif
