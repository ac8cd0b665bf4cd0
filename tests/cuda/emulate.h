/* SPDX-License-Identifier: MIT */
/*
 * Runs the kernels of src/cuda, compiled as C++, on this processor, as two cards would: one of compute capability 8.0
 * and a Hopper, 9.0. The threads of a block, and of the blocks of a cluster, are fibers that stop at barriers and at
 * what a warp does together; between two stops they run one after another, in an order that changes from launch to
 * launch, as the order of the blocks does. A launch fails, with the line, on:
 *
 *   a race      two threads touch the same shared memory, one of them writes, and no barrier of both is between; or a
 *               thread and Hopper's copy engine do, or a product of a warpgroup
 *   divergence  threads wait for one another at different places, or for what never happens
 *   outside     memory is touched that no cudaMalloc() gave, and that is no variable of the kernel
 *
 * A block begins with NaN in dynamic shared memory, and in what the launch's blocks before it used of the static one.
 * What is asynchronous (copies, the copy engine, products of warpgroups) happens as early as it may, as late, or at any
 * time between, in turn. Kernels are compiled with the compiler's instrumentation of memory accesses
 * (emulate/accesses.h).
 *
 * The headers in include/ stand in for those of CUDA's toolkit and for the instructions of src/cuda/common; what a
 * kernel needs of them and is missing is added when it first does. Not here: static shared memory for each block of a
 * cluster, and so the clusters of group_norm.
 */
#ifndef VJP_TESTS_CUDA_EMULATE_H
#define VJP_TESTS_CUDA_EMULATE_H

#include <cstddef>
#include <cstdint>
#include <functional>

#include "tensor_cores.h"

struct CUtensorMap;

namespace emulated {

constexpr int MAX_THREADS = 1024, MAX_CLUSTER = 2, WARP = 32, WARPGROUP = 128;
constexpr size_t MAX_SHARED = 227 << 10, MESSAGE = 512;

struct launch {
    unsigned grid, threads, cluster; // blocks, threads of each, blocks that run together
    size_t shared;
    std::function<void()> thread; // what a thread of the kernel does
    const void *arguments;        // which every thread reads
    size_t argument_bytes;
    tensor_cores cores; // of the card
};

// One at a time. False: `message` is the first error.
bool run(const launch &l, char message[MESSAGE]);

// Memory that kernels may touch.
void add_memory(const void *memory, size_t bytes);
void remove_memory(const void *memory);

// ---- For kernels --------------------------------------------------------------------------------------------

struct indices {
    unsigned x, y, z;
};
indices thread_index(), block_index(), block_size(), grid_size();

// Barrier 0 waits for all threads of the block that have not ended, another one for `threads`, some of which may only
// arrive. True if any thread that waits says so.
bool wait_at_barrier(int id, int threads, bool says, const char *file, int line);
void arrive_at_barrier(int id);
// All threads of all blocks of the cluster.
void wait_for_cluster(const char *file, int line);
int block_of_cluster();
tensor_cores cores_of_card();

// The lanes of `mask` wait for one another, then run() is called once with what each brought, by lane (null: not in the
// mask, or ended), then they continue.
using together = void (*)(void *const *brought, uint32_t mask);
void meet(uint32_t mask, void *brought, together run, const char *file, int line);
// The same as a barrier of memory.
void meet_and_see(uint32_t mask, const char *file, int line);

// Waits until *now == value, which another thread or block sets.
void wait_for_value(const int *now, int value, const char *file, int line);

// Dynamic shared memory of the block, and any shared memory by its 32-bit address.
char *dynamic_memory();
uint32_t address_of(const void *shared);
char *at_address(uint32_t address);

// An access that no instrumented code makes; `lane`: whose it is, -1: the thread's that runs. Returns false outside of
// memory.
bool touch(const void *address, size_t bytes, bool write, bool atomic = false, int lane = -1);

// `bytes` to shared memory, of which `from_memory` are copied and the rest zero.
void copy_async(void *to, const void *from, size_t bytes, size_t from_memory);
void commit_copies();
void wait_copies(int pending);

// ---- For Hopper's kernels (hopper.cpp) ----------------------------------------------------------------------

// Barriers that count arrivals and bytes.
void barrier_init(const void *barrier, int arrivals);
void barrier_arrive(const void *barrier, int expected_bytes);
// At the one at the same place in a block of the cluster; what the thread wrote is not visible by it.
void barrier_arrive_in(int block, const void *barrier);
void barrier_wait(const void *barrier, uint32_t parity, const char *file, int line);

// What the thread wrote to shared memory can be seen by the copy engine and by products.
void publish();

// The copy engine loads to the same place in every block of the cluster whose bit is set, and arrives at its barrier:
// what is at these coordinates of a tensor, or bytes.
void load_box(uint32_t blocks, void *shared, const CUtensorMap &map, const void *barrier, int column, int head, int row,
              int batch);
void load_walk(uint32_t blocks, void *shared, const CUtensorMap &map, const void *barrier, int channel, int column,
               int row, int image, int across, int down);
void load_bytes(uint32_t blocks, void *shared, const void *global, int bytes, const void *barrier);
void store_box(const CUtensorMap &map, const void *shared, int column, int head, int row, int batch);
// adds: f32 numbers to those in memory.
void store_bytes(void *global, const void *shared, int bytes, bool adds);
void engine_commit();
void engine_wait(bool only_read);

// A product of a warpgroup: d += a b, 64 x 2 `count`. The left factor is in registers, or described as the right one
// is.
struct product_of_group {
    enum number_type { BF16, F16, TF32 } type;
    float *d;
    int count;
    bool keep, left_over_rows, over_rows;
    const uint32_t *registers;
    uint64_t a, b;
    uint32_t place; // in the code
};
void add_product(const product_of_group &p);
void commit_products();
void wait_products(int pending, const char *file, int line);

} // namespace emulated

#endif
