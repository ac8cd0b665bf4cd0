/* SPDX-License-Identifier: MIT */
// A tile of a matrix product, out[rows, columns] = left[rows, depth] right[depth, columns]: linear and conv2d. A
// threadgroup has a tile of 64 x 64, a thread 4 x 4 of it (fewer than 256 threads have a smaller tile); 16 of the depth
// at a time go through threadgroup memory, while the next 16 are already in registers. Sums are chains of c.p.chain
// products, which are added in order.
//
// A shader that includes this has a `float4 tiles[640]` in its Shared and `chain` in its Params. It gives multiply() a
// Load, which says for each operand along which axis a thread loads four neighbours (left_along, right_along: along the
// depth, else along the rows or columns), and loads them, zeros past the end of an axis.

constexpr constant uint TILE_FOURS = 320; // of one operand; left comes first
constexpr constant uint MAX_FOURS = 16;   // of rows, or of columns, that a threadgroup has
constexpr constant uint DEPTH = 16;

// Elements i to i + 3, zeros instead of those past the first `count`: there may be a NaN there, or no memory.
inline float4 first_of(Float from, uint i, uint count) {
    if (count >= 4) {
        return from.four(i);
    }
    return float4(from.at(i), count > 1 ? from.at(i + 1) : 0.0f, count > 2 ? from.at(i + 2) : 0.0f, 0.0f);
}

// A tile is laid out as it is loaded, in fours. Along the depth: a line of the tile has 4 fours and one of padding, and
// the fours of a line change position every 8 lines, so that 8 threads reading 8 lines that are 4 apart hit 32
// different banks. Else: 16 fours for each of 16 depths.
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

struct Block {
    float4 v[4];
};

// Four lines from 4 * four, four depths from 4 * quad: one line per vector where the tile is loaded along the depth,
// else one depth per vector.
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

// A thread's place in its threadgroup's tile.
struct Tile {
    uint across; // fours of columns that the threadgroup has, and of rows; as tiles.c counts them
    uint down;
    uint row_four;
    uint column_four;
};

inline Tile tile_of(thread const Call &c) {
    uint across = min(c.threads, MAX_FOURS);
    return {across, min(c.threads / across, MAX_FOURS), c.lane / across, c.lane % across};
}

// The sums over depths [begin, end) of a thread's four rows of four columns, in the tile whose first row and column are
// these. A thread that is not `inside` has no row or no column, and only loads; every thread of the threadgroup must
// come here.
template <typename Load>
void multiply(thread const Call &c, thread const Load &load, uint first_row, uint first_column, uint begin, uint end,
              bool inside, thread float4 (&total)[4]) {
    Tile tile = tile_of(c);
    bool left_along = load.left_along();
    bool right_along = load.right_along();
    uint2 left_from = uint2(first_row, 0);
    uint2 right_from = uint2(first_column, 0);
    uint2 left_four_at = four_of(left_along, c.lane, tile.down);
    uint2 right_four_at = four_of(right_along, c.lane, tile.across);
    // The current chain; `total` is the sum of the finished ones.
    float4 sum[4] = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
    for (uint i = 0; i < 4; i++) {
        total[i] = float4(0.0f);
    }
    // A round loads a step, multiplies the one before, and only then stores the loaded one in its place.
    for (uint next = begin; next < end + DEPTH; next += DEPTH) {
        uint2 left_at = left_from + uint2(0, next);
        uint2 right_at = right_from + uint2(0, next);
        float4 left_next = load.left(c, left_at + left_four_at, end);
        float4 right_next = load.right(c, right_at + right_four_at, end);
        if (inside && next > begin) {
            uint quads = min((end + DEPTH - next + 3) / 4, DEPTH / 4);
            for (uint quad = 0; quad < quads; quad++) {
                Block l = block_of(c, 0, left_along, tile.row_four, quad);
                Block r = block_of(c, TILE_FOURS, right_along, tile.column_four, quad);
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
        if (c.lane < DEPTH * tile.down) {
            store_four(c, 0, left_along, left_four_at, left_next);
        }
        if (c.lane < DEPTH * tile.across) {
            store_four(c, TILE_FOURS, right_along, right_four_at, right_next);
        }
        // 256 threads have one four of each tile. With fewer, the remaining fours are loaded here.
        for (uint i = c.lane + c.threads; i < DEPTH * tile.down; i += c.threads) {
            uint2 at = four_of(left_along, i, tile.down);
            store_four(c, 0, left_along, at, load.left(c, left_at + at, end));
        }
        for (uint i = c.lane + c.threads; i < DEPTH * tile.across; i += c.threads) {
            uint2 at = four_of(right_along, i, tile.across);
            store_four(c, TILE_FOURS, right_along, at, load.right(c, right_at + at, end));
        }
        wait_for_all();
    }
    for (uint i = 0; i < 4; i++) {
        total[i] += sum[i];
    }
}
