/* SPDX-License-Identifier: MIT */
// What every shader has: its operands, 16-bit floats, indices, and sums over threads along a fixed tree.
//
// A shader defines these lists, then includes this file:
//
//     OPERANDS(operand)   operand(Float, 0, x) operand(Index, 1, index) ...: buffers, numbered from 0
//     NUMBERS(number)     number(0, PAIRS) ...: constants that it is compiled with, numbered from 0
//     KERNELS(kernel_of)  kernel_of(forward) ...: functions void forward(thread const Call &c)
//     struct Params       the numbers that a launch gives, words in their order
//     struct Shared       memory that a threadgroup shares
//
// and ends with KERNELS(ENTRY). A kernel sees c.x, c.p.rows, c.shared->tile, c.group, c.lane. Whether an operand is
// present, and its type, are function constants, so that a pipeline has no branches on them.
#include <metal_stdlib>
using namespace metal;
#pragma STDC FP_CONTRACT OFF

// An operand's function constant: the element's type, as the host writes it, and what is known of its alignment.
enum Type : uint {
    ABSENT = 0,
    F32 = 1,
    BF16 = 2,
    F16 = 3,
    I32 = 5,
    I64 = 6,
    TYPE = 7,  // the bits of the type itself
    TWOS = 8,  // 16-bit elements: every two of a run, from an even one on, are one word
    FOURS = 16 // every four of a run, from a multiple of four on, are one aligned load
};

// ---- Floats -------------------------------------------------------------------------------------------------

// bf16 by its bits, which needs no version of the language; rounded to nearest even, and a NaN stays one.
inline ushort bf16_bits(float value) {
    uint u = as_type<uint>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return ushort(u >> 16 | 0x40u);
    }
    return ushort((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

// f32, bf16 or f16 in memory, f32 here. set() adds where the call says so, and rounds once.
struct Float {
    device uchar *memory;
    uint type;
    bool adds;

    bool is() const {
        return type != ABSENT;
    }
    bool wide() const {
        return (type & TYPE) == F32;
    }
    float value_of(ushort bits) const {
        return (type & TYPE) == BF16 ? as_type<float>(uint(bits) << 16) : float(as_type<half>(bits));
    }
    ushort bits_of(float value) const {
        return (type & TYPE) == BF16 ? bf16_bits(value) : as_type<ushort>(half(value));
    }
    float2 values_of(uint word) const {
        return float2(value_of(ushort(word & 0xffffu)), value_of(ushort(word >> 16)));
    }
    uint word_of(float2 v) const {
        return uint(bits_of(v.x)) | uint(bits_of(v.y)) << 16;
    }

    // As it would be after set() and at().
    float rounded(float value) const {
        return wide() ? value : value_of(bits_of(value));
    }

    float at(uint i) const {
        if (!is()) {
            return 0.0f;
        }
        return wide() ? ((device const float *)memory)[i] : value_of(((device const ushort *)memory)[i]);
    }
    // Elements i and i + 1, i even within a run.
    float2 two(uint i) const {
        if (is() && !wide() && (type & TWOS)) {
            return values_of(((device const uint *)memory)[i / 2]);
        }
        return float2(at(i), at(i + 1));
    }
    // Elements i to i + 3, i a multiple of four within a run.
    float4 four(uint i) const {
        if (is() && (type & FOURS)) {
            if (wide()) {
                return ((device const float4 *)memory)[i / 4];
            }
            uint2 words = ((device const uint2 *)memory)[i / 4];
            return float4(values_of(words.x), values_of(words.y));
        }
        return float4(two(i), two(i + 2));
    }

    void set(uint i, float value) const {
        if (!is()) {
            return;
        }
        float v = adds ? at(i) + value : value;
        if (wide()) {
            ((device float *)memory)[i] = v;
        } else {
            ((device ushort *)memory)[i] = bits_of(v);
        }
    }
    void set_two(uint i, float2 value) const {
        if (is() && !wide() && (type & TWOS)) {
            ((device uint *)memory)[i / 2] = word_of(adds ? two(i) + value : value);
            return;
        }
        set(i, value.x);
        set(i + 1, value.y);
    }
    void set_four(uint i, float4 value) const {
        if (is() && (type & FOURS)) {
            float4 v = adds ? four(i) + value : value;
            if (wide()) {
                ((device float4 *)memory)[i / 4] = v;
            } else {
                ((device uint2 *)memory)[i / 4] = uint2(word_of(v.xy), word_of(v.zw));
            }
            return;
        }
        set_two(i, value.xy);
        set_two(i + 2, value.zw);
    }
};

// By its bits, because a compiler may assume that there are no NaN.
inline bool is_nan(float value) {
    return (as_type<uint>(value) & 0x7fffffffu) > 0x7f800000u;
}

inline bool is_finite(float value) {
    return (as_type<uint>(value) & 0x7fffffffu) < 0x7f800000u;
}

// ---- Powers of two -------------------------------------------------------------------------------------------

// 1 / power, exactly.
inline float inverse_power(float power) {
    return as_type<float>((254u << 23) - as_type<uint>(power));
}

// Values near f32's largest overflow when they are subtracted or added. Where the exponent of the largest magnitude of
// a row is LARGE or more, the row is multiplied by GUARD; else by 1, which changes no bit.
constexpr constant int LARGE = 217; // of 2^90
constexpr constant float GUARD = 0x1p-40f;
constexpr constant int GUARD_EXPONENT = 40;

inline float guard_of(int exponent) {
    return exponent >= LARGE ? GUARD : 1.0f;
}

// ---- Integers -----------------------------------------------------------------------------------------------

constexpr constant uint NO_INDEX = 0xffffffffu;

// i32, i64, or f32 that holds integers.
struct Index {
    device uchar *memory;
    uint type;
    bool adds;

    bool is() const {
        return type != ABSENT;
    }
    // Its words in memory, low word first.
    uint2 raw(uint i) const {
        if (!is()) {
            return uint2(0, 0);
        }
        device const uint *words = (device const uint *)memory;
        return (type & TYPE) == I64 ? uint2(words[2 * i], words[2 * i + 1]) : uint2(words[i], 0);
    }
    // NO_INDEX where it is not an integer in [0, limit).
    uint in(uint i, uint limit) const {
        if (!is()) {
            return NO_INDEX;
        }
        uint2 word = raw(i);
        if ((type & TYPE) == I64) {
            return word.y == 0 && word.x < limit ? word.x : NO_INDEX;
        }
        if ((type & TYPE) == I32) {
            return word.x < limit ? word.x : NO_INDEX; // a negative one is a large one
        }
        if (word.x == 0x80000000u) {
            return limit > 0 ? 0 : NO_INDEX; // -0
        }
        if (word.x > 0x4b800000u) { // negative, past 2^24, infinite or NaN
            return NO_INDEX;
        }
        float value = as_type<float>(word.x);
        uint index = uint(value);
        return float(index) == value && index < limit ? index : NO_INDEX;
    }
    // Any integer: both words of its 64 bits, and 1; or 0 last where it is stored as f32 and is no integer that f32
    // holds exactly.
    uint3 integer(uint i) const {
        uint2 word = raw(i);
        if ((type & TYPE) == I64) {
            return uint3(word.x, word.y, 1);
        }
        if ((type & TYPE) == I32) {
            return uint3(word.x, word.x >= 0x80000000u ? 0xffffffffu : 0, 1);
        }
        float value = as_type<float>(word.x & 0x7fffffffu);
        uint size = (word.x & 0x7fffffffu) <= 0x4b800000u ? uint(value) : NO_INDEX; // 2^24
        if (size == NO_INDEX || float(size) != value) {
            return uint3(0, 0, 0);
        }
        bool negative = word.x >= 0x80000000u && size > 0;
        return uint3(negative ? 0u - size : size, negative ? 0xffffffffu : 0, 1);
    }
    void put(uint i, uint value) const {
        if (!is()) {
            return;
        }
        device uint *words = (device uint *)memory;
        if ((type & TYPE) == I64) {
            words[2 * i] = value;
            words[2 * i + 1] = 0;
        } else {
            words[i] = value;
        }
    }
};

// u32 of the workspace.
struct Word {
    device uchar *memory;
    uint type;
    bool adds;

    bool is() const {
        return type != ABSENT;
    }
    uint word(uint i) const {
        return is() ? ((device const uint *)memory)[i] : 0;
    }
    void put(uint i, uint value) const {
        if (is()) {
            ((device uint *)memory)[i] = value;
        }
    }
};

// Reports of bad indices: the first position of a pass, and the value there.
struct BadIndex {
    device uchar *memory;
    uint type;
    bool adds;

    device atomic_uint *at(uint i) const {
        return (device atomic_uint *)memory + i;
    }
    void report(uint position) const {
        if (type != ABSENT) {
            atomic_fetch_min_explicit(at(0), position, memory_order_relaxed);
        }
    }
    uint first() const {
        return type != ABSENT ? atomic_load_explicit(at(0), memory_order_relaxed) : NO_INDEX;
    }
    uint explained() const {
        return type != ABSENT ? atomic_load_explicit(at(1), memory_order_relaxed) : NO_INDEX;
    }
    void note(uint position, uint2 value) const {
        if (type != ABSENT) {
            atomic_store_explicit(at(1), position, memory_order_relaxed);
            atomic_store_explicit(at(2), value.x, memory_order_relaxed);
            atomic_store_explicit(at(3), value.y, memory_order_relaxed);
        }
    }
    // Reports a position and its value, from a single thread of the launch.
    void explain(uint position, uint2 value) const {
        report(position);
        if (first() == position && explained() != position) {
            note(position, value);
        }
    }
};

// ---- A kernel's call ----------------------------------------------------------------------------------------

#define CONSTANT_OF_OPERAND(kind, n, name) constant uint name##_type [[function_constant(n)]];
#define CONSTANT_OF_NUMBER(n, name)        constant uint name [[function_constant(32 + n)]];
#define MEMBER(kind, n, name)              kind name;
#define ARGUMENT(kind, n, name)            device uchar *name##_memory [[buffer(n)]],
#define GIVEN(kind, n, name)               {name##_memory + base_of(u, n), name##_type, (u.adds >> n & 1) != 0},

OPERANDS(CONSTANT_OF_OPERAND)
NUMBERS(CONSTANT_OF_NUMBER)

// How launches of several calls are one, as gpu.h has it. The parameters are then a table with a row for each call.
constant uint MERGED [[function_constant(48)]];
constexpr constant uint ALONE = 0;
constexpr constant uint BESIDE = 1;   // each threadgroup does the work of one call
constexpr constant uint IN_ORDER = 2; // one threadgroup does one call after another

constexpr constant uint BASES = 12;
constexpr constant uint ROW_BYTES = 128;

struct Uniforms {
    uint groups;      // of the launch, or row; the grid's last row may have groups too many
    uint adds;        // bit n: set() of operand n adds
    uint before;      // groups of the rows before
    uint calls;       // rows
    uint base[BASES]; // merged: where a row's operands begin, in halves of a word
    Params p;
};

inline ulong base_of(constant Uniforms &u, uint n) {
    return MERGED == ALONE ? 0 : 2 * ulong(u.base[n % BASES]);
}

inline constant Uniforms &row_at(constant uchar *table, uint row) {
    return *(constant Uniforms *)(table + row * ROW_BYTES);
}

// The row that a group belongs to.
inline uint row_of(constant uchar *table, uint place) {
    uint row = 0;
    for (uint end = row_at(table, 0).calls; end - row > 1;) {
        uint middle = (row + end) / 2;
        if (row_at(table, middle).before <= place) {
            row = middle;
        } else {
            end = middle;
        }
    }
    return row;
}

constexpr constant uint MAX_THREADS = 256;

struct Call {
    OPERANDS(MEMBER)
    constant Params &p;
    threadgroup Shared *shared;
    threadgroup float4 *tree; // [MAX_THREADS]
    uint group;
    uint lane;    // of this thread in its threadgroup
    uint threads; // of a threadgroup: any number up to MAX_THREADS
    uint simd;    // this many threads from a multiple of it on, a power of two, are in one simdgroup
};

// Memory of a threadgroup is declared in an entry and nowhere else, so that a test can watch accesses to it.
#ifndef THREADGROUP_MEMORY
#define THREADGROUP_MEMORY(type, name, count) threadgroup type name[count]
#endif

// All threads of a threadgroup have the same rows, so kernels may have barriers.
#define ENTRY(name)                                                                                                    \
    [[kernel, max_total_threads_per_threadgroup(256)]] void run_##name(                                                \
        OPERANDS(ARGUMENT) constant uchar *table [[buffer(30)]], uint3 at [[threadgroup_position_in_grid]],            \
        uint3 grid [[threadgroups_per_grid]], uint3 size [[threads_per_threadgroup]],                                  \
        uint lane [[thread_index_in_threadgroup]], uint width [[threads_per_simdgroup]]) {                             \
        THREADGROUP_MEMORY(Shared, shared, 1);                                                                         \
        THREADGROUP_MEMORY(float4, tree, MAX_THREADS);                                                                 \
        uint place = at.y * grid.x + at.x;                                                                             \
        uint row = MERGED == BESIDE ? row_of(table, place) : 0;                                                        \
        uint end = MERGED == IN_ORDER ? row_at(table, 0).calls : row + 1;                                              \
        for (; row < end; row++) {                                                                                     \
            constant Uniforms &u = row_at(table, row);                                                                 \
            uint group = MERGED == BESIDE ? place - u.before : place;                                                  \
            if (group < u.groups) {                                                                                    \
                const Call c = {OPERANDS(GIVEN) u.p, shared, tree, group, lane, size.x, width & (0u - width)};         \
                name(c);                                                                                               \
            }                                                                                                          \
            if (MERGED == IN_ORDER) {                                                                                  \
                threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);                               \
            }                                                                                                          \
        }                                                                                                              \
    }

// ---- Sums over threads --------------------------------------------------------------------------------------

inline void wait_for_all() {
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

struct Sum {
    template <typename T> static T join(T a, T b) {
        return a + b;
    }
    template <typename T> static T none() {
        return T(-0.0f); // x + -0 is x, whatever x
    }
};

// Of numbers that are not negative.
struct Largest {
    template <typename T> static T join(T a, T b) {
        return max(a, b);
    }
    template <typename T> static T none() {
        return T(0.0f);
    }
};

// v of all threads of a team joined, for each of them. Teams are `lanes` threads each, any number, one after another
// from thread 0 on; threads after the last whole team get a meaningless result. Every thread of the threadgroup must
// come here.
//
// The tree is the same for any width of a simdgroup: neighbours first, then neighbouring twos, and so on; what has no
// neighbour is passed on unchanged. Shuffles do the levels that stay within `block` threads of one simdgroup and one
// team, memory the others. The last barrier keeps the next tree from overwriting this one while it is still being read.
template <typename Join, typename T> T team_tree(thread const Call &c, T v, uint lanes) {
    uint block = min(c.simd, lanes & (0u - lanes));
    for (uint stride = 1; stride < block; stride *= 2) {
        v = Join::join(v, simd_shuffle_xor(v, ushort(stride)));
    }
    uint count = lanes / block;
    if (count == 1) {
        return v;
    }
    threadgroup T *tree = (threadgroup T *)c.tree;
    uint team = c.lane / lanes;
    uint base = team * count;
    bool whole = (team + 1) * lanes <= c.threads;
    if (c.lane % block == 0) {
        tree[c.lane / block] = v;
    }
    wait_for_all();
    if (count <= block) {
        uint rank = c.lane % block;
        v = whole && rank < count ? tree[base + rank] : Join::template none<T>();
        for (uint stride = 1; stride < block; stride *= 2) {
            v = Join::join(v, simd_shuffle_xor(v, ushort(stride)));
        }
    } else {
        uint rank = c.lane % lanes;
        for (uint n = count; n > 1; n = (n + 1) / 2) {
            bool has = whole && rank < (n + 1) / 2;
            if (has) {
                v = tree[base + 2 * rank];
                if (2 * rank + 1 < n) {
                    v = Join::join(v, tree[base + 2 * rank + 1]);
                }
            }
            wait_for_all();
            if (has) {
                tree[base + rank] = v;
            }
            wait_for_all();
        }
        if (whole) {
            v = tree[base];
        }
    }
    wait_for_all();
    return v;
}

template <typename T> T team_sum(thread const Call &c, T v, uint lanes) {
    return team_tree<Sum>(c, v, lanes);
}

inline float team_max(thread const Call &c, float v, uint lanes) {
    return team_tree<Largest>(c, v, lanes);
}

// v joined over the teams, for the threads with the same number in each.
template <typename Join, typename T> T across_tree(thread const Call &c, T v, uint lanes) {
    threadgroup T *tree = (threadgroup T *)c.tree;
    tree[c.lane] = v;
    wait_for_all();
    for (uint n = c.threads / lanes; n > 1; n = (n + 1) / 2) {
        uint half_of = (n + 1) / 2;
        if (c.lane < (n - half_of) * lanes) {
            tree[c.lane] = Join::join(tree[c.lane], tree[c.lane + half_of * lanes]);
        }
        wait_for_all();
    }
    v = tree[c.lane % lanes];
    wait_for_all();
    return v;
}

inline float4 across_teams(thread const Call &c, float4 v, uint lanes) {
    return across_tree<Sum>(c, v, lanes);
}

inline float across_max(thread const Call &c, float v, uint lanes) {
    return across_tree<Largest>(c, v, lanes);
}
