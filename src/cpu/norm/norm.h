/*
 * What the CPU's three norms share: the statistics of a run of elements, the folded constants that make a row's
 * result a chain of FMAs, stores that overwrite, add or stream, and column sums over very many rows.
 *
 * Three rules keep the numbers right whatever the input:
 * - A sum stays in f32 for NORM_BLOCK elements, then moves into a double, so no f32 chain grows with the problem.
 * - Variance is summed around a pilot close to the mean, so that an offset of 1000 with a spread of 1 costs nothing.
 *   Where f32 squares leave their range (rows of 1e20 or 1e-20) or the pilot was far off, the run is measured again in
 *   double.
 * - xh = x * rstd - mean * rstd as one FMA, with mean * rstd in two floats (`shift` and `rest`): a mean rounded to
 *   f32 would cost 3e-5 at that offset. Without FMA the product would round, so there it is (x - mean) * rstd.
 */
#ifndef VJP_CPU_NORM_H
#define VJP_CPU_NORM_H

#include <math.h>

#include "cpu/cpu.h"
#include "cpu/simd/vec.h"
#include "op/op.h"

/* Each lane then adds 32 terms in a chain: at most 32/2 roundings of 2^-24, 1e-6 of the sum even if all terms agree. */
enum { NORM_BLOCK = 32 * LANES };

/* The same bound for sums down a column: rows added in a chain before norm_flush(). */
enum { NORM_FLUSH_ROWS = 32 };

/* Columns of one task where sums down the columns are finished, and of one task of a wide row. */
enum { NORM_COLUMNS = 1024 };

INLINE int64_t norm_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

INLINE int64_t norm_pad(int64_t n) {
    return (n + LANES - 1) / LANES * LANES;
}

static inline const void *norm_at(vjp_dtype dtype, const void *data, int64_t i) {
    return (const char *)data + i * (int64_t)dtype_bytes(dtype);
}

static inline void *norm_at_out(vjp_dtype dtype, void *data, int64_t i) {
    return data ? (char *)data + i * (int64_t)dtype_bytes(dtype) : NULL;
}

/*
 * Loads and stores by storage type. `plain` converts 16-bit numbers one at a time, in tens of instructions: a call
 * there keeps each loop from being made of hundreds of copies of that.
 */
#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2) || defined(CPU_ISA_NEON)
enum { NORM_CONVERTS_INLINE = 1 };
#else
enum { NORM_CONVERTS_INLINE = 0 };
#endif

static __attribute__((noinline, unused)) vf norm_load_call(vjp_dtype dtype, const void *from, int64_t i, int64_t n) {
    vf r = vf_zero();
    for (int k = 0; k < (int)norm_min(n, LANES); k++)
        r.v[k / NATIVE_LANES][k % NATIVE_LANES] = f32_load(dtype, from, i + k);
    return r;
}

static __attribute__((noinline, unused)) void norm_store_call(vjp_dtype dtype, void *to, int64_t i, int64_t n,
                                                              const vf *a) {
    for (int k = 0; k < (int)norm_min(n, LANES); k++)
        f32_store(dtype, to, i + k, a->v[k / NATIVE_LANES][k % NATIVE_LANES]);
}

INLINE vf norm_load(vjp_dtype dtype, const void *from, int64_t i, int64_t n) {
#if defined(CPU_ISA_AVX512)
    if (dtype != VJP_F32 && n < LANES) { /* masked, as rows whose length is no multiple of 16 end and begin often */
        __m256i half = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), (const uint16_t *)from + i);
        if (dtype == VJP_F16) return (vf){{(native_f)_mm512_cvtph_ps(half)}};
        return (vf){{(native_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)}};
    }
#endif
    if (NORM_CONVERTS_INLINE || dtype == VJP_F32) return vf_load_part(dtype, from, i, n);
    return norm_load_call(dtype, from, i, n);
}

INLINE void norm_store_to(vjp_dtype dtype, void *to, int64_t i, int64_t n, vf a) {
#if defined(CPU_ISA_AVX512)
    if (dtype != VJP_F32 && n < LANES) {
        __m256i half = dtype == VJP_BF16 ? _mm512_cvtepi32_epi16((__m512i)native_round_bf16(a.v[0]))
                                         : _mm512_cvtps_ph((__m512)a.v[0], _MM_FROUND_TO_NEAREST_INT);
        _mm256_mask_storeu_epi16((uint16_t *)to + i, (__mmask16)((1u << n) - 1), half);
        return;
    }
#endif
    if (NORM_CONVERTS_INLINE || dtype == VJP_F32)
        vf_store_part(dtype, to, i, n, a);
    else
        norm_store_call(dtype, to, i, n, &a);
}

INLINE native_f norm_load_native(vjp_dtype dtype, const void *from, int64_t i) {
    native_f r;
    if (dtype == VJP_F32)
        memcpy(&r, (const float *)from + i, sizeof r);
    else if (!NORM_CONVERTS_INLINE)
        r = norm_load_call(dtype, from, i, NATIVE_LANES).v[0];
    else if (dtype == VJP_BF16)
        r = native_load_bf16((const uint16_t *)from + i);
    else
        r = native_load_f16((const uint16_t *)from + i);
    return r;
}

/* ---- Statistics --------------------------------------------------------------------------------------- */

typedef struct norm_statistics {
    double mean, rstd;
} norm_statistics;

#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2) || defined(CPU_ISA_NEON) || defined(__FP_FAST_FMAF) ||            \
    defined(__ARM_FEATURE_FMA)
enum { NORM_FMA = 1 };
#else
enum { NORM_FMA = 0 };
#endif

/* xh = (x * rstd + shift) + rest; without FMA, xh = (x - shift) * rstd + rest. */
typedef struct norm_scale {
    float rstd, shift, rest;
} norm_scale;

static inline norm_scale norm_scale_of(norm_statistics s) {
    norm_scale scale = {.rstd = (float)s.rstd};
    double rstd = (double)scale.rstd, shift = NORM_FMA ? -s.mean * rstd : s.mean;
    scale.shift = (float)shift;
    double rest = shift - (double)scale.shift;
    scale.rest = (float)(NORM_FMA ? rest : -rest * rstd);
    return scale;
}

/* xh but for its rest. */
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

/* A value near the mean: that of the first 64 elements. 0 where no mean is taken away. */
INLINE float norm_pilot(vjp_dtype dtype, const void *x, int64_t n, bool centered) {
    if (!centered) return 0;
    if (n < LANES) return norm_pilot_of(vf_sum(norm_load(dtype, x, 0, n)) / (float)n);
    vf sum = norm_load(dtype, x, 0, LANES);
    int64_t i = LANES;
    for (; i + LANES <= norm_min(n, 4 * LANES); i += LANES)
        sum = vf_add(sum, norm_load(dtype, x, i, LANES));
    return norm_pilot_of(vf_sum(sum) / (float)i);
}

INLINE norm_moments norm_measure(vjp_dtype dtype, const void *x, int64_t n, float pilot, bool centered) {
    norm_moments m = {0, 0};
    vf shift = vf_set(pilot);
    for (int64_t block = 0; block < n; block += NORM_BLOCK) {
        int64_t end = norm_min(block + NORM_BLOCK, n), i = block;
        vf sum[2] = {vf_zero(), vf_zero()}, squares[2] = {vf_zero(), vf_zero()};
        for (; i + 2 * LANES <= end; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                vf d = norm_load(dtype, x, i + k * LANES, LANES);
                if (centered) {
                    d = vf_sub(d, shift);
                    sum[k] = vf_add(sum[k], d);
                }
                squares[k] = vf_fma(d, d, squares[k]);
            }
        for (int k = 0; i < end; i += LANES, k++) {
            float tail[LANES] = {0}; /* a lane past the end counts as the pilot itself */
            int64_t count = norm_min(LANES, end - i);
            vf d = norm_load(dtype, x, i, count);
            if (centered) {
                d = vf_sub(d, shift);
                if (count < LANES) {
                    vf_store_part(VJP_F32, tail, 0, count, d);
                    d = vf_load(VJP_F32, tail, 0);
                }
                sum[k] = vf_add(sum[k], d);
            }
            squares[k] = vf_fma(d, d, squares[k]);
        }
        if (centered) m.sum += (double)vf_sum(vf_add(sum[0], sum[1]));
        m.squares += (double)vf_sum(vf_add(squares[0], squares[1]));
    }
    return m;
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
        for (int64_t k = 0; k < norm_min(8, n - i); k++) {
            double d = (double)f32_load(dtype, x, i + k) - mean;
            sum[k] += square ? d * d : d;
        }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

INLINE norm_statistics norm_statistics_exact(vjp_dtype dtype, const void *x, int64_t n, double eps, bool centered) {
    double mean = centered ? norm_sum_exact(dtype, x, n, 0, false) / (double)n : 0;
    double square = norm_sum_exact(dtype, x, n, mean, true) / (double)n;
    return (norm_statistics){mean, 1 / sqrt(square + eps)};
}

/* ---- Stores -------------------------------------------------------------------------------------------- */

typedef enum norm_store { NORM_WRITE, NORM_ADD, NORM_STREAM } norm_store;

/*
 * How an output is stored by a call that moves `total` bytes. Streaming pays once what the call moves cannot stay in
 * the last-level cache anyway.
 */
INLINE norm_store norm_store_of(const vjp_work *work, int slot, bool in_place, double total) {
    if (vjp_accumulates(work, slot)) return NORM_ADD;
    return !in_place && total > (double)cpu_state_of(work)->cache_bytes ? NORM_STREAM : NORM_WRITE;
}

/* Elements before the first address that can be streamed to, at most n; 0 where nothing is streamed. */
INLINE int64_t norm_head(vjp_dtype dtype, norm_store store, const void *to, int64_t n) {
    if (store != NORM_STREAM) return 0;
    uintptr_t past = (uintptr_t)to % (LANES * dtype_bytes(dtype));
    return past ? norm_min((int64_t)((LANES * dtype_bytes(dtype) - past) / dtype_bytes(dtype)), n) : 0;
}

INLINE void norm_put(vjp_dtype dtype, norm_store store, void *to, int64_t i, int64_t n, vf value) {
    if (store == NORM_ADD) value = vf_add(norm_load(dtype, to, i, n), value);
    if (store == NORM_STREAM && n >= LANES)
        vf_stream(dtype, to, i, value);
    else
        norm_store_to(dtype, to, i, n, value);
}

INLINE void norm_prefetch(vjp_dtype dtype, const void *from, int64_t i) {
    __builtin_prefetch(norm_at(dtype, from, i), 0, 3);
}

/* n elements as doubles, and back: for runs too short for vectors. */
static inline void norm_read_doubles(vjp_dtype dtype, const void *from, int64_t at, int64_t n, double *values) {
    for (int64_t i = 0; i < n; i++)
        values[i] = (double)f32_load(dtype, from, at + i);
}

static inline void norm_write_doubles(vjp_dtype dtype, norm_store store, void *to, int64_t at, int64_t n,
                                      const double *values) {
    for (int64_t i = 0; i < n; i++) {
        double old = store == NORM_ADD ? (double)f32_load(dtype, to, at + i) : 0;
        f32_store(dtype, to, at + i, (float)(values[i] + old));
    }
}

/* ---- Parameters ---------------------------------------------------------------------------------------- */

/* A parameter as it was given: T or f32, or absent. */
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
    if (p.data && p.dtype == VJP_F32) return (const float *)p.data + from;
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t count = norm_min(LANES, n - i);
        vf value = vf_set(absent);
        if (p.data && p.dtype == VJP_BF16) value = norm_load(VJP_BF16, p.data, from + i, count);
        if (p.data && p.dtype == VJP_F16) value = norm_load(VJP_F16, p.data, from + i, count);
        vf_store_part(VJP_F32, buffer, i, count, value);
    }
    return buffer;
}

/* Writes elements [from, from + n) of a parameter's gradient, or adds to them. */
static inline void norm_parameter_write(norm_parameter p, int64_t from, int64_t n, const double *values) {
    if (p.dtype == VJP_F32 && !p.accumulate)
        for (int64_t i = 0; i < n; i++)
            ((float *)p.data)[from + i] = (float)values[i];
    else
        norm_write_doubles(p.dtype, p.accumulate ? NORM_ADD : NORM_WRITE, p.data, from, n, values);
}

/* ---- Sums down columns --------------------------------------------------------------------------------- */

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

/* Adds column [0, n) of `count` rows of floats that are `stride` apart to sum, in order. */
static inline void norm_add_columns(double *sum, const float *rows, int64_t count, int64_t stride, int64_t n) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < n; i++)
            sum[i] += (double)rows[row * stride + i];
}

/* ---- Pieces -------------------------------------------------------------------------------------------- */

/* What is done to a piece. Each op's file compiles those that it needs, once a storage type (`by_dtype` there). */
typedef enum norm_step {
    NORM_MEASURE,     /* moments of elements [from, from + n) of the run x, around its pilot */
    NORM_EXACT,       /* statistics of the n elements of x, in double */
    NORM_Y,           /* rows: y */
    NORM_SUMS,        /* rows: sums of g and g * xh, column sums */
    NORM_DX,          /* rows: dx */
    NORM_PLANE_SUMS,  /* group_norm, one channel's run: sums of dy and dy * xh */
    NORM_PLANE_OUT,   /* the same: y or dx */
    NORM_COLUMN_SUMS, /* group_norm, channels as columns: sums of x - pilot and its square, or of dy and dy * xh */
    NORM_COLUMN_OUT   /* the same: y or dx */
} norm_step;

/* Arguments and results of a step; a step reads and sets only what it names. */
typedef struct norm_piece {
    norm_step step;
    norm_store store;
    const void *x, *dy; /* dy is NULL in the forward */
    void *out;
    int64_t from, n, run;        /* run: elements of x as a whole, for the pilot */
    int64_t rows, stride, ahead; /* rows are `stride` apart; `ahead`: elements to what comes next, or 0 */
    const float *gamma, *beta;   /* by column */
    float *dgamma, *dbeta;       /* by column; NULL: not wanted */
    norm_scale scale[4];         /* by row */
    norm_moments sums[4];        /* by row */
    bool want_sums;
    double mean_g, mean_gxh, eps;
    float pilot;
    norm_statistics statistics;
    const float *rstd, *shift, *weight, *slope, *level; /* by column, or one of each */
} norm_piece;

typedef void (*norm_by_dtype)(norm_piece *piece);

INLINE void norm_step_measure(norm_piece *p, vjp_dtype dtype, bool centered) {
    p->pilot = norm_pilot(dtype, p->x, p->run, centered);
    p->sums[0] = norm_measure(dtype, norm_at(dtype, p->x, p->from), p->n, p->pilot, centered);
}

INLINE void norm_step_exact(norm_piece *p, vjp_dtype dtype, bool centered) {
    p->statistics = norm_statistics_exact(dtype, p->x, p->run, p->eps, centered);
}

/* Statistics of the run x from its moments around its pilot. */
static inline norm_statistics norm_conclude(norm_by_dtype by_dtype, norm_piece *p, norm_moments total, bool centered) {
    norm_statistics s;
    if (norm_finish(total, p->pilot, p->run, p->eps, centered, &s)) return s;
    p->step = NORM_EXACT;
    by_dtype(p);
    return p->statistics;
}

/* Statistics of n elements at x. */
static inline norm_statistics norm_statistics_of(norm_by_dtype by_dtype, const void *x, int64_t n, double eps,
                                                 bool centered) {
    norm_piece p = {.step = NORM_MEASURE, .x = x, .n = n, .run = n, .eps = eps};
    by_dtype(&p);
    return norm_conclude(by_dtype, &p, p.sums[0], centered);
}

#endif
