/* SPDX-License-Identifier: MIT */
/*
 * Prints one line for every op, pass, storage type and output: a hash of the output's bytes. Two processors, thread
 * counts or instruction sets that keep the promise of equal bits print the same text.
 *
 * usage: bits_hash [threads] [instruction set]; the summary of the device goes to stderr.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "sample.h"

static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16};

enum { STORAGES = sizeof storages / sizeof storages[0] };

static int print_call(vjp_device *device, const sample *from, const char *size, vjp_pass pass, vjp_dtype storage) {
    call made;
    sample_types types = {storage, VJP_F32, VJP_I32};
    if (!call_make(&made, device, from, pass, types, 1)) {
        fprintf(stderr, "bits_hash: %s: no sample\n", from->op);
        return 1;
    }
    if (call_run(device, &made) != VJP_OK) {
        fprintf(stderr, "bits_hash: %s\n", vjp_error(device));
        call_free(&made);
        return 1;
    }
    for (size_t i = 0; i < made.info->pass[pass].outputs; i++)
        printf("%s.%s %s %s %s %016" PRIx64 "\n", from->op, pass == VJP_FORWARD ? "forward" : "backward", size,
               vjp_dtype_name(storage), made.info->pass[pass].slots[i].name, call_hash(&made, i));
    call_free(&made);
    return 0;
}

int main(int argc, char **argv) {
    vjp_options options = {.struct_size = sizeof(vjp_options),
                           .threads = argc > 1 ? atoi(argv[1]) : 2,
                           .instruction_set = argc > 2 ? argv[2] : NULL,
                           .matrix_products = "builtin"};
    vjp_device *device;
    int failed = 0;
    if (vjp_open("cpu", &options, &device) != VJP_OK) {
        fprintf(stderr, "bits_hash: %s\n", vjp_error(device));
        vjp_close(device);
        return 1;
    }
    fprintf(stderr, "bits_hash: %s\n", vjp_device_summary(device));
    for (size_t op = 0; op < vjp_op_count(); op++) {
        const char *name = vjp_op_describe(vjp_op_at(op))->name;
        const sample *both[] = {sample_find(name), sample_find_large(name)};
        const char *sizes[] = {"small", "large"};
        for (int size = 0; size < 2; size++)
            for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
                for (int s = 0; s < STORAGES; s++)
                    failed |= print_call(device, both[size], sizes[size], (vjp_pass)pass, storages[s]);
    }
    vjp_close(device);
    return failed;
}
