/* SPDX-License-Identifier: MIT */
/*
 * attention, plainly, one query at a time: its scores s_j = scale <q, k_j> of the keys that it sees, p = softmax(s), y
 * = sum of p_j v_j. Backward: dp_j = <dy, v_j>, D = <dy, y>, ds_j = p_j (dp_j - D); then dv_j += p_j dy, dq = scale sum
 * of ds_j k_j, dk_j += scale ds_j q.
 */
#include <math.h>

#include "ref/ref.h"

/* One query: where its head begins in y and dy, and its place in lse. */
typedef struct query {
    int64_t at, lse_at;
    int64_t from, seen; /* it sees the keys [from, seen) */
    int64_t row, head;  /* its row in q and dq, and its head there */
    int64_t batch, kv_head;
} query;

static query query_at(const vjp_attention_sizes *s, int64_t batch, int64_t head, int64_t time) {
    int64_t seen = s->causal ? time + s->keys - s->time + 1 : s->keys;
    int64_t window = s->window && s->window < seen ? seen - s->window : 0, first = 0;
    double ignored;
    if (s->first) vjp_index_at(s->first, s->first_dtype, batch * s->time + time, &first, &ignored);
    return (query){.at = ((batch * s->time + time) * s->heads + head) * s->dim,
                   .lse_at = (batch * s->heads + head) * s->time + time,
                   .from = first > window ? first : window,
                   .seen = seen,
                   .row = batch * s->time + time,
                   .head = head,
                   .batch = batch,
                   .kv_head = head / s->group};
}

/* Where the query's head begins in q or dq, whose rows may lie apart. */
static int64_t query_in(const vjp_work *work, int slot, const vjp_attention_sizes *s, const query *i) {
    return i->row * vjp_step(work, slot) + i->head * s->dim;
}

/* Where key j's head begins in k or v, whose rows may lie apart. */
static int64_t key_in(const vjp_work *work, int slot, const vjp_attention_sizes *s, const query *i, int64_t j) {
    return (i->batch * s->keys + j) * vjp_step(work, slot) + i->kv_head * s->dim;
}

/* The same in packed memory. */
static int64_t key_at(const vjp_attention_sizes *s, const query *i, int64_t j) {
    return ((i->batch * s->keys + j) * s->kv_heads + i->kv_head) * s->dim;
}

static double dot(const vjp_work *work, int a, int64_t a_at, int b, int64_t b_at, int64_t dim) {
    double sum = 0;
    for (int64_t d = 0; d < dim; d++)
        sum += ref_get(work, a, a_at + d, 0) * ref_get(work, b, b_at + d, 0);
    return sum;
}

/* Fills `score` and returns the log of the sum of exp(score); the largest is subtracted first, so nothing overflows. */
static double scores(const vjp_work *work, int q, int k, const vjp_attention_sizes *s, const query *i, double *score) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = i->from; j < i->seen; j++) {
        score[j] = s->scale * dot(work, q, query_in(work, q, s, i), k, key_in(work, k, s, i, j), s->dim);
        if (!(score[j] <= largest)) largest = score[j];
    }
    for (int64_t j = i->from; j < i->seen; j++)
        sum += exp(score[j] - largest);
    return largest + log(sum);
}

/* Scores to weights: softmax, by the log of the sum. */
static void weigh(const query *i, double *score, double lse) {
    for (int64_t j = i->from; j < i->seen; j++)
        score[j] = exp(score[j] - lse);
}

/* Element d of the weighted average of the values. No keys: an empty sum. */
static double average(const vjp_work *work, int v, const vjp_attention_sizes *s, const query *i, const double *weight,
                      int64_t d) {
    double sum = 0;
    for (int64_t j = i->from; j < i->seen; j++)
        sum += weight[j] * ref_get(work, v, key_in(work, v, s, i, j) + d, 0);
    return sum;
}

static vjp_status forward(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    double *score = work->workspace;
    for (int64_t batch = 0; batch < s.batch; batch++)
        for (int64_t head = 0; head < s.heads; head++)
            for (int64_t time = 0; time < s.time; time++) {
                query i = query_at(&s, batch, head, time);
                double lse = scores(work, ATTENTION_Q, ATTENTION_K, &s, &i, score);
                ref_put(work, ATTENTION_LSE, i.lse_at, lse);
                weigh(&i, score, lse);
                for (int64_t d = 0; d < s.dim; d++)
                    ref_put(work, ATTENTION_Y, i.at + d, average(work, ATTENTION_V, &s, &i, score, d));
            }
    return VJP_OK;
}

/* D = <dy, y>, y as saved or computed again. */
static double dy_y(const vjp_work *work, const vjp_attention_sizes *s, const query *i, const double *weight,
                   bool saved) {
    double sum = 0;
    for (int64_t d = 0; d < s->dim; d++) {
        double y = saved ? ref_get(work, ATTENTION_B_Y, i->at + d, 0) : average(work, ATTENTION_B_V, s, i, weight, d);
        sum += ref_get(work, ATTENTION_B_DY, i->at + d, 0) * y;
    }
    return sum;
}

/* One query's dq, and its contributions to dk and dv. */
static void backward_query(const vjp_work *work, const vjp_attention_sizes *s, const query *i, double *score,
                           double *dk, double *dv) {
    bool saved = work->tensor[ATTENTION_B_Y] && work->tensor[ATTENTION_B_LSE];
    double lse = scores(work, ATTENTION_B_Q, ATTENTION_B_K, s, i, score);
    if (saved) lse = ref_get(work, ATTENTION_B_LSE, i->lse_at, 0);
    weigh(i, score, lse);
    double mean = dy_y(work, s, i, score, saved);
    int64_t q_at = query_in(work, ATTENTION_B_Q, s, i);
    for (int64_t j = i->from; j < i->seen; j++) {
        int64_t at = key_at(s, i, j), v_at = key_in(work, ATTENTION_B_V, s, i, j);
        double p = score[j];
        double ds = p * (dot(work, ATTENTION_B_DY, i->at, ATTENTION_B_V, v_at, s->dim) - mean);
        for (int64_t d = 0; d < s->dim; d++) {
            dv[at + d] += p * ref_get(work, ATTENTION_B_DY, i->at + d, 0);
            dk[at + d] += s->scale * ds * ref_get(work, ATTENTION_B_Q, q_at + d, 0);
        }
        score[j] = ds;
    }
    for (int64_t d = 0; d < s->dim && work->tensor[ATTENTION_B_DQ]; d++) {
        double sum = 0;
        for (int64_t j = i->from; j < i->seen; j++)
            sum += score[j] * ref_get(work, ATTENTION_B_K, key_in(work, ATTENTION_B_K, s, i, j) + d, 0);
        ref_put(work, ATTENTION_B_DQ, query_in(work, ATTENTION_B_DQ, s, i) + d, s->scale * sum);
    }
}

static vjp_status backward(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    int64_t count = s.batch * s.keys * s.kv_heads * s.dim;
    double *dk = work->workspace, *dv = dk + count, *score = dv + count;
    for (int64_t i = 0; i < 2 * count; i++)
        dk[i] = 0;
    for (int64_t batch = 0; batch < s.batch; batch++)
        for (int64_t head = 0; head < s.heads; head++)
            for (int64_t time = 0; time < s.time; time++) {
                query i = query_at(&s, batch, head, time);
                backward_query(work, &s, &i, score, dk, dv);
            }
    int64_t row = s.kv_heads * s.dim;
    for (int64_t i = 0; i < count; i++) {
        ref_put(work, ATTENTION_B_DK, i / row * vjp_step(work, ATTENTION_B_DK) + i % row, dk[i]);
        ref_put(work, ATTENTION_B_DV, i / row * vjp_step(work, ATTENTION_B_DV) + i % row, dv[i]);
    }
    return VJP_OK;
}

/* One query's scores; in the backward after dk and dv, which many queries add to. */
static size_t forward_workspace(const vjp_work *work) {
    return sizeof(double) * (size_t)vjp_attention_sizes_of(work).keys;
}

static size_t backward_workspace(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    if ((double)s.batch * (double)s.keys * (double)s.kv_heads * (double)s.dim > 0x1p58) return SIZE_MAX;
    return sizeof(double) * (size_t)(2 * s.batch * s.keys * s.kv_heads * s.dim) + forward_workspace(work);
}

const vjp_kernel vjp_ref_attention[VJP_PASS_COUNT] = {
    {forward, forward_workspace, REF_STORAGE | VJP_TAKES_ROWS},
    {backward, backward_workspace, REF_STORAGE | VJP_TAKES_ROWS},
};
