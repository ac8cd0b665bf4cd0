/* SPDX-License-Identifier: MIT */
/*
 * gather on CUDA. Forward: rows of the table copied by index, as bytes. Backward: the deterministic scatter-add
 * dtable[o, index[k], :] += dy[o, k, :], repeats in the order of k, every row of dtable written, no float atomics.
 *
 * The backward sorts the indices by row (gather_order.cuh) and then sums the rows of dy in that order
 * (gather_sums.cuh). Which sort:
 *
 *     indices                              launches  sort
 *     up to 4096, row and k in 32 bits     2         one block sorts in shared memory, others write zeros to dtable
 *     up to 65536, row and k in 32 bits    3         several such blocks; a second launch merges what they sorted
 *     more                                 3 + CUB   CUB's radix sort in the workspace
 *
 * The last launch writes the sums, and the zeros that are left. The fewest bytes: dy read, dtable written.
 */
#include "cuda/common/kernel.cuh"
#include "cuda/index/gather_order.cuh"
#include "cuda/index/gather_sums.cuh"

namespace vjp {
namespace {

int64_t blocks_for(int64_t items, int64_t per_block) {
    return vjp_min(MAX_BLOCKS, vjp_divide_up(items, per_block));
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/*
 * Loads in flight per thread: 4 of 16 bytes and 32 lanes are 2 KiB, and as the kernel uses few registers 64 warps fit
 * on a multiprocessor: up to 128 KiB.
 */
constexpr int LOADS = 4;

/* Blocks resident on a multiprocessor. */
constexpr int FORWARD_RESIDENT = 5;

struct copy_split {
    int lanes; /* of a group, 1 << lane_bits: each group copies one chunk of one row */
    int lane_bits;
    int64_t across; /* loads per row */
    int64_t chunks; /* of a row: lanes x LOADS loads */
};

__device__ inline void store_once(uint4 *to, uint4 value) {
    __stcs(to, value);
}
template <class P> __device__ void store_once(P *to, P value) {
    *to = value;
}

/* P is what one load moves: 16 bytes, or one element where rows do not begin at multiples of 16. */
template <class T, class P>
__global__ void __launch_bounds__(THREADS, FORWARD_RESIDENT)
    gather_rows(vjp_gather_sizes s, copy_split c, P *y, const P *table, const void *index, vjp_dtype index_type,
                bool add, findings f) {
    begin_chained();
    int lane = threadIdx.x % 32, across = lane & (c.lanes - 1), groups = THREADS >> c.lane_bits;
    int64_t items = s.outer * s.count, total = items * c.chunks, stride = (int64_t)gridDim.x * groups;
    /* The loop condition is that of the warp's first group, so that its lanes stay together. */
    for (int64_t base = (int64_t)blockIdx.x * groups + (threadIdx.x / 32 * 32 >> c.lane_bits); base < total;
         base += stride) {
        int64_t group = base + (lane >> c.lane_bits), item = c.chunks == 1 ? group : quotient(group, c.chunks);
        int64_t outer = s.outer == 1 ? 0 : quotient(item, s.count), row = -1;
        if (across == 0 && group < total) row = read_index(f, index, index_type, item - outer * s.count, s.rows);
        row = __shfl_sync(0xffffffffu, (long long)row, lane - across);
        if (row < 0) continue;
        int64_t column = (group - item * c.chunks) * c.lanes * LOADS + across;
        const P *from = table + (outer * s.rows + row) * c.across;
        P *to = y + item * c.across, value[LOADS];
#pragma unroll
        for (int p = 0; p < LOADS; p++)
            if (column + p * c.lanes < c.across) value[p] = from[column + p * c.lanes];
#pragma unroll
        for (int p = 0; p < LOADS; p++) {
            if (column + p * c.lanes >= c.across) continue;
            P *at = to + column + p * c.lanes;
            if (add) {
                T *mine = reinterpret_cast<T *>(&value[p]);
                const T *old = reinterpret_cast<const T *>(at);
#pragma unroll
                for (int i = 0; i < (int)(sizeof(P) / sizeof(T)); i++)
                    mine[i] = from_f32<T>(to_f32(old[i]) + to_f32(mine[i]));
            }
            store_once(at, value[p]);
        }
    }
}

template <class T, class P> vjp_status forward_as(const vjp_work *work, const vjp_gather_sizes &s) {
    copy_split c{32, 5, s.inner * (int64_t)sizeof(T) / (int64_t)sizeof(P), 0};
    for (; c.lanes > 1 && c.lanes / 2 * LOADS >= c.across; c.lane_bits--)
        c.lanes /= 2;
    c.chunks = vjp_divide_up(c.across, c.lanes * LOADS);
    return launch(work, true, gather_rows<T, P>, blocks_for(s.outer * s.count * c.chunks, THREADS / c.lanes), THREADS,
                  0, s, c, static_cast<P *>(vjp_data(work, GATHER_Y)),
                  static_cast<const P *>(vjp_data(work, GATHER_TABLE)), vjp_data(work, GATHER_INDEX),
                  vjp_type(work, GATHER_INDEX), vjp_accumulates(work, GATHER_Y), findings_of(work));
}

vjp_status forward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    void *y = vjp_data(work, GATHER_Y), *table = vjp_data(work, GATHER_TABLE);
    if (!y || s.outer * s.count * s.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        bool wide = is_aligned(y, 16) && is_aligned(table, 16) && s.inner % WIDE<T> == 0;
        return wide ? forward_as<T, uint4>(work, s) : forward_as<T, T>(work, s);
    });
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/*
 * Bytes of dtable that are cleared while the indices are sorted: at its end, because the first words of a vocabulary
 * are the frequent ones, and rows in use are written a second time. On an H200, of 40, 70, 120 and 400 MiB, wide tables
 * were fastest with 120 (0.80 of the limit, 0.77 with 40), narrow ones with 40 (0.67, 0.63 with 120); later, of 25, 40
 * and 60, narrow ones again with 40 (0.71, 0.67 and 0.69 with the others).
 */
constexpr int64_t CLEARED_SORTING_WIDE = 120ll << 20, CLEARED_SORTING_NARROW = 40ll << 20;

/*
 * Bytes that are cleared while runs are merged, by up to two blocks per multiprocessor, with at least so many bytes
 * each. 24 MiB were slower; none at all was as fast before the merge was in shared memory.
 */
constexpr int64_t CLEARED_MERGING = 12ll << 20, MERGE_WRITERS = 2 * 132, MIN_CLEARED_MERGING = 32 << 10;

/*
 * A block for each multiprocessor of a large Hopper card, including those that sort; and the fewest bytes that one
 * clears.
 */
constexpr int64_t SORT_BLOCKS = 132, MIN_CLEARED = 64 << 10;

bool is_few(const vjp_gather_sizes &s) {
    return s.count <= MAX_RUNS * RUN && bits_for(s.rows) + bits_for(s.count - 1) <= 32;
}

/* Lays out the workspace and returns its size. */
size_t place_order(order *o, void *workspace, const vjp_gather_sizes &s, int wide) {
    workspace_layout layout(workspace);
    sum_split split = split_of(s.inner, wide);
    int64_t blocks = vjp_divide_up(s.count, split.entries);
    o->arrivals = blocks > 1 ? blocks * s.outer * split.slices : 0; /* a single block shares no list */
    o->first = layout.take<int64_t>(s.rows);
    o->last = layout.take<int64_t>(s.rows);
    o->arrived = layout.take<unsigned>(o->arrivals);
    o->partial = layout.take<double>(o->arrivals * PARTIALS * split.lanes * wide);
    if (is_few(s)) {
        o->k_bits = s.count ? bits_for(s.count - 1) : 0;
        o->packed = layout.take<uint32_t>(vjp_max(s.count, 1));
        if (s.count > RUN) o->runs = layout.take<uint32_t>(s.count);
        return layout.max;
    }
    o->row = layout.take<int64_t>(s.count);
    o->k = layout.take<int64_t>(s.count);
    o->key = layout.take<uint64_t>(s.count);
    o->value = layout.take<int64_t>(s.count);
    o->sorting_bytes = 0;
    cub::DeviceRadixSort::SortPairs(nullptr, o->sorting_bytes, o->key, reinterpret_cast<uint64_t *>(o->row), o->value,
                                    o->k, s.count, 0, bits_for(s.rows));
    o->sorting = layout.take<char>((int64_t)o->sorting_bytes);
    return layout.max;
}

int wide_of(const vjp_work *work) {
    return 16 / (int)vjp_dtype_size(work->storage);
}

size_t backward_workspace(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    order o{};
    return work->tensor[GATHER_B_DTABLE] && s.rows ? place_order(&o, nullptr, s, wide_of(work)) : 0;
}

/* Enqueues the sort of few indices, which also clears `beside`, and `merging` where there are runs to merge. */
vjp_status order_few(const vjp_work *work, const order &o, const vjp_gather_sizes &s, zeros beside, zeros merging) {
    int64_t runs = vjp_divide_up(s.count, RUN), cleared = beside.bytes + o.arrivals * (int64_t)sizeof *o.arrived;
    int64_t writers = vjp_min(SORT_BLOCKS - runs, vjp_divide_up(cleared, MIN_CLEARED));
    vjp_status status = launch(work, true, sort_runs, runs + writers, SORT_THREADS, SORT_BYTES, o, (int)runs,
                               vjp_data(work, GATHER_B_INDEX), vjp_type(work, GATHER_B_INDEX), s.count, s.rows,
                               bits_for(s.rows), findings_of(work), beside);
    if (status != VJP_OK || runs <= 1) return status;
    int64_t mergers = vjp_divide_up(s.count, MERGE_THREADS);
    writers = vjp_min(MERGE_WRITERS, vjp_divide_up(merging.bytes, MIN_CLEARED_MERGING));
    bool few = runs <= FEW_RUNS;
    return launch(work, true, few ? merge_runs<FEW_RUNS> : merge_runs<MAX_RUNS>, mergers + writers, MERGE_THREADS,
                  few ? STAGED_BYTES : 0, o, (int)mergers, s.count, s.rows, merging);
}

vjp_status order_many(const vjp_work *work, const order &o, const vjp_gather_sizes &s) {
    vjp_status status =
        launch(work, true, make_keys, blocks_for(s.count, 4 * THREADS), THREADS, 0, o, vjp_data(work, GATHER_B_INDEX),
               vjp_type(work, GATHER_B_INDEX), s.count, s.rows, findings_of(work));
    if (status != VJP_OK) return status;
    size_t bytes = o.sorting_bytes;
    status =
        result_of(work, cub::DeviceRadixSort::SortPairs(o.sorting, bytes, o.key, reinterpret_cast<uint64_t *>(o.row),
                                                        o.value, o.k, s.count, 0, bits_for(s.rows), stream_of(work)));
    if (status != VJP_OK) return status;
    return launch(work, true, find_lists, blocks_for(s.count, 4 * THREADS), THREADS, 0, o, s.count, s.rows);
}

template <class T, class D> vjp_status backward_as(const vjp_work *work, const vjp_gather_sizes &s) {
    D *dtable = static_cast<D *>(vjp_data(work, GATHER_B_DTABLE));
    const T *dy = static_cast<const T *>(vjp_data(work, GATHER_B_DY));
    bool add = vjp_accumulates(work, GATHER_B_DTABLE), few = is_few(s);
    bool wide = s.inner % WIDE<T> == 0 && is_aligned(dy, 16) && is_aligned(dtable, 16);
    order o{};
    place_order(&o, work->workspace, s, WIDE<T>);
    int64_t row_bytes = s.inner * (int64_t)sizeof(D), all = s.outer * s.rows;
    int64_t beside = sizeof(D) == 4 ? CLEARED_SORTING_WIDE : CLEARED_SORTING_NARROW;
    /* Rows [0, zero_rows) are left to write_rows(); those up to sort_rows are cleared while runs are merged. */
    int64_t merging = s.count > RUN ? CLEARED_MERGING : 0;
    int64_t sort_rows = vjp_max(0, all - (few ? beside / row_bytes : 0));
    int64_t zero_rows = vjp_max(0, sort_rows - (few ? merging / row_bytes : 0));
    if (add) zero_rows = sort_rows = all = 0;
    auto rows_from = [&](int64_t begin, int64_t end) {
        return zeros{reinterpret_cast<char *>(dtable) + begin * row_bytes, (end - begin) * row_bytes};
    };
    vjp_status status = few ? order_few(work, o, s, rows_from(sort_rows, all), rows_from(zero_rows, sort_rows))
                            : order_many(work, o, s);
    if (status != VJP_OK) return status;
    sum_split split = split_of(s.inner, WIDE<T>);
    int64_t sums = vjp_divide_up(s.count, split.entries) * s.outer * split.slices;
    sum_call<T, D> call{s, o, split, dy, dtable, add, sums, zero_rows};
    return launch(work, true, wide ? write_rows<T, D, true> : write_rows<T, D, false>,
                  vjp_min(MAX_BLOCKS, sums + vjp_divide_up(zero_rows, ZERO_ROWS)), THREADS, 0, call);
}

vjp_status backward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    if (!vjp_data(work, GATHER_B_DTABLE) || s.outer * s.rows * s.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (vjp_type(work, GATHER_B_DTABLE) == VJP_F32) return backward_as<T, float>(work, s);
        return backward_as<T, T>(work, s);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_gather[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_gather[VJP_PASS_COUNT] = {
    {vjp::forward, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, vjp::backward_workspace, VJP_STORAGE_16_32},
};
}
