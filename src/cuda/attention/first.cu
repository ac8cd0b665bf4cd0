/* SPDX-License-Identifier: MIT */
/*
 * attention's `first` on CUDA: checked once, and turned into what the kernels of every path use, both ends of what is
 * visible: the first key that each query sees, with the window in it, and for the backward the end of the queries that
 * see each key, by a binary search, because first keys never decrease.
 *
 * A bad value (not an integer, before that of the query before, past the query's own key) is reported. Key 0 takes the
 * place of one outside the query's keys, so that whatever `first` holds every query sees its own key, every key at a
 * query's own time is seen by that query, and no kernel reads outside its tensors.
 */
#include "cuda/attention/attention.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

struct visible_call {
    const void *first;
    vjp_dtype dtype;
    findings found;
    attention_call a;
    int64_t queries, keys; /* of all batches; no keys in the forward */
};

/* An element of first; 0 and a report where it is not one of the keys up to the query's own. */
__device__ int given_first(const visible_call &c, int64_t row, int query) {
    int64_t at = row * c.a.time + query;
    return (int)max(read_index(c.found, c.first, c.dtype, at, query + (c.a.keys - c.a.time) + 1), (int64_t)0);
}

__device__ int visible_from(const visible_call &c, int64_t row, int query) {
    int64_t window_begins = query + (c.a.keys - c.a.time) + 1 - c.a.window;
    return max(given_first(c, row, query), (int)max(window_begins, (int64_t)0));
}

/* The end of the queries of a row of the batch that see a key. The query at the key's own time does. */
__device__ int visible_until(const visible_call &c, int64_t row, int key) {
    int low = max(0, (int)(key - (c.a.keys - c.a.time) + 1)), high = (int)c.a.time;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (visible_from(c, row, middle) <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(THREADS) attention_visible(visible_call c) {
    begin_chained();
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < c.queries + c.keys;
         i += (int64_t)gridDim.x * THREADS) {
        if (i >= c.queries) {
            int64_t key = i - c.queries;
            c.a.end_queries[key] = visible_until(c, key / c.a.keys, (int)(key % c.a.keys));
            continue;
        }
        int64_t row = i / c.a.time;
        int query = (int)(i % c.a.time), own = given_first(c, row, query);
        int before = query ? given_first(c, row, query - 1) : 0;
        if (own < before) report(c.found, i, own, query + (c.a.keys - c.a.time) + 1, before);
        c.a.first_keys[i] = visible_from(c, row, query);
    }
}

} // namespace

vjp_status find_visible(const vjp_work *work, attention_call &a, workspace_layout &layout) {
    bool backward = work->pass == VJP_BACKWARD;
    int slot = backward ? (int)ATTENTION_B_FIRST : (int)ATTENTION_FIRST;
    if (!work->tensor[slot]) return VJP_OK;
    visible_call c{vjp_data(work, slot), vjp_type(work, slot),           {}, {},
                   a.batch * a.time,     backward ? a.batch * a.keys : 0};
    a.first_keys = layout.take<int>(c.queries);
    if (backward) a.end_queries = layout.take<int>(c.keys);
    if (!layout.base) return VJP_OK;
    c.found = findings_of(work);
    c.a = a;
    return launch(work, true, attention_visible, vjp_min(vjp_divide_up(c.queries + c.keys, THREADS), MAX_BLOCKS),
                  THREADS, 0, c);
}

} // namespace vjp
