/*
 * conv2d: the forward and the gradient of x are sums of one kind (conv2d.h), made by three ways: planes (channels
 * first), pixels (channels last), and pixels of a depthwise convolution. The gradient of the weights is made by blocks
 * (conv2d_weight.h); with a BLAS it is a matrix product over all outputs, whose operand of windows is made while it is
 * packed. dbias sums dy in double.
 */
#include "cpu/conv/conv2d.h"
#include "cpu/conv/conv2d_each.h"
#include "cpu/conv/conv2d_last.h"
#include "cpu/conv/conv2d_planes.h"
#include "cpu/conv/conv2d_weight.h"

/* ---- Sums: the forward, and the phases of dx ---------------------------------------------------------- */

static size_t sum_workspace(const vjp_conv2d_sizes *s, const conv_sum *p) {
    if (!s->channels_last) return planes_workspace(p);
    return is_each(s) ? each_workspace(p) : pixels_workspace(p);
}

static void run_sum(const vjp_work *work, const vjp_conv2d_sizes *s, const conv_sum *p, void *workspace) {
    if (!s->channels_last)
        sum_planes(work, p, workspace);
    else if (is_each(s))
        sum_each(work, p, workspace);
    else
        sum_pixels(work, p, workspace);
}

static size_t forward_workspace(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = forward_sum(work);
    return sum_workspace(&s, &p);
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[CONV2D_Y]) return VJP_OK;
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = forward_sum(work);
    run_sum(work, &s, &p, work->workspace);
    return VJP_OK;
}

static size_t dx_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    size_t bytes = 0;
    for (int64_t down = 0; down < phases_of(side_of(s, false)); down++)
        for (int64_t across = 0; across < phases_of(side_of(s, true)); across++) {
            conv_sum p = backward_sum(work, down, across);
            size_t one = sum_workspace(s, &p);
            bytes = one > bytes ? one : bytes;
        }
    return bytes;
}

/* Where no tap reaches, dx is zero: all of it is, before the phases are written. */
static void clear(const vjp_work *work, int slot, int64_t count) {
    memset(vjp_data(work, slot), 0, (size_t)count * dtype_bytes(work->storage));
}

static void make_dx(const vjp_work *work, const vjp_conv2d_sizes *s) {
    int64_t count = s->batch * s->channels * s->height * s->width;
    if (count == 0) return;
    bool gaps = leaves_gaps(side_of(s, false)) || leaves_gaps(side_of(s, true));
    if (gaps && !vjp_accumulates(work, CONV2D_B_DX)) clear(work, CONV2D_B_DX, count);
    for (int64_t down = 0; down < phases_of(side_of(s, false)); down++)
        for (int64_t across = 0; across < phases_of(side_of(s, true)); across++) {
            conv_sum p = backward_sum(work, down, across);
            run_sum(work, s, &p, work->workspace);
        }
}

/* ---- dweight ------------------------------------------------------------------------------------------ */

/* The forward's sum in the backward, with x as its source. */
static conv_sum windows_of_x(const vjp_work *work, const vjp_conv2d_sizes *s) {
    return (conv_sum){.h = forward_axis(side_of(s, false)),
                      .w = forward_axis(side_of(s, true)),
                      .batch = s->batch,
                      .groups = s->groups,
                      .ins = s->channels / s->groups,
                      .outs = s->out_channels / s->groups,
                      .source = matrix_of(work, CONV2D_B_X, 0, 0),
                      .last = s->channels_last,
                      .blas = cpu_state_of(work)->blas,
                      .threads = cpu_state_of(work)->threads};
}

/*
 * With a BLAS: one group's gradient as a product over the outputs (image, i, j). Channels first: [terms, outputs] by
 * [outputs, outs], so that both operands run along outputs, as memory does. Channels last: [outs, outputs] by
 * [outputs, terms], whose rows are pixels.
 */
typedef struct weight_gradient {
    conv_sum windows;
    window_rows rows;
    matrix dy, dweight;
    int64_t group, terms;
    gemm_call product;
} weight_gradient;

/* Row (channel, tap) of the windows of planes: a stretch of outputs. */
static void read_window_planes(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const weight_gradient *g = source;
    const conv_sum *p = &g->windows;
    int64_t across = row % p->w.taps, down = row / p->w.taps % p->h.taps, in = row / p->w.taps / p->h.taps;
    int64_t j = column % p->w.out, i = column / p->w.out % p->h.out, image = column / p->w.out / p->h.out;
    int64_t shift = p->w.base + across * p->w.dilation;
    while (count > 0) {
        int64_t n = least(count, p->w.out - j), h = i * p->h.step + p->h.base + down * p->h.dilation;
        int64_t channel = (image * p->groups + g->group) * p->ins + in;
        if (h < 0 || h >= p->h.size)
            memset(to, 0, (size_t)n * sizeof *to);
        else
            load_places(&p->w, p->source.dtype, p->source.data, (channel * p->h.size + h) * p->w.size, shift, j, n, to);
        to += n;
        count -= n;
        j = 0;
        if (++i < p->h.out) continue;
        i = 0;
        image++;
    }
}

/* Row `out` of dy: the planes of all images one after the other. */
static void read_planes(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const weight_gradient *g = source;
    const conv_sum *p = &g->windows;
    int64_t plane = p->h.out * p->w.out, image = column / plane, at = column % plane;
    while (count > 0) {
        int64_t n = least(count, plane - at);
        load_row(g->dy.dtype, g->dy.data, ((image * p->groups + g->group) * p->outs + row) * plane + at, n, to);
        to += n;
        count -= n;
        at = 0;
        image++;
    }
}

/* A row of sums is one term of many outs: a column of dweight. */
static void finish_turned(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    const weight_gradient *g = target;
    for (int64_t o = 0; o < count; o++)
        put_element(&g->dweight, (g->group * g->windows.outs + column + o) * g->terms + row, sums[o]);
}

static void set_weight_gradient(const vjp_work *work, const vjp_conv2d_sizes *s, int64_t group, weight_gradient *g) {
    *g = (weight_gradient){.windows = windows_of_x(work, s), .group = group};
    g->rows = window_rows_of(&g->windows);
    g->terms = g->rows.terms;
    g->dy = matrix_of(work, CONV2D_B_DY, s->out_channels, 0);
    g->dweight = matrix_of(work, CONV2D_B_DWEIGHT, g->terms, 0);
    int64_t outs = g->windows.outs;
    g->product = (gemm_call){.blas = cpu_state_of(work)->blas,
                             .threads = cpu_state_of(work)->threads,
                             .items = 1,
                             .k = s->batch * s->out_height * s->out_width};
    if (!s->channels_last) {
        g->product.m = g->terms;
        g->product.n = outs;
        g->product.a = (gemm_operand){.read = read_window_planes, .source = g};
        g->product.b = (gemm_operand){.transposed = true, .read = read_planes, .source = g};
        g->product.c = (gemm_result){.finish = finish_turned, .target = g};
        return;
    }
    g->product.m = outs;
    g->product.n = g->terms;
    g->dy.data = element(g->dy.data, g->dy.dtype, group * outs);
    g->dweight.data = element(g->dweight.data, g->dweight.dtype, group * outs * g->terms);
    g->windows.source.data = element(g->windows.source.data, g->windows.source.dtype, group * g->windows.ins);
    g->product.a = operand_of(&g->dy, true, 0);
    g->product.b = (gemm_operand){.read = read_windows, .source = &g->rows};
    g->product.c = result_in(&g->dweight, 0);
}

static size_t dweight_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    conv_sum p = windows_of_x(work, s);
    if (is_each(s)) return each_gradient_workspace(&p);
    if (!p.blas) return weights_workspace(&p);
    weight_gradient g;
    set_weight_gradient(work, s, 0, &g);
    return CPU_NAME(gemm_workspace)(&g.product);
}

static void make_dweight(const vjp_work *work, const vjp_conv2d_sizes *s) {
    conv_sum p = windows_of_x(work, s);
    matrix dy = matrix_of(work, CONV2D_B_DY, 0, 0), dweight = matrix_of(work, CONV2D_B_DWEIGHT, 0, 0);
    if (is_each(s)) {
        each_weight_gradient(work, &p, &dy, &dweight, s->channels_last, work->workspace);
        return;
    }
    if (!p.blas) {
        weight_gradient_of(work, &p, &dy, &dweight, work->workspace);
        return;
    }
    for (int64_t group = 0; group < s->groups && s->channels && s->out_channels; group++) {
        weight_gradient g;
        set_weight_gradient(work, s, group, &g);
        CPU_NAME(gemm)(work, &g.product, work->workspace);
    }
}

/* ---- dbias -------------------------------------------------------------------------------------------- */

/* The most doubles of all partial sums (4 MiB), partials of a channel, and numbers summed in f32 before a double. */
enum { BIAS_PARTIALS = 1 << 19, BIAS_CHUNKS = 64, BIAS_RUN = 1024 };

/* dy as `rows` rows of `n` numbers: pixels of channels, or planes of which row r is of channel r % channels. */
typedef struct bias_pass {
    matrix dy;
    bool last;
    int64_t rows, n, channels;
    cpu_cut cut;
    double *partial; /* [chunk][channel] */
} bias_pass;

static double sum_run(const matrix *m, int64_t at, int64_t count) {
    float values[BIAS_RUN];
    load_row(m->dtype, m->data, at, count, values);
    vf sum = vf_zero();
    for (int64_t i = 0; i < count; i += LANES)
        sum = vf_add(sum, vf_load_part(VJP_F32, values, i, count - i));
    return (double)vf_sum(sum);
}

static void bias_task(void *argument, size_t task) {
    const bias_pass *b = argument;
    double *sums = b->partial + (int64_t)task * b->channels;
    memset(sums, 0, (size_t)b->channels * sizeof *sums);
    for (int64_t row = cpu_cut_begin(&b->cut, task); row < cpu_cut_end(&b->cut, task); row++)
        for (int64_t i = 0; i < b->n; i += BIAS_RUN) {
            int64_t count = least(BIAS_RUN, b->n - i);
            if (!b->last) {
                sums[row % b->channels] += sum_run(&b->dy, row * b->n + i, count);
                continue;
            }
            float values[BIAS_RUN];
            load_row(b->dy.dtype, b->dy.data, row * b->n + i, count, values);
            for (int64_t j = 0; j < count; j++)
                sums[i + j] += (double)values[j];
        }
}

static bias_pass bias_pass_of(const vjp_work *work, const vjp_conv2d_sizes *s) {
    int64_t plane = s->out_height * s->out_width;
    bias_pass b = {.dy = matrix_of(work, CONV2D_B_DY, 0, 0), .last = s->channels_last, .channels = s->out_channels};
    b.rows = s->batch * (b.last ? plane : s->out_channels);
    b.n = b.last ? s->out_channels : plane;
    int64_t limit = most(1, least(BIAS_CHUNKS, BIAS_PARTIALS / most(1, s->out_channels)));
    b.cut = vjp_cpu_cut_items(b.rows, b.n * (int64_t)dtype_bytes(work->storage), limit);
    return b;
}

static size_t dbias_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    return round_up(bias_pass_of(work, s).cut.count * s->out_channels * (int64_t)sizeof(double));
}

static void make_dbias(const vjp_work *work, const vjp_conv2d_sizes *s) {
    bias_pass b = bias_pass_of(work, s);
    b.partial = work->workspace;
    matrix dbias = matrix_of(work, CONV2D_B_DBIAS, 0, 0);
    vjp_cpu_for(work, b.cut.count, bias_task, &b);
    for (int64_t o = 0; o < s->out_channels; o++) {
        double total = 0;
        for (int64_t chunk = 0; chunk < b.cut.count; chunk++)
            total += b.partial[chunk * s->out_channels + o];
        put_element(&dbias, o, (float)total);
    }
}

/* ---- The backward ------------------------------------------------------------------------------------- */

/* The gradients are made one after the other, in the same workspace. */
static size_t backward_workspace(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    size_t dx = work->tensor[CONV2D_B_DX] ? dx_workspace(work, &s) : 0;
    size_t dweight = work->tensor[CONV2D_B_DWEIGHT] ? dweight_workspace(work, &s) : 0;
    size_t dbias = work->tensor[CONV2D_B_DBIAS] ? dbias_workspace(work, &s) : 0;
    size_t bytes = dx > dweight ? dx : dweight;
    return bytes > dbias ? bytes : dbias;
}

static vjp_status backward(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    if (work->tensor[CONV2D_B_DX]) make_dx(work, &s);
    if (work->tensor[CONV2D_B_DWEIGHT]) make_dweight(work, &s);
    if (work->tensor[CONV2D_B_DBIAS]) make_dbias(work, &s);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(conv2d)[VJP_PASS_COUNT];

const vjp_kernel CPU_NAME(conv2d)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};
