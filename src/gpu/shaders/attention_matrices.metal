/* SPDX-License-Identifier: MIT */
// attention's products in matrices of 8 x 8 that a simdgroup of 32 threads multiplies together: attention.metal uses
// them where MATRIX is 8, which the host gives on Apple's GPUs from family 7 on (256 threads, simdgroups of 32). Then a
// tile has 64 rows, 32 terms and chunks of 64 columns.
//
//     MatrixScores      16 terms by 16 rows per simdgroup: 2 by 2 matrices; for 8 of dim it loads 4 and multiplies 4
//     matrix_weighted   16 rows by 32 columns per simdgroup: 2 by 4 matrices; for 8 terms it loads 6 and multiplies 8
//     matrix_deltas     8 queries per simdgroup: one matrix, whose diagonal is the result
//
// Elements are f32, whatever the storage. Results reach their threads through `stage`, so that softmax and the sums
// over tiles are the same as without matrices. A term that not all rows see may be NaN: where a product is not finite,
// each thread adds again what its rows see. Which thread has which element of a matrix is not defined, and never used:
// thread_elements() only adds element by element. Every thread of a simdgroup must come to each function of a matrix;
// so conditions are the simdgroup's. Loops over matrices are unrolled, because an array with an index that is not known
// when it is compiled would not stay in registers.

constexpr constant uint EDGE = 8;
constexpr constant uint SIMD_THREADS = 32;
constexpr constant uint SIMD_LINES = 2;   // of matrices, one below the other
constexpr constant uint RESULT_ROWS = 32; // of 64 columns, that fit into `stage`

// The matrix whose first element is the first of this four; staged by slot_of(), its 64 elements are neighbours.
inline simdgroup_float8x8 matrix_at(threadgroup const float4 *four) {
    simdgroup_float8x8 m;
    simdgroup_load(m, (threadgroup const float *)four, EDGE, ulong2(0, 0), false);
    return m;
}

inline simdgroup_float8x8 transposed_at(threadgroup const float4 *four) {
    simdgroup_float8x8 m;
    simdgroup_load(m, (threadgroup const float *)four, EDGE, ulong2(0, 0), true);
    return m;
}

// Two lines of `ACROSS` matrices.
template <uint ACROSS> struct Matrices {
    simdgroup_float8x8 m[SIMD_LINES][ACROSS];

    void clear() {
#pragma unroll
        for (uint i = 0; i < SIMD_LINES; i++) {
#pragma unroll
            for (uint j = 0; j < ACROSS; j++) {
                m[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
    }

    void add(thread Matrices &other) {
#pragma unroll
        for (uint i = 0; i < SIMD_LINES; i++) {
#pragma unroll
            for (uint j = 0; j < ACROSS; j++) {
                m[i][j].thread_elements()[0] += other.m[i][j].thread_elements()[0];
                m[i][j].thread_elements()[1] += other.m[i][j].thread_elements()[1];
            }
        }
    }

    void multiply(thread simdgroup_float8x8 (&left)[SIMD_LINES], thread simdgroup_float8x8 (&right)[ACROSS]) {
#pragma unroll
        for (uint i = 0; i < SIMD_LINES; i++) {
#pragma unroll
            for (uint j = 0; j < ACROSS; j++) {
                simdgroup_multiply_accumulate(m[i][j], left[i], right[j], m[i][j]);
            }
        }
    }

    // As lines of 64: line and column of the first element.
    void store(threadgroup float4 *to, uint line, uint column) {
#pragma unroll
        for (uint i = 0; i < SIMD_LINES; i++) {
#pragma unroll
            for (uint j = 0; j < ACROSS; j++) {
                threadgroup float4 *at = to + slot_of(line + EDGE * i, (column + EDGE * j) / 4, MAX_FOURS);
                simdgroup_store(m[i][j], (threadgroup float *)at, EDGE);
            }
        }
    }
};

// The scores of products(): one line per term, one column per row, as weights are stored.
struct MatrixScores {
    Matrices<2> sum; // the current chain, and the sum of the finished ones
    Matrices<2> total;
    uint line;
    uint row;
    bool inside; // the simdgroup has a term and a row

    void begin(thread const Call &c, thread const Place &p, uint term) {
        uint own = c.lane / SIMD_THREADS;
        line = own % 2 * (SIMD_LINES * EDGE);
        row = own / 2 * (2 * EDGE);
        inside = term + line < term_count(c) && p.row + row < row_count(c);
        sum.clear();
        total.clear();
    }

    // Depths past the last are zeros.
    void add(thread const Call &c, thread const Place &, uint depths) {
        threadgroup const float4 *stage = c.shared->stage;
        for (uint depth = 0; inside && depth < depths; depth += EDGE) {
            simdgroup_float8x8 left[SIMD_LINES];
            simdgroup_float8x8 right[2];
#pragma unroll
            for (uint i = 0; i < 2; i++) {
                left[i] = matrix_at(stage + STAGE_RIGHT + line_slot(line + EDGE * i, depth / 4));
                right[i] = transposed_at(stage + line_slot(row + EDGE * i, depth / 4));
            }
            sum.multiply(left, right);
        }
    }

    void end_chain() {
        total.add(sum);
        sum.clear();
    }

    Scores scores(thread const Call &c, thread const Place &p) {
        threadgroup float4 *stage = c.shared->stage;
        wait_for_all();
        total.store(stage, line, row);
        wait_for_all();
        return {{stage[weight_slot(p.x, p.y)], stage[weight_slot(p.x + p.across, p.y)]}};
    }
};

// The sums of weighted() over the tile's first `count` terms. A term that is not finite reaches all rows.
inline Block matrix_weighted(thread const Call &c, thread const Place &p, uint column, uint count) {
    threadgroup const float4 *weights = c.shared->weights;
    threadgroup float4 *stage = c.shared->stage;
    uint own = c.lane / SIMD_THREADS;
    uint own_row = own / 2 * (SIMD_LINES * EDGE);
    uint own_column = own % 2 * (4 * EDGE);
    bool inside = p.row + own_row < row_count(c) && column + own_column < c.p.dim;
    Matrices<4> product;
    product.clear();
    for (uint k = 0; inside && k < count; k += EDGE) {
        simdgroup_float8x8 left[SIMD_LINES];
        simdgroup_float8x8 right[4];
#pragma unroll
        for (uint i = 0; i < SIMD_LINES; i++) {
            left[i] = transposed_at(weights + weight_slot(k, (own_row + EDGE * i) / 4));
        }
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            right[j] = matrix_at(stage + column_slot(k, (own_column + EDGE * j) / 4));
        }
        product.multiply(left, right);
    }
    Block sum = zero_block();
    for (uint first = 0; first < p.rows; first += RESULT_ROWS) {
        wait_for_all(); // what is stored here was read
        if (inside && own_row / RESULT_ROWS == first / RESULT_ROWS) {
            product.store(stage, own_row - first, own_column);
        }
        wait_for_all();
        if (4 * p.y / RESULT_ROWS == first / RESULT_ROWS) {
            for (uint i = 0; i < 4; i++) {
                sum.v[i] = stage[column_slot(4 * p.y - first + i, p.x)];
            }
        }
    }
    return sum;
}

// An overflow of this sum counts as not finite, which costs only time.
inline bool is_finite(Block b) {
    float4 sum = b.v[0] + b.v[1] + b.v[2] + b.v[3];
    return is_finite(sum.x) && is_finite(sum.y) && is_finite(sum.z) && is_finite(sum.w);
}

// The same of only those terms that each row sees, where one of the others may not be finite. The staged rows are no
// longer there.
inline Block seen_weighted(thread const Call &c, Rows right, thread const Place &p, uint column, uint term,
                           uint count) {
    Block sum = zero_block();
    for (uint k = 0; k < count; k++) {
        float4 w = c.shared->weights[weight_slot(k, p.y)];
        float4 v = term_four(c, right, p.unit, true, term + k, column + 4 * p.x);
        for (uint i = 0; i < 4; i++) {
            if (sees(p, i, term + k)) {
                sum.v[i] = fma(float4(w[i]), v, sum.v[i]);
            }
        }
    }
    return sum;
}

// deltas() of 64 queries, with the factors and the order that products() has: see there.
inline void matrix_deltas(thread const Call &c) {
    threadgroup float4 *stage = c.shared->stage;
    threadgroup float *results = (threadgroup float *)c.shared->weights;
    uint first = c.group * (4 * MAX_FOURS);
    uint count = c.p.units * queries(c);
    uint line = c.lane / 4;
    uint quad = c.lane % 4;
    bool valid = first + line < count;
    uint unit = (first + line) / queries(c);
    uint query = (first + line) % queries(c);
    uint dy_at = query_start(c, unit, query, c.p.left2_step);
    uint y_at = query_start(c, unit, query, c.p.right2_step);
    uint own_line = c.lane / SIMD_THREADS * EDGE;
    bool inside = first + own_line < count;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_float8x8 total = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint d = 0; d < c.p.dim; d += DEPTH) {
        wait_for_all();
        stage[line_slot(line, quad)] = load_four(c, c.left2, valid, dy_at, d + 4 * quad);
        stage[STAGE_RIGHT + line_slot(line, quad)] = load_four(c, c.right2, valid, y_at, d + 4 * quad);
        wait_for_all();
        for (uint depth = 0; inside && depth < min(c.p.dim - d, DEPTH); depth += EDGE) {
            simdgroup_float8x8 dy = matrix_at(stage + line_slot(own_line, depth / 4));
            simdgroup_float8x8 y = transposed_at(stage + STAGE_RIGHT + line_slot(own_line, depth / 4));
            simdgroup_multiply_accumulate(sum, dy, y, sum);
        }
        if ((d + DEPTH) % DEPTH_FOLD == 0) {
            total.thread_elements()[0] += sum.thread_elements()[0];
            total.thread_elements()[1] += sum.thread_elements()[1];
            sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    total.thread_elements()[0] += sum.thread_elements()[0];
    total.thread_elements()[1] += sum.thread_elements()[1];
    simdgroup_store(total, results + EDGE * own_line, EDGE);
    wait_for_all();
    uint item = first + c.lane;
    if (c.lane < 4 * MAX_FOURS && item < count) {
        float diagonal = results[c.lane / EDGE * (EDGE * EDGE) + c.lane % EDGE * (EDGE + 1)];
        c.delta.set(statistic_at(c, item / queries(c), item % queries(c)), diagonal);
    }
}
