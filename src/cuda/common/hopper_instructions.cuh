/* SPDX-License-Identifier: MIT */
/*
 * Hopper's own instructions (compute capability 9.0, code for sm_90a) as functions: barriers in shared memory that
 * count bytes, clusters of blocks, the copy engine that moves tiles between global and shared memory, and matrix
 * products of a warpgroup. Kernels have no assembly of their own, as with instructions.cuh: tests run them on a
 * processor (tests/cuda).
 */
#ifndef VJP_CUDA_HOPPER_INSTRUCTIONS_CUH
#define VJP_CUDA_HOPPER_INSTRUCTIONS_CUH

#include <cuda.h>

#include "cuda/common/instructions.cuh"

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

/*
 * Stores four matrices of 8 x 8 numbers of 16 bits: thread t of a warp has the place of row t % 8 of matrix t / 8, and
 * of each matrix two numbers of row t / 4, from column t % 4 * 2 on.
 */
__device__ inline void store_matrices(uint32_t to, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(first), "r"(second),
                 "r"(third), "r"(fourth)
                 : "memory");
}

/* ---- Others ------------------------------------------------------------------------------------------ */

/* A barrier among the threads of a warpgroup, and whether any of them says so. */
__device__ inline bool group_any(int id, bool mine) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.b32 %0, 1, 0, "
                 "q;\n}\n"
                 : "=r"(any)
                 : "r"((int)mine), "r"(id)
                 : "memory");
    return any;
}

/*
 * Waits until a number in global memory, which other blocks count up, is `turn`; what they stored before is visible
 * then, also to the copy engine.
 */
__device__ inline void wait_for_turn(const int *now, int turn) {
    int value;
    do
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(now) : "memory");
    while (value != turn);
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* Sets it, after stores_done(). */
__device__ inline void set_turn(int *now, int turn) {
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(now), "r"(turn) : "memory");
}

template <int REGISTERS> __device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif

} // namespace hopper
} // namespace vjp

#endif
