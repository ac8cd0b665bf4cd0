/* SPDX-License-Identifier: MIT */
/* The functions of src/cuda/common/hopper_instructions.cuh, without the instructions: see there what each does. */
#ifndef VJP_TESTS_CUDA_HOPPER_INSTRUCTIONS_CUH
#define VJP_TESTS_CUDA_HOPPER_INSTRUCTIONS_CUH

#include <cuda.h>

#include "cuda/common/instructions.cuh"

#define VJP_HOPPER 1

/*
 * As many empty instructions at the beginning of a kernel, which enqueue_kernel() counts. All clusters are of two
 * blocks; GCC 12 does not take a constant by its name here. Another count is an alignment that does not compile.
 */
#define VJP_IN_CLUSTERS(count) __attribute__((patchable_function_entry(2), aligned((count) == 2 ? 16 : 3)))

namespace vjp {
namespace hopper {

/* ---- Barriers ---------------------------------------------------------------------------------------- */

inline void barrier_init(uint64_t &barrier, int arrivals) {
    emulated::barrier_init(&barrier, arrivals);
}
inline void barriers_are_ready() {
    emulated::publish();
}
inline void barrier_arrive(uint64_t &barrier) {
    emulated::barrier_arrive(&barrier, 0);
}
inline void barrier_expect(uint64_t &barrier, int bytes) {
    emulated::barrier_arrive(&barrier, bytes);
}
inline void barrier_wait(uint64_t &barrier, uint32_t parity, VJP_PLACE) {
    emulated::barrier_wait(&barrier, parity, file, line);
}
inline void barrier_arrive_in(int block, uint64_t &barrier) {
    emulated::barrier_arrive_in(block, &barrier);
}
inline int block_of_cluster() {
    return emulated::block_of_cluster();
}
inline void cluster_sync(VJP_PLACE) {
    emulated::wait_for_cluster(file, line);
}
inline void group_sync(int id, int threads, VJP_PLACE) {
    emulated::wait_at_barrier(id, threads, false, file, line);
}
inline void group_arrive(int id, int) {
    emulated::arrive_at_barrier(id);
}
inline bool group_any(int id, bool mine, VJP_PLACE) {
    return emulated::wait_at_barrier(id, emulated::WARPGROUP, mine, file, line);
}
inline void wait_for_turn(const int *at, int turn, VJP_PLACE) {
    emulated::wait_for_value(at, turn, file, line);
}
inline void set_turn(int *at, int turn) {
    *at = turn;
}

/* ---- The copy engine --------------------------------------------------------------------------------- */

inline void prefetch_map(const CUtensorMap &) {
}
inline uint32_t own_block() {
    return 1u << block_of_cluster();
}
inline void load_box(void *shared, const CUtensorMap &map, uint64_t &barrier, int column, int head, int row,
                     int batch) {
    emulated::load_box(own_block(), shared, map, &barrier, column, head, row, batch);
}
inline void load_box_in(int blocks, void *shared, const CUtensorMap &map, uint64_t &barrier, int column, int head,
                        int row, int batch) {
    emulated::load_box((uint32_t)blocks, shared, map, &barrier, column, head, row, batch);
}
inline void load_walk(void *shared, const CUtensorMap &map, uint64_t &barrier, int channel, int column, int row,
                      int image, int across, int down) {
    emulated::load_walk(own_block(), shared, map, &barrier, channel, column, row, image, across, down);
}
inline void load_walk_in(int blocks, void *shared, const CUtensorMap &map, uint64_t &barrier, int channel, int column,
                         int row, int image, int across, int down) {
    emulated::load_walk((uint32_t)blocks, shared, map, &barrier, channel, column, row, image, across, down);
}
inline void load_bytes(void *shared, const void *global, int bytes, uint64_t &barrier) {
    emulated::load_bytes(own_block(), shared, global, bytes, &barrier);
}
inline void store_box(const CUtensorMap &map, const void *shared, int column, int head, int row, int batch) {
    emulated::store_box(map, shared, column, head, row, batch);
}
inline void store_bytes(void *global, const void *shared, int bytes) {
    emulated::store_bytes(global, shared, bytes, false);
}
inline void add_numbers(float *global, const float *shared, int bytes) {
    emulated::store_bytes(global, shared, bytes, true);
}
inline void commit_stores() {
    emulated::engine_commit();
}
inline void stores_read() {
    emulated::engine_wait(true);
}
inline void stores_done() {
    emulated::engine_wait(false);
}
inline void publish_shared() {
    emulated::publish();
}

/* ---- Products of a warpgroup ------------------------------------------------------------------------- */

inline void products_begin() {
}
inline void products_commit() {
    emulated::commit_products();
}
template <int PENDING> void products_wait(VJP_PLACE) {
    emulated::wait_products(PENDING, file, line);
}
/* Products read and write the registers later, by address. */
template <class R, int N> void pin(R (&registers)[N]) {
    asm volatile("" ::"r"(registers) : "memory");
}

template <class T>
constexpr auto TYPE_OF_PRODUCT = std::is_same_v<T, float>  ? emulated::product_of_group::TF32
                                 : std::is_same_v<T, bf16> ? emulated::product_of_group::BF16
                                                           : emulated::product_of_group::F16;

/* Inline: a report names the line that calls. */
template <class T, bool OVER_ROWS, bool LEFT_OVER_ROWS = false, int COUNT>
[[gnu::always_inline]] inline void product(float (&d)[COUNT], uint64_t a, uint64_t b, bool keep) {
    emulated::add_product({TYPE_OF_PRODUCT<T>, d, COUNT, keep, LEFT_OVER_ROWS, OVER_ROWS, nullptr, a, b, 0});
}
template <class T, bool OVER_ROWS, int COUNT>
[[gnu::always_inline]] inline void product(float (&d)[COUNT], const uint32_t *a, uint64_t b, bool keep) {
    emulated::add_product({TYPE_OF_PRODUCT<T>, d, COUNT, keep, false, OVER_ROWS, a, 0, b, 0});
}
template <int COUNT>
[[gnu::always_inline]] inline void tf32_product(float (&d)[COUNT], const uint32_t *a, uint64_t b, bool keep) {
    emulated::add_product({TYPE_OF_PRODUCT<float>, d, COUNT, keep, false, false, a, 0, b, 0});
}

struct lane_matrices {
    uint32_t to, words[4];
};
inline void store_matrices(uint32_t to, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth, VJP_PLACE) {
    lane_matrices own{to, {first, second, third, fourth}};
    emulated::meet(
        0xffffffffu, &own,
        [](void *const *brought, uint32_t) {
            for (int lane = 0; lane < emulated::WARP; lane++)
                for (int matrix = 0; matrix < 4 && brought[lane]; matrix++) {
                    auto *row = static_cast<const lane_matrices *>(brought[8 * matrix + lane / 4]);
                    if (!row) continue;
                    char *at = emulated::at_address(row->to) + lane % 4 * 4;
                    if (emulated::touch(at, 4, true, false, lane))
                        memcpy(at, &static_cast<const lane_matrices *>(brought[lane])->words[matrix], 4);
                }
        },
        file, line);
}

template <int REGISTERS> void give_registers() {
}
template <int REGISTERS> void take_registers() {
}

} // namespace hopper
} // namespace vjp

#endif
