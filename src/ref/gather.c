/* SPDX-License-Identifier: MIT */
/*
 * gather, plainly. The backward first links the occurrences of each table row in the order of k, so that every element
 * of dtable is one sum in double, stored once, without a search of all indices per row.
 */
#include "ref/ref.h"

/* Index k of the call. The indices were checked before the call. */
static int64_t index_of(const vjp_work *work, int slot, int64_t k) {
    int64_t index = 0;
    double value;
    vjp_index_at(vjp_data(work, slot), vjp_type(work, slot), k, &index, &value);
    return index;
}

static vjp_status forward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    if (s.count == 0 || s.inner == 0) return VJP_OK; /* rather than loop over `outer` empty tables */
    for (int64_t outer = 0; outer < s.outer; outer++)
        for (int64_t k = 0; k < s.count; k++) {
            int64_t row = index_of(work, GATHER_INDEX, k);
            for (int64_t i = 0; i < s.inner; i++) {
                double value = ref_get(work, GATHER_TABLE, (outer * s.rows + row) * s.inner + i, 0);
                ref_put(work, GATHER_Y, (outer * s.count + k) * s.inner + i, value);
            }
        }
    return VJP_OK;
}

/* No dtable, or an empty one: nothing to do, and no memory needed. */
static bool is_empty(const vjp_work *work, const vjp_gather_sizes *s) {
    return !work->tensor[GATHER_B_DTABLE] || s->outer == 0 || s->rows == 0 || s->inner == 0;
}

static vjp_status backward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    if (is_empty(work, &s)) return VJP_OK;
    /* first[row]: the first k that selects the row; next[k]: the next that selects the same one; -1: none. */
    int64_t *first = work->workspace, *next = first + s.rows;
    for (int64_t row = 0; row < s.rows; row++)
        first[row] = -1;
    for (int64_t k = s.count - 1; k >= 0; k--) {
        int64_t row = index_of(work, GATHER_B_INDEX, k);
        next[k] = first[row];
        first[row] = k;
    }
    for (int64_t outer = 0; outer < s.outer; outer++)
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t i = 0; i < s.inner; i++) {
                double sum = 0;
                for (int64_t k = first[row]; k >= 0; k = next[k])
                    sum += ref_get(work, GATHER_B_DY, (outer * s.count + k) * s.inner + i, 0);
                ref_put(work, GATHER_B_DTABLE, (outer * s.rows + row) * s.inner + i, sum);
            }
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    return is_empty(work, &s) ? 0 : sizeof(int64_t) * ((size_t)s.rows + (size_t)s.count);
}

const vjp_kernel vjp_ref_gather[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};
