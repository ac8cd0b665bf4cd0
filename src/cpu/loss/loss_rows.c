/* SPDX-License-Identifier: MIT */
/*
 * The losses of rows of logits and their gradients; loss_rows.h has the contract. Rows are independent and split into
 * tasks; losses are summed in double, one partial per task, and the partials are added in order.
 *
 * A row is read from memory once. Losses: a block at a time (part of a row, or several narrow ones), first its largest
 * logit, then the sum of exp(z - max) while the block is in the first-level cache; when a block raises the maximum,
 * the sum so far is scaled down to it. Gradients: scale (p - q) in one pass, p = exp(z - lse) with the saved lse;
 * without it the row is measured as for its loss, and the pass finds it in the second-level cache. Every logit is read
 * before its gradient is written, so dlogits may be logits.
 */
#include "cpu/loss/loss_rows.h"
#include "cpu/dispatch.h"
#include "cpu/simd/vec_math.h"

/* Logits of a block: 16 KiB of f32, half of a small first-level cache. Four sums per lane of 64 terms each. */
enum { BLOCK = 4096, CHAINS = 4 };

/* The distance of prefetching: the block after the next, 3 us away. */
enum { AHEAD = 2 * BLOCK };

/* The sum for label smoothing is scaled by this, so that no sum of a block is larger than its terms. */
static const float BLOCK_INVERSE = 1.0f / BLOCK;

INLINE int64_t target_at(vjp_dtype dtype, const void *target, int64_t row) {
    switch (dtype) {
    case VJP_I32: return ((const int32_t *)target)[row];
    case VJP_I64: return ((const int64_t *)target)[row];
    default: return (int64_t)((const float *)target)[row];
    }
}

/* ---- A row's largest logit and sums ------------------------------------------------------------------ */

typedef struct row_sums {
    float max;    /* -Inf where every logit is */
    double sum;   /* of exp(z - max) */
    double below; /* of max - z; with label smoothing */
} row_sums;

/* Lanes past the row's end hold `past`, which changes no result. */
INLINE vf load_or(vjp_dtype dtype, const void *z, int64_t i, int64_t n, float past) {
    if (n >= LANES) return vf_load(dtype, z, i);
    return vf_select(vi_first(n), vf_load_part(dtype, z, i, n), vf_set(past));
}

INLINE float block_max(vjp_dtype dtype, const void *z, int64_t n) {
    vf max[CHAINS];
    int64_t i = 0;
    for (int c = 0; c < CHAINS; c++)
        max[c] = vf_set(-INFINITY);
    for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++)
            max[c] = vf_max(vf_load(dtype, z, i + c * LANES), max[c]);
    for (; i < n; i += LANES)
        max[0] = vf_max(load_or(dtype, z, i, n - i, -INFINITY), max[0]);
    return vf_max_lane(vf_max(vf_max(max[0], max[1]), vf_max(max[2], max[3])));
}

typedef struct block_sums {
    vf sum[CHAINS], below[CHAINS];
} block_sums;

INLINE void add_vector(block_sums *s, int c, vf z, float shift, bool smooth) {
    s->sum[c] = vf_add(s->sum[c], vf_exp_below(vf_sub(z, vf_set(shift))));
    if (smooth) s->below[c] = vf_sub(s->below[c], vf_fma(z, vf_set(BLOCK_INVERSE), vf_set(-shift * BLOCK_INVERSE)));
}

INLINE float chains_sum(const vf *sums) {
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

/*
 * exp(z - shift) and, scaled, shift - z, summed over a block. Meanwhile the logits AHEAD are prefetched into the
 * second-level cache: otherwise the maximum of the next block waits for memory while nothing is computed, which halves
 * the speed.
 */
INLINE block_sums sum_block(vjp_dtype dtype, const void *z, int64_t n, float shift, bool smooth) {
    block_sums s;
    int64_t i = 0;
    for (int c = 0; c < CHAINS; c++)
        s.sum[c] = s.below[c] = vf_zero();
    for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) {
            if (dtype == VJP_F32 || c % 2 == 0) prefetch_second_level(at(dtype, z, i + c * LANES + AHEAD), 1);
            add_vector(&s, c, vf_load(dtype, z, i + c * LANES), shift, smooth);
        }
    for (; i + LANES <= n; i += LANES)
        add_vector(&s, 0, vf_load(dtype, z, i), shift, smooth);
    if (i < n) {
        block_sums tail = {.sum = {vf_zero()}, .below = {vf_zero()}};
        add_vector(&tail, 0, vf_load_part(dtype, z, i, n - i), shift, smooth);
        vi first = vi_first(n - i);
        s.sum[1] = vf_add(s.sum[1], vf_select(first, tail.sum[0], vf_zero()));
        s.below[1] = vf_add(s.below[1], vf_select(first, tail.below[0], vf_zero()));
    }
    return s;
}

/* Avoids the NaN of -Inf - -Inf: exp(-Inf - 0) is 0 as it should be. */
INLINE float finite_shift(float max) {
    return max == -INFINITY ? 0 : max;
}

INLINE float exp_of(float x) {
    float lanes[LANES];
    vf_store(VJP_F32, lanes, 0, vf_exp(vf_set(x)));
    return lanes[0];
}

/* The sums so far, of `seen` logits, for a larger maximum. By value, so that a row's sums stay in registers. */
OUTLINE row_sums raised(row_sums row, float max, int64_t seen) {
    if (row.max > -INFINITY) row.sum *= (double)exp_of(row.max - max);
    row.below += (double)seen * ((double)max - (double)finite_shift(row.max));
    row.max = max;
    return row;
}

INLINE void add_block(row_sums *row, vjp_dtype dtype, const void *z, int64_t n, bool smooth) {
    block_sums sums = sum_block(dtype, z, n, finite_shift(row->max), smooth);
    row->sum += (double)chains_sum(sums.sum);
    if (smooth) row->below += (double)chains_sum(sums.below) * BLOCK;
}

INLINE row_sums measure(vjp_dtype dtype, const void *z, int64_t classes, bool smooth) {
    row_sums row = {.max = -INFINITY};
    for (int64_t from = 0; from < classes; from += BLOCK) {
        int64_t n = classes - from < BLOCK ? classes - from : BLOCK;
        float max = block_max(dtype, at(dtype, z, from), n);
        if (max > row.max && from > 0)
            row = raised(row, max, from);
        else if (max > row.max)
            row.max = max;
        add_block(&row, dtype, at(dtype, z, from), n, smooth);
    }
    return row;
}

/* ---- Losses ------------------------------------------------------------------------------------------ */

/* A term whose weight is 0 is left out: 0 * Inf would be NaN. */
INLINE double row_loss(const vjp_cross_entropy_sizes *s, const row_sums *row, double log_sum, float z) {
    double loss = log_sum;
    if (s->smoothing != 1) loss += (1 - s->smoothing) * ((double)row->max - (double)z);
    if (s->smoothing != 0) loss += s->smoothing * (row->below / (double)s->classes);
    return loss;
}

/* Rows that are measured before their logarithms are taken, several in a vector. */
enum { ROWS_TOGETHER = 2 * LANES };

/* Whether the row's loss is needed. */
INLINE bool counts(const loss_rows *call, int64_t row) {
    return call->wants_loss && target_at(call->target_type, call->target, row) != call->s.ignore_index;
}

/*
 * Rows [begin, begin + count). Narrow ones a block at a time, all their maxima before all their sums: a row then does
 * not wait for the reduction of its maximum, nor the next row for that of its sum.
 */
INLINE void measure_rows(const loss_rows *call, int64_t begin, int64_t count, vjp_dtype dtype, bool smooth,
                         row_sums *rows) {
    int64_t classes = call->s.classes, together = classes < BLOCK ? BLOCK / classes : 1;
    const void *logits = at(dtype, call->logits, begin * classes);
    for (int64_t first = 0; first < count; first += together) {
        int64_t end = count - first < together ? count : first + together;
        for (int64_t r = first; r < end; r++) {
            const void *z = at(dtype, logits, r * classes);
            if (!call->lse && !counts(call, begin + r)) continue;
            if (classes > BLOCK)
                rows[r] = measure(dtype, z, classes, smooth);
            else
                rows[r] = (row_sums){.max = block_max(dtype, z, classes)};
        }
        for (int64_t r = first; r < end && classes <= BLOCK; r++)
            if (call->lse || counts(call, begin + r))
                add_block(&rows[r], dtype, at(dtype, logits, r * classes), classes, smooth);
    }
}

INLINE void measure_task(const loss_rows *call, size_t task, vjp_dtype dtype, bool smooth) {
    const vjp_cross_entropy_sizes *s = &call->s;
    int64_t begin = cpu_split_begin(&call->split, task), end = cpu_split_end(&call->split, task), step = ROWS_TOGETHER;
    loss_partial sum = {0};
    for (; begin < end; begin += step) {
        if (end - begin < step) step = end - begin;
        row_sums rows[ROWS_TOGETHER] = {0};
        double log_sums[ROWS_TOGETHER];
        measure_rows(call, begin, step, dtype, smooth, rows);
        for (int r = 0; r < ROWS_TOGETHER; r++)
            log_sums[r] = rows[r].sum;
        for (int64_t r = 0; r < step; r += LANES)
            f64_logs(log_sums + r);
        for (int64_t r = 0; r < step; r++) {
            int64_t row = begin + r;
            if (!call->lse && !counts(call, row)) continue;
            if (call->lse) call->lse[row] = (float)((double)rows[r].max + log_sums[r]);
            if (!counts(call, row)) continue;
            int64_t target = target_at(call->target_type, call->target, row);
            sum.loss += row_loss(s, &rows[r], log_sums[r], f32_load(dtype, call->logits, row * s->classes + target));
            sum.count++;
        }
    }
    call->partials[task] = sum;
}

INLINE void measure_task_of(vjp_dtype dtype, const loss_rows *call, size_t task) {
    if (call->s.smoothing != 0)
        measure_task(call, task, dtype, true);
    else
        measure_task(call, task, dtype, false);
}

static void loss_task(void *argument, size_t task) {
    const loss_rows *call = argument;
    BY_DTYPE(call->dtype, measure_task_of, call, task);
}

cpu_split CPU_NAME(loss_split)(int64_t rows, int64_t classes) {
    return vjp_cpu_split_items(rows, classes * 4, CPU_MAX_TASKS);
}

void CPU_NAME(loss_rows)(const vjp_work *work, loss_rows *call) {
    call->split = CPU_NAME(loss_split)(call->s.rows, call->s.classes);
    vjp_cpu_for(work, call->split.count, loss_task, call);
}

void CPU_NAME(loss_store)(const vjp_cross_entropy_sizes *s, const loss_partial *partials, int64_t count, float *loss,
                          bool adds) {
    loss_partial total = {0};
    for (int64_t i = 0; i < count; i++) {
        total.loss += partials[i].loss;
        total.count += partials[i].count;
    }
    if (s->mean && total.count) total.loss /= (double)total.count;
    *loss = (float)(adds ? (double)*loss + total.loss : total.loss);
}

/* ---- Gradients --------------------------------------------------------------------------------------- */

/* dlogits = scale (inverse exp(z - shift) - q), q one number at the target and another elsewhere. */
typedef struct row_gradient {
    int64_t target;
    float shift, inverse, scale, at_target, elsewhere;
} row_gradient;

/* -q of elements [i, i + 16). */
INLINE vf minus_q(const row_gradient *g, int64_t i) {
    if ((uint64_t)(g->target - i) >= LANES) return vf_set(-g->elsewhere);
    float lanes[LANES];
    vf_store(VJP_F32, lanes, 0, vf_set(-g->elsewhere));
    lanes[g->target - i] = -g->at_target;
    return vf_load(VJP_F32, lanes, 0);
}

INLINE void write_vector(const row_gradient *g, vjp_dtype dtype, write_mode mode, void *to, const void *z, int64_t i,
                         int64_t n) {
    vf e = vf_exp(vf_sub(vf_load_part(dtype, z, i, n), vf_set(g->shift)));
    vf d = vf_fma(e, vf_set(g->inverse), minus_q(g, i));
    vf_write_part(mode, dtype, to, i, n, vf_mul(d, vf_set(g->scale)));
}

INLINE void write_row(const row_gradient *g, vjp_dtype dtype, write_mode mode, void *to, const void *z, int64_t n) {
    int64_t i = write_head(mode, dtype, to, n);
    if (i > 0) write_vector(g, dtype, mode, to, z, 0, i);
    for (; i + LANES <= n; i += LANES)
        write_vector(g, dtype, mode, to, z, i, LANES);
    if (i < n) write_vector(g, dtype, mode, to, z, i, n - i);
}

INLINE void write_zeros(vjp_dtype dtype, write_mode mode, void *to, int64_t n) {
    if (mode != WRITE_ADD) memset(to, 0, (size_t)n * dtype_bytes(dtype));
}

INLINE void write_rows(vjp_dtype dtype, write_mode mode, const gradient_rows *call, size_t task) {
    const vjp_cross_entropy_sizes *s = &call->s;
    row_gradient g = {.scale = call->scale, .at_target = (float)s->at_target, .elsewhere = (float)s->elsewhere};
    for (int64_t row = cpu_split_begin(&call->split, task); row < cpu_split_end(&call->split, task); row++) {
        const void *z = at(dtype, call->logits, row * call->width);
        void *to = at_mutable(dtype, call->dlogits, row * call->width);
        int64_t target = target_at(call->target_type, call->target, row);
        if (target == s->ignore_index) {
            write_zeros(dtype, mode, to, call->width);
            continue;
        }
        g.target = target - call->first_class; /* in a range of classes it may be none of them */
        if (call->lse) {
            g.shift = call->lse[row];
            g.inverse = 1; /* exp(z - lse) is p itself */
        } else {
            row_sums sums = measure(dtype, z, call->width, false);
            g.shift = finite_shift(sums.max);
            g.inverse = (float)(1 / sums.sum);
        }
        write_row(&g, dtype, mode, to, z, call->width);
    }
    if (mode == WRITE_STREAM) vf_stream_done();
}

static void gradient_task(void *argument, size_t task) {
    const gradient_rows *call = argument;
    BY_DTYPE_AND_MODE(call->dtype, call->mode, write_rows, call, task);
}

void CPU_NAME(gradient_rows)(const vjp_work *work, gradient_rows *call) {
    call->split = CPU_NAME(loss_split)(call->s.rows, call->width);
    vjp_cpu_for(work, call->split.count, gradient_task, call);
}

/* ---- How many rows take part ------------------------------------------------------------------------- */

typedef struct row_count {
    vjp_cross_entropy_sizes s;
    vjp_dtype target_type;
    const void *target;
    int64_t *counts; /* one per task */
    cpu_split split;
} row_count;

static void count_task(void *argument, size_t task) {
    const row_count *call = argument;
    int64_t count = 0;
    for (int64_t row = cpu_split_begin(&call->split, task); row < cpu_split_end(&call->split, task); row++)
        count += target_at(call->target_type, call->target, row) != call->s.ignore_index;
    call->counts[task] = count;
}

static cpu_split split_counts(const vjp_cross_entropy_sizes *s) {
    return vjp_cpu_split_items(s->rows, 8, CPU_MAX_TASKS);
}

size_t CPU_NAME(loss_scale_workspace)(const vjp_cross_entropy_sizes *s) {
    return s->mean ? (size_t)split_counts(s).count * sizeof(int64_t) : 0;
}

float CPU_NAME(loss_scale)(const vjp_work *work, const vjp_cross_entropy_sizes *s, int target_slot, int dloss_slot,
                           void *workspace) {
    double dloss = (double)*(const float *)vjp_data(work, dloss_slot);
    if (!s->mean) return (float)dloss;
    row_count call = {.s = *s,
                      .target_type = vjp_type(work, target_slot),
                      .target = vjp_data(work, target_slot),
                      .counts = workspace,
                      .split = split_counts(s)};
    int64_t count = 0;
    vjp_cpu_for(work, call.split.count, count_task, &call);
    for (int64_t task = 0; task < call.split.count; task++)
        count += call.counts[task];
    return (float)(dloss / (double)count);
}
