/* SPDX-License-Identifier: MIT */
/*
 * rope, plainly: each pair (u, v) of a head is rotated by the angle of its position,
 *     u' = u cos - v sin,   v' = u sin + v cos,
 * and the backward rotates dy by the opposite angle, the transpose of a rotation. Both elements of a pair are read
 * before either is written, so the call may run in place.
 */
#include "ref/ref.h"

/* The row of the tables for time t of a batch. The indices were checked before the call. */
static int64_t position_of(const vjp_work *work, const vjp_rope_sizes *s, int64_t batch, int64_t t) {
    const void *positions = vjp_data(work, ROPE_POSITIONS);
    if (!positions) return t;
    int64_t position = 0;
    double value;
    vjp_index_at(positions, vjp_type(work, ROPE_POSITIONS), batch * s->position_stride + t, &position, &value);
    return position;
}

/* One head, which begins at `x` and `y` in those tensors, by row `position` of the tables; `sign` is -1 for the
 * opposite angle. */
static void rotate_head(const vjp_work *work, const vjp_rope_sizes *s, int64_t x, int64_t y, int64_t position,
                        double sign) {
    const vjp_rope_attributes *a = work->attributes;
    int64_t pairs = s->n_rot / 2;
    bool interleaved = a->pairing == VJP_PAIRING_INTERLEAVED;
    for (int64_t i = 0; i < pairs; i++) {
        int64_t first = interleaved ? 2 * i : i;
        int64_t second = first + (interleaved ? 1 : pairs);
        double u = ref_get(work, ROPE_X, x + first, 0), v = ref_get(work, ROPE_X, x + second, 0);
        double cosine = ref_get(work, ROPE_COSINE, position * pairs + i, 1);
        double sine = sign * ref_get(work, ROPE_SINE, position * pairs + i, 0);
        ref_put(work, ROPE_Y, y + first, u * cosine - v * sine);
        ref_put(work, ROPE_Y, y + second, u * sine + v * cosine);
    }
    for (int64_t i = s->n_rot; i < s->head_dim; i++)
        ref_put(work, ROPE_Y, y + i, ref_get(work, ROPE_X, x + i, 0));
}

static vjp_status rotate(const vjp_work *work) {
    vjp_rope_sizes s = vjp_rope_sizes_of(work);
    if (s.heads == 0 || s.head_dim == 0) return VJP_OK; /* rather than loop over empty times */
    double sign = work->pass == VJP_FORWARD ? 1 : -1;
    for (int64_t batch = 0; batch < s.batch; batch++)
        for (int64_t t = 0; t < s.time; t++) {
            int64_t position = position_of(work, &s, batch, t), row = batch * s.time + t;
            int64_t x = row * vjp_step(work, ROPE_X), y = row * vjp_step(work, ROPE_Y);
            for (int64_t head = 0; head < s.heads; head++)
                rotate_head(work, &s, x + head * s.head_dim, y + head * s.head_dim, position, sign);
        }
    return VJP_OK;
}

const vjp_kernel vjp_ref_rope[VJP_PASS_COUNT] = {
    {rotate, NULL, REF_STORAGE | VJP_TAKES_ROWS},
    {rotate, NULL, REF_STORAGE | VJP_TAKES_ROWS},
};
