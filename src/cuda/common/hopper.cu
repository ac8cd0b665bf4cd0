/* SPDX-License-Identifier: MIT */
/* Maps for the copy engine. The driver's function is found at run time, so that the library does not link the driver.
 */
#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

using encode_function = decltype(&cuTensorMapEncodeTiled);

static encode_function find_encode() {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<encode_function>(function)
                                                                        : nullptr;
}

bool make_map(CUtensorMap *map, const void *data, int64_t row_step, vjp_dtype dtype, int64_t batch, int64_t rows,
              int64_t heads, int64_t columns, int box_rows) {
    static const encode_function encode = find_encode();
    const cuuint64_t size[] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)rows, (cuuint64_t)batch};
    const cuuint64_t head = (cuuint64_t)columns * 2, row = (cuuint64_t)row_step * 2;
    const cuuint64_t stride[] = {head, row, row * size[2]};
    const cuuint32_t box[] = {SLICE, 1, (cuuint32_t)box_rows, 1}, step[] = {1, 1, 1, 1};
    if (!encode || !is_aligned(data, 16) || head % 16 != 0 || row % 16 != 0) return false;
    return encode(map, dtype == VJP_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                  const_cast<void *>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

} // namespace hopper
} // namespace vjp
