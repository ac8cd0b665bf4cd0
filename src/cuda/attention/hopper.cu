/* SPDX-License-Identifier: MIT */
/* attention on Hopper: what is launched for each pass. The kernels: hopper_forward.cuh, hopper_dq.cuh, hopper_dkv.cuh.
 */
#include "cuda/attention/hopper_dkv.cuh"
#include "cuda/attention/hopper_forward.cuh"

namespace vjp {
namespace hopper {
namespace {

/* ---- Numbers of each row ----------------------------------------------------------------------------- */

constexpr int ROW_THREADS = 256;

/* Above this size of lse / log 2 its f32 keeps fewer than 10 bits of a weight: recomputed heads take the exact path. */
constexpr float LARGE_LSE = 8192;

struct rows_call {
    attention_call a;
    row_numbers rows;
    int *irregular; /* [batch * kv_heads], where lse was computed again: heads that take the exact path */
};

/* The numbers of each row, a warp per row. Where lse was computed again, also row_max and row_log for the exact path.
 */
template <class T, int D> __global__ void __launch_bounds__(ROW_THREADS) attention_rows(rows_call c) {
    const attention_call &a = c.a;
    constexpr int EACH = D / 32;
    int lane = threadIdx.x % 32;
    int64_t warps = (int64_t)gridDim.x * (ROW_THREADS / 32), count = a.batch * c.rows.padded * a.heads;
    begin_chained();
    for (int64_t row = blockIdx.x * (int64_t)(ROW_THREADS / 32) + threadIdx.x / 32; row < count; row += warps) {
        int64_t head = row % a.heads, time = row / a.heads % c.rows.padded, batch = row / a.heads / c.rows.padded;
        int64_t to = (batch * a.heads + head) * c.rows.padded + time, from = (batch * a.heads + head) * a.time + time;
        float lse = CUDART_INF_F, delta = 0;
        if (time < a.time) {
            const int64_t at = ((batch * a.time + time) * a.heads + head) * a.dim + lane * EACH;
            const T *dy = static_cast<const T *>(a.dy) + at, *y = static_cast<const T *>(a.out) + at;
            const float *y_f32 = static_cast<const float *>(a.out) + at;
#pragma unroll
            for (int i = 0; i < EACH && lane * EACH < a.dim; i++)
                delta = fmaf(to_f32(dy[i]), c.a.y_f32 ? y_f32[i] : to_f32(y[i]), delta);
            delta = warp_sum(delta);
            lse = a.lse_in[from] * LOG2_E;
            if (!(fabsf(lse) < (c.irregular ? LARGE_LSE : CUDART_INF_F))) {
                lse = CUDART_NAN_F;
                if (c.irregular && lane == 0) c.irregular[batch * a.kv_heads + head / a.group] = 1;
            }
            if (c.irregular && lane == 0) {
                a.row_max[from] = a.lse_in[from];
                a.row_log[from] = 0;
            }
        }
        if (lane == 0) {
            c.rows.lse[to] = lse - WEIGHT_BITS<T>;
            c.rows.delta[to] = delta;
        }
    }
}

/* ---- Launching --------------------------------------------------------------------------------------- */

/* Keys and values of a section of heads together: well inside the second-level cache of any Hopper card. */
constexpr int64_t SECTION_BYTES = 20 << 20;

/* The order of `blocks` blocks of every head; `shared`: how many heads in a row use the same `bytes`. */
tile_order order_of(int64_t heads, int64_t heads_per_batch, int64_t shared, int64_t bytes, int64_t blocks,
                    bool descending) {
    int64_t section = vjp_max(SECTION_BYTES / vjp_max(bytes, 1), 1) * shared;
    return {(int)heads, (int)heads_per_batch, (int)vjp_min(section, heads), (int)blocks, descending};
}

int64_t flag_blocks(int64_t heads, int64_t rows) {
    return heads * vjp_divide_up(rows, FLAG_ROWS);
}

template <class S> constexpr size_t shared_bytes() {
    return sizeof(S) + TILE_ALIGNMENT;
}

vjp_status no_map(const vjp_work *work) {
    return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                      work->device->name);
}

/* Calls f with the type, the dim of a tile (64 or 128: the copy engine fills what is missing with 0), and whether it is
 * causal. */
template <class F> vjp_status with_variant(const vjp_work *work, const attention_call &a, F f) {
    return with_bool(work->storage == VJP_BF16, [&](auto is_bf16) {
        using T = std::conditional_t<decltype(is_bf16)::value, bf16, f16>;
        return with_bool(a.dim <= 64, [&](auto is_64) {
            return with_bool(a.causal, [&](auto causal) {
                return f(T{}, std::integral_constant < int, decltype(is_64)::value ? 64 : 128 > {}, causal);
            });
        });
    });
}

int64_t persistent_blocks(const vjp_work *work, int64_t tiles) {
    return vjp_min(tiles, state_of(work->device)->multiprocessors);
}

} // namespace

bool takes(const vjp_work *work, const attention_call &a) {
    const device_state *state = state_of(work->device);
    const void *all[] = {a.q, a.k, a.v, a.dy, a.out, a.y, a.dq, a.dk, a.dv};
    for (const void *data : all)
        if (!is_aligned(data, 16)) return false;
    int64_t largest = INT32_MAX / 2;
    return state->capability == 90 && work->storage != VJP_F32 && a.dim <= 128 && a.dim % 8 == 0 && a.time > 0 &&
           a.keys > 0 && a.batch * a.heads > 0 && a.time < largest && a.keys < largest &&
           a.batch * a.heads < largest / vjp_divide_up(vjp_max(a.time, a.keys), FLAG_ROWS);
}

vjp_status attention_forward(const vjp_work *work, const attention_call &a, workspace_layout &layout) {
    int *flags = layout.take<int>(flag_blocks(a.batch * a.heads, a.time));
    if (!layout.base) return VJP_OK;
    vjp_status status = with_variant(work, a, [&](auto zero, auto dim, auto causal) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        using shape = forward_shape<D>;
        forward_call c{};
        c.a = a;
        c.flags = flags;
        c.order = order_of(a.batch * a.heads, a.heads, a.group, 2 * a.keys * D * 2, vjp_divide_up(a.time, shape::ROWS),
                           a.causal);
        if (!make_map(&c.q, a.q, work->storage, a.batch, a.time, a.heads, a.dim, shape::ROWS) ||
            !make_map(&c.k, a.k, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
            !make_map(&c.v, a.v, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
            (a.y && !a.y_f32 && !make_map(&c.y, a.y, work->storage, a.batch, a.time, a.heads, a.dim, 64)))
            return no_map(work);
        return launch(work, true, forward<T, D, decltype(causal)::value>, persistent_blocks(work, c.order.count()),
                      shape::THREADS, shared_bytes<forward_shared<T, D>>(), c);
    });
    return status == VJP_OK && a.y ? exact_forward(work, a, {flags, nullptr}) : status;
}

vjp_status attention_backward(const vjp_work *work, const attention_call &given, bool recomputed,
                              workspace_layout &layout) {
    attention_call a = given;
    row_numbers rows{};
    rows.padded = vjp_round_up(a.time, 384);
    rows.lse = layout.take<float>(a.batch * a.heads * rows.padded);
    rows.delta = layout.take<float>(a.batch * a.heads * rows.padded);
    int64_t heads = a.batch * a.kv_heads, query_flags = flag_blocks(a.batch * a.heads, a.time);
    int *flags = layout.take<int>(query_flags + flag_blocks(heads, a.keys));
    int *irregular = recomputed ? layout.take<int>(heads) : nullptr;
    a.row_max = recomputed ? layout.take<float>(a.batch * a.heads * a.time) : const_cast<float *>(a.lse_in);
    a.row_log = recomputed ? layout.take<float>(a.batch * a.heads * a.time) : nullptr;
    if (!layout.base) return VJP_OK;
    vjp_status status = VJP_OK;
    if (recomputed)
        status = result_of(work, cudaMemsetAsync(irregular, 0, (size_t)heads * sizeof(int), stream_of(work)));
    if (status != VJP_OK) return status;
    status = with_variant(work, a, [&](auto zero, auto dim, auto causal) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        constexpr bool CAUSAL = decltype(causal)::value;
        rows_call r{a, rows, irregular};
        int64_t warps = a.batch * a.heads * rows.padded;
        vjp_status made =
            launch(work, true, attention_rows<T, D>, vjp_min(vjp_divide_up(warps, 8), 132 * 32), ROW_THREADS, 0, r);
        if (a.dq && made == VJP_OK) {
            using shape = dq_shape<D>;
            dq_call c{};
            c.a = a;
            c.rows = rows;
            c.flags = flags;
            c.order = order_of(a.batch * a.heads, a.heads, a.group, 2 * a.keys * D * 2,
                               vjp_divide_up(a.time, shape::ROWS), a.causal);
            if (!make_map(&c.q, a.q, work->storage, a.batch, a.time, a.heads, a.dim, shape::ROWS) ||
                !make_map(&c.dy, a.dy, work->storage, a.batch, a.time, a.heads, a.dim, shape::ROWS) ||
                !make_map(&c.k, a.k, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
                !make_map(&c.v, a.v, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
                !make_map(&c.dq, a.dq, work->storage, a.batch, a.time, a.heads, a.dim, 64))
                return no_map(work);
            made = launch(work, true, backward_dq<T, D, CAUSAL>, persistent_blocks(work, c.order.count()),
                          shape::THREADS, shared_bytes<dq_shared<T, D>>(), c);
        }
        if ((a.dk || a.dv) && made == VJP_OK) {
            using shape = dkv_shape<D>;
            dkv_call c{};
            c.a = a;
            c.rows = rows;
            c.flags = flags + query_flags;
            c.order =
                order_of(heads, a.kv_heads, 1, 2 * a.group * a.time * D * 2, vjp_divide_up(a.keys, shape::KEYS), false);
            if (!make_map(&c.q, a.q, work->storage, a.batch, a.time, a.heads, a.dim, shape::QUERIES) ||
                !make_map(&c.dy, a.dy, work->storage, a.batch, a.time, a.heads, a.dim, shape::QUERIES) ||
                !make_map(&c.k, a.k, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
                !make_map(&c.v, a.v, work->storage, a.batch, a.keys, a.kv_heads, a.dim, shape::KEYS) ||
                (a.dk && !make_map(&c.dk, a.dk, work->storage, a.batch, a.keys, a.kv_heads, a.dim, 64)) ||
                (a.dv && !make_map(&c.dv, a.dv, work->storage, a.batch, a.keys, a.kv_heads, a.dim, 64)))
                return no_map(work);
            made = launch(work, true, backward_dkv<T, D, CAUSAL>, persistent_blocks(work, c.order.count()),
                          shape::THREADS, shared_bytes<dkv_shared<T, D>>(), c);
        }
        return made;
    });
    /* What is left: rows of irregular heads need their maxima apart from their sums. */
    if (status == VJP_OK && recomputed) {
        attention_call only_rows = a;
        only_rows.y = nullptr;
        only_rows.lse = nullptr;
        status = exact_forward(work, only_rows, {nullptr, irregular});
    }
    if (status == VJP_OK && a.dq) status = exact_dq(work, a, {flags, nullptr});
    if (status == VJP_OK && (a.dk || a.dv)) status = exact_dkv(work, a, {flags + query_flags, nullptr});
    return status;
}

} // namespace hopper
} // namespace vjp
