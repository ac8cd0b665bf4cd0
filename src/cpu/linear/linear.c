/*
 * linear: y = act(a b + bias) and its gradients, as matrix products (gemm.h) whose edges do everything else.
 *
 * Forward: one product; bias, activation, pre and the rounding to storage are done to each tile while it is in cache.
 * Backward: da = dpre b^T, db = a^T dpre and dbias, the sum of the rows of dpre, where dpre = dy * act'(pre). One pass
 * makes dpre in the workspace and sums dbias on the way, in double, so that 2^24 rows are as right as two. It is laid
 * out so that neither product packs it (slabs, gemm.h). A dpre that is wanted once, or is too large to store, is made
 * where it is read: when a product packs it, at a cost of one act' for some thousand flops.
 *
 * Where pre was not saved it is computed again, a panel of rows at a time, and the gradients go panel by panel. db is
 * then a sum over panels; in 16 bits it would be rounded at each, so it is gathered in f32 and rounded once.
 */
#include "cpu/elementwise/activation.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/rows.h"
#include "op/op.h"

/* Numbers handled at a time by what reads and finishes rows: 1 KiB on the stack. */
enum { PIECE = 256 };

/* pre that is computed again, or dpre that is stored: 16 MiB of it, so 1024 rows of 4096. */
enum { PANEL_FLOATS = 4 << 20 };

/* dbias: the most doubles of all partial sums (4 MiB) and the most partials of a column. */
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

/* Calls elements into the cache that the next row is about: the processor's own prefetching stops at each page. */
static void call_in(const matrix *m, int64_t at, int64_t count) {
    enum { LINE = 64 };
    const char *from = element(m->data, m->dtype, at), *end = element(m->data, m->dtype, at + count);
    for (; from < end; from += LINE)
        __builtin_prefetch(from, 0, 2);
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* Where a tile of a b goes: bias is added, pre is kept, y = act(pre). */
typedef struct outputs {
    matrix y, pre;
    matrix bias; /* one row */
    vjp_activation activation;
    int64_t rows;
} outputs;

static void finish_outputs(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    const outputs *o = target;
    float value[PIECE], bias[PIECE];
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t n = least(PIECE, count - done), at = row * o->y.columns + column + done;
        const float *pre = sums + done;
        if (row + 1 < o->rows) {
            call_in(&o->pre, at + o->y.columns, n);
            call_in(&o->y, at + o->y.columns, n);
        }
        if (o->bias.data) {
            load_row(o->bias.dtype, o->bias.data, column + done, n, bias);
            for (int64_t i = 0; i < n; i++)
                value[i] = sums[done + i] + bias[i];
            pre = value;
        }
        if (o->pre.data) store_row(o->pre.dtype, o->pre.data, at, n, pre, false);
        if (!o->y.data) continue;
        const float *y = pre;
        if (o->activation != VJP_ACTIVATION_NONE) {
            bool straight = o->y.dtype == VJP_F32 && !o->y.accumulate;
            float *to = straight ? (float *)o->y.data + at : value;
            activate_row(o->activation, n, pre, to);
            if (straight) continue;
            y = to;
        }
        store_row(o->y.dtype, o->y.data, at, n, y, o->y.accumulate);
    }
}

static bool is_product_alone(const vjp_work *work, const vjp_linear_sizes *s) {
    return work->storage == VJP_F32 && s->activation == VJP_ACTIVATION_NONE && !work->tensor[LINEAR_PRE] &&
           !work->tensor[LINEAR_BIAS];
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
                       .activation = s.activation,
                       .rows = s.batch * s.m};
    f->product = (gemm_call){.blas = cpu_state_of(work)->blas,
                             .tiles = cpu_state_of(work)->tiles,
                             .threads = cpu_state_of(work)->threads,
                             .items = s.batch,
                             .m = s.m,
                             .n = s.n,
                             .k = s.k,
                             .a = operand_of(&f->a, false, s.m),
                             .b = operand_of(&f->b, s.transpose_b, s.transpose_b ? s.n : s.k)};
    if (is_product_alone(work, &s))
        f->product.c = result_in(&f->out.y, s.m);
    else
        f->product.c = (gemm_result){.finish = finish_outputs, .target = &f->out, .item_row = s.m};
}

static size_t forward_workspace(const vjp_work *work) {
    forward_call f;
    set_forward(work, &f);
    return CPU_NAME(gemm_workspace)(&f.product);
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[LINEAR_Y] && !work->tensor[LINEAR_PRE]) return VJP_OK;
    forward_call f;
    set_forward(work, &f);
    CPU_NAME(gemm)(work, &f.product, work->workspace);
    return VJP_OK;
}

/* ---- dpre -------------------------------------------------------------------------------------------- */

/* dpre = dy * act'(pre), made when it is read. Rows are packed, so a run of elements may go over several of them. */
typedef struct dpre_source {
    matrix dy, pre;
    vjp_activation activation;
    bool zero_nan;
} dpre_source;

static void read_dpre(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const dpre_source *d = source;
    float dy_piece[PIECE], pre_piece[PIECE];
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t n = least(PIECE, count - done), at = row * d->dy.columns + column + done;
        const float *dy = (const float *)d->dy.data + at, *pre = (const float *)d->pre.data + at;
        if (d->dy.dtype != VJP_F32) {
            load_row(d->dy.dtype, d->dy.data, at, n, dy_piece);
            dy = dy_piece;
        }
        if (d->pre.dtype != VJP_F32) {
            load_row(d->pre.dtype, d->pre.data, at, n, pre_piece);
            pre = pre_piece;
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
 * Panels: the whole batch where pre is there or not needed; else whole items as many as fit, or rows of one item. The
 * workspace holds, in this order: pre and then dpre of a panel, partial sums of dbias and their totals, db in f32, and
 * what the products need.
 */
typedef struct backward_plan {
    vjp_linear_sizes sizes;
    bool again;            /* pre is computed again */
    bool stored;           /* dpre is made once, in the workspace */
    bool in_slabs;         /* in the form that products read in place */
    int64_t items, rows;   /* of a panel; the last of an item may have fewer rows */
    bool gather_db;        /* in f32, over several panels */
    int64_t chunk, chunks; /* rows of a partial sum of dbias, and how many */
    size_t pre_bytes, partial_bytes, total_bytes, db_bytes;
} backward_plan;

/* One panel's products. */
typedef struct panel {
    matrix a, b, da, db;
    dpre_source dpre;
    matrix stored; /* dpre as f32 in the workspace */
    outputs pre;   /* where pre is computed again */
    gemm_call make_pre, make_da, make_db;
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
    char *space = work->workspace; /* NULL while its size is being asked for */
    int64_t first = item * s->m + row, b_rows = s->transpose_b ? s->n : s->k, b_columns = s->transpose_b ? s->k : s->n;
    bool blas = cpu_state_of(work)->blas, tiles = cpu_state_of(work)->tiles;
    int threads = cpu_state_of(work)->threads;
    q->a = matrix_of(work, LINEAR_B_A, s->k, first);
    q->b = matrix_of(work, LINEAR_B_B, b_columns, item * b_rows);
    q->da = matrix_of(work, LINEAR_B_DA, s->k, first);
    q->db = matrix_of(work, LINEAR_B_DB, b_columns, item * b_rows);
    q->dpre = (dpre_source){.dy = matrix_of(work, LINEAR_B_DY, s->n, first),
                            .pre = matrix_of(work, LINEAR_B_PRE, s->n, first),
                            .activation = s->activation,
                            .zero_nan = s->zero_nan};
    q->stored = (matrix){.data = space, .dtype = VJP_F32, .columns = s->n};
    if (p->again) q->dpre.pre = q->stored;
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
    q->make_pre = (gemm_call){.blas = blas,
                              .tiles = tiles,
                              .threads = threads,
                              .items = items,
                              .m = rows,
                              .n = s->n,
                              .k = s->k,
                              .a = operand_of(&q->a, false, rows),
                              .b = operand_of(&q->b, s->transpose_b, b_rows),
                              .c = {.finish = finish_outputs, .target = &q->pre, .item_row = rows}};
    q->make_da = (gemm_call){.blas = blas,
                             .tiles = tiles,
                             .threads = threads,
                             .items = items,
                             .m = rows,
                             .n = s->k,
                             .k = s->n,
                             .a = dpre_operand(p, q, false, rows),
                             .b = operand_of(&q->b, !s->transpose_b, b_rows),
                             .c = result_in(&q->da, rows)};
    /* db is a^T dpre; as [n, k], dpre^T a. */
    q->make_db = (gemm_call){.blas = blas,
                             .tiles = tiles,
                             .threads = threads,
                             .items = items,
                             .m = b_rows,
                             .n = b_columns,
                             .k = rows,
                             .a = operand_of(&q->a, true, rows),
                             .b = dpre_operand(p, q, false, rows),
                             .c = result_in(&q->db, b_rows)};
    if (s->transpose_b) {
        q->make_db.a = dpre_operand(p, q, true, rows);
        q->make_db.b = operand_of(&q->a, false, rows);
    }
}

static size_t product_bytes(const vjp_work *work, const backward_plan *p, int64_t rows) {
    panel q;
    set_panel(work, p, 0, p->items, 0, rows, &q);
    size_t bytes = p->again ? CPU_NAME(gemm_workspace)(&q.make_pre) : 0;
    size_t da = work->tensor[LINEAR_B_DA] ? CPU_NAME(gemm_workspace)(&q.make_da) : 0;
    size_t db = work->tensor[LINEAR_B_DB] ? CPU_NAME(gemm_workspace)(&q.make_db) : 0;
    bytes = bytes > da ? bytes : da;
    return bytes > db ? bytes : db;
}

static backward_plan plan_of(const vjp_work *work) {
    backward_plan p = {.sizes = vjp_linear_sizes_of(work)};
    const vjp_linear_sizes *s = &p.sizes;
    p.again = s->activation != VJP_ACTIVATION_NONE && !work->tensor[LINEAR_B_PRE];
    p.items = s->batch;
    p.rows = s->m;
    int uses = !!work->tensor[LINEAR_B_DA] + !!work->tensor[LINEAR_B_DB] + !!work->tensor[LINEAR_B_DBIAS];
    bool fits = s->batch * s->m <= PANEL_FLOATS / most(1, s->n);
    p.stored = s->activation != VJP_ACTIVATION_NONE && uses > 1 && (p.again || fits);
    bool fills_slabs = divide_up(s->n, SLAB_COLUMNS) * SLAB_COLUMNS <= s->n + s->n / 4;
    p.in_slabs = p.stored && !p.again && fills_slabs && !cpu_state_of(work)->blas;
    if (p.stored) {
        int64_t floats = p.in_slabs ? slab_floats(s->batch * s->m, s->n) : s->batch * s->m * s->n;
        p.pre_bytes = round_up(floats * (int64_t)sizeof(float));
    }
    if (p.again && s->m > 0 && s->n > 0) {
        p.rows = least(s->m, most(1, PANEL_FLOATS / s->n));
        p.items = most(1, least(s->batch, PANEL_FLOATS / (p.rows * s->n)));
        if (p.rows < s->m) p.items = 1;
        p.pre_bytes = round_up(p.items * p.rows * s->n * (int64_t)sizeof(float));
    }
    if (work->tensor[LINEAR_B_DBIAS] || p.stored) {
        int64_t limit = most(1, least(BIAS_CHUNKS, BIAS_PARTIALS / most(1, s->n)));
        cpu_cut cut = vjp_cpu_cut_items(p.items * p.rows, s->n * (int64_t)dtype_bytes(work->storage), limit);
        p.chunk = cut.size;
        p.chunks = cut.count;
    }
    if (work->tensor[LINEAR_B_DBIAS]) {
        p.partial_bytes = round_up(p.chunks * s->n * (int64_t)sizeof(double));
        p.total_bytes = round_up(s->n * (int64_t)sizeof(double));
    }
    p.gather_db = p.rows < s->m && work->tensor[LINEAR_B_DB] && vjp_type(work, LINEAR_B_DB) != VJP_F32;
    if (p.gather_db) p.db_bytes = round_up(s->k * s->n * (int64_t)sizeof(float));
    return p;
}

static size_t backward_workspace(const vjp_work *work) {
    backward_plan p = plan_of(work);
    size_t products = product_bytes(work, &p, p.rows), last = 0;
    if (p.rows > 0 && p.sizes.m % p.rows) last = product_bytes(work, &p, p.sizes.m % p.rows);
    return p.pre_bytes + p.partial_bytes + p.total_bytes + p.db_bytes + (last > products ? last : products);
}

/* ---- One pass over dpre: stored, summed for dbias, or both -------------------------------------------- */

/* Columns that a task takes: a page of each row in f32, so that whole pages are read one after the other. */
enum { PASS_COLUMNS = 1024 };

typedef struct dpre_pass {
    const dpre_source *dpre;
    int64_t rows, n, chunk, pieces;
    float *to;       /* NULL: not stored */
    bool in_slabs;   /* or side by side */
    double *partial; /* of each chunk; NULL: not summed */
} dpre_pass;

/* Elements of dpre that lie side by side, whatever rows they are of. */
static void load_dpre(const dpre_source *d, int64_t at, int64_t count, float *to) {
    if (d->activation == VJP_ACTIVATION_NONE)
        load_row(d->dy.dtype, d->dy.data, at, count, to);
    else
        read_dpre(d, 0, at, count, to);
}

_Static_assert((int)SLAB_COLUMNS == PIECE, "a piece of a row is in one slab");

/* Some columns of a chunk of rows. Narrow rows are read several at once. */
static void dpre_task(void *argument, size_t task) {
    const dpre_pass *b = argument;
    int64_t chunk = (int64_t)task / b->pieces, first = (int64_t)task % b->pieces * PASS_COLUMNS;
    int64_t width = least(PASS_COLUMNS, b->n - first), end = least(b->rows, (chunk + 1) * b->chunk);
    int64_t at_once = width == b->n ? most(1, PIECE / b->n) : 1;
    double *partial = b->partial ? b->partial + chunk * b->n + first : NULL;
    float values[PIECE];
    if (partial) memset(partial, 0, (size_t)width * sizeof *partial);
    for (int64_t row = chunk * b->chunk; row < end; row += at_once) {
        int64_t rows = least(at_once, end - row);
        for (int64_t column = 0; column < width; column += PIECE) {
            int64_t count = least(PIECE, width - column), at = row * b->n + first + column;
            float *to = b->to ? b->to + (b->in_slabs ? slab_place(b->rows, row, first + column) : at) : values;
            if (row + at_once < end) {
                call_in(&b->dpre->dy, at + b->n, count);
                call_in(&b->dpre->pre, at + b->n, count);
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
    int64_t chunks, n, columns; /* columns of a task */
} bias_sums;

static void total_task(void *argument, size_t task) {
    const bias_sums *b = argument;
    int64_t first = (int64_t)task * b->columns, end = least(b->n, first + b->columns), chunks = b->chunks;
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t j = first; j < end; j++)
            b->total[j] += b->partial[c * b->n + j];
}

static void pass_over_dpre(const vjp_work *work, const backward_plan *p, const panel *q, int64_t rows) {
    char *space = work->workspace;
    int64_t n = p->sizes.n, chunks = divide_up(rows, p->chunk);
    dpre_pass pass = {.dpre = &q->dpre, .rows = rows, .n = n, .chunk = p->chunk};
    pass.pieces = divide_up(n, PASS_COLUMNS);
    if (p->stored) pass.to = q->stored.data;
    pass.in_slabs = p->in_slabs;
    if (p->partial_bytes) pass.partial = (double *)(space + p->pre_bytes);
    vjp_cpu_for(work, chunks * pass.pieces, dpre_task, &pass);
    if (!pass.partial) return;
    bias_sums sums = {.partial = pass.partial, .total = (double *)(space + p->pre_bytes + p->partial_bytes)};
    sums.chunks = chunks;
    sums.n = n;
    sums.columns = divide_up(TOTAL_TASK, chunks);
    vjp_cpu_for(work, divide_up(n, sums.columns), total_task, &sums);
}

static void put_dbias(const vjp_work *work, const backward_plan *p) {
    const double *total = (const double *)((char *)work->workspace + p->pre_bytes + p->partial_bytes);
    matrix dbias = matrix_of(work, LINEAR_B_DBIAS, p->sizes.n, 0);
    float values[PIECE];
    for (int64_t j = 0; j < p->sizes.n; j += PIECE) {
        int64_t count = least(PIECE, p->sizes.n - j);
        for (int64_t i = 0; i < count; i++)
            values[i] = (float)total[j + i];
        store_row(dbias.dtype, dbias.data, j, count, values, dbias.accumulate);
    }
}

/* ---- db gathered over panels, rounded once ----------------------------------------------------------- */

typedef struct gathered {
    const float *from;
    matrix to;
    int64_t count;
} gathered;

enum { GATHERED_TASK = 1 << 14 };

static void put_gathered_task(void *argument, size_t task) {
    const gathered *g = argument;
    int64_t at = (int64_t)task * GATHERED_TASK;
    store_row(g->to.dtype, g->to.data, at, least(GATHERED_TASK, g->count - at), g->from + at, g->to.accumulate);
}

static void put_gathered(const vjp_work *work, const backward_plan *p, const panel *q, int64_t item) {
    const vjp_linear_sizes *s = &p->sizes;
    gathered g = {.from = q->db.data,
                  .to = matrix_of(work, LINEAR_B_DB, q->db.columns, item * (s->transpose_b ? s->n : s->k)),
                  .count = s->k * s->n};
    vjp_cpu_for(work, divide_up(g.count, GATHERED_TASK), put_gathered_task, &g);
}

static vjp_status backward(const vjp_work *work) {
    bool da = work->tensor[LINEAR_B_DA], db = work->tensor[LINEAR_B_DB], dbias = work->tensor[LINEAR_B_DBIAS];
    if (!da && !db && !dbias) return VJP_OK;
    backward_plan p = plan_of(work);
    const vjp_linear_sizes *s = &p.sizes;
    char *space = work->workspace;
    void *product_space = space + p.pre_bytes + p.partial_bytes + p.total_bytes + p.db_bytes;
    if (dbias) memset(space + p.pre_bytes + p.partial_bytes, 0, p.total_bytes);
    for (int64_t item = 0; item < s->batch; item += p.items) {
        int64_t row = 0;
        do {
            int64_t items = least(p.items, s->batch - item), rows = least(p.rows, s->m - row);
            panel q;
            set_panel(work, &p, item, items, row, rows, &q);
            if (p.again) CPU_NAME(gemm)(work, &q.make_pre, product_space);
            if ((dbias || p.stored) && s->n > 0 && items * rows > 0) pass_over_dpre(work, &p, &q, items * rows);
            if (da) CPU_NAME(gemm)(work, &q.make_da, product_space);
            if (db) CPU_NAME(gemm)(work, &q.make_db, product_space);
            row += rows;
            if (p.gather_db && row == s->m) put_gathered(work, &p, &q, item);
        } while (row < s->m);
    }
    if (dbias) put_dbias(work, &p);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT];

const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};
