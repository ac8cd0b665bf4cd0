/* SPDX-License-Identifier: MIT */
/*
 * The sums of conv2d's tiles: 256 threads compute ROWS x COLUMNS results from stages of terms in shared memory, which
 * asynchronous copies fill while others are multiplied.
 *
 *     T           product         stages                 sums
 *     bf16, f16   tensor cores    3 of 128-byte rows     one chain, in registers
 *     tf32        tensor cores    the same               the same
 *     f32         FMA             2 of 64-byte rows      the current chain of CHAIN terms in registers, the sum of
 *                                                        those before in shared memory
 *
 * Two blocks share a multiprocessor, so that one multiplies while the other waits, begins or ends. In f32 that leaves
 * no registers for a second set of sums, and half as much shared memory for stages.
 */
#ifndef VJP_CUDA_TILE_SUMS_CUH
#define VJP_CUDA_TILE_SUMS_CUH

#include <climits>

#include "cuda/conv/conv2d_general.cuh"

namespace vjp {
namespace {

template <class T> using stored = std::conditional_t<std::is_same_v<T, tf32>, float, T>;

/*
 * Makes the 19 bits that products read of x the nearest number, ties away from zero, by adding half a unit of the last
 * of them: 2^-11 of the power of two that begins x. round_tf32() does the same in three instructions, adding integers,
 * where x is finite.
 */
__device__ inline void round_to_tf32(unsigned &x) {
    x = __float_as_uint(fmaf(__uint_as_float(x & 0xff800000u), 0x1p-11f, __uint_as_float(x)));
}

template <class T> constexpr bool BY_FMA = std::is_same_v<T, float>;

/* 16-byte runs in a row of terms, terms of a stage, and stages. */
template <class T> constexpr int RUNS = BY_FMA<T> ? 4 : 8;
template <class T> constexpr int DEPTH = RUNS<T> *WIDE<T>;
template <class T> constexpr int STAGES = BY_FMA<T> ? 2 : 3;

/* 16-byte places of a stage, and of the sums that are kept behind the stages; bytes of shared memory. */
template <class T, int ROWS, int COLUMNS> constexpr int STAGE = (ROWS + COLUMNS) * RUNS<T>;
template <class T, int ROWS, int COLUMNS> constexpr int SAVED = BY_FMA<T> ? ROWS *COLUMNS / 4 : 0;
template <class T, int ROWS, int COLUMNS>
constexpr size_t TILE_BYTES = (size_t)(STAGES<T> *STAGE<T, ROWS, COLUMNS> + SAVED<T, ROWS, COLUMNS>)*16;

/* Where a row of terms has a run: the same run of neighbouring rows is in different banks. */
template <class T> __device__ int place_in_row(int run, int row) {
    return RUNS<T> == 8 ? run ^ (row & 7) : run ^ (row >> 1 & 3);
}

/* The same if a term has a row of result rows (columns). FMAs read it along the row alone. */
template <class T> __device__ int place_in_term(int run, int term) {
    return BY_FMA<T> ? run : run ^ (term & 7);
}

/* Sums of neighbouring columns. */
template <int N> struct alignas(4 * N) neighbours {
    float v[N];

    __device__ neighbours operator+(const neighbours &b) const {
        neighbours sum;
#pragma unroll
        for (int i = 0; i < N; i++)
            sum.v[i] = v[i] + b.v[i];
        return sum;
    }
};

/*
 * The threads' sums of a tile. multiply() adds the products of one stage: `a` and `b` have a row of DEPTH terms per
 * result row and column; if BY_TERM, a row of result rows (columns) per term. end_chain() is called after every CHAIN
 * terms, finish() before each(), which calls f(row, column, neighbours) for the sums from that column on.
 */
template <class T, int ROWS, int COLUMNS, bool BY_TERM> struct tile_sums {
    /* Warps over rows and columns; 16-row and 8-column matrices of a warp. */
    static constexpr int WARPS_ACROSS = COLUMNS / 32, WARPS_DOWN = 8 / WARPS_ACROSS;
    static constexpr int DOWN = ROWS / WARPS_DOWN / 16, ACROSS = 4;
    float sum[DOWN][ACROSS][4] = {};
    int lane = (int)threadIdx.x % 32;
    int first_row = (int)threadIdx.x / 32 / WARPS_ACROSS * DOWN * 16;
    int first_column = (int)threadIdx.x / 32 % WARPS_ACROSS * 32;

    __device__ explicit tile_sums(uint4 *) {
    }

    /* A step of the product is two runs of terms, or as many rows of terms. */
    static constexpr int STEP = 2 * WIDE<T>, A_RUNS = BY_TERM ? ROWS / WIDE<T> : RUNS<T>,
                         B_RUNS = BY_TERM ? COLUMNS / WIDE<T> : RUNS<T>;
    static constexpr bool PERMUTED = BY_TERM && std::is_same_v<T, tf32>;

    __device__ void load(unsigned (&left)[DOWN][4], unsigned (&right)[ACROSS / 2][4], int k, const uint4 *a,
                         const uint4 *b) const {
        int low = lane & 7, middle = lane >> 3 & 1, high = lane >> 4;
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
            int first = first_row + i * 16;
            int row = BY_TERM ? k * STEP + high * 8 + low : first + middle * 8 + low;
            int run = BY_TERM ? first / 8 + middle : k * 2 + high;
            load_matrices<BY_TERM>(left[i], shared_address(a + row * A_RUNS + (run ^ low)));
        }
#pragma unroll
        for (int j = 0; j < ACROSS / 2; j++) {
            int first = first_column + j * 16;
            int row = BY_TERM ? k * STEP + middle * 8 + low : first + high * 8 + low;
            int run = BY_TERM ? first / 8 + high : k * 2 + middle;
            load_matrices<BY_TERM>(right[j], shared_address(b + row * B_RUNS + (run ^ low)));
        }
    }

    /*
     * There is no transposed load of 32-bit elements. A lane reads four neighbouring rows (columns) of a term at once:
     * matrix i has every fourth, and terms are permuted within a step, so that eight lanes read from different banks.
     */
    __device__ void load_permuted(unsigned (&left)[DOWN][4], unsigned (&right)[ACROSS / 2][4], int k, const uint4 *a,
                                  const uint4 *b) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int term = lane % 4 * 2 + half;
#pragma unroll
            for (int i = 0; i < DOWN; i += 2) {
                int run = first_row / 4 + i * 4 + lane / 4;
                uint4 four = a[(k * STEP + term) * A_RUNS + place_in_term<T>(run, term)];
                left[i][half * 2] = four.x;
                left[i][half * 2 + 1] = four.y;
                left[i + 1][half * 2] = four.z;
                left[i + 1][half * 2 + 1] = four.w;
            }
            int run = first_column / 4 + lane / 4;
            uint4 four = b[(k * STEP + term) * B_RUNS + place_in_term<T>(run, term)];
            right[0][half] = four.x;
            right[0][half + 2] = four.y;
            right[1][half] = four.z;
            right[1][half + 2] = four.w;
        }
    }

    __device__ void multiply(const uint4 *a, const uint4 *b) {
#pragma unroll
        for (int k = 0; k < DEPTH<T> / STEP; k++) {
            unsigned left[DOWN][4], right[ACROSS / 2][4];
            if constexpr (PERMUTED)
                load_permuted(left, right, k, a, b);
            else
                load(left, right, k, a, b);
            if constexpr (std::is_same_v<T, tf32>) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
#pragma unroll
                    for (int i = 0; i < DOWN; i++)
                        round_to_tf32(left[i][e]);
#pragma unroll
                    for (int j = 0; j < ACROSS / 2; j++)
                        round_to_tf32(right[j][e]);
                }
            }
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    multiply_matrices<T>(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }

    __device__ void end_chain() {
    }

    __device__ void finish() {
    }

    template <class F> __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if constexpr (PERMUTED) {
                    int row = first_row + i / 2 * 32 + lane / 4 * 4 + i % 2 * 2 + e / 2;
                    f(row, first_column + (lane % 4 * 2 + e % 2) * 4,
                      neighbours<4>{sum[i][0][e], sum[i][1][e], sum[i][2][e], sum[i][3][e]});
                } else {
                    int row = first_row + i * 16 + e / 2 * 8 + lane / 4, j = e % 2 * 2;
#pragma unroll
                    for (int next = 0; next < 2; next++)
                        f(row, first_column + (j + next) * 8 + lane % 4 * 2,
                          neighbours<2>{sum[i][j + next][e / 2 * 2], sum[i][j + next][e / 2 * 2 + 1]});
                }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[i][j][e] = 0;
    }
};

/*
 * f32: a thread has 8 x ACROSS results. The 8 x 4 threads of a warp are numbered so that lanes i and i ^ 1 read the
 * same rows, i and i ^ 2 the same columns: then 16 bytes for each lane take two accesses to the banks, not four.
 */
template <int ROWS, int COLUMNS, bool BY_TERM> struct tile_sums<float, ROWS, COLUMNS, BY_TERM> {
    static constexpr int ACROSS = ROWS * COLUMNS / THREADS / 8, WARPS_ACROSS = COLUMNS / (4 * ACROSS);
    float chain[8][ACROSS] = {};
    float4 *saved; /* the sum of the chains before, in places of this thread alone */
    bool has_saved = false;
    int x = ((int)threadIdx.x & 1) | ((int)threadIdx.x >> 3 & 2), y = (int)threadIdx.x >> 1 & 7;
    int first_row = (int)threadIdx.x / 32 / WARPS_ACROSS * 64;
    int first_column = (int)threadIdx.x / 32 % WARPS_ACROSS * 4 * ACROSS;

    __device__ explicit tile_sums(uint4 *shared)
        : saved(reinterpret_cast<float4 *>(shared + STAGES<float> * STAGE<float, ROWS, COLUMNS>) + threadIdx.x) {
    }

    __device__ static void read(float (&to)[4], const uint4 *from) {
        float4 v = *reinterpret_cast<const float4 *>(from);
        to[0] = v.x;
        to[1] = v.y;
        to[2] = v.z;
        to[3] = v.w;
    }

    __device__ void multiply(const uint4 *a, const uint4 *b) {
        if constexpr (BY_TERM) {
            a += first_row / 4 + y;
            b += first_column / 4 + x;
#pragma unroll 4
            for (int k = 0; k < DEPTH<float>; k++) {
                float left[2][4], right[ACROSS / 4][4];
#pragma unroll
                for (int i = 0; i < 2; i++)
                    read(left[i], a + k * (ROWS / 4) + i * 8);
#pragma unroll
                for (int j = 0; j < ACROSS / 4; j++)
                    read(right[j], b + k * (COLUMNS / 4) + j * 4);
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < ACROSS; j++)
                        chain[i][j] = fmaf(left[i / 4][i % 4], right[j / 4][j % 4], chain[i][j]);
            }
        } else {
            a += (first_row + y) * RUNS<float>;
            b += (first_column + x) * RUNS<float>;
#pragma unroll(ACROSS == 4 ? 2 : 1) /* 2 would spill 8 x 8 */
            for (int run = 0; run < RUNS<float>; run++) {
                float right[ACROSS][4];
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    read(right[j], b + j * 4 * RUNS<float> + place_in_row<float>(run, j * 4 + x));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float left[4];
                    read(left, a + i * 8 * RUNS<float> + place_in_row<float>(run, y));
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int j = 0; j < ACROSS; j++)
                            chain[i][j] = fmaf(left[k], right[j][k], chain[i][j]);
                }
            }
        }
    }

    /* Calls f(the four sums' place in `saved`, the first of the four) for all of the thread's sums. */
    template <class F> __device__ void each_four(F f) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j += 4)
                f(saved[(i * ACROSS + j) / 4 * THREADS], chain[i] + j);
    }

    __device__ static void add(float *to, float4 four) {
        to[0] += four.x;
        to[1] += four.y;
        to[2] += four.z;
        to[3] += four.w;
    }

    __device__ void end_chain() {
        each_four([&](float4 &place, float *four) {
            if (has_saved) add(four, place);
            place = {four[0], four[1], four[2], four[3]};
        });
        has_saved = true;
        clear();
    }

    __device__ void finish() {
        if (!has_saved) return;
        each_four([&](float4 &place, float *four) { add(four, place); });
        has_saved = false;
    }

    template <class F> __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if constexpr (BY_TERM) {
#pragma unroll
                for (int j = 0; j < ACROSS; j += 4)
                    f(first_row + i / 4 * 32 + y * 4 + i % 4, first_column + j * 4 + x * 4,
                      neighbours<4>{chain[i][j], chain[i][j + 1], chain[i][j + 2], chain[i][j + 3]});
            } else {
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    f(first_row + i * 8 + y, first_column + j * 4 + x, neighbours<1>{chain[i][j]});
            }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                chain[i][j] = 0;
    }
};

/*
 * Adds the products of `stages` stages to the sums. load(stage) starts the copies of the next stage to that place;
 * at_chunk() is called after every `chunk` stages but the last.
 */
template <class T, int ROWS, int COLUMNS, bool BY_TERM, class LOAD, class AT_CHUNK>
__device__ void multiply_stages(tile_sums<T, ROWS, COLUMNS, BY_TERM> &sums, const uint4 *shared, int stages, LOAD load,
                                int chunk, AT_CHUNK at_chunk) {
    constexpr int CHAIN_STAGES = (int)CHAIN / DEPTH<T>;
#pragma unroll
    for (int s = 0; s < STAGES<T> - 1; s++) {
        if (s < stages) load(s);
        commit_copies();
    }
    for (int s = 0, place = 0; s < stages; s++) {
        wait_copies<STAGES<T> - 2>();
        __syncthreads(); /* the stage has arrived, and all threads have used the one before it, which is filled next */
        if (s + STAGES<T> - 1 < stages) load(place ? place - 1 : STAGES<T> - 1);
        commit_copies();
        const uint4 *a = shared + place * STAGE<T, ROWS, COLUMNS>;
        sums.multiply(a, a + ROWS * RUNS<T>);
        place = place + 1 < STAGES<T> ? place + 1 : 0;
        if (s + 1 == stages) break;
        if ((s + 1) % CHAIN_STAGES == 0) sums.end_chain();
        if ((s + 1) % chunk == 0) {
            sums.finish();
            at_chunk();
        }
    }
    sums.finish();
    wait_copies<0>();
    __syncthreads();
}

/* The same as one chunk. */
template <class T, int ROWS, int COLUMNS, bool BY_TERM, class LOAD>
__device__ void multiply_stages(tile_sums<T, ROWS, COLUMNS, BY_TERM> &sums, const uint4 *shared, int stages,
                                LOAD load) {
    multiply_stages(sums, shared, stages, load, INT_MAX, [] {});
}

} // namespace
} // namespace vjp

#endif
