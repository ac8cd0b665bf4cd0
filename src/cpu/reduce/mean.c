/*
 * mean on the CPU: x as [outer, length, inner], averaged along length. Where inner is 1 the elements of a mean lie side
 * by side and a line is summed (sums.h); else they are the column of a matrix. A long line is cut into chunks by its
 * length alone, each with its sum in the workspace. The backward writes dy / length as often as there are elements.
 */
#include "cpu/reduce/sums.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(mean)[VJP_PASS_COUNT];

/* Elements of a chunk of a long line: 256 KiB of f32, several times what a task is worth waking a thread for. */
enum { LINE_CHUNK = 1 << 16 };

typedef struct mean_call {
    vjp_mean_sizes s;
    vjp_dtype dtype;
    const void *x;   /* the backward's dy */
    void *y;         /* the backward's dx */
    bool accumulate; /* lines */
    write_mode mode; /* the backward's */
    int64_t chunks;  /* lines */
    double *partial; /* lines: [outer, chunks] where there are several */
    column_sums columns;
    cpu_cut cut;
    element_cut elements;
} mean_call;

/* ---- Forward ----------------------------------------------------------------------------------------- */

static void put_line(const mean_call *c, int64_t line, double sum) {
    double old = c->accumulate ? (double)f32_load(c->dtype, c->y, line) : 0;
    f32_store(c->dtype, c->y, line, (float)(sum / (double)c->s.length + old));
}

INLINE void sum_lines(const mean_call *c, size_t task, vjp_dtype dtype) {
    for (int64_t item = cpu_cut_begin(&c->cut, task); item < cpu_cut_end(&c->cut, task); item++) {
        int64_t line = item / c->chunks, begin = item % c->chunks * LINE_CHUNK;
        int64_t end = c->chunks > 1 && begin + LINE_CHUNK < c->s.length ? begin + LINE_CHUNK : c->s.length;
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

INLINE vf element_of_x(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const mean_call *c = call;
    (void)j;
    return vf_load_part(v.dtype, c->x, i, n);
}

INLINE void forward_task(const void *call, size_t task, vjp_dtype dtype) {
    const mean_call *c = call;
    element_variant v = {.dtype = dtype};
    if (c->s.inner == 1)
        sum_lines(c, task, dtype);
    else
        for (int64_t item = cpu_cut_begin(&c->cut, task); item < cpu_cut_end(&c->cut, task); item++)
            column_item(element_of_x, c, v, &c->columns, item);
}

static void forward_f32(void *call, size_t task) {
    forward_task(call, task, VJP_F32);
}

static void forward_bf16(void *call, size_t task) {
    forward_task(call, task, VJP_BF16);
}

static void forward_f16(void *call, size_t task) {
    forward_task(call, task, VJP_F16);
}

/* Cuts the problem; returns the bytes of workspace. */
static size_t plan_forward(const vjp_work *work, mean_call *c) {
    size_t bytes = dtype_bytes(work->storage);
    c->s = vjp_mean_sizes_of(work);
    c->dtype = work->storage;
    c->accumulate = vjp_accumulates(work, MEAN_Y);
    if (c->s.inner == 1) {
        c->chunks = c->s.length >= 2 * LINE_CHUNK ? (c->s.length + LINE_CHUNK - 1) / LINE_CHUNK : 1;
        int64_t each = c->chunks > 1 ? LINE_CHUNK : c->s.length;
        c->cut = vjp_cpu_cut_items(c->s.outer * c->chunks, each * (int64_t)bytes, CPU_MOST_TASKS);
        return c->chunks > 1 ? (size_t)(c->s.outer * c->chunks) * sizeof(double) : 0;
    }
    c->columns = (column_sums){.matrices = c->s.outer,
                               .rows = c->s.length,
                               .dim = c->s.inner,
                               .to = vjp_data(work, MEAN_Y),
                               .to_dtype = work->storage,
                               .accumulate = c->accumulate,
                               .factor = 1 / (double)c->s.length};
    size_t workspace = column_plan(&c->columns, bytes);
    c->cut = column_cut(&c->columns, bytes);
    return workspace;
}

static size_t forward_workspace(const vjp_work *work) {
    mean_call c = {0};
    return plan_forward(work, &c);
}

static vjp_status forward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = forward_f32, [VJP_BF16] = forward_bf16, [VJP_F16] = forward_f16};
    mean_call c = {.x = vjp_data(work, MEAN_X), .y = vjp_data(work, MEAN_Y)};
    plan_forward(work, &c);
    if (!c.y || c.s.outer * c.s.inner == 0) return VJP_OK;
    c.partial = c.columns.partial = work->workspace;
    vjp_cpu_for(work, c.cut.count, tasks[work->storage], &c);
    if (c.s.inner != 1) column_total(work, &c.columns);
    for (int64_t line = 0; c.s.inner == 1 && c.chunks > 1 && line < c.s.outer; line++) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < c.chunks; chunk++)
            sum += c.partial[line * c.chunks + chunk];
        put_line(&c, line, sum);
    }
    return VJP_OK;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/* One outer's part of dx, as rows that are all alike. */
typedef struct spread {
    const void *row; /* of dy, or dy / length laid out in f32 */
    float factor;
} spread;

INLINE vf spread_one(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const spread *p = call;
    (void)v, (void)i, (void)j, (void)n;
    return vf_set(p->factor);
}

INLINE vf spread_row(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const spread *p = call;
    (void)i;
    return vf_mul(vf_load_part(v.other, p->row, j, n), vf_set(p->factor));
}

/* Elements [begin, end) of dx, which belong to one outer, walked in rows of `width`. */
INLINE void spread_rows(const mean_call *c, const spread *p, element_variant v, int64_t first, int64_t begin,
                        int64_t end, int64_t width) {
    for (int64_t row = first + (begin - first) / width * width; row < end; row += width) {
        int64_t from = row < begin ? begin : row, to = row + width < end ? row + width : end;
        element_walk(c->mode, v.dtype, spread_row, p, v, c->y, from, to, row);
    }
}

INLINE void backward_task(const void *call, size_t task, vjp_dtype dtype) {
    const mean_call *c = call;
    const vjp_mean_sizes s = c->s;
    int64_t each = s.length * s.inner, end = element_end(&c->elements, task), width = column_width(s.length, s.inner);
    float share = (float)(1 / (double)s.length), tile[COLUMN_PIECE + LANES];
    for (int64_t begin = element_begin(&c->elements, task), to; begin < end; begin = to) {
        int64_t outer = begin / each, first = outer * each;
        to = first + each < end ? first + each : end;
        spread p = {at(dtype, c->x, outer * s.inner), share};
        if (s.inner == 1) {
            p.factor = share * f32_load(dtype, c->x, outer);
            element_walk(c->mode, dtype, spread_one, &p, (element_variant){.dtype = dtype}, c->y, begin, to, first);
        } else if (width == s.inner) {
            spread_rows(c, &p, (element_variant){dtype, dtype, false}, first, begin, to, width);
        } else { /* narrow rows side by side */
            int64_t wide = width < each ? width : each;
            for (int64_t j = 0; j < wide; j++)
                tile[j] = j < s.inner ? f32_load(dtype, p.row, j) : tile[j - s.inner];
            p.row = tile;
            spread_rows(c, &p, (element_variant){dtype, VJP_F32, false}, first, begin, to, wide);
        }
    }
    if (c->mode == WRITE_STREAM) vf_stream_done();
}

static void backward_f32(void *call, size_t task) {
    backward_task(call, task, VJP_F32);
}

static void backward_bf16(void *call, size_t task) {
    backward_task(call, task, VJP_BF16);
}

static void backward_f16(void *call, size_t task) {
    backward_task(call, task, VJP_F16);
}

static vjp_status backward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = backward_f32, [VJP_BF16] = backward_bf16, [VJP_F16] = backward_f16};
    mean_call c = {.s = vjp_mean_sizes_of(work), .x = vjp_data(work, MEAN_B_DY), .y = vjp_data(work, MEAN_B_DX)};
    int64_t count = c.s.outer * c.s.length * c.s.inner;
    if (!c.y || count == 0) return VJP_OK;
    c.mode = element_mode(work, MEAN_B_DX, count, false);
    c.elements = element_cut_of(count, dtype_bytes(work->storage));
    vjp_cpu_for(work, c.elements.units.count, tasks[work->storage], &c);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(mean)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, NULL, VJP_BITS_CPU},
};
