/* SPDX-License-Identifier: MIT */
/* attention on Hopper: launching the kernels of hopper_forward.cuh, hopper_dq.cuh and hopper_dkv.cuh. */
#include "cuda/attention/hopper_dkv.cuh"
#include "cuda/attention/hopper_forward.cuh"

namespace vjp {
namespace hopper {
namespace {

template <class S> constexpr size_t shared_bytes() {
    return sizeof(S) + TILE_ALIGNMENT;
}

/* Calls f with the type, the dim of a tile (64 or 128: the copy engine fills what is missing with 0), and `visible`. */
template <class F> vjp_status with_variant(const fast_call &c, F f) {
    return with_kind(c, [&](auto zero) {
        return with_bool(c.a.dim <= 64, [&](auto is_64) {
            std::integral_constant<int, decltype(is_64)::value ? 64 : 128> dim;
            if (c.a.first_keys) return f(zero, dim, std::integral_constant<visible, visible::first>{});
            if (c.a.window < c.a.keys) return f(zero, dim, std::integral_constant<visible, visible::window>{});
            if (c.a.causal) return f(zero, dim, std::integral_constant<visible, visible::causal>{});
            return f(zero, dim, std::integral_constant<visible, visible::all>{});
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

    vjp_status status() const {
        if (ok) return VJP_OK;
        return vjp_refuse(c.work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                          c.work->device->name);
    }
};

} // namespace

vjp_status enqueue_forward(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = forward_shape<D>;
        forward_call call{};
        call.a = a;
        call.flags = c.flags;
        call.order = order_of(a.batch * a.heads, a.heads, a.group, 2 * a.keys * D * 2,
                              vjp_divide_up(a.time, shape::ROWS), a.causal);
        maps m{c};
        m.queries(&call.q, a.q, a.q_step, shape::ROWS);
        m.keys(&call.k, a.k, a.k_step, shape::KEYS);
        m.keys(&call.v, a.v, a.v_step, shape::KEYS);
        if (a.y) m.queries(&call.y, a.y, a.y_step, 64);
        if (!m.ok) return m.status();
        return launch(c.work, true, forward<T, D, decltype(keys)::value>, persistent_blocks(c.work, call.order.count()),
                      shape::THREADS, shared_bytes<forward_shared<T, D>>(), call);
    });
}

vjp_status enqueue_dq(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = dq_shape<D>;
        dq_call call{};
        call.a = a;
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
                      persistent_blocks(c.work, call.order.count()), shape::THREADS, shared_bytes<dq_shared<T, D>>(),
                      call);
    });
}

vjp_status enqueue_dkv(const fast_call &c) {
    const attention_call &a = c.a;
    return with_variant(c, [&](auto zero, auto dim, auto keys) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = dkv_shape<D>;
        dkv_call call{};
        call.a = a;
        call.rows = c.rows;
        call.flags = c.flags;
        /* No sections: blocks that run at the same time read the same queries. */
        call.order = order_of(a.batch * a.kv_heads, a.kv_heads, a.batch * a.kv_heads, 0,
                              vjp_divide_up(a.keys, shape::KEYS), false);
        maps m{c};
        m.queries(&call.q, a.q, a.q_step, shape::QUERIES);
        m.queries(&call.dy, a.dy, a.y_step, shape::QUERIES);
        m.keys(&call.k, a.k, a.k_step, shape::KEYS);
        m.keys(&call.v, a.v, a.v_step, shape::KEYS);
        if (a.dk) m.keys(&call.dk, a.dk, a.dk_step, 64);
        if (a.dv) m.keys(&call.dv, a.dv, a.dv_step, 64);
        if (!m.ok) return m.status();
        return launch(c.work, true, backward_dkv<T, D, decltype(keys)::value>,
                      persistent_blocks(c.work, call.order.count()), shape::THREADS, shared_bytes<dkv_shared<T, D>>(),
                      call);
    });
}

} // namespace hopper
} // namespace vjp
