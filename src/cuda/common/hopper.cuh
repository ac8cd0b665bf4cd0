/* SPDX-License-Identifier: MIT */
/*
 * Hopper's own instructions (compute capability 9.0, code for sm_90a): barriers in shared memory that count bytes, the
 * copy engine that moves tiles between global and shared memory, and matrix products of a warpgroup.
 *
 * A tile in shared memory is [columns / 64][rows][64] elements of 16 bits (or 32 of f32): 128 bytes per row, the
 * 16-byte chunks of row r at chunk ^ (r % 8), as the copy engine writes it with CU_TENSOR_MAP_SWIZZLE_128B. A tile
 * begins at a multiple of 1024 bytes. Either dimension of it can be the one that a product sums over.
 */
#ifndef VJP_CUDA_HOPPER_CUH
#define VJP_CUDA_HOPPER_CUH

#include <cuda.h>

#include "cuda/common/fragments.cuh"

/* Whether this pass of the compiler can assemble these instructions. Kernels have no code otherwise. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VJP_HOPPER 1
#else
#define VJP_HOPPER 0
#endif

/* Blocks of a kernel are clusters of `count`. */
#if defined(VJP_CUDA_HOPPER) && VJP_CUDA_HOPPER
#define VJP_IN_CLUSTERS(count) __cluster_dims__(count)
#else
#define VJP_IN_CLUSTERS(count) /* the compiler knows none for other cards */
#endif

namespace vjp {
namespace hopper {

constexpr int WARPGROUP = 128, TILE_ALIGNMENT = 1024;
constexpr int SLICE = 64; /* columns of a tile that lie together */

#if VJP_HOPPER

/* ---- Barriers ---------------------------------------------------------------------------------------- */

/* A phase ends when `arrivals` threads have arrived and all expected bytes are there. Phases have parity 0, 1, 0, ...
 */
__device__ inline void barrier_init(uint64_t &barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

/* After barriers are initialised and before the copy engine or other threads use them. */
__device__ inline void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ inline void barrier_expect(uint64_t &barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline void barrier_wait(uint64_t &barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(shared_address(&barrier)),
                 "r"(parity)
                 : "memory");
}

/*
 * Arrives at a barrier of a block of the cluster, the one at the same place there. For places that products have read:
 * ordinary writes before it are not ordered. That would be a fence of the whole card, a microsecond each time.
 */
__device__ inline void barrier_arrive_in(int block, uint64_t &barrier) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
                 "}\n" ::"r"(shared_address(&barrier)),
                 "r"(block)
                 : "memory");
}

/* Of the cluster's blocks, the thread's own. */
__device__ inline int block_of_cluster() {
    int block;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    return block;
}

/* All threads of all blocks of the cluster. */
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* A barrier among `threads` threads, all of which wait (sync) or some of which only arrive. */
__device__ inline void group_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void group_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A position in a ring of stages: which one, and the parity of its current phase. */
template <int STAGES> struct ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ void skip(int stages) {
        stage += stages;
        parity ^= (uint32_t)(stage / STAGES) & 1;
        stage %= STAGES;
    }
};

/* ---- The copy engine --------------------------------------------------------------------------------- */

__device__ inline void prefetch_map(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* Loads the box at (column, head, row, batch); elements outside the tensor are 0. Arrives at the barrier by bytes. */
__device__ inline void load_box(void *shared, const CUtensorMap &map, uint64_t &barrier, int column, int head, int row,
                                int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(head), "r"(row), "r"(batch)
                 : "memory");
}

/* Loads it to the same place in all blocks of the cluster whose bit is set; arrives at the barrier of each. */
__device__ inline void load_box_in(int blocks, void *shared, const CUtensorMap &map, uint64_t &barrier, int column,
                                   int head, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(head), "r"(row), "r"(batch),
                 "h"((uint16_t)blocks)
                 : "memory");
}

/*
 * Loads a box of a walk (make_walk): its pixels from (row, column, image) on, of each the channels from `channel` on,
 * all moved by (down, across). What lies outside the picture is 0.
 */
__device__ inline void load_walk(void *shared, const CUtensorMap &map, uint64_t &barrier, int channel, int column,
                                 int row, int image, int across, int down) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
                 "%4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(shared_address(&barrier)), "r"(channel), "r"(column), "r"(row), "r"(image),
                 "h"((uint16_t)across), "h"((uint16_t)down)
                 : "memory");
}

/* To the same place in all blocks of the cluster whose bit is set. */
__device__ inline void load_walk_in(int blocks, void *shared, const CUtensorMap &map, uint64_t &barrier, int channel,
                                    int column, int row, int image, int across, int down) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(channel), "r"(column), "r"(row), "r"(image),
        "h"((uint16_t)across), "h"((uint16_t)down), "h"((uint16_t)blocks)
        : "memory");
}

/* Loads consecutive bytes, a multiple of 16, both addresses aligned to 16. */
__device__ inline void load_bytes(void *shared, const void *global, int bytes, uint64_t &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

/* Stores a box; elements outside the tensor are not written. stores_read() waits until shared memory is free again. */
__device__ inline void store_box(const CUtensorMap &map, const void *shared, int column, int head, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(column), "r"(head), "r"(row), "r"(batch)
                 : "memory");
}

/* Stores consecutive bytes, a multiple of 16, or adds f32 numbers to those that are there. */
__device__ inline void store_bytes(void *global, const void *shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ inline void add_numbers(float *global, const float *shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ inline void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ inline void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until this thread's stores are in global memory. */
__device__ inline void stores_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Ordinary writes of shared memory before this are visible to the copy engine and to products after it. */
__device__ inline void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- Products of a warpgroup ------------------------------------------------------------------------- */

/*
 * The accumulators of 64 x N are those of fragments.cuh, sixteen rows for each warp.
 */
__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` committed groups are not done. */
template <int PENDING> __device__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from moving accesses to registers over the asynchronous products that use them. */
template <class R, int N> __device__ void pin(R (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if constexpr (std::is_same_v<R, float>)
            asm volatile("" : "+f"(registers[i])::"memory");
        else
            asm volatile("" : "+r"(registers[i])::"memory");
}

constexpr uint32_t SWIZZLE_128 = 1u << 30;

/*
 * Describes an operand that begins `offset` bytes behind `address`. The offset is a constant of the step and is added
 * last, to the lower half alone: all steps of a product share the rest, and one addition lies between two products.
 */
__device__ inline uint64_t describe(uint32_t address, int offset, int leading, int stride) {
    uint32_t low = ((address & 0x3ffff) >> 4 | (uint32_t)(leading >> 4) << 16) + (uint32_t)(offset >> 4);
    return (uint64_t)((uint32_t)(stride >> 4) | SWIZZLE_128) << 32 | low;
}

/* Sixteen columns from column 16 `step` on of rows from `row` on: the product sums over columns. `rows`: of the tile.
 */
__device__ inline uint64_t over_columns(uint32_t tile, int rows, int row, int step) {
    return describe(tile + (uint32_t)(row * 128), step / 4 * rows * 128 + step % 4 * 32, 16, 1024);
}

/* Sixteen rows from row 16 `step` on, all columns: the product sums over rows. */
__device__ inline uint64_t over_rows(uint32_t tile, int rows, int step) {
    return describe(tile, step * 16 * 128, rows * 128, 1024);
}

/* Of the block's warpgroups, the thread's own; the same for all threads of a warp, which the compiler can see. */
__device__ inline int warpgroup() {
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
}

#define VJP_D8(d, i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define VJP_D32(d, i) VJP_D8(d, i), VJP_D8(d, i + 8), VJP_D8(d, i + 16), VJP_D8(d, i + 24)

#define VJP_NAMES_0_31                                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define VJP_NAMES_32_47 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define VJP_NAMES_32_63                                                                                                \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define VJP_NAMES_64_95                                                                                                \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define VJP_NAMES_96_127                                                                                               \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* Left operand in shared memory, or four registers. The names of the operands that follow the accumulators differ. */
#define VJP_SHARED_PRODUCT(N, TYPE, NAMES, A, B, KEEP, ROWS, ...)                                                      \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, " A ", " B              \
                 ", keep, 1, 1, " ROWS ";\n}\n"                                                                        \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"((int)keep), "n"((int)LEFT_OVER_ROWS), "n"((int)OVER_ROWS))

#define VJP_REGISTER_PRODUCT(N, TYPE, NAMES, A, B, KEEP, ROWS, ...)                                                    \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B            \
                 ", keep, 1, 1, " ROWS ";\n}\n"                                                                        \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep), "n"((int)OVER_ROWS))

/* Eight terms of f32, whose last 13 bits the tensor cores leave out (TF32); they sum over columns alone. */
#define VJP_TF32_PRODUCT(N, NAMES, A, B, KEEP, ...)                                                                    \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" N "k8.f32.tf32.tf32 {" NAMES "}, " A ", " B ", keep, 1, 1;\n}\n"  \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"((int)keep))

#define VJP_TF32_REGISTER_PRODUCT(N, NAMES, A, B, KEEP, ...)                                                           \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" N "k8.f32.tf32.tf32 {" NAMES "}, {" A "}, " B                     \
                 ", keep, 1, 1;\n}\n"                                                                                  \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)keep))

/*
 * d = (keep ? d : 0) + a b, 64 x 2 COUNT, 32 bytes of terms. a: over_columns(), or over_rows() of a tile of 64 columns
 * with LEFT_OVER_ROWS; b: over_columns(), or over_rows() with OVER_ROWS.
 */
template <class T, bool OVER_ROWS, bool LEFT_OVER_ROWS = false, int COUNT>
__device__ void product(float (&d)[COUNT], uint64_t a, uint64_t b, bool keep) {
    static_assert(COUNT == 32 || COUNT == 48 || COUNT == 64 || COUNT == 96 || COUNT == 128);
    if constexpr (std::is_same_v<T, float>) {
        static_assert(!OVER_ROWS && !LEFT_OVER_ROWS && (COUNT == 32 || COUNT == 64 || COUNT == 128));
        if constexpr (COUNT == 32)
            VJP_TF32_PRODUCT("64", VJP_NAMES_0_31, "%32", "%33", "%34", VJP_D32(d, 0));
        else if constexpr (COUNT == 128)
            VJP_TF32_PRODUCT("256", VJP_NAMES_0_31 VJP_NAMES_32_63 VJP_NAMES_64_95 VJP_NAMES_96_127, "%128", "%129",
                             "%130", VJP_D32(d, 0), VJP_D32(d, 32), VJP_D32(d, 64), VJP_D32(d, 96));
        else
            VJP_TF32_PRODUCT("128", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64", "%65", "%66", VJP_D32(d, 0), VJP_D32(d, 32));
    } else if constexpr (COUNT == 32 && std::is_same_v<T, bf16>)
        VJP_SHARED_PRODUCT("64", "bf16", VJP_NAMES_0_31, "%32", "%33", "%34", "%35, %36", VJP_D32(d, 0));
    else if constexpr (COUNT == 32)
        VJP_SHARED_PRODUCT("64", "f16", VJP_NAMES_0_31, "%32", "%33", "%34", "%35, %36", VJP_D32(d, 0));
    else if constexpr (COUNT == 48 && std::is_same_v<T, bf16>)
        VJP_SHARED_PRODUCT("96", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_47, "%48", "%49", "%50", "%51, %52", VJP_D32(d, 0),
                           VJP_D8(d, 32), VJP_D8(d, 40));
    else if constexpr (COUNT == 48)
        VJP_SHARED_PRODUCT("96", "f16", VJP_NAMES_0_31 VJP_NAMES_32_47, "%48", "%49", "%50", "%51, %52", VJP_D32(d, 0),
                           VJP_D8(d, 32), VJP_D8(d, 40));
    else if constexpr (COUNT == 96 && std::is_same_v<T, bf16>)
        VJP_SHARED_PRODUCT("192", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_63 VJP_NAMES_64_95, "%96", "%97", "%98",
                           "%99, %100", VJP_D32(d, 0), VJP_D32(d, 32), VJP_D32(d, 64));
    else if constexpr (COUNT == 96)
        VJP_SHARED_PRODUCT("192", "f16", VJP_NAMES_0_31 VJP_NAMES_32_63 VJP_NAMES_64_95, "%96", "%97", "%98",
                           "%99, %100", VJP_D32(d, 0), VJP_D32(d, 32), VJP_D32(d, 64));
    else if constexpr (COUNT == 128 && std::is_same_v<T, bf16>)
        VJP_SHARED_PRODUCT("256", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_63 VJP_NAMES_64_95 VJP_NAMES_96_127, "%128",
                           "%129", "%130", "%131, %132", VJP_D32(d, 0), VJP_D32(d, 32), VJP_D32(d, 64), VJP_D32(d, 96));
    else if constexpr (COUNT == 128)
        VJP_SHARED_PRODUCT("256", "f16", VJP_NAMES_0_31 VJP_NAMES_32_63 VJP_NAMES_64_95 VJP_NAMES_96_127, "%128",
                           "%129", "%130", "%131, %132", VJP_D32(d, 0), VJP_D32(d, 32), VJP_D32(d, 64), VJP_D32(d, 96));
    else if constexpr (std::is_same_v<T, bf16>)
        VJP_SHARED_PRODUCT("128", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64", "%65", "%66", "%67, %68",
                           VJP_D32(d, 0), VJP_D32(d, 32));
    else
        VJP_SHARED_PRODUCT("128", "f16", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64", "%65", "%66", "%67, %68", VJP_D32(d, 0),
                           VJP_D32(d, 32));
}

/* The same with a left operand in registers, which must not change until the product is done. */
template <class T, bool OVER_ROWS, int COUNT>
__device__ void product(float (&d)[COUNT], const uint32_t *a, uint64_t b, bool keep) {
    static_assert(COUNT == 32 || COUNT == 48 || COUNT == 64);
    if constexpr (COUNT == 32 && std::is_same_v<T, bf16>)
        VJP_REGISTER_PRODUCT("64", "bf16", VJP_NAMES_0_31, "%32, %33, %34, %35", "%36", "%37", "%38", VJP_D32(d, 0));
    else if constexpr (COUNT == 32)
        VJP_REGISTER_PRODUCT("64", "f16", VJP_NAMES_0_31, "%32, %33, %34, %35", "%36", "%37", "%38", VJP_D32(d, 0));
    else if constexpr (COUNT == 48 && std::is_same_v<T, bf16>)
        VJP_REGISTER_PRODUCT("96", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_47, "%48, %49, %50, %51", "%52", "%53", "%54",
                             VJP_D32(d, 0), VJP_D8(d, 32), VJP_D8(d, 40));
    else if constexpr (COUNT == 48)
        VJP_REGISTER_PRODUCT("96", "f16", VJP_NAMES_0_31 VJP_NAMES_32_47, "%48, %49, %50, %51", "%52", "%53", "%54",
                             VJP_D32(d, 0), VJP_D8(d, 32), VJP_D8(d, 40));
    else if constexpr (std::is_same_v<T, bf16>)
        VJP_REGISTER_PRODUCT("128", "bf16", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64, %65, %66, %67", "%68", "%69", "%70",
                             VJP_D32(d, 0), VJP_D32(d, 32));
    else
        VJP_REGISTER_PRODUCT("128", "f16", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64, %65, %66, %67", "%68", "%69", "%70",
                             VJP_D32(d, 0), VJP_D32(d, 32));
}

/*
 * The same in TF32. Of its left operand a thread has rows t % 32 / 4 and 8 below of its warp's sixteen, at term t % 4
 * in a[0] and a[1], at term t % 4 + 4 in a[2] and a[3]. b: over_columns().
 */
template <int COUNT> __device__ void tf32_product(float (&d)[COUNT], const uint32_t *a, uint64_t b, bool keep) {
    static_assert(COUNT == 32 || COUNT == 64);
    if constexpr (COUNT == 32)
        VJP_TF32_REGISTER_PRODUCT("64", VJP_NAMES_0_31, "%32, %33, %34, %35", "%36", "%37", VJP_D32(d, 0));
    else
        VJP_TF32_REGISTER_PRODUCT("128", VJP_NAMES_0_31 VJP_NAMES_32_63, "%64, %65, %66, %67", "%68", "%69",
                                  VJP_D32(d, 0), VJP_D32(d, 32));
}

/* Where two adjacent elements of a tile begin: row, even column. */
__device__ inline uint32_t tile_offset(int rows, int row, int column) {
    return (uint32_t)((column / SLICE) * rows * 128 + row * 128 + ((column % SLICE * 2) ^ (row % 8 * 16)));
}

/* Writes numbers of 16 bits, in the order of accumulators, to 64 rows of a tile from `row` on. */
template <int COUNT> __device__ void write_packed(char *tile, int rows, int row, const uint32_t (&two)[COUNT]) {
    int thread = threadIdx.x % WARPGROUP, own = row + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        *reinterpret_cast<uint32_t *>(tile + tile_offset(rows, own + i % 2 * 8, i / 2 * 8 + thread % 4 * 2)) = two[i];
}

/* Writes the accumulators of a warpgroup, times their factors, to 64 rows of a tile from `row` on. */
template <class T, int COUNT>
__device__ void write_tile(char *tile, int rows, int row, const float (&d)[COUNT], float low_factor,
                           float high_factor) {
    uint32_t two[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        float factor = i % 2 ? high_factor : low_factor;
        two[i] = pack_two<T>(d[2 * i] * factor, d[2 * i + 1] * factor);
    }
    write_packed(tile, rows, row, two);
}

/*
 * Writes the sums of 64 x 64, rounded, to a tile. Four matrices of 8 x 8 at a time: thread t of a warp has the place of
 * row t % 8 of matrix t / 8, and of each matrix its usual two numbers.
 */
template <class T> __device__ void write_rounded(char *tile, const float *sum) {
    uint32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    uint32_t first = shared_address(tile) + row * 128 + ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++, sum += 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first ^ (i * 32)),
                     "r"(pack_two<T>(sum[0], sum[1])), "r"(pack_two<T>(sum[2], sum[3])),
                     "r"(pack_two<T>(sum[4], sum[5])), "r"(pack_two<T>(sum[6], sum[7]))
                     : "memory");
}

template <int REGISTERS> __device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif

/* ---- The host's side --------------------------------------------------------------------------------- */

/*
 * A map of a tensor [batch, rows, heads, columns], its rows at a distance of `row_step` elements, with boxes of 128
 * bytes of columns, one head and `box_rows` rows. False: the copy engine cannot address it (alignment, or a driver
 * without the function).
 */
bool make_map(CUtensorMap *map, const void *data, int64_t row_step, vjp_dtype dtype, int64_t batch, int64_t rows,
              int64_t heads, int64_t columns, int box_rows);

/*
 * One axis of a walk over the pixels of a picture of `source` pixels: `count` of them, `stride` apart, from `first` on,
 * which may lie outside; then the same moved by `apart`, up to `taps` - 1 times.
 */
struct walk_axis {
    int source, first, count, stride, taps, apart;
};

/* Whether the copy engine can walk so. */
bool can_walk(const walk_axis &axis);

/*
 * A map of pictures [batch, down.source, across.source, channels] with boxes of `pixels` successive pixels of a walk
 * over rows, columns and pictures, and of 128 bytes of channels.
 */
bool make_walk(CUtensorMap *map, const void *data, vjp_dtype dtype, int64_t batch, const walk_axis &down,
               const walk_axis &across, int64_t channels, int pixels);

} // namespace hopper
} // namespace vjp

#endif
