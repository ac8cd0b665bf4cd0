/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d on the CPU. The first maximum of a window in row-major order wins, the first NaN wins over all, padding
 * never wins. In the backward every element of dx has one owner, which adds the dy of the windows that it won in the
 * order of the windows, in f32, and writes it once: no atomics, the same bits for any number of threads.
 *
 * The paths, the first that suits:
 *
 *     saved rows   backward with a saved argmax, channels first, one of four usual windows: each element of dx compares
 *                  its place with the argmax of the windows over it, 16 at a time, in a third of the time of saved
 *                  tiles (maxpool2d_saved.h)
 *     saved tiles  other backwards with a saved argmax: adds dy number by number into tiles as wide as the plane;
 *                  nothing has to be searched
 *     pairs        channels first, 2 x 2 windows that tile the plane: even and odd columns compared in registers, in a
 *                  third of the time of rows, or less where the data are in the cache (maxpool2d_pairs.h)
 *     rows         channels first, kernels that fit: vectors along a row of windows (maxpool2d_rows.h)
 *     pixels       channels last: vectors along the channels; the backward adds each window's dy into the tile of dx
 *                  where its argmax is
 *     elements     large kernels, planes past 2^31 elements: one element at a time; the backward by tiles, too
 *
 * A saved argmax is taken to lie in its window, as the forward wrote it; one that does not may be left out.
 */
#include "cpu/pool/maxpool2d.h"
#include "cpu/pool/maxpool2d_pairs.h"
#include "cpu/pool/maxpool2d_rows.h"
#include "cpu/pool/maxpool2d_saved.h"

/* Channels that a tile holds: two vectors, so that 16-bit types fill a cache line. */
enum { TILE_CHANNELS = 2 * LANES };

/*
 * Elements of a tile: 64 KiB of f32, so that tiles stay in the second-level cache and few windows reach over an edge.
 * Windows of more than LARGE_KERNEL elements get tiles eight times as large: each tile looks for the argmax again.
 */
enum { TILE_FLOATS = 16 << 10, LARGE_TILE_FLOATS = 128 << 10, LARGE_KERNEL = 64, MAX_TILE_TASKS = 64 };

/* Side of a tile in pixels, channels last: 16 x 32 x TILE_CHANNELS floats. */
enum { TILE_ROWS = 16, TILE_COLUMNS = 32 };

static bool pixels_fit(const vjp_maxpool2d_sizes *s) {
    return s->channels_last && s->height * s->width <= INT32_MAX;
}

/* ---- Channels last, by pixels ------------------------------------------------------------------------ */

/* The maxima of one window for channels [c, c + n), n < 16 or more. */
INLINE best find_channels(vjp_dtype dtype, const vjp_maxpool2d_sizes *s, const void *plane, taps rows, taps in_row,
                          int64_t c, int64_t n) {
    best b = {vf_set(-INFINITY), vi_set((int32_t)((rows.origin + rows.first * s->dilation_h) * s->width +
                                                  in_row.origin + in_row.first * s->dilation_w))};
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t j = in_row.first; j < in_row.end; j++) {
            int64_t place = (rows.origin + i * s->dilation_h) * s->width + in_row.origin + j * s->dilation_w;
            best_take(&b, vf_load_part(dtype, plane, place * s->channels + c, n), vi_set((int32_t)place));
        }
    return b;
}

/* Items are rows of windows. */
INLINE void forward_pixels(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        int64_t image = item / s->out_height;
        const void *plane = at(dtype, call->x, image * s->height * s->width * s->channels);
        taps rows = row_taps(s, item % s->out_height);
        for (int64_t ow = 0; ow < s->out_width; ow++) {
            taps in_row = column_taps(s, ow);
            int64_t to = (item * s->out_width + ow) * s->channels;
            for (int64_t c = 0; c < s->channels; c += LANES) {
                int64_t n = s->channels - c;
                best b = find_channels(dtype, s, plane, rows, in_row, c, n);
                if (call->y) vf_write_part(call->mode, dtype, call->y, to + c, n, b.value);
                if (call->argmax) store_argmax(call->argmax_type, call->argmax, to + c, n, b.index);
            }
        }
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* A tile of dx: rows [top, top + rows), columns [left, left + columns) of one image, and the windows over it. */
typedef struct tile {
    int64_t top, left, rows, columns;
    span down, across;
} tile;

static tile tile_at(const pool_call *call, int64_t index) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t in_row = vjp_divide_up(s->width, call->tile_w);
    tile t = {.top = index / in_row * call->tile_h, .left = index % in_row * call->tile_w};
    t.rows = vjp_min(s->height - t.top, call->tile_h);
    t.columns = vjp_min(s->width - t.left, call->tile_w);
    t.down = windows_over(t.top, t.top + t.rows, s->out_height, s->kernel_h, s->stride_h, s->padding_h, s->dilation_h);
    t.across =
        windows_over(t.left, t.left + t.columns, s->out_width, s->kernel_w, s->stride_w, s->padding_w, s->dilation_w);
    return t;
}

static int64_t tiles_of(const pool_call *call) {
    const vjp_maxpool2d_sizes *s = &call->s;
    return vjp_divide_up(s->height, call->tile_h) * (vjp_divide_up(s->width, call->tile_w));
}

/* Adds the dy of window (oh, ow) for channels [c, c + n) into the tile. */
INLINE void add_window(const pool_call *call, vjp_dtype dtype, const tile *t, float *sums, int64_t image, int64_t oh,
                       int64_t ow, int64_t c, int64_t n) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t from = ((image * s->out_height + oh) * s->out_width + ow) * s->channels + c;
    taps rows = row_taps(s, oh), in_row = column_taps(s, ow);
    vf dy = vf_load_part(dtype, call->dy, from, n);
    vi index = call->saved ? load_argmax(call->argmax_type, call->saved, from, n)
                           : find_channels(dtype, s, at(dtype, call->x, image * s->height * s->width * s->channels),
                                           rows, in_row, c, n)
                                 .index;
    for (int64_t i = rows.first; i < rows.end; i++) {
        int64_t h = rows.origin + i * s->dilation_h;
        if (h < t->top || h >= t->top + t->rows) continue;
        for (int64_t j = in_row.first; j < in_row.end; j++) {
            int64_t w = in_row.origin + j * s->dilation_w;
            if (w < t->left || w >= t->left + t->columns) continue;
            float *sum = sums + ((h - t->top) * t->columns + (w - t->left)) * TILE_CHANNELS;
            vf_store(VJP_F32, sum, 0,
                     add_where(vf_load(VJP_F32, sum, 0), index, vi_set((int32_t)(h * s->width + w)), dy));
        }
    }
}

/* Items are tiles, of TILE_CHANNELS channels each. */
INLINE void backward_pixels(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t blocks = vjp_divide_up(s->channels, TILE_CHANNELS), tiles = tiles_of(call);
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        int64_t c = item % blocks * TILE_CHANNELS, image = item / blocks / tiles;
        int64_t n = vjp_min(s->channels - c, TILE_CHANNELS);
        tile t = tile_at(call, item / blocks % tiles);
        memset(sums, 0, (size_t)(t.rows * t.columns * TILE_CHANNELS) * sizeof sums[0]);
        for (int64_t oh = t.down.begin; oh < t.down.end; oh++)
            for (int64_t ow = t.across.begin; ow < t.across.end; ow++)
                for (int64_t i = 0; i < n; i += LANES)
                    add_window(call, dtype, &t, sums + i, image, oh, ow, c + i, n - i);
        for (int64_t h = 0; h < t.rows; h++)
            for (int64_t w = 0; w < t.columns; w++) {
                int64_t to = ((image * s->height + t.top + h) * s->width + t.left + w) * s->channels + c;
                const float *sum = sums + (h * t.columns + w) * TILE_CHANNELS;
                for (int64_t i = 0; i < n; i += LANES)
                    vf_write_part(call->mode, dtype, call->dx, to + i, n - i, vf_load(VJP_F32, sum, i));
            }
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* ---- Saved tiles: any layout --------------------------------------------------------------------------- */

/* Numbers of dy that are converted to f32 at a time. */
enum { SAVED_BLOCK = 256 };

/* Tiles as wide as the plane: a place in the plane is then a place in the tile, without a division. */
static bool saved_tiles_fit(const vjp_maxpool2d_sizes *s) {
    return s->width <= (s->channels_last ? TILE_ROWS * TILE_COLUMNS : TILE_FLOATS);
}

/* Adds n numbers of dy, from element `from` on, to the places that won them; `base` is the tile's first. */
INLINE void add_saved(const pool_call *call, vjp_dtype dtype, vjp_dtype argmax_type, float *sums, int64_t base,
                      int64_t places, int64_t from, int64_t n, int64_t place_step, int64_t lane_step) {
    for (int64_t i = 0; i < n; i += SAVED_BLOCK) {
        int64_t count = vjp_min(n - i, SAVED_BLOCK);
        float dy[SAVED_BLOCK];
        for (int64_t j = 0; j < count; j += LANES)
            vf_store(VJP_F32, dy, j, vf_load_part(dtype, call->dy, from + i + j, count - j));
        for (int64_t j = 0; j < count; j++) {
            int64_t index = argmax_type == VJP_I32 ? ((const int32_t *)call->saved)[from + i + j]
                                                   : ((const int64_t *)call->saved)[from + i + j];
            uint64_t place = (uint64_t)(index - base);
            if (place < (uint64_t)places) sums[(int64_t)place * place_step + (i + j) * lane_step] += dy[j];
        }
    }
}

/* Items are tiles: of one plane, or of one image and TILE_CHANNELS channels. */
INLINE void saved_tiles_typed(vjp_dtype dtype, vjp_dtype argmax_type, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t tiles = tiles_of(call), plane = s->height * s->width, windows = s->out_height * s->out_width;
    int64_t blocks = vjp_divide_up(s->channels, TILE_CHANNELS);
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        tile t = tile_at(call, s->channels_last ? item / blocks % tiles : item % tiles);
        int64_t base = t.top * s->width, places = t.rows * s->width, first = t.down.begin * s->out_width;
        int64_t count = t.down.end > t.down.begin ? (t.down.end - t.down.begin) * s->out_width : 0;
        if (!s->channels_last) {
            memset(sums, 0, (size_t)places * sizeof sums[0]);
            int64_t from = item / tiles * windows + first, to = item / tiles * plane + base;
            add_saved(call, dtype, argmax_type, sums, base, places, from, count, 1, 0);
            for (int64_t i = 0; i < places; i += LANES)
                vf_write_part(call->mode, dtype, call->dx, to + i, places - i,
                              vf_load_part(VJP_F32, sums, i, places - i));
            continue;
        }
        int64_t c = item % blocks * TILE_CHANNELS, image = item / blocks / tiles;
        int64_t n = vjp_min(s->channels - c, TILE_CHANNELS);
        memset(sums, 0, (size_t)(places * TILE_CHANNELS) * sizeof sums[0]);
        for (int64_t w = 0; w < count; w++)
            add_saved(call, dtype, argmax_type, sums, base, places, (image * windows + first + w) * s->channels + c, n,
                      TILE_CHANNELS, 1);
        for (int64_t e = 0; e < places; e++)
            for (int64_t i = 0; i < n; i += LANES)
                vf_write_part(call->mode, dtype, call->dx, (image * plane + base + e) * s->channels + c + i, n - i,
                              vf_load(VJP_F32, sums, e * TILE_CHANNELS + i));
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

INLINE void backward_saved_tiles(vjp_dtype dtype, const pool_call *call, size_t task) {
    if (call->argmax_type == VJP_I32)
        saved_tiles_typed(dtype, VJP_I32, call, task);
    else
        saved_tiles_typed(dtype, VJP_I64, call, task);
}

/* ---- Any layout and kernel, an element at a time ----------------------------------------------------- */

/* Element e of plane (image, channel) of a tensor with `plane` elements per plane is first + e * step. */
typedef struct plane_place {
    int64_t first, step;
} plane_place;

INLINE plane_place place_of(const vjp_maxpool2d_sizes *s, int64_t image_channel, int64_t plane) {
    int64_t image = image_channel / s->channels, channel = image_channel % s->channels;
    if (s->channels_last) return (plane_place){image * plane * s->channels + channel, s->channels};
    return (plane_place){image_channel * plane, 1};
}

INLINE int64_t find_element(const vjp_maxpool2d_sizes *s, vjp_dtype dtype, const void *x, plane_place at_x, int64_t oh,
                            int64_t ow, float *value) {
    taps rows = row_taps(s, oh), in_row = column_taps(s, ow);
    int64_t index = -1;
    float largest = 0;
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t j = in_row.first; j < in_row.end; j++) {
            int64_t e = (rows.origin + i * s->dilation_h) * s->width + in_row.origin + j * s->dilation_w;
            float v = f32_load(dtype, x, at_x.first + e * at_x.step);
            if (index >= 0 && (v <= largest || largest != largest)) continue;
            index = e;
            largest = v;
        }
    *value = largest;
    return index;
}

/* Items are rows of windows of one image and channel. */
INLINE void forward_elements(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        int64_t oh = item % s->out_height;
        plane_place at_x = place_of(s, item / s->out_height, s->height * s->width);
        plane_place at_y = place_of(s, item / s->out_height, s->out_height * s->out_width);
        for (int64_t ow = 0; ow < s->out_width; ow++) {
            float value;
            int64_t index = find_element(s, dtype, call->x, at_x, oh, ow, &value);
            int64_t to = at_y.first + (oh * s->out_width + ow) * at_y.step;
            if (call->y) f32_write(call->mode, dtype, call->y, to, value);
            if (call->argmax && call->argmax_type == VJP_I32) ((int32_t *)call->argmax)[to] = (int32_t)index;
            if (call->argmax && call->argmax_type == VJP_I64) ((int64_t *)call->argmax)[to] = index;
        }
    }
}

/* Items are tiles of one image and channel. */
INLINE void backward_elements(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t tiles = tiles_of(call);
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        plane_place at_x = place_of(s, item / tiles, s->height * s->width);
        plane_place at_y = place_of(s, item / tiles, s->out_height * s->out_width);
        tile t = tile_at(call, item % tiles);
        memset(sums, 0, (size_t)(t.rows * t.columns) * sizeof sums[0]);
        for (int64_t oh = t.down.begin; oh < t.down.end; oh++)
            for (int64_t ow = t.across.begin; ow < t.across.end; ow++) {
                int64_t from = at_y.first + (oh * s->out_width + ow) * at_y.step, index;
                float value;
                if (!call->saved)
                    index = find_element(s, dtype, call->x, at_x, oh, ow, &value);
                else
                    index = call->argmax_type == VJP_I32 ? ((const int32_t *)call->saved)[from]
                                                         : ((const int64_t *)call->saved)[from];
                int64_t h = index / s->width - t.top, w = index % s->width - t.left;
                if (h < 0 || h >= t.rows || w < 0 || w >= t.columns) continue;
                sums[h * t.columns + w] += f32_load(dtype, call->dy, from);
            }
        for (int64_t h = 0; h < t.rows; h++)
            for (int64_t w = 0; w < t.columns; w++)
                f32_write(call->mode, dtype, call->dx, at_x.first + ((t.top + h) * s->width + t.left + w) * at_x.step,
                          sums[h * t.columns + w]);
    }
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* The table at the head of this file; `saved`: a backward with a saved argmax. */
static pool_path path_of(const vjp_maxpool2d_sizes *s, bool saved) {
    if (saved && saved_rows_fit(s)) return POOL_SAVED_ROWS;
    if (saved && saved_tiles_fit(s)) return POOL_SAVED_TILES;
    if (!saved && pairs_fit(s)) return POOL_PAIRS;
    if (!saved && rows_fit(s)) return POOL_ROWS;
    return pixels_fit(s) ? POOL_PIXELS : POOL_ELEMENTS;
}

static void forward_task(void *argument, size_t task) {
    const pool_call *call = argument;
    switch (call->path) {
    case POOL_PAIRS: BY_DTYPE(call->dtype, forward_pairs, call, task); break;
    case POOL_ROWS: pool_rows_sized(call, task, false); break;
    case POOL_PIXELS: BY_DTYPE(call->dtype, forward_pixels, call, task); break;
    default: BY_DTYPE(call->dtype, forward_elements, call, task); break;
    }
}

static void backward_task(void *argument, size_t task) {
    const pool_call *call = argument;
    switch (call->path) {
    case POOL_SAVED_ROWS: BY_DTYPE(call->dtype, backward_saved_rows, call, task); break;
    case POOL_SAVED_TILES: BY_DTYPE(call->dtype, backward_saved_tiles, call, task); break;
    case POOL_PAIRS: BY_DTYPE(call->dtype, backward_pairs, call, task); break;
    case POOL_ROWS: pool_rows_sized(call, task, true); break;
    case POOL_PIXELS: BY_DTYPE(call->dtype, backward_pixels, call, task); break;
    case POOL_ELEMENTS: BY_DTYPE(call->dtype, backward_elements, call, task); break;
    }
}

/* Splits the planes over the tasks, or their rows where there are few planes. */
static void split_rows(pool_call *call, int64_t rows, int64_t row_bytes) {
    int64_t planes = call->s.batch * call->s.channels;
    bool many = planes >= MAX_TILE_TASKS;
    call->item_rows = many ? rows : 1;
    call->split = vjp_cpu_split_items(many ? planes : planes * rows, (many ? rows : 1) * row_bytes, CPU_MAX_TASKS);
}

static vjp_status forward(const vjp_work *work) {
    pool_call call = {
        .s = vjp_maxpool2d_sizes_of(work),
        .dtype = work->storage,
        .argmax_type = vjp_type(work, MAXPOOL2D_ARGMAX),
        .y = vjp_data(work, MAXPOOL2D_Y),
        .argmax = vjp_data(work, MAXPOOL2D_ARGMAX),
        .x = vjp_data(work, MAXPOOL2D_X),
    };
    const vjp_maxpool2d_sizes *s = &call.s;
    int64_t element = (int64_t)dtype_bytes(work->storage), planes = s->batch * s->channels;
    if ((!call.y && !call.argmax) || planes * s->out_height * s->out_width == 0) return VJP_OK;
    int64_t along = s->channels_last ? s->channels : s->out_width;
    bool aligned = along % LANES == 0 && call.y && vf_stream_aligned(work->storage, call.y);
    call.mode = write_mode_of(work, MAXPOOL2D_Y, planes * s->out_height * s->out_width * element, aligned, false);
    call.path = path_of(s, false);
    int64_t row_bytes = (s->stride_h * s->width + s->out_width) * element;
    if (call.path == POOL_ROWS)
        split_rows(&call, s->out_height, row_bytes);
    else if (call.path == POOL_PIXELS)
        call.split = vjp_cpu_split_items(s->batch * s->out_height, row_bytes * s->channels, CPU_MAX_TASKS);
    else
        call.split = vjp_cpu_split_items(planes * s->out_height, row_bytes, CPU_MAX_TASKS);
    vjp_cpu_for(work, call.split.count, forward_task, &call);
    return VJP_OK;
}

/* The backward by tiles: their size, and how many a task takes. */
static void split_tiles(pool_call *call) {
    const vjp_maxpool2d_sizes *s = &call->s;
    bool saved = call->path == POOL_SAVED_TILES, large = !saved && s->kernel_h * s->kernel_w > LARGE_KERNEL;
    bool vectors = saved ? s->channels_last : call->path == POOL_PIXELS; /* along TILE_CHANNELS channels */
    int64_t channels = vectors ? TILE_CHANNELS : 1, elements = TILE_FLOATS / channels * (large ? 8 : 1);
    int64_t max_width = vectors ? (large ? 2 * TILE_COLUMNS : TILE_COLUMNS) : elements / TILE_ROWS;
    call->tile_w = saved ? s->width : vjp_min(s->width, max_width);
    call->tile_h = vjp_min(elements / call->tile_w, s->height);
    call->tile_floats = large ? LARGE_TILE_FLOATS : TILE_FLOATS;
    int64_t blocks = s->batch * (vectors ? vjp_divide_up(s->channels, TILE_CHANNELS) : s->channels);
    int64_t tensors = saved ? 2 : 3, element = (int64_t)dtype_bytes(call->dtype);
    call->split = vjp_cpu_split_items(blocks * tiles_of(call),
                                      tensors * call->tile_w * call->tile_h * channels * element, MAX_TILE_TASKS);
}

/* How the backward is split; all of it follows from the sizes and the dtype. */
static pool_call plan(const vjp_work *work) {
    pool_call call = {.s = vjp_maxpool2d_sizes_of(work), .dtype = work->storage};
    const vjp_maxpool2d_sizes *s = &call.s;
    int64_t row_bytes = s->width * (int64_t)dtype_bytes(work->storage), planes = s->batch * s->channels;
    if (planes * s->height * s->width == 0) return call;
    call.path = path_of(s, work->tensor[MAXPOOL2D_B_ARGMAX] != NULL);
    switch (call.path) {
    case POOL_SAVED_ROWS: split_rows(&call, s->height, 2 * row_bytes); break;
    case POOL_PAIRS: call.split = vjp_cpu_split_items(planes * s->out_height, 5 * row_bytes, CPU_MAX_TASKS); break;
    case POOL_ROWS:
        call.block = vjp_round_up(vjp_divide_up(s->width, vjp_divide_up(s->width, ROW_BLOCK)), LANES);
        split_rows(&call, s->height, 3 * row_bytes);
        break;
    default: split_tiles(&call); break;
    }
    return call;
}

static vjp_status backward(const vjp_work *work) {
    pool_call call = plan(work);
    const vjp_maxpool2d_sizes *s = &call.s;
    call.dx = vjp_data(work, MAXPOOL2D_B_DX);
    call.dy = vjp_data(work, MAXPOOL2D_B_DY);
    call.x = vjp_data(work, MAXPOOL2D_B_X);
    call.saved = vjp_data(work, MAXPOOL2D_B_ARGMAX);
    call.windows = s->batch * s->channels * s->out_height * s->out_width;
    call.argmax_type = vjp_type(work, MAXPOOL2D_B_ARGMAX);
    call.tiles = work->workspace;
    int64_t bytes = s->batch * s->channels * s->height * s->width * (int64_t)dtype_bytes(work->storage);
    if (!call.dx || bytes == 0) return VJP_OK;
    bool aligned =
        (s->channels_last ? s->channels : s->width) % LANES == 0 && vf_stream_aligned(work->storage, call.dx);
    call.mode = write_mode_of(work, MAXPOOL2D_B_DX, bytes, aligned, false);
    vjp_cpu_for(work, call.split.count, backward_task, &call);
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    pool_call call = plan(work);
    return work->tensor[MAXPOOL2D_B_DX] ? (size_t)call.split.count * (size_t)call.tile_floats * sizeof(float) : 0;
}

extern const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_STORAGE_16_32},
    {backward, backward_workspace, VJP_STORAGE_16_32},
};
