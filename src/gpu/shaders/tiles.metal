/* SPDX-License-Identifier: MIT */
// A tile of a matrix product, out[rows, columns] = left[rows, depth] right[depth, columns]: linear and conv2d. A
// threadgroup has a tile of 64 x 64, a thread 4 x 4 of it (fewer than 256 threads have a smaller tile), or with BLOCK 2
// a tile of 128 x 128, a thread 4 x 4 of each quarter of it. 16 of the depth at a time (BLOCK 2: 8) go through
// threadgroup memory, while the next are already in registers. Sums are chains of c.p.chain products, which are added
// in order: BLOCK changes no bit of them.
//
//     MATRIX 1  a thread multiplies its own rows and columns, in registers
//     MATRIX 8  a simdgroup multiplies matrices of 8 x 8 (matrices.metal), with BLOCK 1 and 256 threads
//
// A shader that includes this has the numbers BLOCK and MATRIX, a `float4 tiles[640]` in its Shared and `chain` in its
// Params. It gives multiply() a Load, which says for each operand along which axis a thread loads four neighbours
// (left_along, right_along: along the depth, else along the rows or columns), and loads them, zeros past the end of an
// axis.

constexpr constant uint TILE_FOURS = 320; // of one operand; left comes first
constexpr constant uint MAX_FOURS = 16;   // of rows, or of columns, of a quarter

inline uint step_depth() {
    return 16 / BLOCK;
}

// Elements i to i + 3, zeros instead of those past the first `count`: there may be a NaN there, or no memory.
inline float4 first_of(Float from, uint i, uint count) {
    if (count >= 4) {
        return from.four(i);
    }
    return float4(from.at(i), count > 1 ? from.at(i + 1) : 0.0f, count > 2 ? from.at(i + 2) : 0.0f, 0.0f);
}

// A tile is laid out as it is loaded, in fours. Along the depth a line is 4 fours (BLOCK 2: 2). Threads read 8 lines
// that are 4 apart at once, so lines are padded and their fours change position: that hits 32 different banks. Else: 16
// fours (BLOCK 2: 32) for each depth.
inline uint line_index(uint line, uint quad) {
    return BLOCK == 2 ? line * 2 + line / 4 + quad : line * 5 + (quad ^ (line >> 3 & 3));
}

// Where in a tile whose quarters have `fours` fours of lines its i-th four of 16 * fours begins: line and depth.
inline uint2 four_of(bool along, uint i, uint fours) {
    uint quads = step_depth() / 4;
    return along ? uint2(i / quads, 4 * (i % quads)) : uint2(4 * (i % (fours * BLOCK)), i / (fours * BLOCK));
}

struct Block {
    float4 v[4];
};

// Four lines from 4 * four, four depths from 4 * quad: one line per vector where the tile is loaded along the depth,
// else one depth per vector.
inline Block block_of(thread const Call &c, uint base, bool along, uint four, uint quad) {
    uint at = base + (along ? line_index(4 * four, quad) : 4 * MAX_FOURS * BLOCK * quad + four);
    uint step = along ? (BLOCK == 2 ? 2 : 5) : MAX_FOURS * BLOCK;
    threadgroup const float4 *tiles = c.shared->tiles;
    return {{tiles[at], tiles[at + step], tiles[at + 2 * step], tiles[at + 3 * step]}};
}

inline Block transposed(Block b) {
    return {{float4(b.v[0].x, b.v[1].x, b.v[2].x, b.v[3].x), float4(b.v[0].y, b.v[1].y, b.v[2].y, b.v[3].y),
             float4(b.v[0].z, b.v[1].z, b.v[2].z, b.v[3].z), float4(b.v[0].w, b.v[1].w, b.v[2].w, b.v[3].w)}};
}

// By comparisons: an array with an index that is not known when it is compiled would not stay in registers.
inline float4 row_at(Block b, uint i) {
    return i == 0 ? b.v[0] : i == 1 ? b.v[1] : i == 2 ? b.v[2] : b.v[3];
}

// One vector per row.
inline Block left_block(thread const Call &c, bool along, uint four, uint quad) {
    Block l = block_of(c, 0, along, four, quad);
    return along ? l : transposed(l);
}

// One vector per depth.
inline Block right_block(thread const Call &c, bool along, uint four, uint quad) {
    Block r = block_of(c, TILE_FOURS, along, four, quad);
    return along ? transposed(r) : r;
}

// Adds four depths of four rows by four depths of four columns.
inline void add_product(thread Block &sum, Block l, Block r) {
    for (uint i = 0; i < 4; i++) {
        float4 s = fma(float4(l.v[i].x), r.v[0], sum.v[i]);
        s = fma(float4(l.v[i].y), r.v[1], s);
        s = fma(float4(l.v[i].z), r.v[2], s);
        sum.v[i] = fma(float4(l.v[i].w), r.v[3], s);
    }
}

// A thread's place in its threadgroup's tile.
struct Tile {
    uint across; // fours of columns that the threadgroup has in a quarter, and of rows; as tiles.c counts them
    uint down;
    uint row_four;
    uint column_four;

    // The first row and column of a tile, of those that a thread has in its first quarter, and of another quarter.
    uint2 first(uint row_tile, uint column_tile) const {
        return 4 * BLOCK * uint2(row_tile * down, column_tile * across);
    }
    uint2 own() const {
        return 4 * uint2(row_four, column_four);
    }
    uint2 quarter(uint i) const {
        return 4 * uint2(i / 2 * down, i % 2 * across);
    }
    // Whether a thread of the tile that begins at `first` has a row and a column of a result of this size.
    bool inside(uint2 first, uint2 size) const {
        uint2 at = first + own();
        return row_four < down && at.x < size.x && at.y < size.y;
    }
};

inline Tile tile_of(thread const Call &c) {
    uint across = min(c.threads, MAX_FOURS);
    return {across, min(c.threads / across, MAX_FOURS), c.lane / across, c.lane % across};
}

// A thread's four rows of four columns of each quarter: the first, that to its right, that below, and the last. With
// BLOCK 1 the tile is the first alone.
struct Quarters {
    Block q[4];
};

inline Block quarter_at(thread const Quarters &s, uint i) {
    return i == 0 ? s.q[0] : i == 1 ? s.q[1] : i == 2 ? s.q[2] : s.q[3];
}

inline uint quarters_count() {
    return BLOCK * BLOCK;
}

inline Quarters no_quarters() {
    Quarters none;
    for (uint q = 0; q < 4; q++) {
        for (uint i = 0; i < 4; i++) {
            none.q[q].v[i] = float4(0.0f);
        }
    }
    return none;
}

inline void add_quarters(thread Quarters &to, thread const Quarters &from) {
    for (uint q = 0; q < quarters_count(); q++) {
        for (uint i = 0; i < 4; i++) {
            to.q[q].v[i] += from.q[q].v[i];
        }
    }
}

// The sums of a thread in registers.
struct RegisterSums {
    Quarters sum; // the current chain, and the sum of the finished ones
    Quarters total;
    Tile tile;
    bool inside;

    static uint four_index(bool along, uint2 at) {
        return along ? line_index(at.x, at.y / 4) : at.y * MAX_FOURS * BLOCK + at.x / 4;
    }

    void begin(thread const Call &c, uint2 first, uint2 size) {
        tile = tile_of(c);
        inside = tile.inside(first, size);
        sum = no_quarters();
        total = no_quarters();
    }

    void add(thread const Call &c, bool left_along, bool right_along, uint depths) {
        if (!inside) {
            return;
        }
        for (uint quad = 0; 4 * quad < depths; quad++) {
            Block l = left_block(c, left_along, tile.row_four, quad);
            Block r = right_block(c, right_along, tile.column_four, quad);
            add_product(sum.q[0], l, r);
            if (BLOCK == 2) {
                Block below = left_block(c, left_along, tile.down + tile.row_four, quad);
                Block beside = right_block(c, right_along, tile.across + tile.column_four, quad);
                add_product(sum.q[1], l, beside);
                add_product(sum.q[2], below, r);
                add_product(sum.q[3], below, beside);
            }
        }
    }

    void end_chain() {
        add_quarters(total, sum);
        sum = no_quarters();
    }
};

#include "matrices.metal"

// Adds the products of depths [begin, end) to sums that have begun.
template <typename Sums, typename Load>
void add_depths(thread const Call &c, thread const Load &load, uint2 first, uint begin, uint end, thread Sums &sums) {
    Tile tile = tile_of(c);
    uint depth = step_depth();
    bool left_along = load.left_along();
    bool right_along = load.right_along();
    uint2 left_four_at = four_of(left_along, c.lane, tile.down);
    uint2 right_four_at = four_of(right_along, c.lane, tile.across);
    threadgroup float4 *left_tile = c.shared->tiles;
    threadgroup float4 *right_tile = c.shared->tiles + TILE_FOURS;
    // A round loads a step, multiplies the one before, and only then stores the loaded one in its place.
    for (uint next = begin; next < end + depth; next += depth) {
        uint2 left_at = uint2(first.x, next);
        uint2 right_at = uint2(first.y, next);
        float4 left_next = load.left(c, left_at + left_four_at, end);
        float4 right_next = load.right(c, right_at + right_four_at, end);
        if (next > begin) {
            sums.add(c, left_along, right_along, min(end + depth - next, depth));
        }
        if ((next - begin) % c.p.chain == 0) {
            sums.end_chain();
        }
        wait_for_all();
        if (c.lane < 16 * tile.down) {
            left_tile[Sums::four_index(left_along, left_four_at)] = left_next;
        }
        if (c.lane < 16 * tile.across) {
            right_tile[Sums::four_index(right_along, right_four_at)] = right_next;
        }
        // 256 threads have one four of each tile. With fewer, the remaining fours are loaded here.
        for (uint i = c.lane + c.threads; i < 16 * tile.down; i += c.threads) {
            uint2 at = four_of(left_along, i, tile.down);
            left_tile[Sums::four_index(left_along, at)] = load.left(c, left_at + at, end);
        }
        for (uint i = c.lane + c.threads; i < 16 * tile.across; i += c.threads) {
            uint2 at = four_of(right_along, i, tile.across);
            right_tile[Sums::four_index(right_along, at)] = load.right(c, right_at + at, end);
        }
        wait_for_all();
    }
    sums.end_chain();
}

// The sums over depths [begin, end) of the tile whose first row and column are these, of a result of `size` rows and
// columns. Every thread of the threadgroup must come here; those that are not Tile::inside() get no sums.
template <typename Load>
Quarters multiply(thread const Call &c, thread const Load &load, uint2 first, uint2 size, uint begin, uint end) {
    if (MATRIX == 8) {
        MatrixSums sums;
        sums.begin(c, first, size);
        add_depths(c, load, first, begin, end, sums);
        return sums.results(c, tile_of(c));
    }
    RegisterSums sums;
    sums.begin(c, first, size);
    add_depths(c, load, first, begin, end, sums);
    return sums.total;
}
