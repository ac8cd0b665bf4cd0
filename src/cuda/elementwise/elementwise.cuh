/* SPDX-License-Identifier: MIT */
/*
 * Elementwise ops on CUDA: each op is its formula, from the inputs of an element to its outputs.
 *
 * A formula is a struct that derives from `formula`, whose call operator computes W adjacent elements. All of y = a +
 * b:
 *
 *     struct sum : formula {
 *         template <int W>
 *         __device__ void operator()(int64_t, const float (&in)[2][W], float (&out)[1][W]) const {
 *             for (int k = 0; k < W; k++)
 *                 out[0][k] = in[0][k] + in[1][k];
 *         }
 *     };
 *
 *     element_call c{.in = {a, b}, .out = {y}, .add = {accumulates}, .count = count};
 *     run_elements(work, sum{}, types<T, T>{}, types<T>{}, c);
 *
 * Everything else is done here: storage types, wide accesses and the elements before and after them, addresses that
 * allow none, absent operands, +=, an input that is repeated, and grids.
 *
 *     path     when                                       what
 *     vectors  all operands are equally far from a        W elements per access: 8 (16 bytes) where all operands have
 *              multiple of W elements                     16 bits, otherwise 4 (16 and 8 bytes); the few elements
 *                                                         before the first vector and after the last are scalar
 *     scalar   otherwise                                  one element per access
 *
 * A thread loads all its vectors before it uses the first, and a block has only those: blocks that end are replaced, so
 * loads stay in flight. An element belongs to one thread, which reads all its inputs before it writes: an output may be
 * the memory of any input. A result depends on its own inputs alone, so no path changes a bit.
 *
 * Loads and stores are ordinary ones, in small blocks. Loads marked as streaming (ld.cs) and blocks of 256 threads move
 * 3 to 8 % fewer bytes per second on an H200: swiglu's forward of 92 MiB tensors 3.84 against 4.14 TB/s, its backward
 * 3.97 against 4.16.
 */
#ifndef VJP_CUDA_ELEMENTWISE_CUH
#define VJP_CUDA_ELEMENTWISE_CUH

#include <tuple>

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

constexpr int ELEMENT_THREADS = 128;
constexpr int ELEMENT_INPUTS = 3, ELEMENT_OUTPUTS = 3;

/* The storage types of a formula's inputs or outputs, in their order. */
template <class... S> struct types {
    static constexpr int COUNT = sizeof...(S);
    static constexpr bool ALL_16_BIT = ((sizeof(S) == 2) && ...);
    template <int K> using at = std::tuple_element_t<K, std::tuple<S...>>;
};

/* What a formula inherits, and may define differently. */
struct formula {
    static constexpr int ROW = -1;     /* the input that may be repeated; -1: none */
    static constexpr int UNIT = 1;     /* vectors must begin at a multiple of this */
    static constexpr int RESIDENT = 8; /* blocks of a multiprocessor; fewer leave more registers */

    static constexpr bool HAS_OVERWRITE = false;  /* a kernel that cannot add, for lack of registers for old values */
    static constexpr int64_t BLOCKS = MAX_BLOCKS; /* the largest grid; with more to do, threads loop */

    /* Called once per thread, when the first loads are issued; if it returns false, nothing is written. */
    __device__ bool prepare() {
        return true;
    }
};

/* The number of an operand, known when compiling. */
template <int K> struct operand { static constexpr int INDEX = K; };

/* Calls f(operand<K>) for K in [0, COUNT). */
template <int COUNT, int K = 0, class F> __device__ void for_each_operand(F f) {
    if constexpr (K < COUNT) {
        f(operand<K>{});
        for_each_operand<COUNT, K + 1>(f);
    }
}

/* ---- W elements as loaded ---------------------------------------------------------------------------- */

/* The bits of one element. */
template <class S> __device__ unsigned element_bits(const S *from) {
    if constexpr (sizeof(S) == 2)
        return *reinterpret_cast<const unsigned short *>(from);
    else
        return *reinterpret_cast<const unsigned *>(from);
}

/* Puts the bits of element k into a vector that was 0 there. k is a constant. */
template <class S> __device__ void set_element(uint4 &raw, int k, unsigned bits) {
    int word = sizeof(S) == 2 ? k / 2 : k;
    unsigned placed = sizeof(S) == 2 ? bits << (k % 2 * 16) : bits;
    if (word == 0) raw.x |= placed;
    if (word == 1) raw.y |= placed;
    if (word == 2) raw.z |= placed;
    if (word == 3) raw.w |= placed;
}

/* W adjacent elements, aligned to their size, in the lowest bytes of a vector. */
template <class S, int W> __device__ uint4 load_elements(const S *from) {
    constexpr int BYTES = W * (int)sizeof(S);
    static_assert(W == 1 || BYTES == 8 || BYTES == 16);
    if constexpr (W == 1) {
        return {element_bits(from), 0, 0, 0};
    } else if constexpr (BYTES == 8) {
        uint2 half = *reinterpret_cast<const uint2 *>(from);
        return {half.x, half.y, 0, 0};
    } else {
        return *reinterpret_cast<const uint4 *>(from);
    }
}

template <class S, int W> __device__ void unpack_elements(const uint4 &raw, float (&values)[W]) {
    float all[WIDE<S>];
    unpack<S>(raw, all);
#pragma unroll
    for (int k = 0; k < W; k++)
        values[k] = all[k];
}

/* Adds the old elements first if `add`. */
template <class S, int W> __device__ void store_elements(S *to, const float (&values)[W], const uint4 &old, bool add) {
    constexpr int BYTES = W * (int)sizeof(S);
    float all[WIDE<S>] = {}, before[WIDE<S>];
    unpack<S>(old, before);
#pragma unroll
    for (int k = 0; k < W; k++)
        all[k] = add ? before[k] + values[k] : values[k];
    if constexpr (W == 1) {
        *to = from_f32<S>(all[0]);
    } else {
        uint4 raw = pack<S>(all);
        if constexpr (BYTES == 8)
            *reinterpret_cast<uint2 *>(to) = make_uint2(raw.x, raw.y);
        else
            *reinterpret_cast<uint4 *>(to) = raw;
    }
}

/* ---- A repeated input -------------------------------------------------------------------------------- */

/* Division of numbers below 2^63 by a number that all threads share: the estimate is at most 1 too small. */
struct divider {
    uint64_t by, inverse;
};

inline divider divider_of(int64_t by) {
    return {(uint64_t)by, UINT64_MAX / (uint64_t)by};
}

__device__ inline int64_t divide(const divider &d, int64_t n, int64_t *rest) {
    uint64_t quotient = __umul64hi((uint64_t)n, d.inverse), left = (uint64_t)n - quotient * d.by;
    if (left >= d.by) {
        left -= d.by;
        quotient++;
    }
    *rest = (int64_t)left;
    return (int64_t)quotient;
}

/*
 * Element i of the outputs belongs to element i / block * period + i % period of the repeated input: a row of `period`
 * elements is used for a whole block, which is a multiple of it, and the next block has the next row.
 */
struct repetition {
    divider period, block;
    enum { VECTORS, CONSTANT, SINGLE } access; /* the W elements of a vector are adjacent, all the same, or any */
};

template <class S, int W> __device__ uint4 load_repeated(const repetition &r, const S *from, int64_t i) {
    int64_t column, within, row = divide(r.block, i, &within);
    divide(r.period, i, &column);
    int64_t period = (int64_t)r.period.by, block = (int64_t)r.block.by;
    from += row * period;
    uint4 raw = {0, 0, 0, 0};
    if (W > 1 && r.access == repetition::VECTORS) {
        constexpr int BYTES = W * (int)sizeof(S);
        if constexpr (BYTES == 16) {
            raw = *reinterpret_cast<const uint4 *>(from + column);
        } else if constexpr (BYTES == 8) {
            uint2 half = *reinterpret_cast<const uint2 *>(from + column);
            raw = {half.x, half.y, 0, 0};
        }
    } else if (r.access == repetition::CONSTANT) {
        unsigned bits = element_bits(from);
#pragma unroll
        for (int k = 0; k < W; k++)
            set_element<S>(raw, k, bits);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) {
            set_element<S>(raw, k, element_bits(from + column));
            if (k == W - 1) break;
            if (++column == period) column = 0;
            if (++within == block) {
                within = 0;
                from += period;
            }
        }
    }
    return raw;
}

/* ---- The kernel -------------------------------------------------------------------------------------- */

struct element_call {
    const void *in[ELEMENT_INPUTS]; /* NULL: 0 */
    void *out[ELEMENT_OUTPUTS];     /* NULL: not wanted */
    bool add[ELEMENT_OUTPUTS];
    int64_t count;
    repetition row = {}; /* of the formula's input ROW, if it is repeated */

    /* The plan: `head` single elements, `vectors` vectors, and the rest, single again. */
    int64_t head = 0, vectors = 0;
};

/* Vectors per operand that a thread loads at once: 64 bytes or more per thread. */
template <class In, class Out> constexpr int FLIGHT = In::COUNT + Out::COUNT == 2 ? 4 : 2;

/*
 * Computes N vectors at elements i, i + W * ELEMENT_THREADS, ... as far as they are below `end`. False: the formula
 * cannot be computed. `prepared`: it has been prepared.
 */
template <int N, int W, bool ROWS, bool ADD, class Formula, class... I, class... O>
__device__ bool compute_elements(Formula &f, bool prepared, const element_call &c, int64_t i, int64_t end, types<I...>,
                                 types<O...>) {
    using In = types<I...>;
    using Out = types<O...>;
    constexpr int64_t STEP = W * ELEMENT_THREADS;
    uint4 in[In::COUNT][N], old[Out::COUNT][N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        int64_t at = i + n * STEP;
        for_each_operand<In::COUNT>([&](auto which) {
            constexpr int K = decltype(which)::INDEX;
            using S = typename In::template at<K>;
            const S *from = static_cast<const S *>(c.in[K]);
            in[K][n] = {0, 0, 0, 0};
            if (!from || at >= end) return;
            if constexpr (ROWS && K == Formula::ROW)
                in[K][n] = load_repeated<S, W>(c.row, from, at);
            else
                in[K][n] = load_elements<S, W>(from + at);
        });
        for_each_operand<Out::COUNT>([&](auto which) {
            constexpr int K = decltype(which)::INDEX;
            using S = typename Out::template at<K>;
            old[K][n] = {0, 0, 0, 0};
            if (ADD && c.out[K] && c.add[K] && at < end)
                old[K][n] = load_elements<S, W>(static_cast<const S *>(c.out[K]) + at);
        });
    }
    if (!prepared && !f.prepare()) return false;
#pragma unroll
    for (int n = 0; n < N; n++) {
        int64_t at = i + n * STEP;
        if (at >= end) return true;
        float x[In::COUNT][W], y[Out::COUNT][W];
        for_each_operand<In::COUNT>([&](auto which) {
            constexpr int K = decltype(which)::INDEX;
            unpack_elements<typename In::template at<K>, W>(in[K][n], x[K]);
        });
        f(at, x, y);
        for_each_operand<Out::COUNT>([&](auto which) {
            constexpr int K = decltype(which)::INDEX;
            using S = typename Out::template at<K>;
            if (c.out[K]) store_elements<S, W>(static_cast<S *>(c.out[K]) + at, y[K], old[K][n], ADD && c.add[K]);
        });
    }
    return true;
}

template <int W, bool ROWS, bool ADD, class Formula, class In, class Out>
__global__ void __launch_bounds__(ELEMENT_THREADS, Formula::RESIDENT) elements(Formula f, element_call c) {
    begin_chained();
    constexpr int N = FLIGHT<In, Out>;
    int64_t end = c.head + c.vectors * W;
    bool prepared = false;
    unsigned block = block_from_the_end();
    for (int64_t v = (int64_t)block * (N * ELEMENT_THREADS) + threadIdx.x; v < c.vectors;
         v += (int64_t)gridDim.x * (N * ELEMENT_THREADS)) {
        if (!compute_elements<N, W, ROWS, ADD>(f, prepared, c, c.head + v * W, end, In{}, Out{})) return;
        prepared = true;
    }
    if constexpr (W > 1) {
        /* Fewer than 2 W elements, in the last block, which has the fewest vectors. */
        int64_t i = threadIdx.x < c.head ? threadIdx.x : threadIdx.x + c.vectors * W;
        if (block == gridDim.x - 1 && i < c.count) {
            element_call single = c;
            single.row.access = repetition::SINGLE;
            compute_elements<1, 1, ROWS, ADD>(f, prepared, single, i, i + 1, In{}, Out{});
        }
    }
}

/* ---- The launch -------------------------------------------------------------------------------------- */

template <bool ROWS, class Formula, class In, class Out>
vjp_status enqueue_elements(const vjp_work *work, Formula f, element_call c, bool in_vectors) {
    constexpr int W = In::ALL_16_BIT && Out::ALL_16_BIT ? 8 : 4;
    int64_t wide = in_vectors ? W : 1, each = FLIGHT<In, Out> * ELEMENT_THREADS;
    c.vectors = (c.count - c.head) / wide;
    if constexpr (ROWS) {
        using S = typename In::template at<Formula::ROW>;
        int64_t period = (int64_t)c.row.period.by, block = (int64_t)c.row.block.by;
        bool adjacent = c.head == 0 && period % W == 0 && is_aligned(c.in[Formula::ROW], W * sizeof(S));
        bool same = period == 1 && (block >= c.count || (c.head == 0 && block % wide == 0));
        c.row.access = same ? repetition::CONSTANT : adjacent && in_vectors ? repetition::VECTORS : repetition::SINGLE;
    }
    int64_t blocks = vjp_min(vjp_max(vjp_divide_up(c.vectors, each), 1), Formula::BLOCKS);
    auto kernel = in_vectors ? elements<W, ROWS, true, Formula, In, Out> : elements<1, ROWS, true, Formula, In, Out>;
    if constexpr (Formula::HAS_OVERWRITE) {
        bool adds = false;
        for (int k = 0; k < Out::COUNT; k++)
            adds = adds || (c.out[k] && c.add[k]);
        if (in_vectors && !adds) kernel = elements<W, ROWS, false, Formula, In, Out>;
    }
    return launch(work, true, kernel, blocks, ELEMENT_THREADS, 0, f, c);
}

/*
 * Runs a formula over c.count elements. With ROWS the formula's input ROW is repeated as c.row says; its type is still
 * in In.
 */
template <bool ROWS = false, class Formula, class... I, class... O>
vjp_status run_elements(const vjp_work *work, const Formula &f, types<I...>, types<O...>, element_call c) {
    using In = types<I...>;
    using Out = types<O...>;
    constexpr int64_t W = In::ALL_16_BIT && Out::ALL_16_BIT ? 8 : 4;
    bool wanted = false, equal = true;
    int64_t phase = -1; /* elements from the last multiple of W to the first element */
    auto see = [&](const void *data, size_t size) {
        if (!data) return;
        int64_t own = (int64_t)(reinterpret_cast<uintptr_t>(data) / size % W);
        equal = equal && (phase < 0 || phase == own);
        phase = own;
    };
    constexpr size_t in_size[] = {sizeof(I)...}, out_size[] = {sizeof(O)...};
    for (int k = 0; k < In::COUNT; k++)
        if (!(ROWS && k == Formula::ROW)) see(c.in[k], in_size[k]);
    for (int k = 0; k < Out::COUNT; k++) {
        see(c.out[k], out_size[k]);
        wanted = wanted || c.out[k];
    }
    if (!wanted || c.count == 0) return VJP_OK;
    int64_t head = phase > 0 ? W - phase : 0;
    bool in_vectors = equal && head % Formula::UNIT == 0;
    c.head = in_vectors ? vjp_min(head, c.count) : 0;
    return enqueue_elements<ROWS, Formula, In, Out>(work, f, c, in_vectors);
}

/* Calls f with a value of the type of a parameter beside storage type T: T or f32. */
template <class T, class F> auto with_parameter_type(bool f32, F f) {
    if constexpr (sizeof(T) == 2)
        if (!f32) return f(T{});
    return f(float{});
}

} // namespace
} // namespace vjp

#endif
