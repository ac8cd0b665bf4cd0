/* SPDX-License-Identifier: MIT */
/*
 * conv2d's dbias on Hopper, beside dweight: while two warpgroups multiply, idle warps of the third add the out channels
 * of dy that are in shared memory anyway. A pass over dy alone would take about a tenth of dweight's time.
 *
 * Blocks with the same pixels and out channels, but other units of x, add every so many stages each. A stage is an f32
 * chain of at most 64 terms; stages are added in double.
 */
#ifndef VJP_CUDA_CONV2D_HOPPER_BIAS_CUH
#define VJP_CUDA_CONV2D_HOPPER_BIAS_CUH

#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

/* Warps that add: each thread has two out channels. */
template <int OUTS> constexpr int BIAS_WARPS = OUTS / 64;

#if VJP_HOPPER

/*
 * Sums of out channels first() and, `APART` behind it, a second one. CHANNEL_ROWS: stages are [OUTS][128 bytes of
 * pixels], else [OUTS / 64][64 pixels][64].
 */
template <class T, int OUTS, bool CHANNEL_ROWS> struct bias_sums {
    static constexpr int APART = CHANNEL_ROWS ? OUTS / 2 : 1;
    double total[2] = {};

    /* The number of the thread among those that add. */
    __device__ static int number() {
        return (int)threadIdx.x - 32;
    }
    __device__ static int first() {
        return CHANNEL_ROWS ? number() : 2 * number();
    }

    __device__ void add(const char *dy) {
        float chain[2] = {};
        if constexpr (CHANNEL_ROWS) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = first() + i * APART;
#pragma unroll 4
                for (int chunk = 0; chunk < 8; chunk++) {
                    float v[WIDE<T>];
                    unpack<T>(*reinterpret_cast<const uint4 *>(dy + row * 128 + (chunk ^ row % 8) * 16), v);
#pragma unroll
                    for (int j = 0; j < WIDE<T>; j++)
                        chain[i] += v[j];
                }
            }
        } else {
            int lane = number() % 32;
            const char *slice = dy + number() / 32 * SLICE * 128 + lane % 4 * 4;
#pragma unroll 8
            for (int pixel = 0; pixel < 64; pixel++) {
                float2 two = unpack_two<T>(
                    *reinterpret_cast<const uint32_t *>(slice + pixel * 128 + (lane / 4 ^ pixel % 8) * 16));
                chain[0] += two.x;
                chain[1] += two.y;
            }
        }
        total[0] += chain[0];
        total[1] += chain[1];
    }
};

#endif

} // namespace hopper
} // namespace vjp

#endif
