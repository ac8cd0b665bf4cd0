/* SPDX-License-Identifier: MIT */
/* Maps for the copy engine. The driver's function is found at run time, so that the library does not link the driver.
 */
#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

template <class Function> static Function find_function(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function)
                                                                        : nullptr;
}

static CUtensorMapDataType type_of(vjp_dtype dtype) {
    if (dtype == VJP_F32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    return dtype == VJP_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

static cuuint32_t slice_of(vjp_dtype dtype) {
    return dtype == VJP_F32 ? SLICE / 2 : SLICE;
}

bool make_map(CUtensorMap *map, const void *data, int64_t row_step, vjp_dtype dtype, int64_t batch, int64_t rows,
              int64_t heads, int64_t columns, int box_rows) {
    static const auto encode = find_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    const cuuint64_t size[] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)rows, (cuuint64_t)batch};
    const cuuint64_t bytes = 128 / slice_of(dtype), head = (cuuint64_t)columns * bytes,
                     row = (cuuint64_t)row_step * bytes;
    const cuuint64_t stride[] = {head, row, row * size[2]};
    const cuuint32_t box[] = {slice_of(dtype), 1, (cuuint32_t)box_rows, 1}, step[] = {1, 1, 1, 1};
    if (!encode || !is_aligned(data, 16) || head % 16 != 0 || row % 16 != 0) return false;
    return encode(map, type_of(dtype), 4, const_cast<void *>(data), size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* The last pixel of the first tap, relative to the picture's last. */
static int64_t upper_corner(const walk_axis &a) {
    return (int64_t)(a.count - 1) * a.stride + 1 + a.first - a.source;
}

bool can_walk(const walk_axis &a) {
    int64_t upper = upper_corner(a);
    return a.count > 0 && a.stride >= 1 && a.stride <= 8 && a.first >= -128 && a.first <= 127 && upper >= -128 &&
           upper <= 127 && (int64_t)(a.taps - 1) * a.apart <= 255;
}

bool make_walk(CUtensorMap *map, const void *data, vjp_dtype dtype, int64_t batch, const walk_axis &down,
               const walk_axis &across, int64_t channels, int pixels) {
    static const auto encode = find_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
    const cuuint64_t size[] = {(cuuint64_t)channels, (cuuint64_t)across.source, (cuuint64_t)down.source,
                               (cuuint64_t)batch};
    const cuuint64_t pixel = size[0] * (128 / slice_of(dtype));
    const cuuint64_t stride[] = {pixel, pixel * size[1], pixel * size[1] * size[2]};
    const int lower[] = {across.first, down.first}, upper[] = {(int)upper_corner(across), (int)upper_corner(down)};
    const cuuint32_t step[] = {1, (cuuint32_t)across.stride, (cuuint32_t)down.stride, 1};
    if (!encode || !is_aligned(data, 16) || pixel % 16 != 0) return false;
    return encode(map, type_of(dtype), 4, const_cast<void *>(data), size, stride, lower, upper, slice_of(dtype),
                  (cuuint32_t)pixels, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

} // namespace hopper
} // namespace vjp
