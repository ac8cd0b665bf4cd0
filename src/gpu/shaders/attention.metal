/* SPDX-License-Identifier: MIT */
// attention: y = softmax(scale q k^T) v for each head, and its gradients. docs/ops/attention.md derives them.
//
// The queries of all heads that share a head of k are rows of one problem: row i is time i / group, head i % group of
// them. A threadgroup of 256 threads has 64 rows (of queries, or of keys for dk and dv) and goes through the other
// side, the terms, 32 at a time: no more of the scores is ever stored. A thread has 4 rows by 2 terms of a tile of
// scores, then 4 rows by 4 columns of each product of the tile's weights with rows of `right` or `right2`, all through
// threadgroup memory. Fewer threads have fewer rows, and below 16 fewer terms and columns.
//
//     kernel    rows     left  right  left2  right2  out  out2     what it makes
//     forward   queries  q     k      -      v       y    -        lse; or row_max and row_log, which are kept apart
//     deltas    queries  -     -      dy     y       -    -        delta = <dy, y> of each query
//     gradient  queries  q     k      dy     v       dq   -        dq = scale sum of ds k
//     gradient  keys     k     q      v      dy      dk   dv       dk = scale sum of ds q, dv = sum of p dy
//
// `gradient` computes the scores again, p = exp(score - row_max - row_log), ds = p (<dy, v> - delta). Where dim is more
// than 64, dk and dv have a launch each, so that the sums of a thread stay in registers; a threadgroup has up to 128
// columns (CHUNKS of 64), and beyond that the scores are computed once for every 128.
//
// With `first` the kernels have `edge`, made by attention_first.metal: the first key of each query, or for rows of keys
// the end of the queries that see each key.
//
//     MATRIX 1  a thread multiplies its own rows, terms and columns, in registers
//     MATRIX 8  a simdgroup multiplies matrices of 8 x 8 (attention_matrices.metal), with 256 threads
//
// Each sum is made in a fixed order: 32 terms in a chain, 64 chains, then all: no chain is longer than 256 up to 524288
// terms. Terms that a row does not see are left out, not multiplied by 0: they may be NaN.
//
// Dispatches, barriers and memory traffic: see attention.wgsl.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, left) operand(Float, 1, right) operand(Float, 2, left2) operand(Float, 3, right2)                \
        operand(Float, 4, out) operand(Float, 5, out2) operand(Float, 6, lse) operand(Float, 7, row_max)               \
            operand(Float, 8, row_log) operand(Float, 9, delta) operand(Word, 10, edge)
#define NUMBERS(number)    number(0, CHUNKS) number(1, KEY_ROWS) number(2, MATRIX)
#define KERNELS(kernel_of) kernel_of(forward) kernel_of(deltas) kernel_of(gradient)

struct Params {
    uint left_step; // elements from one time's heads to the next one's
    uint right_step;
    uint left2_step;
    uint right2_step;
    uint out_step;
    uint out2_step;
    uint units; // batches times heads of k
    uint time;
    uint keys;
    uint kv_heads;
    uint group; // heads of q for each of k
    uint dim;
    uint causal;
    uint window; // of causal: how many of its last keys a query sees; all are `keys`
    uint row_tiles;
    uint column_tiles;
    float scale;
    float infinity;
    float nan;
    uint zero;
    uint first_batch; // of this launch, for `edge`
};

// Weights of a tile, which also take what the rows' threads exchange; then what a product is staged in.
struct Shared {
    float4 weights[512];
    float4 stage[512];
};

#include "common.metal"

#include "exponential.metal"

constexpr constant uint MAX_FOURS = 16; // of rows, and of columns
constexpr constant uint STAGE_RIGHT = 256;
constexpr constant uint DEPTH = 16;
constexpr constant uint FOLD = 64;        // tiles whose sums are added in one chain
constexpr constant uint DEPTH_FOLD = 256; // elements of dim whose products are added in one chain
constexpr constant uint MAX_CHUNKS = 2;

// ---- Rows and terms -----------------------------------------------------------------------------------------

inline uint queries(thread const Call &c) {
    return c.p.time * c.p.group;
}

inline uint query_head(thread const Call &c, uint unit, uint query) {
    return unit % c.p.kv_heads * c.p.group + query % c.p.group;
}

inline uint query_start(thread const Call &c, uint unit, uint query, uint step) {
    uint time = unit / c.p.kv_heads * c.p.time + query / c.p.group;
    return time * step + query_head(c, unit, query) * c.p.dim;
}

inline uint key_start(thread const Call &c, uint unit, uint key, uint step) {
    return (unit / c.p.kv_heads * c.p.keys + key) * step + unit % c.p.kv_heads * c.p.dim;
}

// Where a query's lse is: [batch, heads, time].
inline uint statistic_at(thread const Call &c, uint unit, uint query) {
    uint head = unit / c.p.kv_heads * c.p.kv_heads * c.p.group + query_head(c, unit, query);
    return head * c.p.time + query / c.p.group;
}

inline uint row_count(thread const Call &c) {
    return KEY_ROWS == 1 ? c.p.keys : queries(c);
}

inline uint term_count(thread const Call &c) {
    return KEY_ROWS == 1 ? queries(c) : c.p.keys;
}

inline uint row_start(thread const Call &c, uint unit, uint row, uint step) {
    return KEY_ROWS == 1 ? key_start(c, unit, row, step) : query_start(c, unit, row, step);
}

inline uint term_start(thread const Call &c, uint unit, uint term, uint step) {
    return KEY_ROWS == 1 ? query_start(c, unit, term, step) : key_start(c, unit, term, step);
}

// The end of the keys that a query sees with causal; it sees the last `window` of them.
inline uint end_key(thread const Call &c, uint query) {
    return min(query / c.p.group + c.p.keys - c.p.time + 1, c.p.keys);
}

// A row sees the terms [first, end): for a key, the queries from its own time on, while it is in their window, or up to
// its edge. Edges have the window in them. Rows past the end are like the last one.
inline uint first_term(thread const Call &c, uint unit, uint row) {
    if (c.edge.is() && KEY_ROWS == 0) {
        uint batch = c.p.first_batch + unit / c.p.kv_heads;
        return c.edge.word(batch * c.p.time + min(row / c.p.group, c.p.time - 1));
    }
    if (c.p.causal == 0) {
        return 0;
    }
    if (KEY_ROWS == 1) {
        uint ahead = c.p.keys - c.p.time;
        return (max(row, ahead) - ahead) * c.p.group;
    }
    return max(end_key(c, row), c.p.window) - c.p.window;
}

inline uint end_term(thread const Call &c, uint unit, uint row) {
    if (c.edge.is() && KEY_ROWS == 1) {
        uint batch = c.p.first_batch + unit / c.p.kv_heads;
        return c.edge.word(batch * c.p.keys + min(row, c.p.keys - 1)) * c.p.group;
    }
    if (c.p.causal == 0) {
        return term_count(c);
    }
    if (KEY_ROWS == 1) {
        uint ahead = c.p.keys - c.p.time;
        return min(max(row + c.p.window, ahead) - ahead, c.p.time) * c.p.group;
    }
    return end_key(c, row);
}

// What a threadgroup has: `rows` rows from `row`, columns from `column`; `terms` terms in a tile. And this thread of
// it: the x-th of its `across` threads for the y-th four of rows. Rows that see many terms come first.
struct Place {
    uint unit;
    uint row;
    uint column;
    uint rows;
    uint terms;
    uint columns; // of a chunk
    uint across;
    uint x;
    uint y;
    bool works; // some threads past the last four of rows may only load
    uint first[4];
    uint end[4]; // limits of this thread's rows
};

inline Place place_of(thread const Call &c) {
    Place p;
    uint above = c.group / c.p.column_tiles;
    uint rank = above / c.p.units;
    p.across = min(c.threads, MAX_FOURS); // as attention.c has it
    uint down = min(c.threads / p.across, MAX_FOURS);
    p.rows = 4 * down;
    p.terms = 2 * p.across;
    p.columns = 4 * p.across;
    p.unit = above % c.p.units;
    p.row = (KEY_ROWS == 1 ? rank : c.p.row_tiles - 1 - rank) * p.rows;
    p.column = c.group % c.p.column_tiles * p.columns * CHUNKS;
    p.x = c.lane % p.across;
    p.y = min(c.lane / p.across, down - 1);
    p.works = c.lane / p.across < down;
    for (uint i = 0; i < 4; i++) {
        p.first[i] = first_term(c, p.unit, p.row + 4 * p.y + i);
        p.end[i] = end_term(c, p.unit, p.row + 4 * p.y + i);
    }
    return p;
}

inline bool sees(thread const Place &p, uint i, uint term) {
    return term >= p.first[i] && term < p.end[i];
}

// The end of the terms that any of a threadgroup's rows sees.
inline uint end_of_rows(thread const Call &c, thread const Place &p) {
    return end_term(c, p.unit, min(p.row + p.rows, row_count(c)) - 1);
}

// Whether all of a threadgroup's rows see all terms of a tile.
inline bool all_see(thread const Call &c, thread const Place &p, uint term) {
    uint last = min(p.row + p.rows, row_count(c)) - 1;
    return term >= first_term(c, p.unit, last) && term + p.terms <= end_term(c, p.unit, p.row);
}

// ---- Products -----------------------------------------------------------------------------------------------

// An operand of [heads, dim] for each time.
struct Rows {
    Float of;
    uint step; // elements from one time's heads to the next one's
};

// Four columns of the row that starts at `start`, zeros instead of those that are not there.
inline float4 load_four(thread const Call &c, Float from, bool valid, uint start, uint column) {
    if (!valid || column >= c.p.dim) {
        return float4(0.0f);
    }
    uint i = start + column;
    uint count = c.p.dim - column;
    if (count >= 4) {
        return from.four(i);
    }
    return float4(from.at(i), count > 1 ? from.at(i + 1) : 0.0f, count > 2 ? from.at(i + 2) : 0.0f, 0.0f);
}

// The same of a threadgroup's row, or of a term.
inline float4 row_four(thread const Call &c, Rows left, uint unit, bool valid, uint row, uint column) {
    return load_four(c, left.of, valid, row_start(c, unit, row, left.step), column);
}

inline float4 term_four(thread const Call &c, Rows right, uint unit, bool valid, uint term, uint column) {
    return load_four(c, right.of, valid, term_start(c, unit, term, right.step), column);
}

// Index of a four of lines of `fours` fours that lie as matrices of 8 x 8 in a row: a matrix is 16 neighbouring fours.
inline uint slot_of(uint line, uint four, uint fours) {
    return (line / 8 * (fours / 2) + four / 2) * 16 + line % 8 * 2 + four % 2;
}

// Index of a four of a staged line along dim. In registers 8 threads that read 8 neighbouring lines hit 32 different
// banks.
inline uint line_slot(uint line, uint quad) {
    return MATRIX == 8 ? slot_of(line, quad, DEPTH / 4) : line * 4 + (quad ^ (line >> 1 & 3));
}

// Index of the weights of a term for four rows, and of what the threads of those rows exchange.
inline uint weight_slot(uint term, uint four) {
    return MATRIX == 8 ? slot_of(term, four, MAX_FOURS) : term * MAX_FOURS + (four ^ (term & 7));
}

// Index of four columns of a staged row.
inline uint column_slot(uint line, uint four) {
    return MATRIX == 8 ? slot_of(line, four, MAX_FOURS) : line * MAX_FOURS + four;
}

struct Block {
    float4 v[4];
};

inline Block zero_block() {
    return {{float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)}};
}

inline Block plus(Block a, Block b) {
    return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}};
}

// Each row by its own factor.
inline Block times_rows(Block a, float4 factor) {
    return {
        {a.v[0] * float4(factor.x), a.v[1] * float4(factor.y), a.v[2] * float4(factor.z), a.v[3] * float4(factor.w)}};
}

// Four depths of r by four depths of four rows.
inline float4 add_depths(float4 sum, float4 r, Block l) {
    float4 s = fma(float4(r.x), float4(l.v[0].x, l.v[1].x, l.v[2].x, l.v[3].x), sum);
    s = fma(float4(r.y), float4(l.v[0].y, l.v[1].y, l.v[2].y, l.v[3].y), s);
    s = fma(float4(r.z), float4(l.v[0].z, l.v[1].z, l.v[2].z, l.v[3].z), s);
    return fma(float4(r.w), float4(l.v[0].w, l.v[1].w, l.v[2].w, l.v[3].w), s);
}

// For a thread's four rows: terms x and x + across of a tile.
struct Scores {
    float4 v[2];
};

// The scores of a tile, each thread its own, in registers.
struct RegisterScores {
    Scores sum; // the current chain, and the sum of the finished ones
    Scores total;

    void begin(thread const Call &, thread const Place &, uint) {
        Scores none = {{float4(0.0f), float4(0.0f)}};
        sum = none;
        total = none;
    }

    void add(thread const Call &c, thread const Place &p, uint depths) {
        threadgroup const float4 *stage = c.shared->stage;
        for (uint i = 0; p.works && 4 * i < depths; i++) {
            Block l = {{stage[line_slot(4 * p.y, i)], stage[line_slot(4 * p.y + 1, i)],
                        stage[line_slot(4 * p.y + 2, i)], stage[line_slot(4 * p.y + 3, i)]}};
            for (uint j = 0; j < 2; j++) {
                sum.v[j] = add_depths(sum.v[j], stage[STAGE_RIGHT + line_slot(p.x + j * p.across, i)], l);
            }
        }
    }

    void end_chain() {
        for (uint j = 0; j < 2; j++) {
            total.v[j] += sum.v[j];
            sum.v[j] = float4(0.0f);
        }
    }

    Scores scores(thread const Call &, thread const Place &) {
        return total;
    }
};

#include "attention_matrices.metal"

template <typename Sums>
Scores products_by(thread const Call &c, Rows left, Rows right, thread const Place &p, uint term) {
    threadgroup float4 *stage = c.shared->stage;
    Sums sums;
    sums.begin(c, p, term);
    uint line = c.lane / 4;
    uint quad = c.lane % 4;
    for (uint d = 0; d < c.p.dim; d += DEPTH) {
        // 256 threads have one four of each. With fewer, the remaining fours are loaded after the barrier.
        bool has_row = line < p.rows && p.row + line < row_count(c);
        bool has_term = line < p.terms && term + line < term_count(c);
        float4 of_row = row_four(c, left, p.unit, has_row, p.row + line, d + 4 * quad);
        float4 of_term = term_four(c, right, p.unit, has_term, term + line, d + 4 * quad);
        wait_for_all();
        if (line < p.rows) {
            stage[line_slot(line, quad)] = of_row;
        }
        if (line < p.terms) {
            stage[STAGE_RIGHT + line_slot(line, quad)] = of_term;
        }
        for (uint i = c.lane + c.threads; i < 4 * p.rows; i += c.threads) {
            uint row = p.row + i / 4;
            stage[line_slot(i / 4, i % 4)] = row_four(c, left, p.unit, row < row_count(c), row, d + 4 * (i % 4));
        }
        for (uint i = c.lane + c.threads; i < 4 * p.terms; i += c.threads) {
            uint next = term + i / 4;
            stage[STAGE_RIGHT + line_slot(i / 4, i % 4)] =
                term_four(c, right, p.unit, next < term_count(c), next, d + 4 * (i % 4));
        }
        wait_for_all();
        sums.add(c, p, min(c.p.dim - d, DEPTH));
        if ((d + DEPTH) % DEPTH_FOLD == 0) {
            sums.end_chain();
        }
    }
    sums.end_chain();
    return sums.scores(c, p);
}

// <left row, right row> over dim. Its first barrier also ends the reading of what was staged before.
inline Scores products(thread const Call &c, Rows left, Rows right, thread const Place &p, uint term) {
    if (MATRIX == 8) {
        return products_by<MatrixScores>(c, left, right, p, term);
    }
    return products_by<RegisterScores>(c, left, right, p, term);
}

// Weights of a term for a thread's four rows. A matrix multiplies them all: those of rows that do not see it are 0.
inline float4 seen_of(thread const Place &p, uint term, float4 weight) {
    for (uint i = 0; i < 4; i++) {
        weight[i] = MATRIX == 8 && !sees(p, i, term) ? 0.0f : weight[i];
    }
    return weight;
}

// By each of a thread's four rows, four columns from `column`: the sum of weights times rows of `right` over the tile's
// terms. The weights are visible after its first barrier.
inline Block weighted(thread const Call &c, Rows right, thread const Place &p, uint column, uint term) {
    threadgroup const float4 *weights = c.shared->weights;
    threadgroup float4 *stage = c.shared->stage;
    uint count = min(p.terms, term_count(c) - term);
    wait_for_all();
    for (uint i = c.lane; i < p.terms * p.across; i += c.threads) {
        uint line = i / p.across;
        uint four = i % p.across;
        stage[column_slot(line, four)] = term_four(c, right, p.unit, line < count, term + line, column + 4 * four);
    }
    wait_for_all();
    bool whole = all_see(c, p, term);
    if (MATRIX == 8) {
        Block product = matrix_weighted(c, p, column, count);
        return whole || is_finite(product) ? product : seen_weighted(c, right, p, column, term, count);
    }
    Block sum = zero_block();
    for (uint k = 0; k < (p.works ? count : 0); k++) {
        float4 w = weights[weight_slot(k, p.y)];
        float4 v = stage[column_slot(k, p.x)];
        for (uint i = 0; i < 4; i++) {
            if (whole || sees(p, i, term + k)) {
                sum.v[i] = fma(float4(w[i]), v, sum.v[i]);
            }
        }
    }
    return sum;
}

// Stores four columns of a thread's four rows, or as many as there are.
inline void put_rows(thread const Call &c, Rows to, thread const Place &p, uint chunk, Block rows) {
    uint row = p.row + 4 * p.y;
    uint column = p.column + chunk * p.columns + 4 * p.x;
    if (!to.of.is() || !p.works || row >= row_count(c) || column >= c.p.dim) {
        return;
    }
    uint count = c.p.dim - column;
    for (uint i = 0; i < min(4u, row_count(c) - row); i++) {
        uint at = row_start(c, p.unit, row + i, to.step) + column;
        float4 v = i == 0 ? rows.v[0] : i == 1 ? rows.v[1] : i == 2 ? rows.v[2] : rows.v[3];
        if (count >= 4) {
            to.of.set_four(at, v);
        } else if (count == 1) {
            to.of.set(at, v.x);
        } else {
            to.of.set_two(at, v.xy);
            if (count == 3) {
                to.of.set(at + 2, v.z);
            }
        }
    }
}

// ---- Softmax ------------------------------------------------------------------------------------------------

// exp(x); a NaN stays one. Past 88, where only a wrong lse leads, it is infinite.
inline float weight_of(float x) {
    float w = exp_down(min(x, 88.0f));
    return is_nan(x) ? x : x > 88.0f ? w * w : w;
}

inline float4 weights_of(float4 x) {
    return float4(weight_of(x.x), weight_of(x.y), weight_of(x.z), weight_of(x.w));
}

inline float4 largest_of(float4 a, float4 b) {
    return float4(max(a.x, b.x), max(a.y, b.y), max(a.z, b.z), max(a.w, b.w));
}

// log(x) of x >= 1, by its exponent and the series of the hyperbolic arc tangent: a device's own differs in its last
// digits from one to the next.
inline float log_of(float x) {
    uint bits = as_type<uint>(x);
    if (bits >= 0x7f800000u) {
        return x;
    }
    // x = 2^n m, m between the roots of 1/2 and of 2
    uint n = (bits - 0x3f3504f3u) >> 23;
    float m = as_type<float>(bits - (n << 23));
    float s = (m - 1.0f) / (m + 1.0f);
    float z = s * s;
    float series = fma(z, fma(z, fma(z, fma(z, 1.0f / 9.0f, 1.0f / 7.0f), 0.2f), 1.0f / 3.0f), 1.0f);
    return fma(float(n), 0.693147182f, 2.0f * s * series);
}

// A power of two above `sum`; 2 where there is no sum yet.
inline float power_above(float sum) {
    return as_type<float>(((as_type<uint>(max(sum, 1.0f)) >> 23) + 1) << 23);
}

// ---- Kernels ------------------------------------------------------------------------------------------------

// Sums of weighted values are kept divided by a power of two above the sum of weights, so that they stay below the
// largest value and lose no digit.
inline void forward(thread const Call &c) {
    Place p = place_of(c);
    Rows left = {c.left, c.p.left_step};
    Rows right = {c.right, c.p.right_step};
    Rows right2 = {c.right2, c.p.right2_step};
    threadgroup float4 *weights = c.shared->weights;
    threadgroup float4 *stage = c.shared->stage;
    float4 none = float4(-c.p.infinity);
    float4 largest = none;
    float4 sum = float4(0.0f); // of weights: of the tiles of a chain, and of finished chains
    float4 sum_total = float4(0.0f);
    float4 power = float4(2.0f);
    Block y[MAX_CHUNKS] = {zero_block(), zero_block()}; // of weighted values
    Block total[MAX_CHUNKS] = {zero_block(), zero_block()};
    uint tiles = 0;
    uint end = end_of_rows(c, p);
    for (uint term = first_term(c, p.unit, p.row); term < end; term += p.terms) {
        Scores s = products(c, left, right, p, term);
        for (uint j = 0; j < 2; j++) {
            for (uint i = 0; i < 4; i++) {
                s.v[j][i] = sees(p, i, term + p.x + j * p.across) ? s.v[j][i] * c.p.scale : none.x;
            }
        }
        if (p.works) {
            weights[weight_slot(p.x, p.y)] = largest_of(s.v[0], s.v[1]);
        }
        wait_for_all();
        float4 before = largest;
        for (uint i = 0; i < p.across; i++) {
            largest = largest_of(largest, weights[weight_slot(i, p.y)]);
        }
        float4 top = largest;
        for (uint i = 0; i < 4; i++) { // all scores are -Inf so far: weights are 0, not NaN
            top[i] = as_type<uint>(top[i]) == 0xff800000u ? 0.0f : top[i];
        }
        s.v[0] = weights_of(s.v[0] - top);
        s.v[1] = weights_of(s.v[1] - top);
        float4 correction = weights_of(before - top);
        if (p.works) {
            stage[weight_slot(p.x, p.y)] = s.v[0] + s.v[1];
        }
        wait_for_all();
        float4 added = float4(0.0f);
        for (uint i = 0; i < p.across; i++) {
            added += stage[weight_slot(i, p.y)];
        }
        sum = sum * correction + added;
        sum_total = sum_total * correction;
        float4 all = sum + sum_total;
        float4 old_power = power;
        float4 inverse;
        for (uint i = 0; i < 4; i++) {
            power[i] = power_above(all[i]);
            inverse[i] = inverse_power(power[i]);
        }
        float4 factor = correction * (old_power * inverse);
        if (p.works) {
            weights[weight_slot(p.x, p.y)] = s.v[0] * inverse;
            weights[weight_slot(p.x + p.across, p.y)] = s.v[1] * inverse;
        }
        if (c.out.is()) {
            for (uint chunk = 0; chunk < CHUNKS; chunk++) {
                y[chunk] =
                    plus(times_rows(y[chunk], factor), weighted(c, right2, p, p.column + chunk * p.columns, term));
                total[chunk] = times_rows(total[chunk], factor);
            }
        }
        tiles += 1;
        if (tiles % FOLD == 0) {
            sum_total += sum;
            sum = float4(0.0f);
            for (uint chunk = 0; chunk < MAX_CHUNKS; chunk++) {
                total[chunk] = plus(total[chunk], y[chunk]);
                y[chunk] = zero_block();
            }
        }
    }
    float4 all = sum + sum_total;
    float4 inverse;
    float4 rest;
    for (uint i = 0; i < 4; i++) { // no keys: y is 0. Keys whose scores are all -Inf: NaN
        float without = p.end[i] == 0 ? 0.0f : c.p.nan;
        inverse[i] = all[i] == 0.0f ? without : power[i] / all[i];
        rest[i] = all[i] == 0.0f ? without : log_of(all[i]);
    }
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        put_rows(c, {c.out, c.p.out_step}, p, chunk, times_rows(plus(y[chunk], total[chunk]), inverse));
    }
    if (!p.works || p.x != 0 || p.column != 0) {
        return;
    }
    for (uint i = 0; i < 4; i++) {
        uint row = p.row + 4 * p.y + i;
        if (row < row_count(c)) {
            uint at = statistic_at(c, p.unit, row);
            c.lse.set(at, largest[i] + rest[i]);
            c.row_max.set(at, largest[i]);
            c.row_log.set(at, rest[i]);
        }
    }
}

// <dy, y> of a query, in the order of products(): where one weight is 1 and the others are 0, y is a value, and <dy, v>
// - delta is exactly 0.
inline void deltas(thread const Call &c) {
    if (MATRIX == 8) {
        matrix_deltas(c);
        return;
    }
    uint item = c.group * c.threads + c.lane;
    if (item >= c.p.units * queries(c)) {
        return;
    }
    uint unit = item / queries(c);
    uint query = item % queries(c);
    uint dy_at = query_start(c, unit, query, c.p.left2_step);
    uint y_at = query_start(c, unit, query, c.p.right2_step);
    float sum = 0.0f;
    float total = 0.0f;
    for (uint d = 0; d < c.p.dim; d += 4) {
        float4 dy = load_four(c, c.left2, true, dy_at, d);
        float4 y = load_four(c, c.right2, true, y_at, d);
        for (uint i = 0; i < 4; i++) {
            sum = fma(dy[i], y[i], sum);
        }
        if ((d + 4) % DEPTH_FOLD == 0) {
            total += sum;
            sum = 0.0f;
        }
    }
    c.delta.set(statistic_at(c, unit, query), total + sum);
}

// The softmax of a query: its largest score, the log of the sum, <dy, y>. An absent row_log is 0.
inline float3 softmax_at(thread const Call &c, uint unit, uint query) {
    uint at = statistic_at(c, unit, min(query, queries(c) - 1));
    return float3(c.row_max.at(at), c.row_log.at(at), c.delta.at(at));
}

inline void gradient(thread const Call &c) {
    Place p = place_of(c);
    Rows left = {c.left, c.p.left_step};
    Rows right = {c.right, c.p.right_step};
    Rows left2 = {c.left2, c.p.left2_step};
    Rows right2 = {c.right2, c.p.right2_step};
    threadgroup float4 *weights = c.shared->weights;
    Scores largest = {{float4(0.0f), float4(0.0f)}};
    Scores rest = largest;
    Scores mean = largest;
    if (KEY_ROWS == 0) {
        for (uint i = 0; i < 4; i++) {
            float3 of_query = softmax_at(c, p.unit, p.row + 4 * p.y + i);
            for (uint j = 0; j < 2; j++) {
                largest.v[j][i] = of_query.x;
                rest.v[j][i] = of_query.y;
                mean.v[j][i] = of_query.z;
            }
        }
    }
    Block out[MAX_CHUNKS] = {zero_block(), zero_block()}; // of the tiles of a chain, and of finished chains
    Block out_total[MAX_CHUNKS] = {zero_block(), zero_block()};
    Block out2[MAX_CHUNKS] = {zero_block(), zero_block()};
    Block out2_total[MAX_CHUNKS] = {zero_block(), zero_block()};
    uint tiles = 0;
    uint end = end_of_rows(c, p);
    for (uint term = first_term(c, p.unit, p.row); term < end; term += p.terms) {
        if (KEY_ROWS == 1) {
            for (uint j = 0; j < 2; j++) {
                float3 of_query = softmax_at(c, p.unit, term + p.x + j * p.across);
                largest.v[j] = float4(of_query.x);
                rest.v[j] = float4(of_query.y);
                mean.v[j] = float4(of_query.z);
            }
        }
        Scores s = products(c, left, right, p, term);
        for (uint j = 0; j < 2; j++) {
            s.v[j] = weights_of(s.v[j] * float4(c.p.scale) - largest.v[j] - rest.v[j]);
            if (p.works) {
                weights[weight_slot(p.x + j * p.across, p.y)] = seen_of(p, term + p.x + j * p.across, s.v[j]);
            }
        }
        for (uint chunk = 0; chunk < CHUNKS && c.out2.is(); chunk++) {
            out2[chunk] = plus(out2[chunk], weighted(c, right2, p, p.column + chunk * p.columns, term));
        }
        if (c.out.is()) {
            Scores slope = products(c, left2, right2, p, term);
            for (uint j = 0; j < 2 && p.works; j++) {
                float4 ds = s.v[j] * (slope.v[j] - mean.v[j]);
                weights[weight_slot(p.x + j * p.across, p.y)] = seen_of(p, term + p.x + j * p.across, ds);
            }
            for (uint chunk = 0; chunk < CHUNKS; chunk++) {
                out[chunk] = plus(out[chunk], weighted(c, right, p, p.column + chunk * p.columns, term));
            }
        }
        tiles += 1;
        if (tiles % FOLD == 0) {
            for (uint chunk = 0; chunk < MAX_CHUNKS; chunk++) {
                out_total[chunk] = plus(out_total[chunk], out[chunk]);
                out2_total[chunk] = plus(out2_total[chunk], out2[chunk]);
                out[chunk] = zero_block();
                out2[chunk] = zero_block();
            }
        }
    }
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        put_rows(c, {c.out, c.p.out_step}, p, chunk, times_rows(plus(out[chunk], out_total[chunk]), float4(c.p.scale)));
        put_rows(c, {c.out2, c.p.out2_step}, p, chunk, plus(out2[chunk], out2_total[chunk]));
    }
}

KERNELS(ENTRY)
