/* SPDX-License-Identifier: MIT */
/*
 * dropout on CUDA: y = x / (1 - p) where the element's word is not below the threshold, else 0. The words are those of
 * core/philox.h, in integers, so the mask is the same as on every backend. The backward is the forward with dy for x.
 *
 * The counter is in device memory, so each thread derives the key from it: 10 rounds beside the 80 of 32 elements.
 */
#include "cuda/elementwise/elementwise.cuh"

namespace vjp {
namespace {

/*
 * Twice as many blocks as a large Hopper card holds at once: a thread derives the key once for all its elements, and
 * blocks that end are still replaced.
 */
#ifndef DROPOUT_BLOCKS
#define DROPOUT_BLOCKS (2 * 3 * 132)
#endif

struct kept : formula {
    static constexpr int UNIT = 4;     /* elements that share a call of the generator */
    static constexpr int RESIDENT = 6; /* the keys of the rounds take 20 registers */
    static constexpr bool HAS_OVERWRITE = true;
    static constexpr int64_t BLOCKS = DROPOUT_BLOCKS;

    const void *counter;
    vjp_dtype counter_type;
    int64_t stream;
    uint32_t threshold;
    float factor;
    findings found;
    vjp_dropout_key key;

    /* Any integer is valid, unless it is stored as f32 and may have been rounded: then no element is written. */
    __device__ bool read(int k, int64_t *value) const {
        if (counter_type == VJP_I32) {
            *value = static_cast<const int32_t *>(counter)[k];
        } else if (counter_type == VJP_I64) {
            *value = static_cast<const int64_t *>(counter)[k];
        } else {
            float x = static_cast<const float *>(counter)[k];
            if (!(fabsf(x) <= 16777216.0f) || x != truncf(x)) {
                if (blockIdx.x == 0 && threadIdx.x == 0) report(found, k, x, INT64_MAX);
                return false;
            }
            *value = (int64_t)x;
        }
        return true;
    }

    __device__ bool prepare() {
        int64_t seed, step;
        if (!read(0, &seed) || !read(1, &step)) return false;
        key = vjp_dropout_key_of(seed, step, stream);
        return true;
    }

    template <int W> __device__ void operator()(int64_t i, const float (&in)[1][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k += UNIT) {
            vjp_philox words = vjp_dropout_words(&key, (uint64_t)(i + k) / UNIT);
            if constexpr (W == 1) {
                int which = (int)(i % UNIT);
                uint32_t low = which & 1 ? words.word[1] : words.word[0];
                uint32_t high = which & 1 ? words.word[3] : words.word[2];
                out[0][0] = (which & 2 ? high : low) >= threshold ? in[0][0] * factor : 0.0f;
            } else {
#pragma unroll
                for (int j = 0; j < UNIT; j++)
                    out[0][k + j] = words.word[j] >= threshold ? in[0][k + j] * factor : 0.0f;
            }
        }
    }
};

vjp_status run(const vjp_work *work) {
    const vjp_dropout_attributes *attributes = static_cast<const vjp_dropout_attributes *>(work->attributes);
    kept f{};
    f.counter = vjp_data(work, DROPOUT_COUNTER);
    f.counter_type = vjp_type(work, DROPOUT_COUNTER);
    f.stream = attributes->stream;
    f.threshold = vjp_dropout_threshold(attributes->p);
    f.factor = (float)(1 / (1 - attributes->p));
    f.found = findings_of(work);
    element_call c{.in = {vjp_data(work, DROPOUT_X)},
                   .out = {vjp_data(work, DROPOUT_Y)},
                   .add = {vjp_accumulates(work, DROPOUT_Y)},
                   .count = vjp_elements(work, DROPOUT_Y)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return run_elements(work, f, types<T>{}, types<T>{}, c);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_dropout[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_dropout[VJP_PASS_COUNT] = {
    {vjp::run, nullptr, VJP_STORAGE_16_32},
    {vjp::run, nullptr, VJP_STORAGE_16_32},
};
}
