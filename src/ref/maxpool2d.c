/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d, plainly: search each window in row-major order. The backward takes the saved argmax or searches again, and
 * sums one plane of dx in double before it is stored, since windows may overlap.
 */
#include <math.h>

#include "ref/ref.h"

/* The index of an element in a tensor of a given plane; the layouts differ in nothing else. */
static int64_t at(const vjp_maxpool2d_sizes *s, int64_t plane, int64_t n, int64_t c, int64_t place) {
    return s->channels_last ? (n * plane + place) * s->channels + c : (n * s->channels + c) * plane + place;
}

/*
 * The position of a window's maximum in the plane. The first element is taken whatever it is, so a window of -inf has
 * its maximum too; a later one must be greater, or the first NaN. Padding is skipped.
 */
static int64_t find_maximum(const vjp_work *work, int x, const vjp_maxpool2d_sizes *s, int64_t n, int64_t c,
                            int64_t out_row, int64_t out_column) {
    int64_t best = -1;
    double maximum = 0;
    for (int64_t i = 0; i < s->kernel_h; i++) {
        int64_t row = out_row * s->stride_h - s->padding_h + i * s->dilation_h;
        if (row < 0 || row >= s->height) continue;
        for (int64_t j = 0; j < s->kernel_w; j++) {
            int64_t column = out_column * s->stride_w - s->padding_w + j * s->dilation_w;
            if (column < 0 || column >= s->width) continue;
            int64_t place = row * s->width + column;
            double value = ref_get(work, x, at(s, s->height * s->width, n, c, place), 0);
            if (best < 0 || value > maximum || (isnan(value) && !isnan(maximum))) {
                best = place;
                maximum = value;
            }
        }
    }
    return best;
}

static vjp_status forward(const vjp_work *work) {
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    if (s.channels == 0) return VJP_OK; /* rather than loop over an empty batch */
    for (int64_t n = 0; n < s.batch; n++)
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t row = 0; row < s.out_height; row++)
                for (int64_t column = 0; column < s.out_width; column++) {
                    int64_t place = find_maximum(work, MAXPOOL2D_X, &s, n, c, row, column);
                    int64_t out = at(&s, s.out_height * s.out_width, n, c, row * s.out_width + column);
                    ref_put(work, MAXPOOL2D_Y, out,
                            ref_get(work, MAXPOOL2D_X, at(&s, s.height * s.width, n, c, place), 0));
                    ref_put(work, MAXPOOL2D_ARGMAX, out, (double)place);
                }
    return VJP_OK;
}

/* The saved argmax, whose values were checked before the call, or the maximum found again. */
static int64_t argmax_of(const vjp_work *work, const vjp_maxpool2d_sizes *s, int64_t n, int64_t c, int64_t row,
                         int64_t column, int64_t out) {
    const void *argmax = vjp_data(work, MAXPOOL2D_B_ARGMAX);
    if (!argmax) return find_maximum(work, MAXPOOL2D_B_X, s, n, c, row, column);
    int64_t place = 0;
    double value;
    vjp_index_at(argmax, vjp_type(work, MAXPOOL2D_B_ARGMAX), out, &place, &value);
    return place;
}

static vjp_status backward(const vjp_work *work) {
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    int64_t plane = s.height * s.width, out_plane = s.out_height * s.out_width;
    if (!work->tensor[MAXPOOL2D_B_DX] || s.channels == 0) return VJP_OK;
    double *dx = work->workspace;
    for (int64_t n = 0; n < s.batch; n++)
        for (int64_t c = 0; c < s.channels; c++) {
            for (int64_t place = 0; place < plane; place++)
                dx[place] = 0;
            for (int64_t row = 0; row < s.out_height; row++)
                for (int64_t column = 0; column < s.out_width; column++) {
                    int64_t out = at(&s, out_plane, n, c, row * s.out_width + column);
                    dx[argmax_of(work, &s, n, c, row, column, out)] += ref_get(work, MAXPOOL2D_B_DY, out, 0);
                }
            for (int64_t place = 0; place < plane; place++)
                ref_put(work, MAXPOOL2D_B_DX, at(&s, plane, n, c, place), dx[place]);
        }
    return VJP_OK;
}

/* One plane of dx in double; sides of at most 2^30 keep the product in range. */
static size_t backward_workspace(const vjp_work *work) {
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    bool empty = !work->tensor[MAXPOOL2D_B_DX] || s.batch == 0 || s.channels == 0;
    return empty ? 0 : sizeof(double) * (size_t)s.height * (size_t)s.width;
}

const vjp_kernel vjp_ref_maxpool2d[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};
