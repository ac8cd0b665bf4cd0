/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d by rows, for channels first: vectors run along a row of windows.
 *
 * Rows of x are staged as f32 on the stack with -inf around them, and split by the stride: element p of the padded
 * row is number p / stride of phase p % stride. Tap k of neighbouring windows is then a run of neighbours in one phase,
 * without edge cases. -inf never wins, because a window starts from -inf at its first element inside x.
 *
 * In the backward an element of dx adds, in the order of the windows, the dy of each window over it whose argmax it is.
 * For that the argmax, found again, and dy are kept for the few rows of windows that reach a row of dx. Each element of
 * dx is written once, by the task that owns its row; two tasks that need the same row of windows both search it.
 */
#ifndef VJP_CPU_MAXPOOL2D_ROWS_H
#define VJP_CPU_MAXPOOL2D_ROWS_H

#include "cpu/pool/maxpool2d.h"

/*
 * Columns of dx (or windows of y) at a time, how far a window may reach in steps of the stride, and rows kept: 28 KiB
 * of x and 22 KiB of windows at most, a few KiB for usual kernels. Kernels that do not fit take the path by elements.
 */
enum { ROW_BLOCK = 128, MAX_REACH = 32, MAX_STRIDE = 4, MAX_WINDOW_ROWS = 16 };
enum { WINDOWS = ROW_BLOCK + LANES + MAX_REACH, PHASE = WINDOWS + MAX_REACH + LANES, STAGED_PHASES = 32 };

typedef struct window_row {
    int32_t index[WINDOWS];
    float dy[PHASE];
} window_row;

typedef struct row_state {
    const void *x;                                        /* the plane */
    int64_t first_window, windows;                        /* of the block */
    int64_t staged[STAGED_PHASES], kept[MAX_WINDOW_ROWS]; /* which row a place holds; -1: none */
    int64_t staged_rows, kept_rows;
    int32_t first_column[WINDOWS]; /* a window's first column inside x */
    float phase[STAGED_PHASES][PHASE];
    window_row kept_row[MAX_WINDOW_ROWS];
} row_state;

static bool rows_fit(const vjp_maxpool2d_sizes *s) {
    return !s->channels_last && s->height * s->width <= INT32_MAX && s->stride_w <= MAX_STRIDE &&
           (s->kernel_w - 1) * s->dilation_w / s->stride_w <= MAX_REACH &&
           (s->kernel_h - 1) * s->dilation_h + 1 <= STAGED_PHASES / s->stride_w &&
           (s->kernel_h - 1) * s->dilation_h / s->stride_h + 1 <= MAX_WINDOW_ROWS;
}

/* Elements [i, i + 16) of a row of n, -inf outside. */
INLINE vf load_padded(vjp_dtype dtype, const void *row, int64_t n, int64_t i) {
    if (i >= 0 && i + LANES <= n) return vf_load(dtype, row, i);
    vf outside = vf_set(-INFINITY);
    if (i >= n || i + LANES <= 0) return outside;
#if defined(CPU_ISA_AVX512)
    if (dtype == VJP_F32) { /* lanes that the mask leaves out are not touched in memory */
        unsigned below = i < 0 ? ~0u << -i : ~0u, above = n - i < LANES ? (1u << (n - i)) - 1 : ~0u;
        const float *from = (const float *)row;
        return (vf){{(native_f)_mm512_mask_loadu_ps((__m512)outside.v[0], (__mmask16)(below & above), from + i)}};
    }
#endif
    /* Whole vectors around the edge, put in place through memory: far cheaper than a partial load. */
    float lanes[3 * LANES];
    if (n >= LANES) {
        vf_store(VJP_F32, lanes, i < 0 ? 0 : LANES, outside);
        vf_store(VJP_F32, lanes, i < 0 ? -i : 0, vf_load(dtype, row, i < 0 ? 0 : n - LANES));
        return vf_load(VJP_F32, lanes, i < 0 ? 0 : i - (n - LANES));
    }
    vf_store(VJP_F32, lanes, 0, outside);
    vf_store(VJP_F32, lanes, LANES, outside);
    vf_store(VJP_F32, lanes, 2 * LANES, outside);
    vf_store(VJP_F32, lanes, LANES, vf_select(vi_below(n), vf_load_part(dtype, row, 0, n), outside));
    return vf_load(VJP_F32, lanes, LANES + i);
}

/* Begins a block: windows [first, first + count), of which some may be outside the row of windows. */
INLINE void begin_block(row_state *state, const vjp_maxpool2d_sizes *s, int64_t first, int64_t count) {
    state->first_window = first;
    state->windows = count;
    state->staged_rows = STAGED_PHASES / s->stride_w;
    state->kept_rows = MAX_WINDOW_ROWS;
    for (int i = 0; i < STAGED_PHASES; i++)
        state->staged[i] = -1;
    for (int i = 0; i < MAX_WINDOW_ROWS; i++)
        state->kept[i] = -1;
    for (int64_t w = 0; w < vjp_round_up(count, LANES); w++) {
        int64_t column = (first + w) * s->stride_w - s->padding_w;
        if (column < 0) column += vjp_round_up(-column, s->dilation_w);
        state->first_column[w] = (int32_t)column;
    }
}

/*
 * x is prefetched this far ahead of its staging: on one core of a Sapphire Rapids a forward from memory takes three
 * quarters of the time in f32, a tenth less in 16 bits. 2 and 8 KiB did the same.
 */
enum { STAGE_AHEAD = 4096 };

/* `steps` numbers of each phase of a row of n, from element `first` on. */
INLINE void split_row(vjp_dtype dtype, float (*phase)[PHASE], const void *row, int64_t n, int64_t first, int64_t steps,
                      int64_t stride) {
    for (int64_t j = 0; j < steps; j += LANES) {
        int64_t w = first + j * stride;
        prefetch_first_level((const char *)at(dtype, row, w) + STAGE_AHEAD,
                             stride * LANES * (int64_t)dtype_bytes(dtype));
        if (stride == 1) {
            vf_store(VJP_F32, phase[0], j, load_padded(dtype, row, n, w));
        } else if (stride == 2) {
            vf a = load_padded(dtype, row, n, w), b = load_padded(dtype, row, n, w + LANES);
            vf_store(VJP_F32, phase[0], j, vf_unzip(a, b, false));
            vf_store(VJP_F32, phase[1], j, vf_unzip(a, b, true));
        } else {
            for (int64_t v = 0; v < stride; v++) {
                float lanes[LANES];
                vf_store(VJP_F32, lanes, 0, load_padded(dtype, row, n, w + v * LANES));
                for (int64_t i = 0; i < LANES; i++) {
                    int64_t p = v * LANES + i;
                    phase[p % stride][j + p / stride] = lanes[i];
                }
            }
        }
    }
}

/*
 * Only here and in write_line() does the dtype matter. Neither is inlined into the kernels below, which are compiled
 * for each usual kernel size: three times as much code would gain nothing.
 */
static void stage_row(vjp_dtype dtype, float (*phase)[PHASE], const void *row, int64_t n, int64_t first, int64_t steps,
                      int64_t stride) {
    switch (dtype) {
    case VJP_BF16: split_row(VJP_BF16, phase, row, n, first, steps, stride); break;
    case VJP_F16: split_row(VJP_F16, phase, row, n, first, steps, stride); break;
    default:
        if (stride == 2)
            split_row(VJP_F32, phase, row, n, first, steps, 2);
        else
            split_row(VJP_F32, phase, row, n, first, steps, stride);
        break;
    }
}

INLINE void write_typed(vjp_dtype dtype, write_mode mode, void *to, int64_t i, const float *line, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES)
        vf_write_part(mode, dtype, to, i + j, n - j, vf_load(VJP_F32, line, j));
}

/* n numbers of a line (readable up to a multiple of 16) to element i of y or dx on. */
static void write_line(write_mode mode, vjp_dtype dtype, void *to, int64_t i, const float *line, int64_t n) {
    BY_DTYPE(dtype, write_typed, mode, to, i, line, n);
}

/* The phases of row h of x, staged first if they are not there. */
INLINE const float (*staged_row(row_state *state, const pool_call *call, int64_t h, int64_t stride,
                                int64_t reach))[PHASE] {
    int64_t place = h % state->staged_rows;
    float(*phase)[PHASE] = state->phase + place * stride;
    if (state->staged[place] != h) {
        state->staged[place] = h;
        int64_t steps = state->windows + reach; /* lanes past the last window are never read */
        stage_row(call->dtype, phase, at(call->dtype, state->x, h * call->s.width), call->s.width,
                  state->first_window * stride - call->s.padding_w, steps, stride);
    }
    return (const float(*)[PHASE])phase;
}

/* The kernel's columns, as constants where they are usual ones. */
typedef struct columns {
    int64_t kernel, stride, dilation;
} columns;

/* The maxima of one row of windows of the block: their value and place in the plane, sixteen at a time. */
typedef struct found_row {
    const float (*phase[STAGED_PHASES])[PHASE];
    int64_t row[STAGED_PHASES], rows;
} found_row;

INLINE void stage_windows(row_state *state, const pool_call *call, int64_t oh, columns c, found_row *found) {
    const vjp_maxpool2d_sizes *s = &call->s;
    taps t = row_taps(s, oh);
    int64_t reach = (c.kernel - 1) * c.dilation / c.stride;
    found->rows = 0;
    for (int64_t k = t.first; k < t.end; k++) {
        int64_t h = t.origin + k * s->dilation_h;
        found->row[found->rows] = h;
        found->phase[found->rows++] = staged_row(state, call, h, c.stride, reach);
    }
}

INLINE best find_windows(const row_state *state, const vjp_maxpool2d_sizes *s, columns c, const found_row *found,
                         int64_t w) {
    best b = {vf_set(-INFINITY), vi_add(vi_load(state->first_column + w), vi_set((int32_t)(found->row[0] * s->width)))};
    vi column =
        vi_add(vi_steps((int32_t)c.stride), vi_set((int32_t)((state->first_window + w) * c.stride - s->padding_w)));
    for (int64_t r = 0; r < found->rows; r++) {
        vi row = vi_add(column, vi_set((int32_t)(found->row[r] * s->width)));
        for (int64_t k = 0; k < c.kernel; k++) {
            int64_t offset = k * c.dilation;
            vf value = vf_load(VJP_F32, found->phase[r][offset % c.stride], offset / c.stride + w);
            best_take(&b, value, vi_add(row, vi_set((int32_t)offset)));
        }
    }
    return b;
}

/* Rows [begin, end) of the windows of one plane. */
INLINE void forward_rows(const pool_call *call, row_state *state, columns c, int64_t plane, int64_t begin,
                         int64_t end) {
    const vjp_maxpool2d_sizes *s = &call->s;
    state->x = at(call->dtype, call->x, plane * s->height * s->width);
    for (int64_t first = 0; first < s->out_width; first += ROW_BLOCK) {
        begin_block(state, s, first, vjp_min(s->out_width - first, ROW_BLOCK));
        for (int64_t oh = begin; oh < end; oh++) {
            found_row found;
            stage_windows(state, call, oh, c, &found);
            int64_t to = (plane * s->out_height + oh) * s->out_width + first;
            float line[WINDOWS];
            for (int64_t w = 0; w < state->windows; w += LANES) {
                best b = find_windows(state, s, c, &found, w);
                vf_store(VJP_F32, line, w, b.value);
                if (call->argmax) store_argmax(call->argmax_type, call->argmax, to + w, state->windows - w, b.index);
            }
            if (call->y) write_line(call->mode, call->dtype, call->y, to, line, state->windows);
        }
    }
}

/* The argmax and dy of one row of the block's windows. */
INLINE const window_row *kept_windows(const pool_call *call, row_state *state, columns c, int64_t plane, int64_t oh) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t place = oh % state->kept_rows, first = state->first_window;
    window_row *row = &state->kept_row[place];
    if (state->kept[place] == oh) return row;
    state->kept[place] = oh;
    int64_t from = (plane * s->out_height + oh) * s->out_width;
    int64_t all = vjp_round_up(state->windows, LANES);
    stage_row(call->dtype, &row->dy, at(call->dtype, call->dy, from), s->out_width, first, all, 1);
    found_row found;
    stage_windows(state, call, oh, c, &found);
    for (int64_t w = 0; w < state->windows; w += LANES)
        vi_store(row->index + w, find_windows(state, s, c, &found, w).index);
    /* Windows outside the row have no element. */
    for (int64_t w = 0; w < -first && w < all; w++)
        row->index[w] = -1;
    for (int64_t w = s->out_width - first; w < all; w++)
        row->index[w] = -1;
    return row;
}

/* dx of columns j * stride + phase of the padded row, for 16 values of j. */
INLINE vf gradient_of(const window_row *const *rows, int64_t count, columns c, int64_t phase, int64_t j, int64_t reach,
                      vi place) {
    vf sum = vf_zero();
    for (int64_t r = 0; r < count; r++)
        for (int64_t k = c.kernel - 1; k >= 0; k--) { /* backwards: the windows come forwards */
            int64_t offset = k * c.dilation;
            if (offset % c.stride != phase) continue;
            int64_t w = j + reach - offset / c.stride;
            sum = add_where(sum, vi_load(rows[r]->index + w), place, vf_load(VJP_F32, rows[r]->dy, w));
        }
    return sum;
}

/* Rows [begin, end) of dx of one plane. */
INLINE void backward_rows(const pool_call *call, row_state *state, columns c, int64_t plane, int64_t begin,
                          int64_t end) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t reach = (c.kernel - 1) * c.dilation / c.stride;
    state->x = at(call->dtype, call->x, plane * s->height * s->width);
    for (int64_t left = 0; left < s->width; left += call->block) {
        int64_t width = vjp_min(s->width - left, call->block);
        int64_t j0 = (left + s->padding_w) / c.stride, j1 = (left + width - 1 + s->padding_w) / c.stride + 1;
        int64_t steps = vjp_round_up(j1 - j0, LANES);
        begin_block(state, s, j0 - reach, steps + reach);
        for (int64_t h = begin; h < end; h++) {
            const window_row *rows[MAX_WINDOW_ROWS];
            int64_t count = 0;
            span over = windows_over(h, h + 1, s->out_height, s->kernel_h, s->stride_h, s->padding_h, s->dilation_h);
            for (int64_t oh = over.begin; oh < over.end; oh++)
                if ((h + s->padding_h - oh * s->stride_h) % s->dilation_h == 0)
                    rows[count++] = kept_windows(call, state, c, plane, oh);
            float line[(ROW_BLOCK + 2 * LANES) * MAX_STRIDE];
            for (int64_t j = 0; j < steps; j += LANES) {
                vi place = vi_add(vi_steps((int32_t)c.stride),
                                  vi_set((int32_t)(h * s->width + (j0 + j) * c.stride - s->padding_w)));
                vf phase[MAX_STRIDE];
                for (int64_t p = 0; p < c.stride; p++)
                    phase[p] = gradient_of(rows, count, c, p, j, reach, vi_add(place, vi_set((int32_t)p)));
                if (c.stride == 1) {
                    vf_store(VJP_F32, line, j, phase[0]);
                } else if (c.stride == 2) {
                    vf_store(VJP_F32, line, 2 * j, vf_zip(phase[0], phase[1], false));
                    vf_store(VJP_F32, line, 2 * j + LANES, vf_zip(phase[0], phase[1], true));
                } else {
                    for (int64_t p = 0; p < c.stride; p++) {
                        float lanes[LANES];
                        vf_store(VJP_F32, lanes, 0, phase[p]);
                        for (int64_t i = 0; i < LANES; i++)
                            line[(j + i) * c.stride + p] = lanes[i];
                    }
                }
            }
            int64_t to = (plane * s->height + h) * s->width + left;
            const float *from = line + (left + s->padding_w - j0 * c.stride);
            write_line(call->mode, call->dtype, call->dx, to, from, width);
        }
    }
}

/* Items are rows of y or dx, over all planes. */
INLINE void pool_rows(const pool_call *call, size_t task, bool backward, columns c) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t each = backward ? s->height : s->out_height, per = call->item_rows;
    int64_t end = cpu_split_end(&call->split, task) * per;
    row_state state;
    for (int64_t row = cpu_split_begin(&call->split, task) * per; row < end;) {
        int64_t plane = row / each, from = row % each, to = vjp_min(each, from + (end - row));
        if (backward)
            backward_rows(call, &state, c, plane, from, to);
        else
            forward_rows(call, &state, c, plane, from, to);
        row += to - from;
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* The usual kernels are compiled with their sizes known. */
INLINE void pool_rows_sized(const pool_call *call, size_t task, bool backward) {
    columns c = {call->s.kernel_w, call->s.stride_w, call->s.dilation_w};
    if (c.kernel == 2 && c.stride == 2 && c.dilation == 1)
        pool_rows(call, task, backward, (columns){2, 2, 1});
    else if (c.kernel == 3 && c.stride == 2 && c.dilation == 1)
        pool_rows(call, task, backward, (columns){3, 2, 1});
    else if (c.kernel == 3 && c.stride == 1 && c.dilation == 1)
        pool_rows(call, task, backward, (columns){3, 1, 1});
    else
        pool_rows(call, task, backward, c);
}

#endif
