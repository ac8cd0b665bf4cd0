/* SPDX-License-Identifier: MIT */
// The sums of a tile of 64 x 64 in matrices of 8 x 8 that a simdgroup of 32 threads multiplies together: tiles.metal
// uses them where MATRIX is 8, which the host gives on Apple's GPUs from family 7 on (256 threads, simdgroups of 32).
//
//     each of the 8 simdgroups has 16 rows of 32 columns: 2 by 4 matrices, and as many totals, 32 floats per thread
//     for 8 of the depth it loads 2 + 4 matrices from threadgroup memory and multiplies 8
//
// Elements are f32, whatever the storage: that loses nothing of a 16-bit operand, and takes no more from a product. A
// chain is c.p.chain products as in registers, so no sum is longer than there. Which thread has which element of a
// matrix is not defined, and never used: results leave by simdgroup_store(), and thread_elements() only adds element by
// element. Every thread of a simdgroup must come to each of these functions; so conditions are the simdgroup's. Loops
// over matrices are unrolled, because an array with an index that is not known when it is compiled would not stay in
// registers.

constexpr constant uint EDGE = 8;
constexpr constant uint SIMD_THREADS = 32;
constexpr constant uint SIMD_ROWS = 2; // of matrices
constexpr constant uint SIMD_COLUMNS = 4;

// A tile in threadgroup memory: along the depth a line of 16, else 64 lines for each depth; padded, so that the rows of
// a matrix lie in different banks.
constexpr constant uint ALONG_FOURS = 5;
constexpr constant uint ACROSS_FOURS = 17;
constexpr constant uint RESULT_ROWS = 32; // of 64 columns, that fit into the memory of both tiles

struct Matrices {
    simdgroup_float8x8 m[SIMD_ROWS][SIMD_COLUMNS];
};

inline Matrices no_matrices() {
    Matrices none;
#pragma unroll
    for (uint i = 0; i < SIMD_ROWS; i++) {
#pragma unroll
        for (uint j = 0; j < SIMD_COLUMNS; j++) {
            none.m[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    return none;
}

// Lines and depths from these on, of the tile that begins at four `base`: transposed where it is stored the other way.
inline simdgroup_float8x8 matrix_at(thread const Call &c, uint base, bool along, bool left, uint line, uint depth) {
    threadgroup const float *tile = (threadgroup const float *)(c.shared->tiles + base);
    uint stride = 4 * (along ? ALONG_FOURS : ACROSS_FOURS);
    uint at = along ? line * stride + depth : depth * stride + line;
    simdgroup_float8x8 m;
    if (along == left) { // not an argument: compilers that want it constant have it so
        simdgroup_load(m, tile + at, stride, ulong2(0, 0), false);
    } else {
        simdgroup_load(m, tile + at, stride, ulong2(0, 0), true);
    }
    return m;
}

struct MatrixSums {
    Matrices sum; // the current chain, and the sum of the finished ones
    Matrices total;
    uint row; // of the tile, where this simdgroup's matrices begin
    uint column;
    bool inside; // the simdgroup has a row and a column

    static uint four_index(bool along, uint2 at) {
        return along ? at.x * ALONG_FOURS + at.y / 4 : at.y * ACROSS_FOURS + at.x / 4;
    }

    void begin(thread const Call &c, uint2 first, uint2 size) {
        uint own = c.lane / SIMD_THREADS;
        row = own / 2 * (SIMD_ROWS * EDGE);
        column = own % 2 * (SIMD_COLUMNS * EDGE);
        inside = first.x + row < size.x && first.y + column < size.y;
        sum = no_matrices();
        total = no_matrices();
    }

    // Depths past the last are zeros in both tiles.
    void add(thread const Call &c, bool left_along, bool right_along, uint depths) {
        if (!inside) {
            return;
        }
        for (uint depth = 0; depth < depths; depth += EDGE) {
            simdgroup_float8x8 left[SIMD_ROWS];
            simdgroup_float8x8 right[SIMD_COLUMNS];
#pragma unroll
            for (uint i = 0; i < SIMD_ROWS; i++) {
                left[i] = matrix_at(c, 0, left_along, true, row + EDGE * i, depth);
            }
#pragma unroll
            for (uint j = 0; j < SIMD_COLUMNS; j++) {
                right[j] = matrix_at(c, TILE_FOURS, right_along, false, column + EDGE * j, depth);
            }
#pragma unroll
            for (uint i = 0; i < SIMD_ROWS; i++) {
#pragma unroll
                for (uint j = 0; j < SIMD_COLUMNS; j++) {
                    simdgroup_multiply_accumulate(sum.m[i][j], left[i], right[j], sum.m[i][j]);
                }
            }
        }
    }

    void end_chain() {
#pragma unroll
        for (uint i = 0; i < SIMD_ROWS; i++) {
#pragma unroll
            for (uint j = 0; j < SIMD_COLUMNS; j++) {
                total.m[i][j].thread_elements()[0] += sum.m[i][j].thread_elements()[0];
                total.m[i][j].thread_elements()[1] += sum.m[i][j].thread_elements()[1];
            }
        }
        sum = no_matrices();
    }

    // The totals as each thread stores them, through the memory of the tiles, half of the rows at a time.
    Quarters results(thread const Call &c, Tile tile) {
        threadgroup float *rows = (threadgroup float *)c.shared->tiles;
        Quarters own = no_quarters();
        for (uint first = 0; first < 4 * MAX_FOURS; first += RESULT_ROWS) {
            if (row / RESULT_ROWS == first / RESULT_ROWS) {
#pragma unroll
                for (uint i = 0; i < SIMD_ROWS; i++) {
#pragma unroll
                    for (uint j = 0; j < SIMD_COLUMNS; j++) {
                        uint at = (row - first + EDGE * i) * 4 * ACROSS_FOURS + column + EDGE * j;
                        simdgroup_store(total.m[i][j], rows + at, 4 * ACROSS_FOURS);
                    }
                }
            }
            wait_for_all();
            if (4 * tile.row_four / RESULT_ROWS == first / RESULT_ROWS) {
                for (uint i = 0; i < 4; i++) {
                    uint at = (4 * tile.row_four - first + i) * ACROSS_FOURS + tile.column_four;
                    own.q[0].v[i] = c.shared->tiles[at];
                }
            }
            wait_for_all();
        }
        return own;
    }
};
