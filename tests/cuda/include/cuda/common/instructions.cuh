/* SPDX-License-Identifier: MIT */
/* The functions of src/cuda/common/instructions.cuh, without the instructions: see there what each does. */
#ifndef VJP_TESTS_CUDA_INSTRUCTIONS_CUH
#define VJP_TESTS_CUDA_INSTRUCTIONS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace vjp {

using bf16 = __nv_bfloat16;
using f16 = __half;

/* ---- Shared memory ----------------------------------------------------------------------------------- */

template <class T, int ALIGNMENT = 16> T *dynamic_shared() {
    return reinterpret_cast<T *>(emulated::dynamic_memory());
}

inline uint32_t shared_address(const void *shared) {
    return emulated::address_of(shared);
}

template <class T> void load_shared(uint32_t from, T &value) {
    const char *at = emulated::at_address(from);
    emulated::touch(at, sizeof value, false);
    memcpy(static_cast<void *>(&value), at, sizeof value);
}

template <class T> void store_shared(uint32_t to, T value) {
    char *at = emulated::at_address(to);
    emulated::touch(at, sizeof value, true);
    memcpy(at, &value, sizeof value);
}

inline void clear_shared(uint32_t to) {
    store_shared(to, uint4{});
}

/* ---- Asynchronous copies to shared memory ------------------------------------------------------------ */

inline void copy_async(uint32_t to, const void *global) {
    emulated::copy_async(emulated::at_address(to), global, 16, 16);
}
inline void copy_async(void *shared, const void *global) {
    emulated::copy_async(shared, global, 16, 16);
}
inline void copy_async_word(void *shared, const void *global) {
    emulated::copy_async(shared, global, 4, 4);
}
inline void copy_async_if(bool present, uint32_t to, const void *global) {
    emulated::copy_async(emulated::at_address(to), global, 16, present ? 16 : 0);
}
inline void copy_async_or_zero(uint4 *shared, const uint4 *global, bool present) {
    emulated::copy_async(shared, global, 16, present ? 16 : 0);
}
inline void commit_copies() {
    emulated::commit_copies();
}
template <int N> void wait_copies() {
    emulated::wait_copies(N);
}

/* ---- Matrices on tensor cores ------------------------------------------------------------------------ */

struct tf32 {
    float value;
};

struct lane_rows {
    const char *row;
    uint32_t to[4];
};

template <bool TRANSPOSED> void load_matrices(uint32_t (&to)[4], uint32_t row, VJP_PLACE) {
    lane_rows own{emulated::at_address(row), {}};
    emulated::meet(
        0xffffffffu, &own,
        [](void *const *brought, uint32_t) {
            for (int lane = 0; lane < emulated::WARP; lane++) {
                if (!brought[lane]) continue;
                auto *mine = static_cast<lane_rows *>(brought[lane]);
                for (int matrix = 0; matrix < 4; matrix++)
                    for (int half = 0; half < 2; half++) {
                        int down = TRANSPOSED ? lane % 4 * 2 + half : lane / 4;
                        int across = TRANSPOSED ? lane / 4 : lane % 4 * 2 + half;
                        auto *theirs = static_cast<const lane_rows *>(brought[8 * matrix + down]);
                        uint16_t element = 0xffff;
                        if (theirs && emulated::touch(theirs->row + 2 * across, 2, false, false, lane))
                            memcpy(&element, theirs->row + 2 * across, 2);
                        mine->to[matrix] |= (uint32_t)element << 16 * half;
                    }
            }
        },
        file, line);
    memcpy(to, own.to, sizeof to);
}

template <class T> float element_of(uint32_t word, int half) {
    uint16_t bits = (uint16_t)(word >> 16 * half);
    return std::is_same_v<T, bf16> ? vjp_bf16_to_f32(bits) : vjp_f16_to_f32(bits);
}

struct lane_product {
    uint32_t a[4], b[2];
    float sum[4];
};

template <class T> void multiply_matrices(float *sum, const uint32_t *a, uint32_t b_low, uint32_t b_high, VJP_PLACE) {
    lane_product own{{a[0], a[1], a[2], a[3]}, {b_low, b_high}, {sum[0], sum[1], sum[2], sum[3]}};
    emulated::meet(
        0xffffffffu, &own,
        [](void *const *brought, uint32_t) {
            constexpr int TERMS = std::is_same_v<T, tf32> ? 8 : 16;
            float left[16][TERMS], right[TERMS][8], sums[16][8] = {};
            for (int lane = 0; lane < emulated::WARP; lane++) {
                auto *p = static_cast<const lane_product *>(brought[lane]);
                for (int r = 0; r < 4; r++) { /* rows lane / 4 and that + 8, then the same of the later terms */
                    int row = lane / 4 + r % 2 * 8;
                    if constexpr (TERMS == 8) {
                        float x = p ? __uint_as_float(p->a[r] & 0xffffe000u) : CUDART_NAN_F;
                        left[row][lane % 4 + r / 2 * 4] = x;
                    } else {
                        for (int half = 0; half < 2; half++)
                            left[row][lane % 4 * 2 + half + r / 2 * 8] =
                                p ? element_of<T>(p->a[r], half) : CUDART_NAN_F;
                    }
                }
                for (int r = 0; r < 2; r++)
                    if constexpr (TERMS == 8) {
                        right[lane % 4 + r * 4][lane / 4] = p ? __uint_as_float(p->b[r] & 0xffffe000u) : CUDART_NAN_F;
                    } else {
                        for (int half = 0; half < 2; half++)
                            right[lane % 4 * 2 + half + r * 8][lane / 4] =
                                p ? element_of<T>(p->b[r], half) : CUDART_NAN_F;
                    }
            }
            auto for_each_sum = [&](auto f) {
                for (int lane = 0; lane < emulated::WARP; lane++)
                    for (int e = 0; e < 4 && brought[lane]; e++)
                        f(sums[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2],
                          static_cast<lane_product *>(brought[lane])->sum[e]);
            };
            for_each_sum([](float &sum, const float &own) { sum = own; });
            for (int row = 0; row < 16; row++)
                emulated::add_products(emulated::cores_of_card(), TERMS == 8, sums[row], 8, left[row], right[0], 8,
                                       TERMS);
            for_each_sum([](const float &sum, float &own) { own = sum; });
        },
        file, line);
    memcpy(sum, own.sum, sizeof own.sum);
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

template <class T> uint32_t pack_two(float low, float high) {
    if constexpr (std::is_same_v<T, bf16>)
        return vjp_f32_to_bf16(low) | (uint32_t)vjp_f32_to_bf16(high) << 16;
    else
        return vjp_f32_to_f16(low) | (uint32_t)vjp_f32_to_f16(high) << 16;
}

inline uint32_t round_tf32(float x) {
    uint32_t bits = __float_as_uint(x), rounded = (bits + 0x1000u) & 0xffffe000u;
    return (bits & 0x7f800000u) == 0x7f800000u || (rounded & 0x7fffffffu) == 0x7f800000u ? bits : rounded;
}

inline float without_denormals(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}
inline float exp2_fast(float x) {
    return without_denormals(exp2f(without_denormals(x)));
}
inline float exp2_denormal(float x) {
    return exp2f(x);
}
inline float reciprocal_fast(float x) {
    return without_denormals(1 / without_denormals(x));
}
inline float smaller(float x, float y) {
    return x != x ? x : y != y ? y : x < y ? x : y;
}
inline float larger(float x, float y) {
    return x != x ? x : y != y ? y : x > y ? x : y;
}

/* ---- Others ------------------------------------------------------------------------------------------ */

inline void named_barrier(int id, int threads, VJP_PLACE) {
    emulated::wait_at_barrier(id, threads, false, file, line);
}
template <int THREADS> void named_barrier(int id, VJP_PLACE) {
    emulated::wait_at_barrier(id, THREADS, false, file, line);
}
inline void prefetch(const void *) {
}
inline void store_global(void *to, const uint4 &v) {
    *static_cast<uint4 *>(to) = v;
}
template <class I> void pin(I &) {
}

} // namespace vjp

#endif
