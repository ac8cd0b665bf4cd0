/* SPDX-License-Identifier: MIT */
/* attention on tensor cores: what is launched for each pass, on Hopper's path or the other, and what is left to the
 * exact path. */
#include "cuda/attention/fast.cuh"

namespace vjp {
namespace {

/* ---- Numbers of each row ----------------------------------------------------------------------------- */

constexpr int ROW_THREADS = 256;
constexpr int64_t MAX_ROW_BLOCKS = 4096;

/* Above this size of lse / log 2 its f32 keeps fewer than 10 bits of a weight: recomputed heads take the exact path. */
constexpr float LARGE_LSE = 8192;

struct rows_call {
    attention_call a;
    row_numbers rows;
    int *irregular;     /* [batch * kv_heads], where lse was computed again: heads that take the exact path */
    hopper::dq_sums dq; /* its turns, or NULL: the kernel sets them to 0 */
};

/* dy as the products take it: f32 rounded to TF32, so that <dy, y> cancels dP where one weight is 1 and y is a value.
 */
template <class T> __device__ float as_operand(T x) {
    if constexpr (std::is_same_v<T, float>)
        return __uint_as_float(round_tf32(x));
    else
        return to_f32(x);
}

/*
 * The numbers of each row, LANES threads per row, eight elements each. Where lse was computed again, also row_max and
 * row_log for the exact path.
 */
template <class T, int LANES> __global__ void __launch_bounds__(ROW_THREADS) attention_rows(rows_call c) {
    const attention_call &a = c.a;
    constexpr int EACH = 8, ROWS = ROW_THREADS / LANES;
    int lane = threadIdx.x % LANES;
    int64_t count = a.batch * c.rows.padded * a.heads;
    begin_chained();
    for (int64_t i = blockIdx.x * (int64_t)ROW_THREADS + threadIdx.x; c.dq.turn && i <= c.dq.turns;
         i += (int64_t)gridDim.x * ROW_THREADS)
        c.dq.turn[i] = 0;
    for (int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / LANES;
         row < divide_up(count, (int64_t)(32 / LANES)) * (32 / LANES); row += (int64_t)gridDim.x * ROWS) {
        int64_t head = row % a.heads, time = row / a.heads % c.rows.padded, batch = row / a.heads / c.rows.padded;
        int64_t to = (batch * a.heads + head) * c.rows.padded + time, from = (batch * a.heads + head) * a.time + time;
        bool inside = row < count && time < a.time;
        float lse = CUDART_INF_F, delta = 0;
        if (inside && lane * EACH < a.dim) {
            int64_t at = ((batch * a.time + time) * a.heads + head) * a.dim + lane * EACH;
#pragma unroll
            for (int from = 0; from < EACH; from += WIDE<T>) {
                wide<T> dy = load_wide(static_cast<const T *>(a.dy) + at + from), y{};
                if (!a.y_f32) y = load_wide(static_cast<const T *>(a.out) + at + from);
#pragma unroll
                for (int i = 0; i < WIDE<T>; i++)
                    delta = fmaf(as_operand(dy.v[i]),
                                 a.y_f32 ? static_cast<const float *>(a.out)[at + from + i] : to_f32(y.v[i]), delta);
            }
        }
#pragma unroll
        for (int step = LANES / 2; step; step /= 2)
            delta += __shfl_xor_sync(0xffffffffu, delta, step);
        if (inside) {
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
        if (lane == 0 && row < count) {
            c.rows.lse[to] = lse - (float)WEIGHT_BITS<T>;
            c.rows.delta[to] = delta;
        }
    }
}

/* ---- Launching --------------------------------------------------------------------------------------- */

int64_t flag_blocks(const attention_call &a, int64_t heads, int64_t rows) {
    return a.batch * heads * vjp_divide_up(rows, FLAG_ROWS) * vjp_divide_up(a.dim, FLAG_COLUMNS);
}

bool is_hopper(const vjp_work *work, const attention_call &a) {
    return VJP_CUDA_HOPPER && state_of(work->device)->capability == 90 && work->storage != VJP_F32 && a.dim <= 128;
}

} // namespace

/* Keys and values of a section of heads together: well inside the second-level cache of any large card. */
static constexpr int64_t SECTION_BYTES = 20 << 20;

tile_order order_of(int64_t heads, int64_t heads_per_batch, int64_t shared, int64_t bytes, int64_t blocks,
                    bool descending) {
    int64_t section = vjp_max(SECTION_BYTES / vjp_max(bytes, 1), 1) * shared;
    return {(int)heads, (int)heads_per_batch, (int)vjp_min(section, heads), (int)blocks, descending};
}

bool fast_takes(const vjp_work *work, const attention_call &a) {
    const void *all[] = {a.q, a.k, a.v, a.dy, a.out, a.y, a.dq, a.dk, a.dv};
    for (const void *data : all)
        if (!is_aligned(data, 16)) return false;
    for (int64_t step : {a.q_step, a.k_step, a.v_step, a.dq_step, a.dk_step, a.dv_step})
        if (step * (int64_t)vjp_dtype_size(work->storage) % 16 != 0) return false;
    if (work->storage == VJP_F32 && !(state_of(work->device)->tf32 && tensor::fits(work, a))) return false;
    int64_t largest = INT32_MAX / 2;
    return a.dim <= 256 && a.dim % 8 == 0 && a.time > 0 && a.keys > 0 && a.batch * a.heads > 0 && a.time < largest &&
           a.keys < largest && a.batch * a.heads < largest / vjp_divide_up(vjp_max(a.time, a.keys), FLAG_ROWS);
}

vjp_status fast_forward(const vjp_work *work, const attention_call &a, workspace_layout &layout) {
    int *flags = layout.take<int>(flag_blocks(a, a.heads, a.time));
    /*
     * The backward needs a y computed again to more digits than one of 16-bit weights has: dS is the difference of
     * dy v and dy y, which nearly cancel in rows of few keys. The other path takes weights in two parts.
     */
    bool on_hopper = is_hopper(work, a) && !a.y_f32;
    auto *asides = on_hopper ? hopper::asides : tensor::asides;
    fast_call c{work, a, {}, flags, layout.take<float>(is_long(work, a.keys) ? asides(work, a).forward : 0)};
    if (!layout.base) return VJP_OK;
    vjp_status status = on_hopper ? hopper::enqueue_forward(c) : tensor::enqueue_forward(c);
    return status == VJP_OK && a.y ? exact_forward(work, a, {flags, nullptr}) : status;
}

vjp_status fast_backward(const vjp_work *work, const attention_call &given, bool recomputed, workspace_layout &layout) {
    fast_call c{work, given, {}, nullptr, nullptr};
    attention_call &a = c.a;
    c.rows.padded = vjp_round_up(a.time, 384);
    c.rows.lse = layout.take<float>(a.batch * a.heads * c.rows.padded);
    c.rows.delta = layout.take<float>(a.batch * a.heads * c.rows.padded);
    int64_t heads = a.batch * a.kv_heads, query_flags = flag_blocks(a, a.heads, a.time);
    int *flags = layout.take<int>(query_flags + flag_blocks(a, a.kv_heads, a.keys));
    int *irregular = recomputed ? layout.take<int>(heads) : nullptr;
    a.row_max = recomputed ? layout.take<float>(a.batch * a.heads * a.time) : const_cast<float *>(a.lse_in);
    a.row_log = recomputed ? layout.take<float>(a.batch * a.heads * a.time) : nullptr;
    bool on_hopper = is_hopper(work, a), keys = a.dk || a.dv, at_once = on_hopper && hopper::takes_gradients(a);
    hopper::dq_sums dq{};
    if (at_once) dq = hopper::dq_sums_of(a, layout);
    aside_numbers asides = on_hopper ? hopper::asides(work, a) : tensor::asides(work, a);
    int64_t of_dq = is_long(work, a.keys) && !at_once ? asides.dq : 0;
    int64_t of_dkv = is_long(work, a.group * a.time) ? asides.dkv : 0;
    c.aside = layout.take<float>(vjp_max(of_dq, of_dkv));
    if (!layout.base) return VJP_OK;
    vjp_status status = VJP_OK;
    if (recomputed)
        status = result_of(work, cudaMemsetAsync(irregular, 0, (size_t)heads * sizeof(int), stream_of(work)));
    if (status == VJP_OK)
        status = with_type(work->storage, [&](auto zero) {
            using T = decltype(zero);
            auto kernel = a.dim <= 64    ? attention_rows<T, 8>
                          : a.dim <= 128 ? attention_rows<T, 16>
                                         : attention_rows<T, 32>;
            int64_t lanes = a.dim <= 64 ? 8 : a.dim <= 128 ? 16 : 32, rows = a.batch * a.heads * c.rows.padded;
            return launch(work, true, kernel, vjp_min(vjp_divide_up(rows, ROW_THREADS / lanes), MAX_ROW_BLOCKS),
                          ROW_THREADS, 0, rows_call{a, c.rows, irregular, dq});
        });
    c.flags = flags;
    if (status == VJP_OK && at_once) status = hopper::enqueue_gradients(c, dq, flags + query_flags);
    if (status == VJP_OK && a.dq && !at_once) status = on_hopper ? hopper::enqueue_dq(c) : tensor::enqueue_dq(c);
    c.flags = flags + query_flags;
    if (status == VJP_OK && keys && !at_once) status = on_hopper ? hopper::enqueue_dkv(c) : tensor::enqueue_dkv(c);
    /*
     * What is left: rows of irregular heads need their maxima apart from their sums. Large scores of TF32 may have
     * another order than the exact ones that the weights then come from, so y is computed for these, too.
     */
    if (status == VJP_OK && recomputed) {
        attention_call only_rows = a;
        only_rows.y = work->storage == VJP_F32 ? const_cast<void *>(a.out) : nullptr;
        only_rows.lse = nullptr;
        status = exact_forward(work, only_rows, {nullptr, irregular});
    }
    if (status == VJP_OK && a.dq) status = exact_dq(work, a, {flags, nullptr});
    if (status == VJP_OK && keys) status = exact_dkv(work, a, {flags + query_flags, nullptr});
    return status;
}

} // namespace vjp
