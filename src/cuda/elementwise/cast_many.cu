/* SPDX-License-Identifier: MIT */
/*
 * Casts of many f32 tensors to 16 bits in one launch, as the weights of a step need. The conversion is that of cast.cu,
 * so the bits are, too. A thread loads all its vectors before it uses the first: 64 bytes, 128 KiB per multiprocessor.
 */
#include "cuda/common/many.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256, AHEAD = 2, RESIDENT = 8;
constexpr int EACH = 8; /* adjacent elements of a thread: two vectors of f32 become one of 16 bits */
constexpr int64_t TILE = THREADS * EACH * AHEAD;

struct cast_member {
    const float *x;
    void *y;
    int64_t count;
};

template <class T>
__global__ void __launch_bounds__(THREADS, resident_blocks(THREADS, RESIDENT))
    cast_members(const __grid_constant__ many_members<cast_member> members) {
    begin_chained();
    int block, k = members.find((int)blockIdx.x, &block);
    const cast_member &m = members.member[k];
    T *y = static_cast<T *>(m.y);
    int64_t begin = block * TILE + (int)threadIdx.x * EACH;
    if ((block + 1) * TILE > m.count) {
        for (int64_t i = block * TILE + threadIdx.x; i < m.count; i += THREADS)
            y[i] = from_f32<T>(m.x[i]);
        return;
    }
    uint4 raw[AHEAD][2];
#pragma unroll
    for (int n = 0; n < AHEAD; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            raw[n][half] = load_raw_once(m.x + begin + n * THREADS * EACH + half * (EACH / 2));
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
        float first[4], second[4];
        unpack<float>(raw[n][0], first);
        unpack<float>(raw[n][1], second);
        const float all[EACH] = {first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]};
        *reinterpret_cast<uint4 *>(y + begin + n * THREADS * EACH) = pack<T>(all);
    }
}

bool can_join(const vjp_work *work, vjp_dtype to) {
    return work->storage == VJP_F32 && vjp_data(work, CAST_Y) && vjp_type(work, CAST_Y) == to &&
           !vjp_accumulates(work, CAST_Y) && is_aligned(vjp_data(work, CAST_X), 16) &&
           is_aligned(vjp_data(work, CAST_Y), 16);
}

} // namespace
} // namespace vjp

extern "C" const vjp_kernel vjp_cuda_cast[VJP_PASS_COUNT];

namespace vjp {

vjp_status run_many_cast(const vjp_work *const *works, size_t count) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK;) {
        many_members<cast_member> members;
        vjp_dtype to = vjp_type(works[i], CAST_Y);
        size_t end = i;
        bool narrows = to == VJP_BF16 || to == VJP_F16;
        for (; narrows && end < count && end - i < MANY_MEMBERS && can_join(works[end], to); end++) {
            const vjp_work *work = works[end];
            int64_t elements = vjp_elements(work, CAST_Y);
            members.add({static_cast<const float *>(vjp_data(work, CAST_X)), vjp_data(work, CAST_Y), elements},
                        vjp_divide_up(elements, TILE));
        }
        if (end - i < 2) {
            status = vjp_cuda_cast[works[i]->pass].run(works[i]);
            i++;
            continue;
        }
        status = launch(works[i], true, to == VJP_BF16 ? cast_members<bf16> : cast_members<f16>, members.blocks(),
                        THREADS, 0, members);
        i = end;
    }
    return status;
}

} // namespace vjp
