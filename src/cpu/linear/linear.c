/* SPDX-License-Identifier: MIT */
/*
 * linear: y = act(a b + bias) + residual and its gradients, as matrix products (gemm.h) with everything else in their
 * epilogues.
 *
 * Forward: one product; its epilogue adds the bias, saves pre, applies the activation, adds the residual and rounds to
 * storage, while a tile is in cache. A product without any of that writes y directly.
 *
 * Backward: da = dpre b^T, db = a^T dpre, dbias = the sum of the rows of dpre, with dpre = dy * act'(pre):
 *
 *     dpre is                   when                                        why
 *     dy itself                 no activation
 *     stored in slabs           several gradients need it, pre was saved,   act' is computed once, and both products
 *                               at most 4 Mi numbers, no BLAS               read slabs in place without packing
 *     stored as rows            the same with BLAS, or if slabs would       BLAS takes rows; a recomputed pre becomes
 *                               waste over a quarter; pre is recomputed     dpre in place
 *     computed while packing    one gradient needs it, or it is larger      one act' per some thousand flops
 *
 * dbias is summed in double, in the pass that stores dpre or one of its own: 2^24 rows are as accurate as two.
 *
 * With a gate either pass is a product and the kernel of swiglu (vjp_linear_gated()).
 *
 * A pre that was not saved is recomputed one panel of rows at a time, and the gradients go panel by panel. db is then a
 * sum over panels; a 16-bit db is summed in f32 and rounded once.
 */
#include "cpu/elementwise/activation.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/rows.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT];

/* Numbers that callbacks process at a time: 1 KiB on the stack. */
enum { BUFFER = 256 };

/* Recomputed pre or stored dpre: 16 MiB, such as 1024 rows of 4096. */
enum { PANEL_FLOATS = 4 << 20 };

/* dbias: limits on the doubles of all partial sums (4 MiB) and on the partial sums per column. */
enum { BIAS_PARTIALS = 1 << 19, BIAS_CHUNKS = 64 };

/* ---- Activations of rows ----------------------------------------------------------------------------- */

INLINE void activate_as(vjp_activation activation, int64_t count, const float *x, float *y) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(VJP_F32, y, i, activate(activation, vf_load(VJP_F32, x, i)));
    if (i == count) return;
    vf last = activate(activation, vf_load_part(VJP_F32, x, i, count - i));
    vf_store_part(VJP_F32, y, i, count - i, last);
}

INLINE vf slope_of(vjp_activation activation, bool zero_nan, vf pre, vf dy) {
    vf slope = activate_slope(activation, pre);
    if (zero_nan) slope = vf_select(vf_is_nan(pre), vf_zero(), slope);
    return vf_mul(dy, slope);
}

INLINE void slope_as(vjp_activation activation, bool zero_nan, int64_t count, const float *pre, const float *dy,
                     float *dpre) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(VJP_F32, dpre, i, slope_of(activation, zero_nan, vf_load(VJP_F32, pre, i), vf_load(VJP_F32, dy, i)));
    if (i == count) return;
    vf last_pre = vf_load_part(VJP_F32, pre, i, count - i), last_dy = vf_load_part(VJP_F32, dy, i, count - i);
    vf_store_part(VJP_F32, dpre, i, count - i, slope_of(activation, zero_nan, last_pre, last_dy));
}

static void activate_row(vjp_activation activation, int64_t count, const float *x, float *y) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: break;
    case VJP_ACTIVATION_RELU: activate_as(VJP_ACTIVATION_RELU, count, x, y); break;
    case VJP_ACTIVATION_GELU_TANH: activate_as(VJP_ACTIVATION_GELU_TANH, count, x, y); break;
    case VJP_ACTIVATION_GELU_ERF: activate_as(VJP_ACTIVATION_GELU_ERF, count, x, y); break;
    case VJP_ACTIVATION_SILU: activate_as(VJP_ACTIVATION_SILU, count, x, y); break;
    case VJP_ACTIVATION_SIGMOID: activate_as(VJP_ACTIVATION_SIGMOID, count, x, y); break;
    case VJP_ACTIVATION_TANH: activate_as(VJP_ACTIVATION_TANH, count, x, y); break;
    }
}

static void slope_row(vjp_activation activation, bool zero_nan, int64_t count, const float *pre, const float *dy,
                      float *dpre) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: break;
    case VJP_ACTIVATION_RELU: slope_as(VJP_ACTIVATION_RELU, zero_nan, count, pre, dy, dpre); break;
    case VJP_ACTIVATION_GELU_TANH: slope_as(VJP_ACTIVATION_GELU_TANH, zero_nan, count, pre, dy, dpre); break;
    case VJP_ACTIVATION_GELU_ERF: slope_as(VJP_ACTIVATION_GELU_ERF, zero_nan, count, pre, dy, dpre); break;
    case VJP_ACTIVATION_SILU: slope_as(VJP_ACTIVATION_SILU, zero_nan, count, pre, dy, dpre); break;
    case VJP_ACTIVATION_SIGMOID: slope_as(VJP_ACTIVATION_SIGMOID, zero_nan, count, pre, dy, dpre); break;
    case VJP_ACTIVATION_TANH: slope_as(VJP_ACTIVATION_TANH, zero_nan, count, pre, dy, dpre); break;
    }
}

/* Prefetches elements of the next row: the hardware prefetcher stops at each page. */
static void prefetch_elements(const matrix *m, int64_t at, int64_t count) {
    if (m->data) prefetch_second_level(element(m->data, m->dtype, at), count * (int64_t)dtype_bytes(m->dtype));
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* The forward's epilogue: adds the bias, saves pre, and y = act(pre) + residual. */
typedef struct outputs {
    matrix y, pre;
    matrix bias; /* one row */
    matrix residual;
    vjp_activation activation;
    int64_t rows;
} outputs;

static void store_outputs(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    const outputs *o = target;
    float value[BUFFER], addend[BUFFER];
    for (int64_t done = 0; done < count; done += BUFFER) {
        int64_t n = vjp_min(BUFFER, count - done), at = row * o->y.columns + column + done;
        const float *pre = sums + done;
        if (row + 1 < o->rows) {
            prefetch_elements(&o->pre, at + o->y.columns, n);
            prefetch_elements(&o->y, at + o->y.columns, n);
            prefetch_elements(&o->residual, at + o->y.columns, n);
        }
        if (o->bias.data) {
            load_row(o->bias.dtype, o->bias.data, column + done, n, addend);
            for (int64_t i = 0; i < n; i++)
                value[i] = sums[done + i] + addend[i];
            pre = value;
        }
        if (o->pre.data) store_row(o->pre.dtype, o->pre.data, at, n, pre, false);
        if (!o->y.data) continue;
        const float *y = pre;
        if (o->activation != VJP_ACTIVATION_NONE) {
            bool straight = o->y.dtype == VJP_F32 && !o->y.accumulate && !o->residual.data;
            float *to = straight ? (float *)o->y.data + at : value;
            activate_row(o->activation, n, pre, to);
            if (straight) continue;
            y = to;
        }
        if (o->residual.data) {
            load_row(o->residual.dtype, o->residual.data, at, n, addend);
            for (int64_t i = 0; i < n; i++)
                value[i] = y[i] + addend[i];
            y = value;
        }
        store_row(o->y.dtype, o->y.data, at, n, y, o->y.accumulate);
    }
}

static bool is_product_alone(const vjp_work *work, const vjp_linear_sizes *s) {
    return work->storage == VJP_F32 && s->activation == VJP_ACTIVATION_NONE && !work->tensor[LINEAR_PRE] &&
           !work->tensor[LINEAR_BIAS] && !work->tensor[LINEAR_RESIDUAL];
}

typedef struct forward_call {
    matrix a, b;
    outputs out;
    gemm_call product;
} forward_call;

static void set_forward(const vjp_work *work, forward_call *f) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    f->a = matrix_of(work, LINEAR_A, s.k, 0);
    f->b = matrix_of(work, LINEAR_B, s.transpose_b ? s.k : s.n, 0);
    f->out = (outputs){.y = matrix_of(work, LINEAR_Y, s.n, 0),
                       .pre = matrix_of(work, LINEAR_PRE, s.n, 0),
                       .bias = matrix_of(work, LINEAR_BIAS, s.n, 0),
                       .residual = matrix_of(work, LINEAR_RESIDUAL, s.n, 0),
                       .activation = s.activation,
                       .rows = s.batch * s.m};
    f->product = product_of(work, s.batch, s.m, s.n, s.k);
    f->product.a = operand_of(&f->a, false, s.m);
    f->product.b = operand_of(&f->b, s.transpose_b, s.transpose_b ? s.n : s.k);
    if (is_product_alone(work, &s))
        f->product.c = result_in(&f->out.y, s.m);
    else
        f->product.c = (gemm_result){.epilogue = store_outputs, .target = &f->out, .item_row = s.m};
}

static size_t forward_workspace(const vjp_work *work) {
    if (work->tensor[LINEAR_GATE]) return vjp_linear_gated_workspace(work, CPU_NAME(linear));
    forward_call f;
    set_forward(work, &f);
    return CPU_NAME(gemm_workspace)(&f.product);
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[LINEAR_Y] && !work->tensor[LINEAR_PRE]) return VJP_OK;
    if (work->tensor[LINEAR_GATE]) return vjp_linear_gated(work, CPU_NAME(linear), CPU_NAME(swiglu));
    forward_call f;
    set_forward(work, &f);
    CPU_NAME(gemm)(work, &f.product, work->workspace);
    return VJP_OK;
}

/* ---- dpre -------------------------------------------------------------------------------------------- */

/* dpre = dy * act'(pre), computed when it is read. Rows are dense, so a range of elements may span several of them. */
typedef struct dpre_source {
    matrix dy, pre;
    vjp_activation activation;
    bool zero_nan;
} dpre_source;

static void read_dpre(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const dpre_source *d = source;
    float dy_buffer[BUFFER], pre_buffer[BUFFER];
    for (int64_t done = 0; done < count; done += BUFFER) {
        int64_t n = vjp_min(BUFFER, count - done), at = row * d->dy.columns + column + done;
        const float *dy = (const float *)d->dy.data + at, *pre = (const float *)d->pre.data + at;
        if (d->dy.dtype != VJP_F32) {
            load_row(d->dy.dtype, d->dy.data, at, n, dy_buffer);
            dy = dy_buffer;
        }
        if (d->pre.dtype != VJP_F32) {
            load_row(d->pre.dtype, d->pre.data, at, n, pre_buffer);
            pre = pre_buffer;
        }
        slope_row(d->activation, d->zero_nan, n, pre, dy, to + done);
    }
}

/* Without an activation dpre is dy itself, whatever pre is. */
static gemm_operand operand_of_dpre(const dpre_source *d, bool transposed, int64_t item_row) {
    gemm_operand o = operand_of(&d->dy, transposed, item_row);
    if (d->activation != VJP_ACTIVATION_NONE) {
        o.dtype = VJP_F32;
        o.read = read_dpre;
        o.source = d;
    }
    return o;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/*
 * A panel is the whole batch, unless pre is recomputed: then as many whole items as fit, or rows of one item. The
 * workspace holds pre and then dpre of a panel, partial sums of dbias and their totals, db in f32, and the products'
 * workspace.
 */
typedef struct backward_plan {
    vjp_linear_sizes sizes;
    bool recomputed;       /* pre was not saved */
    bool stored;           /* dpre is computed once, in the workspace */
    bool in_slabs;         /* in slabs, which products read in place */
    int64_t items, rows;   /* of a panel; the last panel of an item may have fewer rows */
    bool gather_db;        /* sum db in f32 over several panels */
    int64_t chunk, chunks; /* rows per partial sum of dbias, and how many */
    size_t pre_bytes, partial_bytes, total_bytes, db_bytes;
} backward_plan;

/* The products of one panel. */
typedef struct panel {
    matrix a, b, da, db;
    dpre_source dpre;
    matrix stored; /* dpre as f32 in the workspace */
    outputs pre;   /* epilogue of a recomputed pre */
    gemm_call pre_product, da_product, db_product;
} panel;

static gemm_operand dpre_operand(const backward_plan *p, const panel *q, bool transposed, int64_t item_row) {
    if (!p->stored) return operand_of_dpre(&q->dpre, transposed, item_row);
    gemm_operand o = operand_of(&q->stored, transposed, item_row);
    if (p->in_slabs) o.slab_rows = p->items * p->rows;
    return o;
}

static void set_panel(const vjp_work *work, const backward_plan *p, int64_t item, int64_t items, int64_t row,
                      int64_t rows, panel *q) {
    const vjp_linear_sizes *s = &p->sizes;
    char *space = work->workspace; /* NULL during the workspace query */
    int64_t first = item * s->m + row, b_rows = s->transpose_b ? s->n : s->k, b_columns = s->transpose_b ? s->k : s->n;
    q->a = matrix_of(work, LINEAR_B_A, s->k, first);
    q->b = matrix_of(work, LINEAR_B_B, b_columns, item * b_rows);
    q->da = matrix_of(work, LINEAR_B_DA, s->k, first);
    q->db = matrix_of(work, LINEAR_B_DB, b_columns, item * b_rows);
    q->dpre = (dpre_source){.dy = matrix_of(work, LINEAR_B_DY, s->n, first),
                            .pre = matrix_of(work, LINEAR_B_PRE, s->n, first),
                            .activation = s->activation,
                            .zero_nan = s->zero_nan};
    q->stored = (matrix){.data = space, .dtype = VJP_F32, .columns = s->n};
    if (p->recomputed) q->dpre.pre = q->stored;
    if (p->gather_db && space) q->db.data = space + p->pre_bytes + p->partial_bytes + p->total_bytes;
    if (p->gather_db) {
        q->db.dtype = VJP_F32;
        q->db.accumulate = false;
    }
    q->db.accumulate = q->db.accumulate || row > 0;
    q->pre = (outputs){.y = {.columns = s->n},
                       .pre = q->dpre.pre,
                       .bias = matrix_of(work, LINEAR_B_BIAS, s->n, 0),
                       .rows = items * rows};
    q->pre_product = product_of(work, items, rows, s->n, s->k);
    q->pre_product.a = operand_of(&q->a, false, rows);
    q->pre_product.b = operand_of(&q->b, s->transpose_b, b_rows);
    q->pre_product.c = (gemm_result){.epilogue = store_outputs, .target = &q->pre, .item_row = rows};
    q->da_product = product_of(work, items, rows, s->k, s->n);
    q->da_product.a = dpre_operand(p, q, false, rows);
    q->da_product.b = operand_of(&q->b, !s->transpose_b, b_rows);
    q->da_product.c = result_in(&q->da, rows);
    /* db is a^T dpre; stored as [n, k], dpre^T a. */
    q->db_product = product_of(work, items, b_rows, b_columns, rows);
    q->db_product.a = s->transpose_b ? dpre_operand(p, q, true, rows) : operand_of(&q->a, true, rows);
    q->db_product.b = s->transpose_b ? operand_of(&q->a, false, rows) : dpre_operand(p, q, false, rows);
    q->db_product.c = result_in(&q->db, b_rows);
}

static size_t product_bytes(const vjp_work *work, const backward_plan *p, int64_t rows) {
    panel q;
    set_panel(work, p, 0, p->items, 0, rows, &q);
    size_t bytes = p->recomputed ? CPU_NAME(gemm_workspace)(&q.pre_product) : 0;
    size_t da = work->tensor[LINEAR_B_DA] ? CPU_NAME(gemm_workspace)(&q.da_product) : 0;
    size_t db = work->tensor[LINEAR_B_DB] ? CPU_NAME(gemm_workspace)(&q.db_product) : 0;
    return max_bytes(bytes, max_bytes(da, db));
}

static backward_plan plan_of(const vjp_work *work) {
    backward_plan p = {.sizes = vjp_linear_sizes_of(work)};
    const vjp_linear_sizes *s = &p.sizes;
    p.recomputed = s->activation != VJP_ACTIVATION_NONE && !work->tensor[LINEAR_B_PRE];
    p.items = s->batch;
    p.rows = s->m;
    int uses = !!work->tensor[LINEAR_B_DA] + !!work->tensor[LINEAR_B_DB] + !!work->tensor[LINEAR_B_DBIAS];
    bool fits = s->batch * s->m <= PANEL_FLOATS / vjp_max(1, s->n);
    p.stored = s->activation != VJP_ACTIVATION_NONE && uses > 1 && (p.recomputed || fits);
    bool fills_slabs = vjp_round_up(s->n, SLAB_COLUMNS) <= s->n + s->n / 4;
    p.in_slabs = p.stored && !p.recomputed && fills_slabs && !cpu_state_of(work)->blas;
    if (p.stored) {
        int64_t floats = p.in_slabs ? slab_floats(s->batch * s->m, s->n) : s->batch * s->m * s->n;
        p.pre_bytes = whole_lines(floats * (int64_t)sizeof(float));
    }
    if (p.recomputed && s->m > 0 && s->n > 0) {
        p.rows = vjp_min(s->m, vjp_max(1, PANEL_FLOATS / s->n));
        p.items = vjp_max(1, vjp_min(s->batch, PANEL_FLOATS / (p.rows * s->n)));
        if (p.rows < s->m) p.items = 1;
        p.pre_bytes = whole_lines(p.items * p.rows * s->n * (int64_t)sizeof(float));
    }
    if (work->tensor[LINEAR_B_DBIAS] || p.stored) {
        int64_t limit = vjp_max(1, vjp_min(BIAS_CHUNKS, BIAS_PARTIALS / vjp_max(1, s->n)));
        cpu_split split = vjp_cpu_split_items(p.items * p.rows, s->n * (int64_t)dtype_bytes(work->storage), limit);
        p.chunk = split.size;
        p.chunks = split.count;
    }
    if (work->tensor[LINEAR_B_DBIAS]) {
        p.partial_bytes = whole_lines(p.chunks * s->n * (int64_t)sizeof(double));
        p.total_bytes = whole_lines(s->n * (int64_t)sizeof(double));
    }
    p.gather_db = p.rows < s->m && work->tensor[LINEAR_B_DB] && vjp_type(work, LINEAR_B_DB) != VJP_F32;
    if (p.gather_db) p.db_bytes = whole_lines(s->k * s->n * (int64_t)sizeof(float));
    return p;
}

static size_t backward_workspace(const vjp_work *work) {
    if (work->tensor[LINEAR_B_GATE]) return vjp_linear_gated_workspace(work, CPU_NAME(linear));
    backward_plan p = plan_of(work);
    size_t products = product_bytes(work, &p, p.rows), last = 0;
    if (p.rows > 0 && p.sizes.m % p.rows) last = product_bytes(work, &p, p.sizes.m % p.rows);
    return p.pre_bytes + p.partial_bytes + p.total_bytes + p.db_bytes + max_bytes(products, last);
}

/* ---- One pass over dpre: stored, summed for dbias, or both -------------------------------------------- */

/* Columns per task: a page of each row in f32, so that whole pages are read in order. */
enum { PASS_COLUMNS = 1024 };

typedef struct dpre_pass {
    const dpre_source *dpre;
    int64_t rows, n, chunk, column_blocks;
    float *to;       /* NULL: not stored */
    bool in_slabs;   /* else as rows */
    double *partial; /* per chunk; NULL: not summed */
} dpre_pass;

/* Consecutive elements of dpre, across rows. */
static void load_dpre(const dpre_source *d, int64_t at, int64_t count, float *to) {
    if (d->activation == VJP_ACTIVATION_NONE)
        load_row(d->dy.dtype, d->dy.data, at, count, to);
    else
        read_dpre(d, 0, at, count, to);
}

_Static_assert((int)SLAB_COLUMNS == BUFFER, "a buffer of a row is in one slab");

/* Some columns of a chunk of rows. Narrow rows are read several at once. */
static void dpre_task(void *argument, size_t task) {
    const dpre_pass *b = argument;
    int64_t chunk = (int64_t)task / b->column_blocks, first = (int64_t)task % b->column_blocks * PASS_COLUMNS;
    int64_t width = vjp_min(PASS_COLUMNS, b->n - first), end = vjp_min(b->rows, (chunk + 1) * b->chunk);
    int64_t at_once = width == b->n ? vjp_max(1, BUFFER / b->n) : 1;
    double *partial = b->partial ? b->partial + chunk * b->n + first : NULL;
    float values[BUFFER];
    if (partial) memset(partial, 0, (size_t)width * sizeof *partial);
    for (int64_t row = chunk * b->chunk; row < end; row += at_once) {
        int64_t rows = vjp_min(at_once, end - row);
        for (int64_t column = 0; column < width; column += BUFFER) {
            int64_t count = vjp_min(BUFFER, width - column), at = row * b->n + first + column;
            float *to = b->to ? b->to + (b->in_slabs ? slab_index(b->rows, row, first + column) : at) : values;
            if (row + at_once < end) {
                prefetch_elements(&b->dpre->dy, at + b->n, count);
                prefetch_elements(&b->dpre->pre, at + b->n, count);
            }
            load_dpre(b->dpre, at, rows * count, to);
            if (b->in_slabs) memset(to + count, 0, (size_t)(SLAB_COLUMNS - count) * sizeof *to);
            for (int64_t r = 0; partial && r < rows; r++)
                for (int64_t j = 0; j < count; j++)
                    partial[column + j] += (double)to[r * count + j];
        }
    }
}

/* Adds the partial sums of some columns to their totals, in the order of the rows. */
enum { TOTAL_TASK = 1 << 14 };

typedef struct bias_sums {
    const double *partial;
    double *total;
    int64_t chunks, n, columns; /* columns per task */
} bias_sums;

static void total_task(void *argument, size_t task) {
    const bias_sums *b = argument;
    int64_t first = (int64_t)task * b->columns, end = vjp_min(b->n, first + b->columns), chunks = b->chunks;
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t j = first; j < end; j++)
            b->total[j] += b->partial[c * b->n + j];
}

static void pass_over_dpre(const vjp_work *work, const backward_plan *p, const panel *q, int64_t rows) {
    char *space = work->workspace;
    int64_t n = p->sizes.n, chunks = vjp_divide_up(rows, p->chunk);
    dpre_pass pass = {.dpre = &q->dpre, .rows = rows, .n = n, .chunk = p->chunk};
    pass.column_blocks = vjp_divide_up(n, PASS_COLUMNS);
    if (p->stored) pass.to = q->stored.data;
    pass.in_slabs = p->in_slabs;
    if (p->partial_bytes) pass.partial = (double *)(space + p->pre_bytes);
    vjp_cpu_for(work, chunks * pass.column_blocks, dpre_task, &pass);
    if (!pass.partial) return;
    bias_sums sums = {.partial = pass.partial, .total = (double *)(space + p->pre_bytes + p->partial_bytes)};
    sums.chunks = chunks;
    sums.n = n;
    sums.columns = vjp_divide_up(TOTAL_TASK, chunks);
    vjp_cpu_for(work, vjp_divide_up(n, sums.columns), total_task, &sums);
}

static void store_dbias(const vjp_work *work, const backward_plan *p) {
    const double *total = (const double *)((char *)work->workspace + p->pre_bytes + p->partial_bytes);
    matrix dbias = matrix_of(work, LINEAR_B_DBIAS, p->sizes.n, 0);
    float values[BUFFER];
    for (int64_t j = 0; j < p->sizes.n; j += BUFFER) {
        int64_t count = vjp_min(BUFFER, p->sizes.n - j);
        for (int64_t i = 0; i < count; i++)
            values[i] = (float)total[j + i];
        store_row(dbias.dtype, dbias.data, j, count, values, dbias.accumulate);
    }
}

/* ---- db summed in f32 over panels, rounded once ------------------------------------------------------  */

typedef struct gathered_db {
    const float *from;
    matrix to;
    int64_t count;
} gathered_db;

enum { GATHERED_TASK = 1 << 14 };

static void store_gathered_task(void *argument, size_t task) {
    const gathered_db *g = argument;
    int64_t at = (int64_t)task * GATHERED_TASK;
    store_row(g->to.dtype, g->to.data, at, vjp_min(GATHERED_TASK, g->count - at), g->from + at, g->to.accumulate);
}

static void store_gathered(const vjp_work *work, const backward_plan *p, const panel *q, int64_t item) {
    const vjp_linear_sizes *s = &p->sizes;
    gathered_db g = {.from = q->db.data,
                     .to = matrix_of(work, LINEAR_B_DB, q->db.columns, item * (s->transpose_b ? s->n : s->k)),
                     .count = s->k * s->n};
    vjp_cpu_for(work, vjp_divide_up(g.count, GATHERED_TASK), store_gathered_task, &g);
}

/* ---- dresidual, which is dy --------------------------------------------------------------------------- */

typedef struct dresidual_copy {
    matrix from, to;
    int64_t count;
} dresidual_copy;

enum { COPY_TASK = 1 << 14 };

static void copy_task(void *argument, size_t task) {
    const dresidual_copy *c = argument;
    int64_t first = (int64_t)task * COPY_TASK, end = vjp_min(c->count, first + COPY_TASK);
    float values[BUFFER];
    for (int64_t at = first; at < end; at += BUFFER) {
        int64_t n = vjp_min(BUFFER, end - at);
        load_row(c->from.dtype, c->from.data, at, n, values);
        store_row(c->to.dtype, c->to.data, at, n, values, c->to.accumulate);
    }
}

static void store_dresidual(const vjp_work *work) {
    dresidual_copy c = {.from = matrix_of(work, LINEAR_B_DY, 0, 0),
                        .to = matrix_of(work, LINEAR_B_DRESIDUAL, 0, 0),
                        .count = vjp_elements(work, LINEAR_B_DY)};
    vjp_cpu_for(work, vjp_divide_up(c.count, COPY_TASK), copy_task, &c);
}

static vjp_status backward(const vjp_work *work) {
    if (work->tensor[LINEAR_B_GATE]) return vjp_linear_gated(work, CPU_NAME(linear), CPU_NAME(swiglu));
    bool da = work->tensor[LINEAR_B_DA], db = work->tensor[LINEAR_B_DB], dbias = work->tensor[LINEAR_B_DBIAS];
    if (work->tensor[LINEAR_B_DRESIDUAL]) store_dresidual(work);
    if (!da && !db && !dbias) return VJP_OK;
    backward_plan p = plan_of(work);
    const vjp_linear_sizes *s = &p.sizes;
    char *space = work->workspace;
    void *product_space = space + p.pre_bytes + p.partial_bytes + p.total_bytes + p.db_bytes;
    if (dbias) memset(space + p.pre_bytes + p.partial_bytes, 0, p.total_bytes);
    for (int64_t item = 0; item < s->batch; item += p.items) {
        int64_t row = 0;
        do {
            int64_t items = vjp_min(p.items, s->batch - item), rows = vjp_min(p.rows, s->m - row);
            panel q;
            set_panel(work, &p, item, items, row, rows, &q);
            if (p.recomputed) CPU_NAME(gemm)(work, &q.pre_product, product_space);
            if ((dbias || p.stored) && s->n > 0 && items * rows > 0) pass_over_dpre(work, &p, &q, items * rows);
            if (da) CPU_NAME(gemm)(work, &q.da_product, product_space);
            if (db) CPU_NAME(gemm)(work, &q.db_product, product_space);
            row += rows;
            if (p.gather_db && row == s->m) store_gathered(work, &p, &q, item);
        } while (row < s->m);
    }
    if (dbias) store_dbias(work, &p);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_STORAGE_16_32},
    {backward, backward_workspace, VJP_STORAGE_16_32},
};
