/* SPDX-License-Identifier: MIT */
/* attention: each query's average of the values, weighted by softmax of its products with the keys. Maths:
 * docs/ops/attention.md. */
#include <math.h>

#include "op/op.h"

static int first_slot(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? ATTENTION_FIRST : ATTENTION_B_FIRST;
}

static vjp_status infer(vjp_work *work) {
    const vjp_attention_attributes *attributes = work->attributes;
    int slot_q = work->pass == VJP_FORWARD ? ATTENTION_Q : ATTENTION_B_Q;
    int slot_k = work->pass == VJP_FORWARD ? ATTENTION_K : ATTENTION_B_K;
    vjp_shape_own(work, slot_q);
    vjp_shape_own(work, slot_k);
    const vjp_shape q = work->shape[slot_q], k = work->shape[slot_k];
    char q_text[VJP_SHAPE_TEXT], k_text[VJP_SHAPE_TEXT];
    if (q.ndim != 4)
        return vjp_refuse(work, VJP_INVALID, "q has rank %d; it must be 4: [batch, time, heads, dim]", q.ndim);
    if (k.ndim != 4)
        return vjp_refuse(work, VJP_INVALID, "k has rank %d; it must be 4: [batch, keys, kv_heads, dim]", k.ndim);
    vjp_shape_text(&q, q_text);
    vjp_shape_text(&k, k_text);
    if (q.size[0] != k.size[0])
        return vjp_refuse(work, VJP_INVALID, "q is %s and k is %s: the batch is %lld in one and %lld in the other",
                          q_text, k_text, (long long)q.size[0], (long long)k.size[0]);
    if (q.size[3] != k.size[3])
        return vjp_refuse(work, VJP_INVALID, "q is %s and k is %s: dim is %lld in one and %lld in the other", q_text,
                          k_text, (long long)q.size[3], (long long)k.size[3]);
    if (q.size[3] == 0) return vjp_refuse(work, VJP_INVALID, "q is %s: a head of no elements has no scores", q_text);
    if (k.size[2] == 0 ? q.size[2] != 0 : q.size[2] % k.size[2] != 0)
        return vjp_refuse(work, VJP_INVALID, "%lld heads of q cannot share %lld heads of k evenly",
                          (long long)q.size[2], (long long)k.size[2]);
    if (attributes->causal && k.size[1] < q.size[1])
        return vjp_refuse(work, VJP_INVALID,
                          "causal with %lld keys for %lld times: the first queries would see no key at all",
                          (long long)k.size[1], (long long)q.size[1]);
    if (attributes->window < 0)
        return vjp_refuse(work, VJP_INVALID, "window is %lld; it must be positive, or 0 for all keys",
                          (long long)attributes->window);
    if (attributes->window && !attributes->causal)
        return vjp_refuse(work, VJP_INVALID,
                          "window is %lld, but causal is false: a window ends at the query's own time",
                          (long long)attributes->window);
    const vjp_tensor *first = work->tensor[first_slot(work)];
    if (first && !attributes->causal)
        return vjp_refuse(work, VJP_INVALID, "first is given, but causal is false: it is for causal attention");
    if (!(attributes->scale >= 0) || isinf(attributes->scale))
        return vjp_refuse(work, VJP_INVALID, "scale is %g; it must be positive, or 0 for 1/sqrt(dim)",
                          attributes->scale);
    vjp_shape_set(work, "[batch, time, heads, dim]", 4, q.size);
    vjp_shape_set(work, "[batch, keys, kv_heads, dim]", 4, k.size);
    vjp_shape_set(work, "[batch, heads, time]", 3, (const int64_t[]){q.size[0], q.size[2], q.size[1]});
    vjp_shape_set(work, "[batch, time]", 2, q.size);
    return VJP_OK;
}

/* Every query sees at least the key at its own time, and none that the query before it does not reach back to. */
static vjp_status check_values(const vjp_work *work) {
    int slot = first_slot(work);
    if (!work->tensor[slot]) return VJP_OK;
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    vjp_status status = vjp_check_indices(work, slot, s.keys, "keys");
    for (int64_t i = 0; i < s.batch * s.time && status == VJP_OK; i++) {
        int64_t time = i % s.time, own = time + s.keys - s.time, first = vjp_attention_first(&s, i / s.time, time);
        int64_t before = time ? vjp_attention_first(&s, i / s.time, time - 1) : 0;
        if (first > own)
            status =
                vjp_refuse(work, VJP_INVALID, "first[%lld, %lld] is %lld; the last key that this query sees is %lld",
                           (long long)(i / s.time), (long long)time, (long long)first, (long long)own);
        else if (first < before)
            status =
                vjp_refuse(work, VJP_INVALID, "first[%lld, %lld] is %lld, less than the %lld of the query before it",
                           (long long)(i / s.time), (long long)time, (long long)first, (long long)before);
    }
    return status;
}

vjp_attention_sizes vjp_attention_sizes_of(const vjp_work *work) {
    const vjp_attention_attributes *attributes = work->attributes;
    const int64_t *q = work->shape[work->pass == VJP_FORWARD ? ATTENTION_Q : ATTENTION_B_Q].size;
    const int64_t *k = work->shape[work->pass == VJP_FORWARD ? ATTENTION_K : ATTENTION_B_K].size;
    return (vjp_attention_sizes){.batch = q[0],
                                 .time = q[1],
                                 .keys = k[1],
                                 .heads = q[2],
                                 .kv_heads = k[2],
                                 .group = k[2] ? q[2] / k[2] : 0,
                                 .dim = q[3],
                                 .causal = attributes->causal,
                                 .window = attributes->window < k[1] ? attributes->window : 0,
                                 .first = vjp_data(work, first_slot(work)),
                                 .first_dtype = vjp_type(work, first_slot(work)),
                                 .scale = attributes->scale > 0 ? attributes->scale : 1 / sqrt((double)q[3])};
}

int64_t vjp_attention_first(const vjp_attention_sizes *s, int64_t batch, int64_t time) {
    int64_t seen = s->causal ? time + s->keys - s->time + 1 : s->keys, first = 0;
    double ignored;
    if (s->first) vjp_index_at(s->first, s->first_dtype, batch * s->time + time, &first, &ignored);
    return s->window && seen - s->window > first ? seen - s->window : first;
}

/*
 * A product of queries and keys over dim is 2 flops for each pair that is seen and each element. The forward makes two
 * (scores, y); the backward has to make the scores again, then one for each of dv and dP, dq, dk.
 */
static double pairs_of(const vjp_attention_sizes *s) {
    double time = (double)s->time, keys = (double)s->keys, window = (double)s->window;
    if (!s->causal) return time * keys;
    double pairs = time * (keys - time) + time * (time + 1) / 2;
    if (!s->window) return pairs;
    /* Less what is before the window: n - window of the n keys up to a query's time, for the last of the queries. */
    double first = fmax(keys - time + 1, window + 1), queries = fmax(0, keys - first + 1);
    return pairs - queries * ((first - window) + (keys - window)) / 2;
}

static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    double product = 2 * (double)s.batch * (double)s.heads * pairs_of(&s) * (double)s.dim;
    if (work->pass == VJP_FORWARD) {
        cost->flops = product * (work->tensor[ATTENTION_Y] ? 2 : 1);
        return;
    }
    bool dq = work->tensor[ATTENTION_B_DQ], dk = work->tensor[ATTENTION_B_DK], dv = work->tensor[ATTENTION_B_DV];
    cost->flops = product * ((dq || dk ? 2 : dv ? 1 : 0) + dq + dk + dv);
}

const vjp_op_rules vjp_attention_rules = {.infer = infer, .check_values = check_values, .cost = cost};
