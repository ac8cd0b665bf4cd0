/* SPDX-License-Identifier: MIT */
/*
 * Random graphs through the planner. Bytes choose the ops, shapes, what is used again, the results, the blocks that are
 * computed again, whether graphs are rewritten, and now and then something that is wrong. random_graph_check() checks
 * them, as it does in the unit test of the planner.
 */
#include <stdio.h>
#include <stdlib.h>

#include "random_graph.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static vjp_device *device;
    if (!device && vjp_open("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}, &device) != VJP_OK)
        abort();
    static const vjp_dtype dtypes[] = {VJP_F32, VJP_BF16, VJP_F16};
    choices from = choices_of(data, size);
    random_kind kind = {.dtype = dtypes[choose(&from, 3)]};
    kind.wild = choose(&from, 2);
    setenv("VJP_REWRITES", choose(&from, 2) ? "+all" : "-all", 1);
    char why[RANDOM_WHY];
    if (!random_graph_check(device, from, kind, why)) {
        fprintf(stderr, "fuzz_graph: %s\n", why);
        abort();
    }
    return 0;
}
