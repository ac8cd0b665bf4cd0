/* SPDX-License-Identifier: MIT */
/* attention on Hopper: launching the kernels of hopper_forward.cuh, hopper_gradients.cuh, hopper_dq.cuh and
 * hopper_dkv.cuh. */
#include "cuda/attention/hopper_forward.cuh"
#include "cuda/attention/hopper_gradients.cuh"

namespace vjp {
namespace hopper {
namespace {

/* Calls f with a value of the type, bf16 or f16. */
template <class F> vjp_status with_kind(const fast_call &c, F f) {
    return with_bool(c.work->storage == VJP_BF16,
                     [&](auto is_bf16) { return f(std::conditional_t<decltype(is_bf16)::value, bf16, f16>{}); });
}

/* The same with `visible`. */
template <class F> vjp_status with_visible(const fast_call &c, F f) {
    return with_kind(c, [&](auto zero) {
        if (c.a.first_keys) return f(zero, std::integral_constant<visible, visible::first>{});
        if (c.a.window < c.a.keys) return f(zero, std::integral_constant<visible, visible::window>{});
        if (c.a.causal) return f(zero, std::integral_constant<visible, visible::causal>{});
        return f(zero, std::integral_constant<visible, visible::all>{});
    });
}

/* The same with the dim of a tile: 64 or 128, the copy engine fills what is missing with 0. */
template <class F> vjp_status with_variant(const fast_call &c, F f) {
    return with_visible(c, [&](auto zero, auto keys) {
        return with_bool(c.a.dim <= 64, [&](auto is_64) {
            return f(zero, std::integral_constant < int, decltype(is_64)::value ? 64 : 128 > {}, keys);
        });
    });
}

int64_t persistent_blocks(const vjp_work *work, int64_t tiles) {
    return vjp_min(tiles, state_of(work->device)->multiprocessors);
}

/* Maps of tensors with the rows of queries or of keys. */
struct maps {
    const fast_call &c;
    bool ok = true;

    void queries(CUtensorMap *map, const void *data, int64_t step, int rows) {
        const attention_call &a = c.a;
        ok = ok && make_map(map, data, step, c.work->storage, a.batch, a.time, a.heads, a.dim, rows);
    }

    void keys(CUtensorMap *map, const void *data, int64_t step, int rows) {
        const attention_call &a = c.a;
        ok = ok && make_map(map, data, step, c.work->storage, a.batch, a.keys, a.kv_heads, a.dim, rows);
    }

    /* All that the kernels over keys have in common. */
    void over_keys(dkv_call *call, int *flags, int query_rows, int key_rows) {
        const attention_call &a = c.a;
        call->a = c.over(a.group * a.time);
        call->rows = c.rows;
        call->out.flags = flags;
        queries(&call->q, a.q, a.q_step, query_rows);
        queries(&call->dy, a.dy, a.y_step, query_rows);
        keys(&call->k, a.k, a.k_step, key_rows);
        keys(&call->v, a.v, a.v_step, key_rows);
        if (a.dk) keys(&call->out.dk, a.dk, a.dk_step, 64);
        if (a.dv) keys(&call->out.dv, a.dv, a.dv_step, 64);
    }

    vjp_status status() const {
        if (ok) return VJP_OK;
        return vjp_refuse(c.work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                          c.work->device->name);
    }
};

} // namespace

aside_numbers asides(const vjp_work *work, const attention_call &a) {
    int64_t blocks = state_of(work->device)->multiprocessors;
    return with_bool(a.dim <= 64, [&](auto is_64) {
        constexpr int D = decltype(is_64)::value ? 64 : 128, DKV_THREADS = dkv_shape<D>::THREADS;
        static_assert(gradients_shape::THREADS == DKV_THREADS);
        return aside_numbers{blocks * sums_aside<D / 2, forward_shape<D>::THREADS>::NUMBERS,
                             blocks * sums_aside<D / 2, dq_shape<D>::THREADS>::NUMBERS,
                             blocks * sums_aside<D / 2, DKV_THREADS, 2>::NUMBERS};
    });
}

vjp_status enqueue_forward(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = forward_shape<D>;
        forward_call call{};
        int64_t blocks = vjp_divide_up(a.time, shape::ROWS);
        call.a = c.over(a.keys);
        call.flags = c.flags;
        call.order = order_of(a.batch * a.heads, a.heads, a.group, 2 * a.keys * D * 2, blocks, a.causal);
        call.before = (int)(blocks * shape::ROWS - vjp_round_up(a.time, 64));
        maps m{c};
        m.queries(&call.q, a.q, a.q_step, shape::ROWS);
        m.keys(&call.k, a.k, a.k_step, shape::KEYS);
        m.keys(&call.v, a.v, a.v_step, shape::KEYS);
        if (a.y) m.queries(&call.y, a.y, a.y_step, 64);
        if (!m.ok) return m.status();
        return launch(c.work, true, forward<T, D, decltype(keys)::value>, persistent_blocks(c.work, call.order.count()),
                      shape::THREADS, sizeof(forward_shared<T, D>), call);
    });
}

vjp_status enqueue_dq(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = dq_shape<D>;
        dq_call call{};
        call.a = c.over(a.keys);
        call.rows = c.rows;
        call.flags = c.flags;
        call.order = order_of(a.batch * a.heads, a.heads, a.group, 2 * a.keys * D * 2,
                              vjp_divide_up(a.time, shape::ROWS), a.causal);
        maps m{c};
        m.queries(&call.q, a.q, a.q_step, shape::ROWS);
        m.queries(&call.dy, a.dy, a.y_step, shape::ROWS);
        m.keys(&call.k, a.k, a.k_step, shape::KEYS);
        m.keys(&call.v, a.v, a.v_step, shape::KEYS);
        m.queries(&call.dq, a.dq, a.dq_step, 64);
        if (!m.ok) return m.status();
        return launch(c.work, true, backward_dq<T, D, decltype(keys)::value>,
                      persistent_blocks(c.work, call.order.count()), shape::THREADS, sizeof(dq_shared<T, D>), call);
    });
}

vjp_status enqueue_dkv(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = dkv_shape<D>;
        dkv_call call{};
        /* No sections: blocks that run at the same time read the same queries. */
        call.order = order_of(a.batch * a.kv_heads, a.kv_heads, a.batch * a.kv_heads, 0,
                              vjp_divide_up(a.keys, shape::KEYS), false);
        maps m{c};
        m.over_keys(&call, c.flags, shape::QUERIES, shape::KEYS);
        if (!m.ok) return m.status();
        return launch(c.work, true, backward_dkv<T, D, decltype(keys)::value>,
                      persistent_blocks(c.work, call.order.count()), shape::THREADS, sizeof(dkv_shared<T, D>), call);
    });
}

/*
 * Tiles of the one kernel must begin with the short ones, so at its end, for some 0.6 of the longest tile, most blocks
 * have nothing to do; the two kernels begin with the long ones, but need 1.17 times as long for a step and a step and a
 * half more to begin a tile (measured on an H200; it has 132 blocks). With fewer tiles than that the longest decides
 * in both.
 */
bool takes_gradients(const attention_call &a) {
    using shape = gradients_shape;
    int64_t blocks = vjp_divide_up(a.time, shape::QUERIES), keys = vjp_divide_up(a.keys, shape::KEYS), steps = 0;
    int64_t heads = a.batch * a.kv_heads, longest = blocks * a.group;
    for (int64_t n = 0; n < keys; n++)
        steps += longest - (a.causal ? vjp_max(n * shape::KEYS - (a.keys - a.time), 0) / shape::QUERIES * a.group : 0);
    int64_t one = heads * (100 * steps + 50 * keys) + 60 * 132 * longest, two = heads * (117 * steps + 175 * keys);
    return a.dq && a.dk && a.dv && a.dim <= shape::D && (heads * keys <= 132 || one < two);
}

dq_sums dq_sums_of(const attention_call &a, workspace_layout &layout) {
    dq_sums dq{};
    dq.blocks = (int)vjp_round_up(vjp_divide_up(a.time, 64), 2);
    dq.sum = layout.take<float>(a.batch * a.heads * dq.blocks * gradients_shape::SUM);
    dq.turns = a.batch * a.heads * dq.blocks;
    dq.turn = layout.take<int>(dq.turns + 1);
    dq.next = dq.turn + dq.turns;
    return dq;
}

vjp_status enqueue_gradients(const fast_call &c, const dq_sums &dq, int *key_flags) {
    const attention_call &a = c.a;
    using shape = gradients_shape;
    vjp_status status = with_visible(c, [&](auto zero, auto keys) {
        using T = decltype(zero);
        gradients_call call{};
        call.dq = dq;
        int64_t bytes = shape::D * (a.keys * 2 * 2 + a.group * a.time * (2 * 2 + (int64_t)sizeof(float)));
        call.order = order_of(a.batch * a.kv_heads, a.kv_heads, 1, bytes, vjp_divide_up(a.keys, shape::KEYS), true);
        maps m{c};
        m.over_keys(&call, key_flags, shape::QUERIES, shape::KEYS);
        if (!m.ok) return m.status();
        return launch(c.work, true, backward_gradients<T, decltype(keys)::value>,
                      persistent_blocks(c.work, call.order.count()), shape::THREADS, sizeof(gradients_shared<T>), call);
    });
    if (status != VJP_OK) return status;
    return with_kind(c, [&](auto zero) {
        finish_call call{};
        call.a = a;
        call.dq = dq;
        call.flags = c.flags;
        maps m{c};
        m.queries(&call.out, a.dq, a.dq_step, 64);
        if (!m.ok) return m.status();
        return launch(c.work, true, finish_dq<decltype(zero)>, a.batch * a.heads * vjp_divide_up(a.time, 64), WARPGROUP,
                      0, call);
    });
}

} // namespace hopper
} // namespace vjp
