/* SPDX-License-Identifier: MIT */
// The driver's descriptions of tensors, and what Hopper's copy engine moves by them.
#include <cuda.h>

#include "state.h"

namespace {

constexpr int ROW = 128; // bytes of a box

// As the driver does, in which a description fails.
bool describe(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data, const cuuint64_t *size,
              const cuuint64_t *stride, cuuint32_t columns, cuuint32_t rows, uint32_t most_rows) {
    *map = {};
    map->data = static_cast<char *>(data);
    map->element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    map->rows = static_cast<int>(rows);
    if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(data) % 16 || rank != 4) return false;
    if (columns * static_cast<cuuint64_t>(map->element) != static_cast<cuuint64_t>(ROW) || rows < 1 || rows > most_rows)
        return false;
    for (int i = 0; i < 4; i++) {
        if (size[i] < 1 || size[i] > UINT64_C(1) << 32) return false;
        if (i > 0 && (stride[i - 1] % 16 || stride[i - 1] >= UINT64_C(1) << 40)) return false;
        map->size[i] = static_cast<int64_t>(size[i]);
        map->stride[i] = i ? static_cast<int64_t>(stride[i - 1]) : map->element;
    }
    return true;
}

// A row of a box, of channels from `column` on; empty where it lies outside.
emulated::piece row_of(const CUtensorMap &map, int64_t column, const int64_t at[3]) {
    char *from = map.data + column * map.element;
    for (int i = 0; i < 3; i++) {
        if (at[i] < 0 || at[i] >= map.size[i + 1]) return {nullptr, 0};
        from += at[i] * map.stride[i + 1];
    }
    int64_t left = (map.size[0] - column) * map.element;
    return {from, column < 0 || left <= 0 ? 0 : static_cast<int>(left < ROW ? left : ROW)};
}

} // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                const cuuint32_t *step, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    bool plain = box[1] == 1 && box[3] == 1 && step[0] == 1 && step[1] == 1 && step[2] == 1 && step[3] == 1;
    return plain && describe(map, type, rank, data, size, stride, box[0], box[2], 256) ? CUDA_SUCCESS
                                                                                       : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                 const cuuint64_t *size, const cuuint64_t *stride, const int *lower, const int *upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *step, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    if (!describe(map, type, rank, data, size, stride, channels, pixels, 1024) || step[0] != 1 || step[3] != 1)
        return CUDA_ERROR_INVALID_VALUE;
    map->walks = true;
    for (int i = 0; i < 2; i++) {
        map->lower[i] = lower[i];
        map->upper[i] = upper[i];
        map->step[i] = static_cast<int>(step[i + 1]);
        if (lower[i] < -128 || lower[i] > 127 || upper[i] < -128 || upper[i] > 127 || step[i + 1] < 1 ||
            step[i + 1] > 8)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

namespace emulated {

static std::vector<piece> box(const CUtensorMap &map, int column, int head, int row, int batch) {
    std::vector<piece> rows;
    for (int i = 0; i < map.rows; i++) {
        const int64_t at[] = {head, row + i, batch};
        rows.push_back(row_of(map, column, at));
    }
    return rows;
}

// From pixel (column, row) of an image on, each moved by (across, down); behind the last column the next row begins,
// and behind the last row the next image.
static std::vector<piece> walk(const CUtensorMap &map, int channel, int column, int row, int image, int across,
                               int down) {
    std::vector<piece> rows;
    int64_t pixel[] = {column, row, image};
    for (int i = 0; i < map.rows; i++) {
        const int64_t at[] = {pixel[0] + across, pixel[1] + down, pixel[2]};
        rows.push_back(row_of(map, channel, at));
        for (int axis = 0; axis < 2; axis++) {
            pixel[axis] += map.step[axis];
            if (pixel[axis] <= map.size[axis + 1] - 1 + map.upper[axis]) break;
            pixel[axis] = map.lower[axis];
            if (axis == 1) pixel[2]++;
        }
    }
    return rows;
}

#define HERE place_in_code(__builtin_return_address(0))

void load_box(uint32_t blocks, void *shared, const CUtensorMap &map, const void *barrier, int column, int head, int row,
              int batch) {
    load(blocks, shared, {box(map, column, head, row, batch), ROW, true, HERE}, barrier);
}
void load_walk(uint32_t blocks, void *shared, const CUtensorMap &map, const void *barrier, int channel, int column,
               int row, int image, int across, int down) {
    load(blocks, shared, {walk(map, channel, column, row, image, across, down), ROW, true, HERE}, barrier);
}
void load_bytes(uint32_t blocks, void *shared, const void *global, int bytes, const void *barrier) {
    load(blocks, shared, {{{static_cast<char *>(const_cast<void *>(global)), bytes}}, bytes, false, HERE}, barrier);
}
void store_box(const CUtensorMap &map, const void *shared, int column, int head, int row, int batch) {
    store(shared, {box(map, column, head, row, batch), ROW, true, HERE}, false);
}
void store_bytes(void *global, const void *shared, int bytes, bool adds) {
    store(shared, {{{static_cast<char *>(global), bytes}}, bytes, false, HERE}, adds);
}

} // namespace emulated
