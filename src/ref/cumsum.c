/* SPDX-License-Identifier: MIT */
/*
 * cumsum, plainly: one running sum in double along each line. The backward is the same scan from the other end, for
 * which vjp_cumsum_sizes_of() has already inverted `reverse`. An element is read before it is written, so the call may
 * run in place.
 */
#include "ref/ref.h"

static vjp_status scan(const vjp_work *work) {
    vjp_cumsum_sizes s = vjp_cumsum_sizes_of(work);
    if (s.length == 0 || s.inner == 0) return VJP_OK; /* rather than loop over `outer` empty lines */
    for (int64_t outer = 0; outer < s.outer; outer++)
        for (int64_t inner = 0; inner < s.inner; inner++) {
            double sum = 0;
            for (int64_t step = 0; step < s.length; step++) {
                int64_t place = s.reverse ? s.length - 1 - step : step;
                int64_t i = (outer * s.length + place) * s.inner + inner;
                double before = sum;
                sum += ref_get(work, CUMSUM_X, i, 0);
                ref_put(work, CUMSUM_Y, i, s.exclusive ? before : sum);
            }
        }
    return VJP_OK;
}

const vjp_kernel vjp_ref_cumsum[VJP_PASS_COUNT] = {
    {scan, NULL, REF_STORAGE},
    {scan, NULL, REF_STORAGE},
};
