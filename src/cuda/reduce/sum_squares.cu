/* SPDX-License-Identifier: MIT */
/*
 * sum_squares on CUDA: x is read once, in chunks of which each block sums one; a second kernel of one block adds the
 * chunks' sums. All in double, as on the CPU: the square of an f32 is exact there and cannot overflow or underflow.
 *
 *     path    when                     what
 *     single  up to SINGLE_STEPS       one block, one launch: a second launch would cost more than the other
 *             steps of a block         multiprocessors save
 *     chunks  otherwise                a block per chunk leaves a sum in the workspace, then one block adds them
 *     many    calls that add to one y  the chunks of all calls in one launch, each split as it would be alone; then one
 *                                      block, of which a warp adds the chunks of one call in the same order, and one
 *                                      thread adds the calls to y, rounding after each
 *
 * The split and the order of additions follow from the number of elements and the dtype alone; where x is not aligned,
 * a thread reads the same elements one by one.
 */
#include "cuda/common/many.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/*
 * Vectors of 16 bytes that a thread loads before it adds the first: 128 bytes per thread, and 128 KiB per
 * multiprocessor with the RESIDENT blocks that it holds at least.
 */
constexpr int AHEAD = 8, RESIDENT = 4;

/* Elements that a block loads at once. */
template <class T> constexpr int64_t STEP = (int64_t)THREADS *AHEAD *WIDE<T>;

/* Sums of a thread: additions in double take several cycles, so those of one vector must not wait for each other. */
constexpr int SUMS = 4;

constexpr int64_t SINGLE_STEPS = 4;

/*
 * Several chunks for each place on a large card: multiprocessors that finish early take others, so that all end
 * together. They are still few for the block that adds them.
 */
constexpr int64_t MAX_CHUNKS = 16 * CHUNKS;

/* Blocks that a large Hopper card holds at once: those may begin before the previous kernel ends. */
constexpr int64_t FIRST_BLOCKS = RESIDENT * 132;

struct squares_call {
    float *y;
    bool add;
    const void *x;
    int64_t count, chunk, chunks; /* chunk: elements of all chunks but the last, whole steps */
    double *partials;             /* [chunks]; unused where there is one chunk */
};

__device__ inline void write_sum(const squares_call &c, double sum) {
    *c.y = (float)(c.add ? (double)*c.y + sum : sum);
}

/* The first `left` elements of a vector, and zeros. */
template <class T> __device__ uint4 load_part(const T *from, int64_t left) {
    wide<T> w;
#pragma unroll
    for (int k = 0; k < WIDE<T>; k++)
        w.v[k] = k < left ? from[k] : from_f32<T>(0);
    return *reinterpret_cast<const uint4 *>(&w);
}

template <class T> __device__ void add_squares(double (&sums)[SUMS], uint4 raw) {
    float values[WIDE<T>];
    unpack<T>(raw, values);
#pragma unroll
    for (int k = 0; k < WIDE<T>; k++)
        sums[k % SUMS] = fma((double)values[k], (double)values[k], sums[k % SUMS]);
}

/* The sum of chunk `block` of x, in every thread. */
template <class T, bool ALIGNED> __device__ double sum_chunk(const void *all, int64_t count, int64_t chunk, int block) {
    constexpr int ROW = THREADS * WIDE<T>; /* the elements of a vector per thread */
    __shared__ block_sums<double, 1, THREADS> shared;
    int64_t begin = block * chunk, left = min(chunk, count - begin);
    int own = (int)threadIdx.x * WIDE<T>;
    const T *x = static_cast<const T *>(all) + begin + own;
    if (blockIdx.x < FIRST_BLOCKS)
#pragma unroll
        for (int n = 0; n < AHEAD; n++)
            if (n * ROW + own < left) prefetch(x + n * ROW);
    wait_for_previous();
    double sums[SUMS] = {0};
    if constexpr (ALIGNED) {
#pragma unroll 1
        for (; left >= STEP<T>; left -= STEP<T>, x += STEP<T>) {
            uint4 raw[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
                raw[n] = load_raw_once(x + n * ROW);
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
                add_squares<T>(sums, raw[n]);
        }
        /* Less than a step, in the last chunk. Absent vectors are zeros, which change no sum. */
        constexpr int GROUP = AHEAD / 2;
        int vectors = left >= own + WIDE<T> ? ((int)left - own - WIDE<T>) / ROW + 1 : 0;
#pragma unroll 1
        for (int first = 0; first < vectors; first += GROUP) {
            uint4 raw[GROUP] = {};
#pragma unroll
            for (int n = 0; n < GROUP; n++)
                if (first + n < vectors) raw[n] = load_raw_once(x + (first + n) * ROW);
#pragma unroll
            for (int n = 0; n < GROUP; n++)
                add_squares<T>(sums, raw[n]);
        }
        x += vectors * ROW;
        left -= vectors * ROW;
    }
    /* A vector that is not whole, or all where x is not aligned. */
#pragma unroll 1
    for (left -= own; left > 0; left -= ROW, x += ROW)
        add_squares<T>(sums, load_part(x, left));
    double sum[1] = {(sums[0] + sums[1]) + (sums[2] + sums[3])};
    int turn = 0;
    block_sum(sum, shared, turn);
    return sum[0];
}

template <class T, bool ALIGNED> __global__ void __launch_bounds__(THREADS, RESIDENT) sum_chunks(squares_call c) {
    let_next_begin();
    double sum = sum_chunk<T, ALIGNED>(c.x, c.count, c.chunk, (int)blockIdx.x);
    if (threadIdx.x != 0) return;
    if (c.chunks == 1)
        write_sum(c, sum);
    else
        c.partials[blockIdx.x] = sum;
}

constexpr int LAST_THREADS = 512;

__global__ void __launch_bounds__(LAST_THREADS) add_chunks(squares_call c) {
    __shared__ block_sums<double, 1, LAST_THREADS> shared;
    begin_chained();
    double sum[1] = {0};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < c.chunks; i += LAST_THREADS)
        sum[0] += c.partials[i];
    int turn = 0;
    block_sum(sum, shared, turn);
    if (threadIdx.x == 0) write_sum(c, sum[0]);
}

/* ---- Many calls -------------------------------------------------------------------------------------- */

struct squares_member {
    const void *x;
    double *partials; /* [chunks] */
    int64_t count, chunk, chunks;
    vjp_dtype storage; /* gradients of matrices may be bf16 between f32 ones of norms */
};

using squares_members = many_members<squares_member>;

__global__ void __launch_bounds__(THREADS, RESIDENT) sum_many_chunks(const __grid_constant__ squares_members members) {
    let_next_begin();
    int chunk, k = members.find((int)blockIdx.x, &chunk);
    const squares_member &m = members.member[k];
    double sum = m.storage == VJP_F32    ? sum_chunk<float, true>(m.x, m.count, m.chunk, chunk)
                 : m.storage == VJP_BF16 ? sum_chunk<bf16, true>(m.x, m.count, m.chunk, chunk)
                                         : sum_chunk<f16, true>(m.x, m.count, m.chunk, chunk);
    if (threadIdx.x == 0) m.partials[chunk] = sum;
}

constexpr int MANY_THREADS = 1024;

/*
 * What add_chunks() computes with LAST_THREADS threads, by one warp: the same terms in each lane of each of its warps,
 * and the same order of the warps. Warps without chunks add 0 there, which changes nothing, and are left out.
 */
__device__ inline double add_chunks_by_warp(const squares_member &m) {
    double sum = 0;
    for (int warp = 0; warp < LAST_THREADS / 32 && warp * 32 < m.chunks; warp++) {
        double own = 0;
#pragma unroll 4
        for (int64_t i = warp * 32 + (int)threadIdx.x % 32; i < m.chunks; i += LAST_THREADS)
            own += m.partials[i];
        own = warp_sum(own);
        sum = warp == 0 ? own : sum + own;
    }
    return sum;
}

__global__ void __launch_bounds__(MANY_THREADS)
    add_many(const __grid_constant__ squares_members members, float *y, bool add) {
    __shared__ double sums[MANY_MEMBERS];
    begin_chained();
    for (int k = (int)threadIdx.x / 32; k < members.count; k += MANY_THREADS / 32) {
        double sum = add_chunks_by_warp(members.member[k]);
        if (threadIdx.x % 32 == 0) sums[k] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float total = add ? (float)((double)*y + sums[0]) : (float)sums[0];
    for (int k = 1; k < members.count; k++)
        total = (float)((double)total + sums[k]);
    *y = total;
}

/* Depends on the number of elements and the dtype only. */
squares_call plan(const vjp_work *work) {
    squares_call c{};
    int64_t step = work->storage == VJP_F32 ? STEP<float> : STEP<bf16>;
    c.count = vjp_elements(work, SUM_SQUARES_X);
    c.chunk = vjp_round_up(vjp_divide_up(c.count, c.count <= SINGLE_STEPS * step ? 1 : MAX_CHUNKS), step);
    c.chunks = vjp_max(vjp_divide_up(c.count, vjp_max(c.chunk, 1)), 1);
    return c;
}

vjp_status run(const vjp_work *work) {
    squares_call c = plan(work);
    c.y = static_cast<float *>(vjp_data(work, SUM_SQUARES_Y));
    c.add = vjp_accumulates(work, SUM_SQUARES_Y);
    c.x = vjp_data(work, SUM_SQUARES_X);
    c.partials = static_cast<double *>(work->workspace);
    if (!c.y || (c.add && c.count == 0)) return VJP_OK;
    vjp_status status = with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return launch(work, true, is_aligned(c.x, 16) ? sum_chunks<T, true> : sum_chunks<T, false>, c.chunks, THREADS,
                      0, c);
    });
    if (status != VJP_OK || c.chunks == 1) return status;
    return launch(work, true, add_chunks, 1, LAST_THREADS, 0, c);
}

size_t workspace(const vjp_work *work) {
    squares_call c = plan(work);
    return work->tensor[SUM_SQUARES_Y] ? (size_t)c.chunks * sizeof(double) : 0;
}

/* Whether the call has elements that are aligned, and adds to the same y as the first, or is the first. */
bool can_join(const vjp_work *work, const vjp_work *first) {
    return vjp_data(work, SUM_SQUARES_Y) && vjp_data(work, SUM_SQUARES_Y) == vjp_data(first, SUM_SQUARES_Y) &&
           vjp_elements(work, SUM_SQUARES_X) > 0 && is_aligned(vjp_data(work, SUM_SQUARES_X), 16) &&
           (work == first || vjp_accumulates(work, SUM_SQUARES_Y));
}

} // namespace

vjp_status run_many_sum_squares(const vjp_work *const *works, size_t count) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK;) {
        squares_members members;
        size_t end = i;
        for (; end < count && end - i < MANY_MEMBERS && can_join(works[end], works[i]); end++) {
            squares_call c = plan(works[end]);
            members.add({vjp_data(works[end], SUM_SQUARES_X), static_cast<double *>(works[end]->workspace), c.count,
                         c.chunk, c.chunks, works[end]->storage},
                        c.chunks);
        }
        if (end - i < 2) {
            status = run(works[i++]);
            continue;
        }
        status = launch(works[i], true, sum_many_chunks, members.blocks(), THREADS, 0, members);
        if (status == VJP_OK)
            status = launch(works[i], true, add_many, 1, MANY_THREADS, 0, members,
                            static_cast<float *>(vjp_data(works[i], SUM_SQUARES_Y)),
                            vjp_accumulates(works[i], SUM_SQUARES_Y));
        i = end;
    }
    return status;
}

} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_sum_squares[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_sum_squares[VJP_PASS_COUNT] = {{vjp::run, vjp::workspace, VJP_STORAGE_16_32}};
}
