/* SPDX-License-Identifier: MIT */
// Kernels with one fault each, which the emulator must report, and one that only looks wrong.
#define OPERANDS(operand) operand(Float, 0, x) operand(Float, 1, y)
#define NUMBERS(number)
#define KERNELS(kernel_of)                                                                                             \
    kernel_of(good) kernel_of(read_too_early) kernel_of(overwritten) kernel_of(both_write) kernel_of(atomic_and_plain) \
        kernel_of(other_barrier) kernel_of(ended) kernel_of(simd_parts) kernel_of(unwritten) kernel_of(outside)        \
            kernel_of(matrix_good) kernel_of(matrix_too_early) kernel_of(matrix_overwritten) kernel_of(matrix_unread)  \
                kernel_of(matrix_twice) kernel_of(matrix_parts) kernel_of(matrix_ended)

struct Params {
    uint unused;
};

struct Pair {
    float a;
    float b;
};

struct Shared {
    float line[256];
    Pair pair[256];
    uint count;
};

#include "common.metal"

inline threadgroup atomic_uint *counter(thread const Call &c) {
    return (threadgroup atomic_uint *)&c.shared->count;
}

inline float neighbour(thread const Call &c) {
    return c.shared->line[(c.lane + 1) % c.threads];
}

inline void good(thread const Call &c) {
    c.shared->line[c.lane] = c.x.at(c.lane);
    c.shared->pair[c.lane].b = 1.0f;
    if (c.lane == 0) {
        atomic_store_explicit(counter(c), 0, memory_order_relaxed);
    }
    wait_for_all();
    atomic_fetch_add_explicit(counter(c), 1, memory_order_relaxed);
    float v = neighbour(c) + c.shared->pair[c.threads - 1 - c.lane].b;
    wait_for_all();
    c.shared->line[c.lane] = v;
    uint count = atomic_load_explicit(counter(c), memory_order_relaxed);
    c.y.set(c.lane, count == c.threads ? c.shared->line[c.lane] : -1.0f);
}

inline void read_too_early(thread const Call &c) {
    c.shared->line[c.lane] = c.x.at(c.lane);
    c.y.set(c.lane, neighbour(c)); // a barrier is missing before this
}

inline void overwritten(thread const Call &c) {
    c.shared->line[c.lane] = c.x.at(c.lane);
    wait_for_all();
    c.y.set(c.lane, neighbour(c));
    c.shared->line[c.lane] = 0.0f; // and before this
}

inline void both_write(thread const Call &c) {
    c.shared->pair[c.lane / 2].a = c.x.at(c.lane);
}

inline void atomic_and_plain(thread const Call &c) {
    if (c.lane == 0) {
        c.shared->count = 0;
    }
    atomic_fetch_add_explicit(counter(c), 1, memory_order_relaxed);
}

inline void other_barrier(thread const Call &c) {
    if (c.lane < 7) {
        wait_for_all();
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

inline void ended(thread const Call &c) {
    if (c.lane == 5) {
        return;
    }
    wait_for_all();
}

inline void simd_parts(thread const Call &c) {
    float v = c.x.at(c.lane);
    if (c.lane != 3) {
        v += simd_shuffle_xor(v, ushort(1));
    } else {
        wait_for_all();
    }
    c.y.set(c.lane, v);
}

inline void unwritten(thread const Call &c) {
    c.shared->line[c.lane] = c.x.at(c.lane);
    wait_for_all();
    c.y.set(c.lane, c.shared->line[c.lane + 1]);
}

inline void outside(thread const Call &c) {
    c.y.set(c.lane, c.x.at(c.lane + 100000));
}

// ---- Matrices of a simdgroup --------------------------------------------------------------------------------

// The first simdgroup's own 64 numbers: those of x from 0 on; b those from 64 on.
inline void fill(thread const Call &c) {
    c.shared->line[c.lane] = c.x.at(c.lane);
    c.shared->line[c.lane + 64] = c.x.at(c.lane + 64);
}

// y = a b^T + 2, of which the second simdgroup stores the transposed.
inline void matrix_good(thread const Call &c) {
    fill(c);
    wait_for_all();
    simdgroup_float8x8 a;
    simdgroup_float8x8 b;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(a, c.shared->line);
    simdgroup_load(b, c.shared->line + 64, 8, ulong2(0, 0), true);
    sum.thread_elements()[0] += 1.0f;
    sum.thread_elements()[1] += 1.0f;
    simdgroup_multiply_accumulate(sum, a, b, sum);
    wait_for_all();
    simdgroup_store(sum, c.shared->line + c.lane / 32 * 64, 8, ulong2(0, 0), c.lane >= 32);
    wait_for_all();
    c.y.set(c.lane, c.shared->line[c.lane]);
    c.y.set(c.lane + 64, c.shared->line[c.lane + 64]);
}

inline void matrix_too_early(thread const Call &c) {
    fill(c);
    simdgroup_float8x8 a;
    simdgroup_load(a, c.shared->line); // a barrier is missing before this
    c.y.set(c.lane, a.thread_elements()[0]);
}

inline void matrix_overwritten(thread const Call &c) {
    fill(c);
    wait_for_all();
    simdgroup_float8x8 a;
    simdgroup_load(a, c.shared->line);
    c.shared->line[c.lane] = a.thread_elements()[0]; // and before this
}

inline void matrix_unread(thread const Call &c) {
    fill(c);
    wait_for_all();
    simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_store(a, c.shared->line + c.lane / 32 * 64);
    c.y.set(c.lane, c.shared->line[c.lane]); // and before this
}

// Both simdgroups write the same.
inline void matrix_twice(thread const Call &c) {
    simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_store(a, c.shared->line);
}

inline void matrix_parts(thread const Call &c) {
    fill(c);
    wait_for_all();
    simdgroup_float8x8 a;
    if (c.lane != 3) {
        simdgroup_load(a, c.shared->line);
    }
    wait_for_all();
}

inline void matrix_ended(thread const Call &c) {
    fill(c);
    wait_for_all();
    if (c.lane == 40) {
        return;
    }
    simdgroup_float8x8 a;
    simdgroup_load(a, c.shared->line);
}

KERNELS(ENTRY)
