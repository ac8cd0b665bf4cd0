/* SPDX-License-Identifier: MIT */
// The raw product of `vjp bench`, which linear is measured against: y[rows, columns] = left[rows, depth]
// right[depth, columns], rows contiguous, of whole tiles alone. It leaves out what linear needs: ends of rows and
// columns, operands stored the other way, chains of limited length, and everything after the sum.
//
//     product   a threadgroup has a tile of 128 x 128, a thread 4 x 4 of each quarter of it. 8 of the depth at a time
//               go through threadgroup memory, in one of two buffers, so that each step has one barrier
//     matrices  a threadgroup has a tile of 128 x 64, each of its 8 simdgroups 32 x 32 of it: 4 by 4 matrices of 8 x 8,
//               so that for 8 of the depth it loads 4 + 4 and multiplies 16. 16 of the depth at a time
//
// Both load the next step while they multiply this one.
#define OPERANDS(operand) operand(Float, 0, left) operand(Float, 1, right) operand(Float, 2, y)
#define NUMBERS(number)
#define KERNELS(kernel_of) kernel_of(product) kernel_of(matrices)

struct Params {
    uint columns;
    uint depth;
    uint column_tiles;
};

struct Shared {
    float4 fours[1024];
};

#include "common.metal"

constexpr constant uint TILE = 128;

// ---- In registers -------------------------------------------------------------------------------------------

constexpr constant uint DEPTH = 8;
constexpr constant uint LINE_FOURS = 32; // of rows, or of columns, of a tile
constexpr constant uint OPERAND_FOURS = 256;
constexpr constant uint BUFFER_FOURS = 512;

struct Block {
    float4 row[4];
};

// Adds four rows of one depth by four columns of it.
inline void add_outer(thread Block &s, float4 l, float4 r) {
    s.row[0] = fma(float4(l.x), r, s.row[0]);
    s.row[1] = fma(float4(l.y), r, s.row[1]);
    s.row[2] = fma(float4(l.z), r, s.row[2]);
    s.row[3] = fma(float4(l.w), r, s.row[3]);
}

inline void put_block(thread const Call &c, uint row, uint column, Block s) {
    for (uint i = 0; i < 4; i++) {
        c.y.set_four((row + i) * c.p.columns + column, s.row[i]);
    }
}

// Two threads load the 8 depths of a row, 32 threads the 128 columns of a depth.
inline void product(thread const Call &c) {
    uint first_row = c.group / c.p.column_tiles * TILE;
    uint first_column = c.group % c.p.column_tiles * TILE;
    uint loaded_row = c.lane / 2;
    uint loaded_quad = c.lane % 2;
    uint left_at = (first_row + loaded_row) * c.p.depth + 4 * loaded_quad;
    uint right_at = c.lane / LINE_FOURS * c.p.columns + first_column + 4 * (c.lane % LINE_FOURS);
    uint row_four = c.lane / 16;
    uint column_four = c.lane % 16;
    Block zero = {{float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)}};
    Block s0 = zero;
    Block s1 = zero;
    Block s2 = zero;
    Block s3 = zero;
    float4 l = c.left.four(left_at);
    float4 r = c.right.four(right_at);
    for (uint k = 0; k < c.p.depth; k += DEPTH) {
        threadgroup float4 *buffer = c.shared->fours + k / DEPTH % 2 * BUFFER_FOURS;
        threadgroup float *rows = (threadgroup float *)buffer + 4 * loaded_quad * TILE + loaded_row;
        rows[0] = l.x;
        rows[TILE] = l.y;
        rows[2 * TILE] = l.z;
        rows[3 * TILE] = l.w;
        buffer[OPERAND_FOURS + c.lane] = r;
        wait_for_all();
        if (k + DEPTH < c.p.depth) {
            left_at += DEPTH;
            right_at += DEPTH * c.p.columns;
            l = c.left.four(left_at);
            r = c.right.four(right_at);
        }
        for (uint d = 0; d < DEPTH; d++) {
            threadgroup const float4 *left = buffer + d * LINE_FOURS + row_four;
            threadgroup const float4 *right = buffer + OPERAND_FOURS + d * LINE_FOURS + column_four;
            float4 above = left[0];
            float4 below = left[16];
            float4 near = right[0];
            float4 beside = right[16];
            add_outer(s0, above, near);
            add_outer(s1, above, beside);
            add_outer(s2, below, near);
            add_outer(s3, below, beside);
        }
    }
    uint row = first_row + 4 * row_four;
    uint column = first_column + 4 * column_four;
    put_block(c, row, column, s0);
    put_block(c, row, column + 64, s1);
    put_block(c, row + 64, column, s2);
    put_block(c, row + 64, column + 64, s3);
}

// ---- By matrices of simdgroups --------------------------------------------------------------------------------

constexpr constant uint EDGE = 8;
constexpr constant uint MATRICES = 4; // of rows and of columns of a simdgroup
constexpr constant uint SIMD_THREADS = 32;
constexpr constant uint SIMD_SIDE = EDGE * MATRICES;
constexpr constant uint MATRIX_COLUMNS = 64;
constexpr constant uint MATRIX_DEPTH = 16;

// Lines in threadgroup memory are padded, so that the rows of a matrix lie in different banks: 128 of 16 depths for the
// left operand, 16 of 64 columns for the right one and for 32 rows of the result.
constexpr constant uint LEFT_FOURS = 5;
constexpr constant uint RIGHT_FOURS = 17;
constexpr constant uint RIGHT_START = TILE * LEFT_FOURS;

inline void matrices(thread const Call &c) {
    uint first_row = c.group / c.p.column_tiles * TILE;
    uint first_column = c.group % c.p.column_tiles * MATRIX_COLUMNS;
    uint own = c.lane / SIMD_THREADS;
    uint own_row = own / 2 * SIMD_SIDE;
    uint own_column = own % 2 * SIMD_SIDE;
    uint left_at = (first_row + c.lane / 4) * c.p.depth + 4 * (c.lane % 4);
    uint below_at = left_at + 64 * c.p.depth;
    uint right_at = c.lane / 16 * c.p.columns + first_column + 4 * (c.lane % 16);
    uint left_to = c.lane / 4 * LEFT_FOURS + c.lane % 4;
    uint right_to = RIGHT_START + c.lane / 16 * RIGHT_FOURS + c.lane % 16;
    simdgroup_float8x8 sum[MATRICES][MATRICES];
#pragma unroll
    for (uint i = 0; i < MATRICES; i++) {
#pragma unroll
        for (uint j = 0; j < MATRICES; j++) {
            sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    threadgroup const float *rows = (threadgroup const float *)c.shared->fours + 4 * own_row * LEFT_FOURS;
    threadgroup const float *columns = (threadgroup const float *)(c.shared->fours + RIGHT_START) + own_column;
    float4 l = c.left.four(left_at);
    float4 below = c.left.four(below_at);
    float4 r = c.right.four(right_at);
    for (uint k = 0; k < c.p.depth; k += MATRIX_DEPTH) {
        wait_for_all();
        c.shared->fours[left_to] = l;
        c.shared->fours[left_to + 64 * LEFT_FOURS] = below;
        c.shared->fours[right_to] = r;
        wait_for_all();
        if (k + MATRIX_DEPTH < c.p.depth) {
            left_at += MATRIX_DEPTH;
            below_at += MATRIX_DEPTH;
            right_at += MATRIX_DEPTH * c.p.columns;
            l = c.left.four(left_at);
            below = c.left.four(below_at);
            r = c.right.four(right_at);
        }
#pragma unroll
        for (uint d = 0; d < MATRIX_DEPTH; d += EDGE) {
            simdgroup_float8x8 left[MATRICES];
            simdgroup_float8x8 right[MATRICES];
#pragma unroll
            for (uint i = 0; i < MATRICES; i++) {
                simdgroup_load(left[i], rows + EDGE * i * 4 * LEFT_FOURS + d, 4 * LEFT_FOURS, ulong2(0, 0), false);
                simdgroup_load(right[i], columns + d * 4 * RIGHT_FOURS + EDGE * i, 4 * RIGHT_FOURS, ulong2(0, 0),
                               false);
            }
#pragma unroll
            for (uint i = 0; i < MATRICES; i++) {
#pragma unroll
                for (uint j = 0; j < MATRICES; j++) {
                    simdgroup_multiply_accumulate(sum[i][j], left[i], right[j], sum[i][j]);
                }
            }
        }
    }
    // Results leave through threadgroup memory, 32 rows at a time, because storage may be of 16 bits.
    for (uint first = 0; first < TILE; first += SIMD_SIDE) {
        threadgroup float *results = (threadgroup float *)c.shared->fours;
        wait_for_all();
        if (own_row == first) {
#pragma unroll
            for (uint i = 0; i < MATRICES; i++) {
#pragma unroll
                for (uint j = 0; j < MATRICES; j++) {
                    simdgroup_store(sum[i][j], results + EDGE * i * 4 * RIGHT_FOURS + own_column + EDGE * j,
                                    4 * RIGHT_FOURS);
                }
            }
        }
        wait_for_all();
        for (uint i = c.lane; i < SIMD_SIDE * MATRIX_COLUMNS / 4; i += c.threads) {
            c.y.set_four((first_row + first + i / 16) * c.p.columns + first_column + 4 * (i % 16),
                         c.shared->fours[i / 16 * RIGHT_FOURS + i % 16]);
        }
    }
}

KERNELS(ENTRY)
