/* SPDX-License-Identifier: MIT */
// linear: y = act(a b + bias) and its gradients da = dpre b^T, db = a^T dpre, dbias = the column sums of dpre, where
// dpre = dy * act'(pre). docs/ops/linear.md derives them.
//
// `product` computes all three products: out[rows, columns] = left[rows, depth] right[depth, columns], `batches` of
// them. The constants LEFT_ALONG and RIGHT_ALONG say whether an operand is stored with its depth contiguous (a of a b,
// b^T of dpre b^T) or with the other axis contiguous. A threadgroup has a tile of 64 x 64, a thread 4 x 4 of it (fewer
// than 256 threads have a smaller tile); 16
// of the depth at a time go through threadgroup memory, while the next 16 are already in registers. Where there are
// few tiles and the depth is long (db of many rows), the depth is split into parts by the sizes alone; each leaves its
// sums in the workspace, and `join` adds them along a fixed tree. No f32 chain is longer than 256.
//
// The kernel that has the finished sums also adds the bias and stores pre and y = act(pre); where the backward
// recomputes pre, it multiplies dy by act'(pre) there, and pre is never stored. With a saved pre, `columns` reads dy
// and pre once, writes dpre (f32, whatever the storage type) and leaves the column sums of each chunk of rows, which
// `join` adds, too.
//
// Dispatches and memory traffic (tiles are read again from cache or memory: a once per column of tiles, b once per
// row):
//   forward                  1: a, b, bias in; y and pre out. Parts: 2, and parts * rows * columns f32 out and in.
//   backward, no activation  da 1, db 1 (parts: 2 each), dbias 2: dy is read by each.
//   backward, pre saved      1 more: dy and pre in, dpre in f32 out; it is also the first of dbias.
//   backward, pre recomputed 1 more: a, b, bias and dy in, dpre out.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, left) operand(Float, 1, right) operand(Float, 2, bias) operand(Float, 3, dy)                     \
        operand(Float, 4, pre) operand(Float, 5, y) operand(Float, 6, parts)
#define NUMBERS(number)                                                                                                \
    number(0, LEFT_ALONG) number(1, RIGHT_ALONG) number(2, ACTIVATION) number(3, LANES) number(4, TEAMS)
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

// A tile of left, then one of right. Each is laid out as in memory, in fours along the contiguous axis. Depth
// contiguous: a line of the tile has 4 fours and one of padding, and the fours of a line change position every 8 lines,
// so that 8 threads reading 8 lines that are 4 apart hit 32 different banks. Else: 16 fours for each of 16 depths.
struct Shared {
    float4 tiles[640];
};

#include "common.metal"

#include "activation.metal"

constexpr constant uint TILE_FOURS = 320;
constexpr constant uint MAX_FOURS = 16; // of rows, or of columns, that a threadgroup has
constexpr constant uint DEPTH = 16;
constexpr constant uint PART = 32; // sums are added in parts of this many

// ---- Results ------------------------------------------------------------------------------------------------

// Elements i to i + 3, zeros instead of those past the first `count`: there may be a NaN there, or no memory.
inline float4 first_of(Float from, uint i, uint count) {
    if (count >= 4) {
        return from.four(i);
    }
    return float4(from.at(i), count > 1 ? from.at(i + 1) : 0.0f, count > 2 ? from.at(i + 2) : 0.0f, 0.0f);
}

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
    } else {
        value = activate(value);
    }
    put_first(c.y, at, count, value);
}

// ---- The product --------------------------------------------------------------------------------------------

inline uint line_index(uint line, uint quad) {
    return line * 5 + (quad ^ (line >> 3 & 3));
}

// Where in a tile of `fours` fours of lines its i-th four of 16 * fours begins: line and depth.
inline uint2 four_of(bool along, uint i, uint fours) {
    return along ? uint2(i / 4, 4 * (i % 4)) : uint2(4 * (i % fours), i / fours);
}

inline void store_four(thread const Call &c, uint base, bool along, uint2 at, float4 v) {
    c.shared->tiles[base + (along ? line_index(at.x, at.y / 4) : at.y * MAX_FOURS + at.x / 4)] = v;
}

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

struct Block {
    float4 v[4];
};

// Four lines from 4 * four, four depths from 4 * quad: one line per vector where the depth is contiguous, else one
// depth per vector.
inline Block block_of(thread const Call &c, uint base, bool along, uint four, uint quad) {
    uint at = base + (along ? line_index(4 * four, quad) : 4 * MAX_FOURS * quad + four);
    uint step = along ? 5 : MAX_FOURS;
    threadgroup const float4 *tiles = c.shared->tiles;
    return {{tiles[at], tiles[at + step], tiles[at + 2 * step], tiles[at + 3 * step]}};
}

inline Block transposed(Block b) {
    return {{float4(b.v[0].x, b.v[1].x, b.v[2].x, b.v[3].x), float4(b.v[0].y, b.v[1].y, b.v[2].y, b.v[3].y),
             float4(b.v[0].z, b.v[1].z, b.v[2].z, b.v[3].z), float4(b.v[0].w, b.v[1].w, b.v[2].w, b.v[3].w)}};
}

// One row: four depths of left by four depths of four columns.
inline float4 add_row(float4 sum, float4 l, Block r) {
    float4 s = fma(float4(l.x), r.v[0], sum);
    s = fma(float4(l.y), r.v[1], s);
    s = fma(float4(l.z), r.v[2], s);
    return fma(float4(l.w), r.v[3], s);
}

inline void product(thread const Call &c) {
    bool left_along = LEFT_ALONG == 1;
    bool right_along = RIGHT_ALONG == 1;
    uint across = min(c.threads, MAX_FOURS); // as linear.c has it
    uint down = min(c.threads / across, MAX_FOURS);
    uint column_tile = c.group % c.p.column_tiles;
    uint above = c.group / c.p.column_tiles;
    uint row_tile = above % c.p.row_tiles;
    uint outer = above / c.p.row_tiles; // part * batches + batch
    uint batch = outer % c.p.batches;
    uint begin = outer / c.p.batches * c.p.span;
    uint end = min(begin + c.p.span, c.p.depth);

    uint left_start = batch * c.p.rows * c.p.depth;
    uint right_start = batch * c.p.depth * c.p.columns;
    uint2 left_from = uint2(row_tile * 4 * down, 0);
    uint2 right_from = uint2(column_tile * 4 * across, 0);
    uint2 left_four_at = four_of(left_along, c.lane, down);
    uint2 right_four_at = four_of(right_along, c.lane, across);
    uint row_four = c.lane / across;
    uint column_four = c.lane % across;
    uint row = left_from.x + 4 * row_four;
    uint column = right_from.x + 4 * column_four;
    bool inside = row_four < down && row < c.p.rows && column < c.p.columns;

    // The current chain, and the sum of the finished ones.
    float4 sum[4] = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
    float4 total[4] = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
    // A round loads a step, multiplies the one before, and only then stores the loaded one in its at.
    for (uint next = begin; next < end + DEPTH; next += DEPTH) {
        uint2 left_at = left_from + uint2(0, next);
        uint2 right_at = right_from + uint2(0, next);
        float4 left_next = load_four(c, c.left, left_along, left_start, c.p.rows, left_at + left_four_at, end);
        float4 right_next = load_four(c, c.right, right_along, right_start, c.p.columns, right_at + right_four_at, end);
        if (inside && next > begin) {
            uint quads = min((end + DEPTH - next + 3) / 4, DEPTH / 4);
            for (uint quad = 0; quad < quads; quad++) {
                Block l = block_of(c, 0, left_along, row_four, quad);
                Block r = block_of(c, TILE_FOURS, right_along, column_four, quad);
                if (!left_along) {
                    l = transposed(l);
                }
                if (right_along) {
                    r = transposed(r);
                }
                for (uint i = 0; i < 4; i++) {
                    sum[i] = add_row(sum[i], l.v[i], r);
                }
            }
        }
        if ((next - begin) % c.p.chain == 0) {
            for (uint i = 0; i < 4; i++) {
                total[i] += sum[i];
                sum[i] = float4(0.0f);
            }
        }
        wait_for_all();
        if (c.lane < DEPTH * down) {
            store_four(c, 0, left_along, left_four_at, left_next);
        }
        if (c.lane < DEPTH * across) {
            store_four(c, TILE_FOURS, right_along, right_four_at, right_next);
        }
        // 256 threads have one four of each tile. With fewer, the remaining fours are loaded here.
        for (uint i = c.lane + c.threads; i < DEPTH * down; i += c.threads) {
            uint2 at = four_of(left_along, i, down);
            store_four(c, 0, left_along, at, load_four(c, c.left, left_along, left_start, c.p.rows, left_at + at, end));
        }
        for (uint i = c.lane + c.threads; i < DEPTH * across; i += c.threads) {
            uint2 at = four_of(right_along, i, across);
            store_four(c, TILE_FOURS, right_along, at,
                       load_four(c, c.right, right_along, right_start, c.p.columns, right_at + at, end));
        }
        wait_for_all();
    }
    if (!inside) {
        return;
    }
    for (uint i = 0; i < 4; i++) {
        total[i] += sum[i];
    }
    // Where y is the workspace's parts, `outer` counts those too. Not unrolled: an activation is long.
    uint start = (outer * c.p.rows + row) * c.p.columns + column;
    for (uint i = 0; i < min(4u, c.p.rows - row); i++) {
        float4 sums = i == 0 ? total[0] : i == 1 ? total[1] : i == 2 ? total[2] : total[3];
        deliver(c, start + i * c.p.columns, column, sums);
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
