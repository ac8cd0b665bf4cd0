/* SPDX-License-Identifier: MIT */
/*
 * rope on CUDA. Each head's first n_rot elements are pairs (u, v), rotated by the angle of their position: u' = u c - v
 * s, v' = v c + u s; the rest of the head is copied. The backward is the same with -s.
 *
 * The fewest bytes are x once and y once; the tables are small and stay in the caches. So the kernel is a copy with a
 * little arithmetic, and must keep as much in flight as a copy does. A thread owns 2 W elements of a head, W whole
 * pairs: with pairs of halves 16 bytes of each half, with interleaved pairs 32 adjacent bytes. Either way their angles
 * are W adjacent elements of a table row. All heads of a time share them.
 *
 *     path       when                                   what
 *     ring       16-bit, aligned, whole heads rotate,   a thread copies its vectors of several rows to shared
 *                = rather than +=, no positions         memory at once
 *     registers  otherwise, aligned                     a thread keeps the angles in registers and loops over
 *                                                       heads, HEADS at a time, all of whose loads are issued
 *                                                       before the first is used (f32: 128 bytes per thread,
 *                                                       about 100 KiB per multiprocessor)
 *     scalar     otherwise                              the same with W = 1
 *
 * Aligned: the tensors begin at multiples of 16 bytes, and rows, heads and rotated halves are whole vectors apart.
 *
 * Several calls, as queries and keys, are one launch where they take the same path, aligned and with = (run_many_rope).
 *
 * Each output is one product and one FMA of its pair and angle on every path, so the bits do not depend on it. A pair
 * belongs to one thread, which reads both elements before it writes either: y may be x.
 */
#include <type_traits>

#include "cuda/common/many.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/*
 * Heads that a thread loads before it rotates the first. 16-bit vectors hold twice as many pairs, whose angles take
 * twice as many registers: two heads and four blocks per multiprocessor instead of four heads and three. += also loads
 * the old values.
 */
template <class T, bool ADD> constexpr int HEADS = ADD || sizeof(T) == 2 ? 2 : 4;
template <class T, bool ADD> constexpr int RESIDENT = sizeof(T) == 4 ? 3 : ADD ? 2 : 4;

/*
 * A block's threads are [block_rows][head_lanes][vector_lanes]: `block_rows` rows, with a thread per head to begin
 * with, and per vector of it.
 */
struct rope_call {
    void *y;
    const void *x, *positions;
    vjp_dtype position_type;
    parameter cosine, sine;
    findings found;
    float sign;                          /* of s: -1 in the backward */
    int64_t rows, time, heads, head_dim; /* rows: batch x time */
    int64_t x_step, y_step;              /* elements from one row to the next: more than heads x head_dim where apart */
    int64_t n_rot, table_rows, position_stride;
    int64_t rotated, vectors; /* of a head: those that rotate, and all */
    int vector_lanes, head_lanes, block_rows;
    int64_t angle_step,
        angle_end; /* in the tables: block_rows further modulo the sequence, and where a sequence ends */
};

/* Calls that one launch computes: queries and keys are two. */
constexpr int ROPE_CALLS = 8;
using rope_calls = many_members<rope_call, ROPE_CALLS>;

/*
 * W elements as loaded: 16 bytes stay in four registers until they are used. Measured on an H200: ordinary loads
 * are 1.5 % faster in f32 than those that mark the line to be evicted first (__ldcs).
 */
template <class T, int W> struct vector {
    using storage = std::conditional_t<W == 1, T, uint4>;
    storage raw;

    __device__ void load(const T *from) {
        if constexpr (W == 1)
            raw = *from;
        else
            raw = *reinterpret_cast<const uint4 *>(from);
    }

    __device__ void unpack(float (&values)[W]) const {
        if constexpr (W == 1) {
            values[0] = to_f32(raw);
        } else {
            wide<T> w;
            *reinterpret_cast<uint4 *>(&w) = raw;
#pragma unroll
            for (int i = 0; i < W; i++)
                values[i] = to_f32(w.v[i]);
        }
    }
};

template <class T, int W> __device__ void store_vector(T *to, const float (&values)[W]) {
    if constexpr (W == 1)
        write_one(to, values[0], false);
    else
        write_wide(to, values, false);
}

/* W adjacent elements of a table. */
template <class T, int W> __device__ void read_angles(float (&angle)[W], parameter table, int64_t i) {
    if constexpr (W == 1) {
        angle[0] = read_parameter<T>(table, i);
    } else if (table.f32) {
#pragma unroll
        for (int k = 0; k < W; k += WIDE<float>) {
            wide<float> w = load_wide(static_cast<const float *>(table.data) + i + k);
#pragma unroll
            for (int j = 0; j < WIDE<float>; j++)
                angle[k + j] = w.v[j];
        }
    } else {
        wide<T> w = load_wide(static_cast<const T *>(table.data) + i);
#pragma unroll
        for (int k = 0; k < W; k++)
            angle[k] = to_f32(w.v[k]);
    }
}

/* The table row for element k of the positions, or -1 if there is none. */
__device__ inline int64_t position_at(const rope_call &c, int64_t k) {
    int64_t position;
    if (c.position_type == VJP_I32) {
        position = static_cast<const int32_t *>(c.positions)[k];
    } else if (c.position_type == VJP_I64) {
        position = static_cast<const int64_t *>(c.positions)[k];
    } else {
        float x = static_cast<const float *>(c.positions)[k];
        position = fabsf(x) <= 16777216.0f && x == truncf(x) ? (int64_t)x : -1;
    }
    return position >= 0 && position < c.table_rows ? position : -1;
}

/* Rotates a thread's W pairs, which are its two vectors. */
template <int W, bool INTERLEAVED>
__device__ void rotate_pairs(float (&x)[2][W], const float (&cosine)[W], const float (&sine)[W]) {
    float y[2][W];
#pragma unroll
    for (int i = 0; i < W; i++) {
        int first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : W + i;
        float u = x[first / W][first % W], v = x[second / W][second % W];
        y[first / W][first % W] = fmaf(-sine[i], v, u * cosine[i]);
        y[second / W][second % W] = fmaf(sine[i], u, v * cosine[i]);
    }
#pragma unroll
    for (int i = 0; i < 2 * W; i++)
        x[i / W][i % W] = y[i / W][i % W];
}

/* Vector p of the heads first, first + head_lanes, ... of a row: rotated, or copied. */
template <class T, int W, bool INTERLEAVED, bool ADD, bool ROTATES>
__device__ void rotate_heads(const rope_call &c, int64_t row, int64_t p, int first) {
    constexpr int N = HEADS<T, ADD>;
    int64_t at, other; /* of the two vectors in the head */
    if constexpr (ROTATES) {
        at = INTERLEAVED ? 2 * W * p : W * p;
        other = at + (INTERLEAVED ? W : c.n_rot / 2);
    } else {
        at = c.n_rot + 2 * W * (p - c.rotated);
        other = at + W;
    }
    bool both = ROTATES || other < c.head_dim; /* the rest may be an odd number of vectors */
    /* Pointers that step from head to head: offsets of all the vectors would take more registers than the vectors. */
    int64_t gap = other - at, step = c.head_lanes * c.head_dim;
    int64_t start = first * c.head_dim + at;
    const T *from = static_cast<const T *>(c.x) + row * c.x_step + start;
    T *to = static_cast<T *>(c.y) + row * c.y_step + start;
    int64_t left = c.heads - first;
    vector<T, W> now[N][2] = {}, old[N][2] = {};
    auto load = [&] {
        const T *before = to;
#pragma unroll
        for (int n = 0; n < N; n++, from += step, before += step) {
            if (n * c.head_lanes >= left) continue;
            now[n][0].load(from);
            if (both) now[n][1].load(from + gap);
            if constexpr (ADD) {
                old[n][0].load(before);
                if (both) old[n][1].load(before + gap);
            }
        }
    };
    /* x is in flight while the position and then the angles are read. */
    load();
    int64_t batch = row / c.time, position = row - batch * c.time;
    if (c.positions) {
        int64_t k = batch * c.position_stride + position;
        position = position_at(c, k);
        if (position < 0) {
            if (p == 0 && first == 0) read_index(c.found, c.positions, c.position_type, k, c.table_rows); /* reports */
            return;
        }
    }
    float cosine[W] = {}, sine[W] = {};
    if constexpr (ROTATES) {
        int64_t i = position * (c.n_rot / 2) + p * W;
        read_angles<T, W>(cosine, c.cosine, i);
        read_angles<T, W>(sine, c.sine, i);
#pragma unroll
        for (int k = 0; k < W; k++)
            sine[k] *= c.sign;
    }
    for (;;) {
#pragma unroll
        for (int n = 0; n < N; n++, to += step) {
            if (n * c.head_lanes >= left) continue;
            float values[2][W];
            now[n][0].unpack(values[0]);
            now[n][1].unpack(values[1]);
            if constexpr (ROTATES) rotate_pairs<W, INTERLEAVED>(values, cosine, sine);
            if constexpr (ADD) {
                float before[2][W];
                old[n][0].unpack(before[0]);
                old[n][1].unpack(before[1]);
#pragma unroll
                for (int i = 0; i < 2 * W; i++)
                    values[i / W][i % W] = before[i / W][i % W] + values[i / W][i % W];
            }
            store_vector(to, values[0]);
            if (both) store_vector(to + gap, values[1]);
        }
        left -= N * c.head_lanes;
        if (left <= 0) return;
        load();
    }
}

/* Prefetches what rotate_heads() reads first of a row, while the previous kernel still runs. */
template <class T, int W, bool INTERLEAVED, bool ADD>
__device__ void prefetch_heads(const rope_call &c, int64_t row, int64_t p, int first) {
    if (row >= c.rows || p >= c.rotated) return;
    int64_t at = INTERLEAVED ? 2 * W * p : W * p, gap = INTERLEAVED ? W : c.n_rot / 2;
    for (int n = 0; n < HEADS<T, ADD>; n++) {
        int64_t head = first + (int64_t)n * c.head_lanes;
        if (head >= c.heads) return;
        const T *from = static_cast<const T *>(c.x) + row * c.x_step + head * c.head_dim + at;
        prefetch(from);
        prefetch(from + gap);
    }
}

/* Block `block` of the `blocks` that a call has. */
template <class T, int W, bool INTERLEAVED, bool ADD>
__device__ void rotate_rows(const rope_call &c, int64_t block, int64_t blocks) {
    int lane = threadIdx.x % c.vector_lanes, rest = threadIdx.x / c.vector_lanes;
    int head = rest % c.head_lanes, block_row = rest / c.head_lanes;
    int64_t first = block * c.block_rows + block_row;
    /* Measured: 2 % faster in f32, 2 % slower in 16 bits, which has twice as many blocks. */
    if constexpr (sizeof(T) == 4) prefetch_heads<T, W, INTERLEAVED, ADD>(c, first, lane, head);
    wait_for_previous();
    if (block_row >= c.block_rows) return;
    for (int64_t row = first; row < c.rows; row += blocks * c.block_rows)
        for (int64_t p = lane; p < c.vectors; p += c.vector_lanes)
            if (p < c.rotated)
                rotate_heads<T, W, INTERLEAVED, ADD, true>(c, row, p, head);
            else
                rotate_heads<T, W, INTERLEAVED, ADD, false>(c, row, p, head);
}

template <class T, int W, bool INTERLEAVED, bool ADD>
__global__ void __launch_bounds__(THREADS, RESIDENT<T, ADD>) rotate(rope_call c) {
    let_next_begin();
    rotate_rows<T, W, INTERLEAVED, ADD>(c, blockIdx.x, gridDim.x);
}

template <class T, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS, RESIDENT<T, false>) rotate_many(const __grid_constant__ rope_calls calls) {
    let_next_begin();
    int block, k = calls.find((int)blockIdx.x, &block);
    rotate_rows<T, WIDE<T>, INTERLEAVED, false>(calls.member[k], block, calls.first[k + 1] - calls.first[k]);
}

/* ---- Whole heads that rotate, in 16 bits ------------------------------------------------------------- */

/*
 * Through registers a thread has 64 bytes of a row in flight and waits for them before it loads more. Here it starts
 * the copies of its vectors of all the block's rows at once, into shared memory (no barrier: no other thread reads
 * them), and rotates the first while the others are in flight: 128 bytes per thread, 128 KiB per multiprocessor.
 *
 * A block has RING_STEPS steps of rows, and the ring a stage for each. Measured on an H200 in bf16 at 8 x 2048 x 32 x
 * 128, all in one run: two steps 0.930 and 0.931 of the limit (with room for a third stage, which stayed empty),
 * through registers 0.929 and 0.927, four steps through three stages 0.907. In other runs the path through registers
 * reached 0.907 to 0.922.
 */
constexpr int RING_STEPS = 2, RING_RESIDENT = 4;
constexpr int RING_HEADS = 2; /* of a row per thread, at most */

/* Blocks that may begin before the previous kernel ends: as many as an H200 holds. It does not affect the bits. */
constexpr int64_t FIRST_BLOCKS = RING_RESIDENT * 132;

/* W adjacent elements of a table of type P as loaded: in 16 bits those of the next row wait in few registers. */
template <class P, int W> struct raw_angles {
    static constexpr int VECTORS = W / WIDE<P>;
    uint4 raw[VECTORS];

    __device__ void load(const void *table, int64_t i) {
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            raw[k] = *reinterpret_cast<const uint4 *>(static_cast<const P *>(table) + i + k * WIDE<P>);
    }

    __device__ void unpack(float (&angle)[W], float sign) const {
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            float values[WIDE<P>];
            vjp::unpack<P>(raw[k], values);
#pragma unroll
            for (int j = 0; j < WIDE<P>; j++)
                angle[k * WIDE<P> + j] = values[j] * sign;
        }
    }
};

template <class T, class P, bool INTERLEAVED> __device__ void rotate_stages(const rope_call &c, int64_t block) {
    /*
     * [RING_STEPS][2 x RING_HEADS][THREADS], at a multiple of 128 bytes: elsewhere group_norm's ring lost 8 % of its
     * speed.
     */
    uint4 *ring = dynamic_shared<uint4, 128>();
    constexpr int W = WIDE<T>, STAGE = 2 * RING_HEADS * THREADS;
    constexpr bool ANGLES_AHEAD = sizeof(P) == 2; /* too few registers for two rows of f32 ones */
    int lane = threadIdx.x % c.vector_lanes, rest = threadIdx.x / c.vector_lanes;
    int head = rest % c.head_lanes, block_row = rest / c.head_lanes;
    int64_t row = block * c.block_rows * RING_STEPS + block_row;
    if (block_row >= c.block_rows || row >= c.rows) return;
    int steps = (int)min((int64_t)RING_STEPS, divide_up(c.rows - row, c.block_rows));
    int64_t start = head * c.head_dim + (INTERLEAVED ? 2 * W : W) * lane;
    int gap = INTERLEAVED ? W : (int)c.n_rot / 2, next_head = c.head_lanes * (int)c.head_dim;
    bool both = head + c.head_lanes < c.heads;
    const T *from = static_cast<const T *>(c.x) + row * c.x_step + start;
    T *to = static_cast<T *>(c.y) + row * c.y_step + start;
    uint4 *own = ring + threadIdx.x;
    if (blockIdx.x < FIRST_BLOCKS) {
        prefetch(from);
        prefetch(from + gap);
        if (both) {
            prefetch(from + next_head);
            prefetch(from + next_head + gap);
        }
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < RING_STEPS; i++, from += c.block_rows * c.x_step) {
        if (i < steps) {
            uint4 *place = own + i * STAGE;
            copy_async(place, from);
            copy_async(place + THREADS, from + gap);
            if (both) {
                copy_async(place + 2 * THREADS, from + next_head);
                copy_async(place + 3 * THREADS, from + next_head + gap);
            }
        }
        commit_copies();
    }
    int64_t angles = row % c.time * (c.n_rot / 2) + lane * W;
    raw_angles<P, W> cosine_raw, sine_raw;
    auto load_angles = [&] {
        cosine_raw.load(c.cosine.data, angles);
        sine_raw.load(c.sine.data, angles);
        angles += c.angle_step;
        if (angles >= c.angle_end) angles -= c.angle_end;
    };
    load_angles();
#pragma unroll 1
    for (int left = steps; left > 0; left--, to += c.block_rows * c.y_step, own += STAGE) {
        float cosine[W], sine[W];
        cosine_raw.unpack(cosine, 1.0f);
        sine_raw.unpack(sine, c.sign);
        if (ANGLES_AHEAD && left > 1) load_angles();
        wait_copies<RING_STEPS - 1>();
        commit_copies(); /* an empty group, so that the next wait is for the next stage */
#pragma unroll
        for (int n = 0; n < RING_HEADS; n++) {
            if (n && !both) continue;
            float values[2][W];
            vjp::unpack<T>(own[2 * n * THREADS], values[0]);
            vjp::unpack<T>(own[(2 * n + 1) * THREADS], values[1]);
            rotate_pairs<W, INTERLEAVED>(values, cosine, sine);
            T *here = to + n * next_head;
            __stcs(reinterpret_cast<uint4 *>(here), pack<T>(values[0]));
            __stcs(reinterpret_cast<uint4 *>(here + gap), pack<T>(values[1]));
        }
        if (!ANGLES_AHEAD && left > 1) load_angles();
    }
}

template <class T, class P, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS, RING_RESIDENT) rotate_ring(rope_call c) {
    let_next_begin();
    rotate_stages<T, P, INTERLEAVED>(c, block_from_the_end());
}

template <class T, class P, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS, RING_RESIDENT) rotate_ring_many(const __grid_constant__ rope_calls calls) {
    let_next_begin();
    int block, k = calls.find((int)block_from_the_end(), &block);
    rotate_stages<T, P, INTERLEAVED>(calls.member[k], block);
}

/*
 * Every head rotates whole, a row's angles follow from its time alone, both tables are of one type, and a row takes at
 * most RING_HEADS heads per thread.
 */
bool takes_ring(const rope_call &c) {
    return !c.positions && c.n_rot == c.head_dim && c.cosine.f32 == c.sine.f32 && c.vector_lanes == c.vectors &&
           c.head_lanes * RING_HEADS >= c.heads && vjp_divide_up(c.rows, c.block_rows * RING_STEPS) <= MAX_BLOCKS;
}

int64_t ring_blocks(const rope_call &c) {
    return vjp_divide_up(c.rows, c.block_rows * RING_STEPS);
}

constexpr size_t RING_BYTES = sizeof(uint4) * RING_STEPS * 2 * RING_HEADS * THREADS;

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* False: there is nothing to compute. */
bool read_call(const vjp_work *work, rope_call *call) {
    vjp_rope_sizes s = vjp_rope_sizes_of(work);
    rope_call c{};
    c.y = vjp_data(work, ROPE_Y);
    c.x = vjp_data(work, ROPE_X);
    c.positions = vjp_data(work, ROPE_POSITIONS);
    c.position_type = vjp_type(work, ROPE_POSITIONS);
    c.cosine = parameter_of(work, ROPE_COSINE);
    c.sine = parameter_of(work, ROPE_SINE);
    c.found = findings_of(work);
    c.sign = work->pass == VJP_BACKWARD ? -1.0f : 1.0f;
    c.rows = s.batch * s.time;
    c.time = s.time;
    c.heads = s.heads;
    c.head_dim = s.head_dim;
    c.n_rot = s.n_rot;
    c.table_rows = s.table_rows;
    c.position_stride = s.position_stride;
    c.x_step = vjp_step(work, ROPE_X);
    c.y_step = vjp_step(work, ROPE_Y);
    *call = c;
    return c.y && c.rows && c.heads && c.head_dim;
}

bool is_interleaved(const vjp_work *work) {
    return static_cast<const vjp_rope_attributes *>(work->attributes)->pairing == VJP_PAIRING_INTERLEAVED;
}

template <class T> bool is_aligned_call(const rope_call &c) {
    return c.head_dim % WIDE<T> == 0 && c.n_rot % (2 * WIDE<T>) == 0 && c.x_step % WIDE<T> == 0 &&
           c.y_step % WIDE<T> == 0 && is_aligned(c.y, 16) && is_aligned(c.x, 16) && is_aligned(c.cosine.data, 16) &&
           is_aligned(c.sine.data, 16);
}

/* Divides a call among the threads of a block; returns how many it needs. */
template <class T, int W, bool ADD> int split_call(rope_call &c) {
    bool stays = c.x == c.y && !ADD; /* what is copied is already there */
    c.rotated = c.n_rot / 2 / W;
    c.vectors = c.rotated + (stays ? 0 : vjp_divide_up(c.head_dim - c.n_rot, 2 * W));
    c.vector_lanes = (int)vjp_min(c.vectors, THREADS);
    /* As few threads per row as have work for all their loads, and as many rows as fill the block. */
    c.head_lanes = (int)vjp_min(vjp_divide_up(c.heads, HEADS<T, ADD>), THREADS / c.vector_lanes);
    c.block_rows = (int)vjp_min(c.rows, THREADS / (c.vector_lanes * c.head_lanes));
    c.angle_step = c.block_rows % c.time * (c.n_rot / 2);
    c.angle_end = c.time * (c.n_rot / 2);
    return (int)vjp_round_up(c.vector_lanes * c.head_lanes * c.block_rows, 32);
}

int64_t grid_of(const rope_call &c) {
    return vjp_min(vjp_divide_up(c.rows, c.block_rows), MAX_BLOCKS);
}

template <class T, int W, bool INTERLEAVED, bool ADD> vjp_status enqueue(const vjp_work *work, rope_call &c) {
    int threads = split_call<T, W, ADD>(c);
    if constexpr (W > 1 && sizeof(T) == 2 && !ADD)
        if (takes_ring(c))
            return launch(work, true,
                          c.cosine.f32 ? rotate_ring<T, float, INTERLEAVED> : rotate_ring<T, T, INTERLEAVED>,
                          ring_blocks(c), threads, RING_BYTES, c);
    return launch(work, true, rotate<T, W, INTERLEAVED, ADD>, grid_of(c), threads, 0, c);
}

vjp_status run(const vjp_work *work) {
    rope_call c;
    if (!read_call(work, &c)) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return with_bool(is_interleaved(work), [&](auto interleaved) {
            return with_bool(vjp_accumulates(work, ROPE_Y), [&](auto add) {
                constexpr bool I = decltype(interleaved)::value, A = decltype(add)::value;
                return is_aligned_call<T>(c) ? enqueue<T, WIDE<T>, I, A>(work, c) : enqueue<T, 1, I, A>(work, c);
            });
        });
    });
}

/* ---- Several calls ----------------------------------------------------------------------------------- */

/* The kernel that can compute a call together with others; calls with the same one are one launch. */
struct shared_kernel {
    vjp_dtype storage;
    bool interleaved, ring, f32_angles;

    bool operator==(const shared_kernel &) const = default;
};

/* Fills in the call, its kernel, threads and blocks; false where it must run alone. */
template <class T>
bool describe(const vjp_work *work, rope_call *c, shared_kernel *kernel, int *threads, int64_t *blocks) {
    if (!read_call(work, c) || vjp_accumulates(work, ROPE_Y) || !is_aligned_call<T>(*c)) return false;
    *threads = split_call<T, WIDE<T>, false>(*c);
    bool ring = sizeof(T) == 2 && takes_ring(*c);
    *kernel = {work->storage, is_interleaved(work), ring, ring && c->cosine.f32};
    *blocks = ring ? ring_blocks(*c) : grid_of(*c);
    return true;
}

template <class T>
vjp_status enqueue_many(const vjp_work *work, const shared_kernel &kernel, const rope_calls &calls, int threads) {
    return with_bool(kernel.interleaved, [&](auto interleaved) {
        constexpr bool I = decltype(interleaved)::value;
        if constexpr (sizeof(T) == 2)
            if (kernel.ring)
                return launch(work, true, kernel.f32_angles ? rotate_ring_many<T, float, I> : rotate_ring_many<T, T, I>,
                              calls.blocks(), threads, RING_BYTES, calls);
        return launch(work, true, rotate_many<T, I>, calls.blocks(), threads, 0, calls);
    });
}

/* Runs the first of the works, with those after it that can share its launch; *done: how many. */
template <class T> vjp_status run_first(const vjp_work *const *works, size_t count, size_t *done) {
    rope_calls calls;
    shared_kernel kernel{}, other{};
    int threads = 0;
    int64_t total = 0;
    for (*done = 0; *done < count && *done < ROPE_CALLS; ++*done) {
        rope_call c;
        int own_threads;
        int64_t blocks;
        if (works[*done]->storage != works[0]->storage) break;
        if (!describe<T>(works[*done], &c, *done ? &other : &kernel, &own_threads, &blocks)) break;
        if ((*done && !(other == kernel)) || total + blocks > MAX_BLOCKS) break;
        total += blocks;
        threads = (int)vjp_max(threads, own_threads);
        calls.add(c, blocks);
    }
    if (*done > 1) return enqueue_many<T>(works[0], kernel, calls, threads);
    *done = 1;
    return run(works[0]);
}

} // namespace

vjp_status run_many_rope(const vjp_work *const *works, size_t count) {
    vjp_status status = VJP_OK;
    for (size_t i = 0, done = 0; i < count && status == VJP_OK; i += done)
        status = with_type(works[i]->storage,
                           [&](auto zero) { return run_first<decltype(zero)>(works + i, count - i, &done); });
    return status;
}

} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_rope[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_rope[VJP_PASS_COUNT] = {
    {vjp::run, nullptr, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
    {vjp::run, nullptr, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
};
}
