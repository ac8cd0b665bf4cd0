/* SPDX-License-Identifier: MIT */
/*
 * Runs the kernels of src/cuda, compiled as C++, on this processor, as a card of compute capability 8.0 would. The
 * threads of a block are fibers that stop at barriers and at what a warp does together; between two stops they run one
 * after another, in an order that changes from launch to launch, as the order of the blocks does. A launch fails, with
 * the line, on:
 *
 *   a race      two threads touch the same shared memory, one of them writes, and no barrier of both is between
 *   divergence  threads wait for one another at different places
 *   outside     memory is touched that no cudaMalloc() gave, and that is no variable of the kernel
 *
 * A block begins with NaN in dynamic shared memory, and in what the launch's blocks before it used of the static one.
 * Asynchronous copies arrive as early or as late as they may, in turn. Kernels are compiled with the compiler's
 * instrumentation of memory accesses (emulate/accesses.h).
 *
 * The headers in include/ stand in for those of CUDA's toolkit and for src/cuda/common/instructions.cuh; what a kernel
 * needs of them and is missing is added when it first does. Not here: what only Hopper has, and clusters of blocks.
 */
#ifndef VJP_TESTS_CUDA_EMULATE_H
#define VJP_TESTS_CUDA_EMULATE_H

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulated {

constexpr int MAX_THREADS = 1024, WARP = 32;
constexpr size_t MAX_SHARED = 163 << 10, MESSAGE = 512;

struct launch {
    unsigned grid, threads;
    size_t shared;
    std::function<void()> thread; // what a thread of the kernel does
    const void *arguments;        // which every thread reads
    size_t argument_bytes;
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

// Barrier 0 waits for all threads that have not ended, another one for `threads`. True if any thread says so.
bool wait_at_barrier(int id, int threads, bool says, const char *file, int line);

// The lanes of `mask` wait for one another, then run() is called once with what each brought, by lane (null: not in the
// mask, or ended), then they continue.
using together = void (*)(void *const *brought, uint32_t mask);
void meet(uint32_t mask, void *brought, together run, const char *file, int line);
// The same as a barrier of memory.
void meet_and_see(uint32_t mask, const char *file, int line);

// Dynamic shared memory, and any shared memory by its 32-bit address.
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

} // namespace emulated

#endif
