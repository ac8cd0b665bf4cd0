/* SPDX-License-Identifier: MIT */
// linear: y = act(a b + bias) + residual, or silu(gate) (a b + bias), and its gradients da = dpre b^T, db = a^T dpre,
// dbias = the column sums of dpre, where dpre = dy * act'(pre), and dresidual = dy. docs/ops/linear.md derives them.
//
// `product` computes all three products: out[rows, columns] = left[rows, depth] right[depth, columns], `batches` of
// them. The constants LEFT_ALONG and RIGHT_ALONG say whether an operand is stored with its depth contiguous (a of a b,
// b^T of dpre b^T) or with the other axis contiguous. A threadgroup has a tile (tiles.metal). Where
// there are few tiles and the depth is long (db of many rows), the depth is split into parts by the sizes alone; each
// leaves its sums in the workspace, and `join` adds them along a fixed tree. No f32 chain is longer than 256.
//
// The kernel that has the finished sums also adds the bias and stores pre and y = act(pre); where the backward
// recomputes pre, it multiplies dy by act'(pre) there, and pre is never stored. With a saved pre, `columns` reads dy
// and pre once, writes dpre (f32, whatever the storage type) and leaves the column sums of each chunk of rows, which
// `join` adds, too.
//
// Dispatches and memory traffic (tiles are read again from cache or memory: a once per column of tiles, b once per
// row):
//   forward                  1: a, b, bias, residual or gate in; y and pre out. Parts: 2, and as many f32 results out
//   and in. backward, no activation  da 1, db 1 (parts: 2 each), dbias 2: dy is read by each. backward, pre saved 1
//   more: dy and pre in, dpre in f32 out; it is also the first of dbias. backward, pre recomputed 1 more: a, b, bias
//   and dy in, dpre out. dresidual                1: dy in and out. backward with a gate     1 more, and 1 where pre is
//   recomputed: swiglu's, which makes dgate and dpre.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, left) operand(Float, 1, right) operand(Float, 2, bias) operand(Float, 3, dy)                     \
        operand(Float, 4, pre) operand(Float, 5, y) operand(Float, 6, parts) operand(Float, 7, residual)               \
            operand(Float, 8, gate)
#define NUMBERS(number)                                                                                                \
    number(0, LEFT_ALONG) number(1, RIGHT_ALONG) number(2, ACTIVATION) number(3, LANES) number(4, TEAMS)               \
        number(5, BLOCK) number(6, MATRIX)
#define KERNELS(kernel_of) kernel_of(product) kernel_of(join) kernel_of(columns)

struct Params {
    uint rows;
    uint columns;
    uint depth;
    uint batches;
    uint row_tiles;
    uint column_tiles;
    uint parts; // of the depth; of `columns`, chunks of rows
    uint span;  // the depth of a part, a multiple of `chain`; the rows of a chunk
    uint chain; // how much of the depth is added in one chain
    uint zero_nan;
};

struct Shared {
    float4 tiles[640];
};

#include "common.metal"

#include "activation.metal"
#include "silu.metal"
#include "tiles.metal"

constexpr constant uint PART = 32; // sums are added in parts of this many

// ---- Results ------------------------------------------------------------------------------------------------

// Stores four from element i, or as many as there are.
inline void put_first(Float to, uint i, uint count, float4 value) {
    if (count >= 4) {
        to.set_four(i, value);
        return;
    }
    if (count == 1) {
        to.set(i, value.x);
        return;
    }
    to.set_two(i, value.xy);
    if (count == 3) {
        to.set(i + 2, value.z);
    }
}

// Four sums from column `column`, which belong at element `at`.
inline void deliver(thread const Call &c, uint at, uint column, float4 sums) {
    uint count = c.p.columns - column;
    float4 value = sums;
    if (c.bias.is()) {
        value += first_of(c.bias, column, count);
    }
    put_first(c.pre, at, count, value);
    if (c.dy.is()) {
        value = first_of(c.dy, at, count) * activate_slope(value, c.p.zero_nan == 1);
    } else if (c.gate.is()) {
        // Rounded as pre is stored, and multiplied as swiglu does: the bits of the two ops.
        float4 gate = first_of(c.gate, at, count);
        for (uint k = 0; k < 4; k++) {
            Silu silu = silu_of(gate[k]);
            value[k] = silu.value * c.gate.rounded(value[k]) * silu.last;
        }
    } else {
        value = activate(value);
        if (c.residual.is()) {
            value += first_of(c.residual, at, count);
        }
    }
    put_first(c.y, at, count, value);
}

// ---- The product --------------------------------------------------------------------------------------------

// A four of an operand that has `lines` rows or columns, in which batch `start` begins.
inline float4 load_four(thread const Call &c, Float from, bool along, uint start, uint lines, uint2 at, uint end) {
    if (at.x >= lines || at.y >= end) {
        return float4(0.0f);
    }
    if (along) {
        return first_of(from, start + at.x * c.p.depth + at.y, end - at.y);
    }
    return first_of(from, start + at.y * lines + at.x, lines - at.x);
}

// The operands of a batch, from where they begin.
struct Operands {
    uint left_start;
    uint right_start;

    bool left_along() const {
        return LEFT_ALONG == 1;
    }
    bool right_along() const {
        return RIGHT_ALONG == 1;
    }
    float4 left(thread const Call &c, uint2 at, uint end) const {
        return load_four(c, c.left, left_along(), left_start, c.p.rows, at, end);
    }
    float4 right(thread const Call &c, uint2 at, uint end) const {
        return load_four(c, c.right, right_along(), right_start, c.p.columns, at, end);
    }
};

inline void product(thread const Call &c) {
    Tile tile = tile_of(c);
    uint column_tile = c.group % c.p.column_tiles;
    uint above = c.group / c.p.column_tiles;
    uint row_tile = above % c.p.row_tiles;
    uint outer = above / c.p.row_tiles; // part * batches + batch
    uint batch = outer % c.p.batches;
    uint begin = outer / c.p.batches * c.p.span;
    uint end = min(begin + c.p.span, c.p.depth);

    Operands operands = {batch * c.p.rows * c.p.depth, batch * c.p.depth * c.p.columns};
    uint2 first = tile.first(row_tile, column_tile);
    uint2 own = first + tile.own();
    uint2 size = uint2(c.p.rows, c.p.columns);
    Quarters sums = multiply(c, operands, first, size, begin, end);
    if (!tile.inside(first, size)) {
        return;
    }
    // Where y is the workspace's parts, `outer` counts those too. Not unrolled: an activation is long.
    for (uint q = 0; q < quarters_count(); q++) {
        uint2 at = own + tile.quarter(q);
        if (at.x < c.p.rows && at.y < c.p.columns) {
            uint start = (outer * c.p.rows + at.x) * c.p.columns + at.y;
            for (uint i = 0; i < min(4u, c.p.rows - at.x); i++) {
                deliver(c, start + i * c.p.columns, at.y, row_at(quarter_at(sums, q), i));
            }
        }
    }
}

// Adds the parts of the depth, or the chunks of `columns`: a team of LANES threads has four columns of a row, and each
// of its threads every LANES-th part.
inline void join(thread const Call &c) {
    uint fours = (c.p.columns + 3) / 4;
    uint rows = c.p.batches * c.p.rows;
    uint team = c.lane / LANES;
    uint item = c.group * TEAMS + team;
    bool valid = team < TEAMS && item < rows * fours;
    uint near = min(item, rows * fours - 1);
    uint column = 4 * (near % fours);
    uint at = near / fours * c.p.columns + column;
    float4 sum = float4(0.0f);
    float4 total = float4(0.0f);
    uint taken = 0;
    for (uint part = c.lane % LANES; part < c.p.parts; part += LANES) {
        sum += first_of(c.parts, part * rows * c.p.columns + at, c.p.columns - column);
        taken += 1;
        if (taken % PART == 0) {
            total += sum;
            sum = float4(0.0f);
        }
    }
    float4 all = team_sum(c, total + sum, LANES);
    if (valid && c.lane % LANES == 0) {
        deliver(c, at, column, all);
    }
}

// ---- The activation's backward and dbias --------------------------------------------------------------------

// A chunk of rows of LANES fours of columns: dpre into y, if there is a pre and a y; column sums into parts. A team of
// LANES threads has a row.
inline void columns(thread const Call &c) {
    uint column = 4 * (c.group % c.p.column_tiles * LANES + c.lane % LANES);
    uint chunk = c.group / c.p.column_tiles;
    uint end = min((chunk + 1) * c.p.span, c.p.rows);
    uint team = c.lane / LANES;
    uint count = c.p.columns - column; // of columns that are there, if any is
    float4 sum = float4(0.0f);
    float4 total = float4(0.0f);
    uint taken = 0;
    if (team < TEAMS && column < c.p.columns) {
        for (uint row = chunk * c.p.span + team; row < end; row += TEAMS) {
            uint at = row * c.p.columns + column;
            float4 v = first_of(c.dy, at, count);
            if (c.pre.is()) {
                v *= activate_slope(first_of(c.pre, at, count), c.p.zero_nan == 1);
            }
            put_first(c.y, at, count, v);
            sum += v;
            taken += 1;
            if (taken % PART == 0) {
                total += sum;
                sum = float4(0.0f);
            }
        }
    }
    if (!c.parts.is()) {
        return;
    }
    float4 all = across_teams(c, total + sum, LANES);
    if (c.lane < LANES && column < c.p.columns) {
        put_first(c.parts, chunk * c.p.columns + column, count, all);
    }
}

KERNELS(ENTRY)
