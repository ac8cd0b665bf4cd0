/*
 * maxpool2d on the CPU. The first maximum of a window in row-major order wins, the first NaN wins over all, padding
 * never wins. In the backward every element of dx has one owner, which adds the dy of the windows that it won in the
 * order of the windows, in f32, and writes it once: no atomics, the same bits for any number of threads.
 *
 * Channels first goes by rows (maxpool2d_rows.h), vectors along a row of windows; 2 x 2 windows that tile the plane by
 * pairs of rows (maxpool2d_pairs.h). Channels last goes by pixels, vectors along the channels; its backward, by tiles
 * of dx, adds each window's dy into the tile where its argmax is.
 * With a saved argmax there is nothing to find. The usual windows, channels first, go by rows of dx straight from the
 * argmax and dy (maxpool2d_saved.h); otherwise dy is added, number by number, into tiles as wide as the plane.
 * Kernels too large for the rows, and planes past 2^31 elements, go by tiles too, an element at a time.
 *
 * A saved argmax is taken to lie in its window, as the forward wrote it; one that does not may be left out.
 */
#include "cpu/pool/maxpool2d.h"
#include "cpu/pool/maxpool2d_pairs.h"
#include "cpu/pool/maxpool2d_rows.h"
#include "cpu/pool/maxpool2d_saved.h"

extern const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT];

/* Channels that a tile holds: two vectors, so that 16-bit types fill a cache line. */
enum { TILE_CHANNELS = 2 * LANES };

/*
 * Elements of a tile: 64 KiB of f32, so that tiles stay in the second-level cache and few windows reach over an edge.
 * Windows of more than LARGE_KERNEL elements get tiles eight times as large: each tile looks for the argmax again.
 */
enum { TILE_FLOATS = 16 << 10, LARGE_TILE_FLOATS = 128 << 10, LARGE_KERNEL = 64, MOST_TILE_TASKS = 64 };

/* Side of a tile in pixels, channels last: 16 x 32 x TILE_CHANNELS floats. */
enum { TILE_ROWS = 16, TILE_COLUMNS = 32 };

static bool channels_fit(const vjp_maxpool2d_sizes *s) {
    return s->channels_last && s->height * s->width <= INT32_MAX;
}

/* ---- Channels last, by pixels ------------------------------------------------------------------------ */

/* The maxima of one window for channels [c, c + n), n < 16 or more; `pixel` is the plane's first. */
INLINE best find_channels(const vjp_maxpool2d_sizes *s, vjp_dtype dtype, const void *plane, taps rows, taps columns_in,
                          int64_t c, int64_t n) {
    best b = {vf_set(-INFINITY), vi_set((int32_t)((rows.origin + rows.first * s->dilation_h) * s->width +
                                                  columns_in.origin + columns_in.first * s->dilation_w))};
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t j = columns_in.first; j < columns_in.end; j++) {
            int64_t place = (rows.origin + i * s->dilation_h) * s->width + columns_in.origin + j * s->dilation_w;
            best_take(&b, vf_load_part(dtype, plane, place * s->channels + c, n), vi_set((int32_t)place));
        }
    return b;
}

/* Items are rows of windows. */
INLINE void forward_channels(const pool_call *call, size_t task, vjp_dtype dtype) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
        int64_t image = item / s->out_height;
        const void *plane = at(dtype, call->x, image * s->height * s->width * s->channels);
        taps rows = row_taps(s, item % s->out_height);
        for (int64_t ow = 0; ow < s->out_width; ow++) {
            taps in_row = column_taps(s, ow);
            int64_t to = (item * s->out_width + ow) * s->channels;
            for (int64_t c = 0; c < s->channels; c += LANES) {
                int64_t n = s->channels - c;
                best b = find_channels(s, dtype, plane, rows, in_row, c, n);
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
    int64_t in_row = (s->width + call->tile_w - 1) / call->tile_w;
    tile t = {.top = index / in_row * call->tile_h, .left = index % in_row * call->tile_w};
    t.rows = s->height - t.top < call->tile_h ? s->height - t.top : call->tile_h;
    t.columns = s->width - t.left < call->tile_w ? s->width - t.left : call->tile_w;
    t.down = windows_over(t.top, t.top + t.rows, s->out_height, s->kernel_h, s->stride_h, s->padding_h, s->dilation_h);
    t.across =
        windows_over(t.left, t.left + t.columns, s->out_width, s->kernel_w, s->stride_w, s->padding_w, s->dilation_w);
    return t;
}

static int64_t tiles_of(const pool_call *call) {
    const vjp_maxpool2d_sizes *s = &call->s;
    return (s->height + call->tile_h - 1) / call->tile_h * ((s->width + call->tile_w - 1) / call->tile_w);
}

/* Adds the dy of window (oh, ow) for channels [c, c + n) into the tile. */
INLINE void add_window(const pool_call *call, vjp_dtype dtype, const tile *t, float *sums, int64_t image, int64_t oh,
                       int64_t ow, int64_t c, int64_t n) {
    const vjp_maxpool2d_sizes *s = &call->s;
    int64_t from = ((image * s->out_height + oh) * s->out_width + ow) * s->channels + c;
    taps rows = row_taps(s, oh), in_row = column_taps(s, ow);
    vf dy = vf_load_part(dtype, call->dy, from, n);
    vi index = call->saved ? load_argmax(call->argmax_type, call->saved, from, n)
                           : find_channels(s, dtype, at(dtype, call->x, image * s->height * s->width * s->channels),
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
INLINE void backward_channels(const pool_call *call, size_t task, vjp_dtype dtype) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t blocks = (s->channels + TILE_CHANNELS - 1) / TILE_CHANNELS, tiles = tiles_of(call);
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
        int64_t c = item % blocks * TILE_CHANNELS, image = item / blocks / tiles;
        int64_t n = s->channels - c < TILE_CHANNELS ? s->channels - c : TILE_CHANNELS;
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

/* ---- Any layout, with a saved argmax ------------------------------------------------------------------ */

/* Numbers of dy and of the argmax that are made f32 and int64 at a time. */
enum { SAVED_BLOCK = 256 };

/* Tiles as wide as the plane: a place in the plane is then a place in the tile, without a division. */
static bool saved_fits(const vjp_maxpool2d_sizes *s) {
    return s->width <= (s->channels_last ? TILE_ROWS * TILE_COLUMNS : TILE_FLOATS);
}

/* Adds n numbers of dy, from element `from` on, to the places that won them; `base` is the tile's first. */
INLINE void add_saved(const pool_call *call, vjp_dtype dtype, vjp_dtype argmax_type, float *sums, int64_t base,
                      int64_t places, int64_t from, int64_t n, int64_t place_step, int64_t lane_step) {
    for (int64_t i = 0; i < n; i += SAVED_BLOCK) {
        int64_t count = n - i < SAVED_BLOCK ? n - i : SAVED_BLOCK;
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
INLINE void backward_saved_typed(const pool_call *call, size_t task, vjp_dtype dtype, vjp_dtype argmax_type) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t tiles = tiles_of(call), plane = s->height * s->width, windows = s->out_height * s->out_width;
    int64_t blocks = (s->channels + TILE_CHANNELS - 1) / TILE_CHANNELS;
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
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
        int64_t n = s->channels - c < TILE_CHANNELS ? s->channels - c : TILE_CHANNELS;
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

INLINE void backward_saved(const pool_call *call, size_t task, vjp_dtype dtype) {
    if (call->argmax_type == VJP_I32)
        backward_saved_typed(call, task, dtype, VJP_I32);
    else
        backward_saved_typed(call, task, dtype, VJP_I64);
}

/* ---- Any layout and kernel, an element at a time ----------------------------------------------------- */

/* Element e of plane (image, channel) of a tensor with `plane` elements a plane is first + e * step. */
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
INLINE void forward_elements(const pool_call *call, size_t task, vjp_dtype dtype) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
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
INLINE void backward_elements(const pool_call *call, size_t task, vjp_dtype dtype) {
    const vjp_maxpool2d_sizes *s = &call->s;
    float *sums = call->tiles + (int64_t)task * call->tile_floats;
    int64_t tiles = tiles_of(call);
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
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

INLINE void forward_task(const pool_call *call, size_t task, vjp_dtype dtype) {
    if (pairs_fit(&call->s))
        forward_pairs(call, task, dtype);
    else if (channels_fit(&call->s))
        forward_channels(call, task, dtype);
    else
        forward_elements(call, task, dtype);
}

INLINE void backward_task(const pool_call *call, size_t task, vjp_dtype dtype) {
    if (call->saved && saved_rows_fit(&call->s))
        backward_saved_rows(call, task, dtype);
    else if (call->saved && saved_fits(&call->s))
        backward_saved(call, task, dtype);
    else if (pairs_fit(&call->s) && !call->saved)
        backward_pairs(call, task, dtype);
    else if (channels_fit(&call->s))
        backward_channels(call, task, dtype);
    else
        backward_elements(call, task, dtype);
}

static void forward_by_rows(void *call, size_t task) {
    pool_rows_sized(call, task, false);
}

static void backward_by_rows(void *call, size_t task) {
    pool_rows_sized(call, task, true);
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

static void backward_f32(void *call, size_t task) {
    backward_task(call, task, VJP_F32);
}

static void backward_bf16(void *call, size_t task) {
    backward_task(call, task, VJP_BF16);
}

static void backward_f16(void *call, size_t task) {
    backward_task(call, task, VJP_F16);
}

/* Cuts planes, or their rows where there are few planes. */
static void cut_rows(pool_call *call, int64_t rows, int64_t row_bytes) {
    int64_t planes = call->s.batch * call->s.channels;
    bool many = planes >= MOST_TILE_TASKS;
    call->item_rows = many ? rows : 1;
    call->cut = vjp_cpu_cut_items(many ? planes : planes * rows, (many ? rows : 1) * row_bytes, CPU_MOST_TASKS);
}

static vjp_status forward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = forward_f32, [VJP_BF16] = forward_bf16, [VJP_F16] = forward_f16};
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
    int64_t row_bytes = (s->stride_h * s->width + s->out_width) * element;
    bool by_rows = rows_fit(s) && !pairs_fit(s);
    if (by_rows)
        cut_rows(&call, s->out_height, row_bytes);
    else if (channels_fit(s))
        call.cut = vjp_cpu_cut_items(s->batch * s->out_height, row_bytes * s->channels, CPU_MOST_TASKS);
    else
        call.cut = vjp_cpu_cut_items(planes * s->out_height, row_bytes, CPU_MOST_TASKS);
    vjp_cpu_for(work, call.cut.count, by_rows ? forward_by_rows : tasks[work->storage], &call);
    return VJP_OK;
}

/* How the backward is cut; all of it follows from the sizes and the dtype. */
static pool_call plan(const vjp_work *work) {
    pool_call call = {.s = vjp_maxpool2d_sizes_of(work), .dtype = work->storage};
    const vjp_maxpool2d_sizes *s = &call.s;
    int64_t element = (int64_t)dtype_bytes(work->storage), planes = s->batch * s->channels;
    if (planes * s->height * s->width == 0) return call;
    bool saved = work->tensor[MAXPOOL2D_B_ARGMAX] != NULL;
    if (saved && saved_rows_fit(s)) {
        cut_rows(&call, s->height, 2 * s->width * element);
        return call;
    }
    if (saved && saved_fits(s)) {
        int64_t channels = s->channels_last ? TILE_CHANNELS : 1, rows = TILE_FLOATS / channels / s->width;
        call.tile_w = s->width;
        call.tile_h = rows < s->height ? rows : s->height;
        call.tile_floats = TILE_FLOATS;
        int64_t each = s->channels_last ? s->batch * ((s->channels + channels - 1) / channels) : planes;
        call.cut = vjp_cpu_cut_items(each * tiles_of(&call), 2 * call.tile_w * call.tile_h * channels * element,
                                     MOST_TILE_TASKS);
        return call;
    }
    if (pairs_fit(s) && !saved) {
        call.cut = vjp_cpu_cut_items(planes * s->out_height, 5 * s->width * element, CPU_MOST_TASKS);
        return call;
    }
    if (rows_fit(s) && !saved) {
        int64_t blocks = (s->width + ROW_BLOCK - 1) / ROW_BLOCK;
        call.block = ((s->width + blocks - 1) / blocks + LANES - 1) / LANES * LANES;
        cut_rows(&call, s->height, 3 * s->width * element);
        return call;
    }
    bool large = s->kernel_h * s->kernel_w > LARGE_KERNEL, channels = channels_fit(s);
    int64_t scale = large ? 8 : 1, elements = (channels ? TILE_ROWS * TILE_COLUMNS : TILE_FLOATS) * scale;
    int64_t most = channels ? (large ? 2 * TILE_COLUMNS : TILE_COLUMNS) : elements / TILE_ROWS;
    call.tile_w = s->width < most ? s->width : most;
    call.tile_h = elements / call.tile_w < s->height ? elements / call.tile_w : s->height;
    call.tile_floats = large ? LARGE_TILE_FLOATS : TILE_FLOATS;
    int64_t blocks = channels ? s->batch * ((s->channels + TILE_CHANNELS - 1) / TILE_CHANNELS) : planes;
    int64_t tile_bytes = 3 * call.tile_w * call.tile_h * (channels ? TILE_CHANNELS : 1) * element;
    call.cut = vjp_cpu_cut_items(blocks * tiles_of(&call), tile_bytes, MOST_TILE_TASKS);
    return call;
}

static vjp_status backward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = backward_f32, [VJP_BF16] = backward_bf16, [VJP_F16] = backward_f16};
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
    bool by_rows = !call.saved && rows_fit(s) && !pairs_fit(s);
    vjp_cpu_for(work, call.cut.count, by_rows ? backward_by_rows : tasks[work->storage], &call);
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    pool_call call = plan(work);
    return work->tensor[MAXPOOL2D_B_DX] ? (size_t)call.cut.count * (size_t)call.tile_floats * sizeof(float) : 0;
}

const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};
