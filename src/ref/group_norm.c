/* SPDX-License-Identifier: MIT */
/*
 * group_norm, plainly: layer_norm's formulas, where a row is the (channel, place) elements of one group of one
 * sample. at() hides the layout.
 */
#include <math.h>

#include "ref/ref.h"

typedef struct group_statistics {
    double mean, rstd;
} group_statistics;

/* One group: its sample, its first channel, one past its last. */
typedef struct group_range {
    int64_t sample, begin, end;
} group_range;

static group_range group_at(const vjp_group_norm_sizes *s, int64_t sample, int64_t group) {
    return (group_range){sample, group * s->group_channels, (group + 1) * s->group_channels};
}

static int64_t at(const vjp_group_norm_sizes *s, int64_t sample, int64_t channel, int64_t place) {
    return sample * s->channels * s->plane + channel * s->channel_stride + place * s->plane_stride;
}

static group_statistics measure(const vjp_work *work, int x, const vjp_group_norm_sizes *s, group_range g, double eps) {
    double count = (double)(s->group_channels * s->plane), sum = 0, squares = 0;
    for (int64_t c = g.begin; c < g.end; c++)
        for (int64_t p = 0; p < s->plane; p++)
            sum += ref_get(work, x, at(s, g.sample, c, p), 0);
    double mean = sum / count;
    for (int64_t c = g.begin; c < g.end; c++)
        for (int64_t p = 0; p < s->plane; p++) {
            double d = ref_get(work, x, at(s, g.sample, c, p), 0) - mean;
            squares += d * d;
        }
    return (group_statistics){mean, 1 / sqrt(squares / count + eps)};
}

static void forward_group(const vjp_work *work, const vjp_group_norm_sizes *s, group_range g, group_statistics r) {
    for (int64_t c = g.begin; c < g.end; c++)
        for (int64_t p = 0; p < s->plane; p++) {
            int64_t i = at(s, g.sample, c, p);
            double xh = (ref_get(work, GROUP_NORM_X, i, 0) - r.mean) * r.rstd;
            double y = xh * ref_get(work, GROUP_NORM_GAMMA, c, 1) + ref_get(work, GROUP_NORM_BETA, c, 0);
            ref_put(work, GROUP_NORM_Y, i, y);
        }
}

static vjp_status forward(const vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    vjp_group_norm_sizes s = vjp_group_norm_sizes_of(work);
    for (int64_t sample = 0; sample < s.batch; sample++)
        for (int64_t group = 0; group < s.groups; group++) {
            group_range g = group_at(&s, sample, group);
            group_statistics r = measure(work, GROUP_NORM_X, &s, g, a->eps);
            ref_put(work, GROUP_NORM_MEAN, sample * s.groups + group, r.mean);
            ref_put(work, GROUP_NORM_RSTD, sample * s.groups + group, r.rstd);
            forward_group(work, &s, g, r);
        }
    return VJP_OK;
}

/* dx of one group, and its contributions to dgamma and dbeta. The whole group is read before dx is written, which may
 * be in place. */
static void backward_group(const vjp_work *work, const vjp_group_norm_sizes *s, group_range g, group_statistics r,
                           double *dgamma, double *dbeta) {
    double count = (double)(s->group_channels * s->plane), mean_g = 0, mean_gxh = 0;
    for (int64_t c = g.begin; c < g.end; c++)
        for (int64_t p = 0; p < s->plane; p++) {
            int64_t i = at(s, g.sample, c, p);
            double dy = ref_get(work, GROUP_NORM_B_DY, i, 0);
            double xh = (ref_get(work, GROUP_NORM_B_X, i, 0) - r.mean) * r.rstd;
            double scaled = dy * ref_get(work, GROUP_NORM_B_GAMMA, c, 1);
            mean_g += scaled / count;
            mean_gxh += scaled * xh / count;
            dgamma[c] += dy * xh;
            dbeta[c] += dy;
        }
    for (int64_t c = g.begin; c < g.end; c++)
        for (int64_t p = 0; p < s->plane; p++) {
            int64_t i = at(s, g.sample, c, p);
            double xh = (ref_get(work, GROUP_NORM_B_X, i, 0) - r.mean) * r.rstd;
            double scaled = ref_get(work, GROUP_NORM_B_DY, i, 0) * ref_get(work, GROUP_NORM_B_GAMMA, c, 1);
            ref_put(work, GROUP_NORM_B_DX, i, r.rstd * (scaled - mean_g - xh * mean_gxh));
        }
}

static vjp_status backward(const vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    vjp_group_norm_sizes s = vjp_group_norm_sizes_of(work);
    bool saved = work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    double *dgamma = work->workspace, *dbeta = dgamma + s.channels;
    for (int64_t c = 0; c < 2 * s.channels; c++)
        dgamma[c] = 0;
    for (int64_t sample = 0; sample < s.batch; sample++)
        for (int64_t group = 0; group < s.groups; group++) {
            group_range g = group_at(&s, sample, group);
            int64_t row = sample * s.groups + group;
            group_statistics r = saved ? (group_statistics){ref_get(work, GROUP_NORM_B_MEAN, row, 0),
                                                            ref_get(work, GROUP_NORM_B_RSTD, row, 0)}
                                       : measure(work, GROUP_NORM_B_X, &s, g, a->eps);
            backward_group(work, &s, g, r, dgamma, dbeta);
        }
    for (int64_t c = 0; c < s.channels; c++) {
        ref_put(work, GROUP_NORM_B_DGAMMA, c, dgamma[c]);
        ref_put(work, GROUP_NORM_B_DBETA, c, dbeta[c]);
    }
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    return 2 * sizeof(double) * (size_t)vjp_group_norm_sizes_of(work).channels;
}

const vjp_kernel vjp_ref_group_norm[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};
