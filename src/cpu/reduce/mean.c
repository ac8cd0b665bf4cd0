/* SPDX-License-Identifier: MIT */
/*
 * mean on the CPU: x as [outer, length, inner], averaged along length. Where inner is 1 the elements of a mean are
 * adjacent and a line is summed (sums.h); else they are the column of a matrix. A long line is split into chunks by its
 * length alone, each with its sum in the workspace. The backward writes dy / length to every element of the mean.
 */
#include "cpu/reduce/sums.h"

extern const vjp_kernel CPU_NAME(mean)[VJP_PASS_COUNT];

/* Elements of a chunk of a long line: 256 KiB of f32, several times what a task is worth waking a thread for. */
enum { LINE_CHUNK = 1 << 16 };

/* ---- Forward: lines ---------------------------------------------------------------------------------- */

typedef struct lines_call {
    vjp_mean_sizes s;
    vjp_dtype dtype;
    const void *x;
    void *y;
    bool accumulate;
    int64_t chunks;
    double *partial; /* [outer, chunks] where there are several */
    cpu_split split;
} lines_call;

static void put_line(const lines_call *c, int64_t line, double sum) {
    double old = c->accumulate ? (double)f32_load(c->dtype, c->y, line) : 0;
    f32_store(c->dtype, c->y, line, (float)(sum / (double)c->s.length + old));
}

INLINE void sum_lines(vjp_dtype dtype, const lines_call *c, size_t task) {
    for (int64_t item = cpu_split_begin(&c->split, task); item < cpu_split_end(&c->split, task); item++) {
        int64_t line = item / c->chunks, begin = item % c->chunks * LINE_CHUNK;
        int64_t end = c->chunks > 1 ? vjp_min(begin + LINE_CHUNK, c->s.length) : c->s.length;
        double sum = 0;
        if (c->s.length < LANES) /* too short for vectors */
            for (int64_t i = 0; i < end; i++)
                sum += (double)f32_load(dtype, c->x, line * c->s.length + i);
        else
            sum = sum_line(dtype, at(dtype, c->x, line * c->s.length + begin), end - begin);
        if (c->chunks > 1)
            c->partial[item] = sum;
        else
            put_line(c, line, sum);
    }
}

static void lines_task(void *call, size_t task) {
    const lines_call *c = call;
    BY_DTYPE(c->dtype, sum_lines, c, task);
}

static int64_t line_chunks(const vjp_mean_sizes *s) {
    return s->length >= 2 * LINE_CHUNK ? vjp_divide_up(s->length, LINE_CHUNK) : 1;
}

static void forward_lines(const vjp_work *work, const vjp_mean_sizes *s) {
    lines_call c = {.s = *s,
                    .dtype = work->storage,
                    .x = vjp_data(work, MEAN_X),
                    .y = vjp_data(work, MEAN_Y),
                    .accumulate = vjp_accumulates(work, MEAN_Y),
                    .chunks = line_chunks(s),
                    .partial = work->workspace};
    int64_t each = c.chunks > 1 ? LINE_CHUNK : s->length;
    c.split = vjp_cpu_split_items(s->outer * c.chunks, each * (int64_t)dtype_bytes(c.dtype), CPU_MAX_TASKS);
    vjp_cpu_for(work, c.split.count, lines_task, &c);
    for (int64_t line = 0; c.chunks > 1 && line < s->outer; line++) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < c.chunks; chunk++)
            sum += c.partial[line * c.chunks + chunk];
        put_line(&c, line, sum);
    }
}

/* ---- Forward: columns -------------------------------------------------------------------------------- */

INLINE void same(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = e->in[0];
}

static const element_op columns_op = {.inputs = 1, .in = {{MEAN_X, STORED}}, .outputs = 1, .out = {{MEAN_Y, STORED}}};

static void columns_task(void *call, size_t task) {
    element_dispatch(column_body, same, &columns_op, call, task);
}

static column_sums columns_of(const vjp_work *work, const vjp_mean_sizes *s) {
    return (column_sums){.matrices = s->outer,
                         .rows = s->length,
                         .dim = s->inner,
                         .to = vjp_data(work, MEAN_Y),
                         .to_dtype = work->storage,
                         .accumulate = vjp_accumulates(work, MEAN_Y),
                         .factor = 1 / (double)s->length};
}

static size_t forward_workspace(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    column_sums columns = columns_of(work, &s);
    if (s.inner != 1) return column_plan(&columns, dtype_bytes(work->storage));
    return line_chunks(&s) > 1 ? (size_t)(s.outer * line_chunks(&s)) * sizeof(double) : 0;
}

static vjp_status forward(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    if (!vjp_data(work, MEAN_Y) || s.outer * s.inner == 0) return VJP_OK;
    if (s.inner == 1) {
        forward_lines(work, &s);
        return VJP_OK;
    }
    column_sums columns = columns_of(work, &s);
    column_plan(&columns, dtype_bytes(work->storage));
    columns.partial = work->workspace;
    element_call c = element_call_of(work, &columns_op, NULL);
    column_run(work, &c, &columns, dtype_bytes(work->storage), columns_task);
    return VJP_OK;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

typedef struct spread_call {
    element_call call; /* all of dy and dx; a task takes one outer after another */
    vjp_mean_sizes s;
} spread_call;

/* Every row of dx that belongs to one outer is dy's row, or where inner is 1 one number. */
INLINE void spread_row(const void *factor, element_vectors *e) {
    e->out[0] = vf_mul(e->in[0], vf_set(*(const float *)factor));
}

INLINE void spread_number(const void *number, element_vectors *e) {
    e->out[0] = vf_set(*(const float *)number);
}

static const element_op row_op = {
    .inputs = 1, .in = {{MEAN_B_DY, OTHER | ROW}}, .outputs = 1, .out = {{MEAN_B_DX, STORED}}};
static const element_op number_op = {.outputs = 1, .out = {{MEAN_B_DX, STORED}}};

INLINE void backward_outers(vjp_dtype dtype, const spread_call *all, size_t task) {
    const vjp_mean_sizes s = all->s;
    element_call c = all->call;
    int64_t each = s.length * s.inner, end = cpu_split_end(&c.split, task), joined = column_width(s.length, s.inner);
    float share = (float)(1 / (double)s.length), tile[COLUMN_BLOCK + LANES];
    for (int64_t begin = cpu_split_begin(&c.split, task), to; begin < end; begin = to) {
        int64_t outer = begin / each, first = outer * each;
        to = vjp_min(first + each, end);
        const void *dy = c.in[0] = at(dtype, all->call.in[0], outer * s.inner);
        float number = share * f32_load(dtype, dy, 0);
        c.parameters = s.inner == 1 ? &number : &share;
        c.out[0] = at_mutable(dtype, all->call.out[0], first);
        c.phase = all->call.phase + first;
        c.width = s.inner == 1 ? each : vjp_min(joined, each);
        if (s.inner == 1) {
            element_range(spread_number, &number_op, (element_types){dtype, dtype}, &c, begin - first, to - first);
        } else if (joined == s.inner) {
            element_range(spread_row, &row_op, (element_types){dtype, dtype}, &c, begin - first, to - first);
        } else {
            for (int64_t j = 0; j < c.width; j++)
                tile[j] = j < s.inner ? f32_load(dtype, dy, j) : tile[j - s.inner];
            c.in[0] = tile;
            element_range(spread_row, &row_op, (element_types){dtype, VJP_F32}, &c, begin - first, to - first);
        }
    }
    if (c.streams) vf_stream_done();
}

static void backward_task(void *call, size_t task) {
    const spread_call *c = call;
    BY_DTYPE(c->call.storage, backward_outers, c, task);
}

static vjp_status backward(const vjp_work *work) {
    spread_call c = {element_call_of(work, &row_op, NULL), vjp_mean_sizes_of(work)};
    int64_t count = c.call.width;
    if (c.call.out[0] && count > 0) element_start(work, &row_op, &c.call, count, backward_task);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(mean)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_STORAGE_16_32},
    {backward, NULL, VJP_STORAGE_16_32},
};
