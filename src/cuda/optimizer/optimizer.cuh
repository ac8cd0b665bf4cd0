/* SPDX-License-Identifier: MIT */
/*
 * The loop of adamw and sgd on CUDA: each element of several streams is read once, changed and written once, so memory
 * is the limit. An element belongs to one thread, which reads all of its streams before it writes any: the step may run
 * in place.
 *
 *     path     when                          what
 *     vectors  all addresses are aligned to  a thread moves VECTOR adjacent elements of every stream; the last
 *              VECTOR elements               count % VECTOR elements are scalars of the last block
 *     scalars  otherwise                     the same with vectors of one element
 *
 * VECTOR is 4 for every dtype: 16 bytes of f32, and 8 of a 16-bit weight beside 16 of its f32 moments. With 16 bytes of
 * the weight a thread would move 32 of each moment, in two stores that each fill only half of a 32-byte sector.
 *
 * Every element is computed by the same instructions on both paths: the bits do not depend on the addresses.
 *
 * A step of an optimizer is a struct of what the host passes, with
 *     factors                    what all elements share and only the device can read: lr, scale, ...
 *     streams<W>                 W elements of each input, as loaded
 *     prefetch_at(i)             may come before the previous kernel is done
 *     prepare(f)                 reads the factors, called by all threads; false: nothing is to be written
 *     load(streams, i), update(streams, factors, i)
 *     member, use(member)        for steps of many tensors: what differs between them
 *
 * Steps of many tensors are one launch: its parameter is a table of members, and a block finds the tensor it belongs
 * to.
 */
#ifndef VJP_CUDA_OPTIMIZER_CUH
#define VJP_CUDA_OPTIMIZER_CUH

#include "cuda/common/many.cuh"

namespace vjp {

constexpr int VECTOR = 4;

template <class E, int W> struct alignas(W * sizeof(E)) elements { E v[W]; };

/*
 * Elements [i, i + W). Measured on an H200: adamw is 6 to 8 % slower with loads that mark the line to be evicted first
 * (__ldcs).
 */
template <class E, int W> __device__ elements<E, W> load_elements(const void *from, int64_t i) {
    const E *place = static_cast<const E *>(from) + i;
    elements<E, W> r;
    if constexpr (W == 1) {
        r.v[0] = *place;
    } else {
        using raw = std::conditional_t<sizeof r == 16, uint4, uint2>;
        *reinterpret_cast<raw *>(&r) = *reinterpret_cast<const raw *>(place);
    }
    return r;
}

template <class E, int W> __device__ void store_raw(E *place, const elements<E, W> &r) {
    if constexpr (W == 1) {
        *place = r.v[0];
    } else {
        using raw = std::conditional_t<sizeof r == 16, uint4, uint2>;
        __stcs(reinterpret_cast<raw *>(place), *reinterpret_cast<const raw *>(&r));
    }
}

/* Does nothing where the output is absent. */
template <class E, int W> __device__ void store_elements(void *to, int64_t i, const float (&values)[W]) {
    if (!to) return;
    E *place = static_cast<E *>(to) + i;
    elements<E, W> r;
#pragma unroll
    for (int k = 0; k < W; k++)
        r.v[k] = from_f32<E>(values[k]);
    store_raw(place, r);
}

/*
 * g + decay w. Without decay an infinite w adds nothing, as 0 * Inf would: the product is then a zero of w's sign,
 * which for every finite w it is anyway.
 */
__device__ inline float decayed(float w, float decay, float g) {
    return decay != 0 ? fmaf(w, decay, g) : copysignf(0.0f, w) + g;
}

/* Calls f with values of the types of the weights and of the gradient, which is f32, bf16 or the weights' type. */
template <class F> auto with_step_types(const vjp_work *work, int gradient, F f) {
    return with_type(work->storage, [&](auto weight) {
        switch (vjp_type(work, gradient)) {
        case VJP_F32: return f(weight, float{});
        case VJP_BF16: return f(weight, bf16{});
        default: return f(weight, weight);
        }
    });
}

/* ---- The kernel -------------------------------------------------------------------------------------- */

constexpr int STEP_THREADS = 256;

/*
 * A multiprocessor holds at least four blocks, whose threads load AHEAD vectors of every stream before they use the
 * first: 128 bytes per thread in f32, 128 KiB per multiprocessor.
 */
constexpr int STEP_RESIDENT = 4;
template <int W> constexpr int AHEAD = W == 1 ? 4 : 2;

/* Elements that a block moves at once. */
template <int W> constexpr int STEP_TILE = STEP_THREADS *W *AHEAD<W>;

/* Blocks that a large Hopper card holds at once: those may begin before the previous kernel ends. */
constexpr int64_t STEP_FIRST_BLOCKS = STEP_RESIDENT * 132;

/*
 * A block has at most this many tiles, which share the latency of its factors; fewer where there would not be several
 * blocks for each place on a large card.
 */
constexpr int64_t STEP_MAX_TILES = 4;

template <int W, class Step> __device__ void step_once(const Step &step, const typename Step::factors &f, int64_t i) {
    typename Step::template streams<W> s;
    step.load(s, i);
    step.update(s, f, i);
}

/* Tiles [block * tiles, (block + 1) * tiles) of `count` elements. */
template <int W, class Step> __device__ void step_tiles(const Step &step, int64_t count, int64_t tiles, int64_t block) {
    constexpr int N = AHEAD<W>, ROW = STEP_THREADS * W, TILE = STEP_TILE<W>;
    int64_t whole = count - count % W; /* elements in vectors */
    int64_t first = block * tiles * TILE, own = first + (int64_t)threadIdx.x * W;
    if (blockIdx.x < STEP_FIRST_BLOCKS)
#pragma unroll
        for (int n = 0; n < N; n++)
            if (own + n * ROW < whole) step.prefetch_at(own + n * ROW);
    wait_for_previous();
    /* The first tile is loaded before the factors are computed, so that their latency is hidden. */
    typename Step::template streams<W> s[N];
    auto load_tile = [&] {
        if (tiles == 0 || first + TILE > whole) return false;
#pragma unroll
        for (int n = 0; n < N; n++)
            step.load(s[n], own + n * ROW);
        return true;
    };
    bool loaded = load_tile();
    typename Step::factors f;
    if (!step.prepare(f)) return;
#pragma unroll 1
    while (loaded) {
#pragma unroll
        for (int n = 0; n < N; n++)
            step.update(s[n], f, own + n * ROW);
        tiles--;
        first += TILE;
        own += TILE;
        loaded = load_tile();
    }
    /* The last tile is not whole. Blocks have at least one tile each, so only the last block gets past here. */
    if (tiles == 0) return;
#pragma unroll 1
    for (; own < whole; own += ROW)
        step_once<W>(step, f, own);
    if (W > 1 && whole + threadIdx.x < count) step_once<1>(step, f, whole + threadIdx.x);
}

template <class Step, int W>
__global__ void __launch_bounds__(STEP_THREADS, STEP_RESIDENT) step_elements(Step step, int64_t count, int64_t tiles) {
    let_next_begin();
    step_tiles<W>(step, count, tiles, blockIdx.x);
}

template <class Step>
__global__ void __launch_bounds__(STEP_THREADS, STEP_RESIDENT)
    step_members(Step step, const __grid_constant__ many_members<typename Step::member> members, int64_t tiles) {
    let_next_begin();
    int block, k = members.find((int)blockIdx.x, &block);
    step.use(members.member[k]);
    step_tiles<VECTOR>(step, members.member[k].count, tiles, block);
}

/* Tiles of a block, for so many in all. */
inline int64_t tiles_of_block(int64_t all) {
    return vjp_min(vjp_max(all / (4 * STEP_FIRST_BLOCKS), 1), STEP_MAX_TILES);
}

template <int W, class Step> vjp_status enqueue_step(const vjp_work *work, const Step &step, int64_t count) {
    int64_t all = vjp_divide_up(count, STEP_TILE<W>);
    int64_t tiles = vjp_max(tiles_of_block(all), vjp_divide_up(all, MAX_BLOCKS));
    return launch(work, true, step_elements<Step, W>, vjp_divide_up(all, tiles), STEP_THREADS, 0, step, count, tiles);
}

/*
 * Calls run(works, count) for the works of each kind, which may lie between others: same(a, b) says whether two are of
 * one. Where gradients are bf16 but for those of norms, there are two kinds.
 */
template <class Same, class Run>
vjp_status for_each_kind(const vjp_work *const *works, size_t count, Same same, Run run) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK; i++) {
        size_t earlier = 0, found = 0;
        while (!same(works[earlier], works[i]))
            earlier++;
        if (earlier < i) continue;
        const vjp_work *kind[MANY_MEMBERS];
        for (size_t k = i; k < count && status == VJP_OK; k++) {
            if (same(works[k], works[i])) kind[found++] = works[k];
            if (found < MANY_MEMBERS && k + 1 < count) continue;
            status = run(kind, found);
            found = 0;
        }
    }
    return status;
}

/*
 * Runs steps of many tensors. step_of(work, &step, &member) describes one of them and returns false where it must run
 * alone; steps that share all but their members run as one, in batches that the table holds.
 */
template <class Step, class StepOf>
vjp_status run_steps(const vjp_work *const *works, size_t count, StepOf step_of,
                     vjp_status (*run_one)(const vjp_work *)) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK;) {
        Step step{}, other{};
        many_members<typename Step::member> members;
        int64_t all = 0, tiles;
        size_t end = i;
        typename Step::member list[MANY_MEMBERS];
        for (; end < count && end - i < MANY_MEMBERS; end++) {
            Step *to = end == i ? &step : &other;
            if (!step_of(works[end], to, &list[end - i])) break;
            if (end > i && !step.shares(other)) break;
            all += vjp_divide_up(list[end - i].count, STEP_TILE<VECTOR>);
        }
        tiles = tiles_of_block(all);
        for (size_t k = i; k < end; k++)
            members.add(list[k - i], vjp_divide_up(list[k - i].count, tiles * STEP_TILE<VECTOR>));
        if (end - i < 2 || all > MAX_BLOCKS) {
            status = run_one(works[i++]);
            continue;
        }
        status = launch(works[i], true, step_members<Step>, members.blocks(), STEP_THREADS, 0, step, members, tiles);
        i = end;
    }
    return status;
}

} // namespace vjp

#endif
