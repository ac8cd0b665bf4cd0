/* SPDX-License-Identifier: MIT */
/* All proofs of a device (proof.h), in the order in which `vjp check` shows them. */
#include <string.h>

#include "core/core.h"
#include "proof/proof.h"

void proof_all(const proof_plan *plan, vjp_device *device,
               void (*begin)(void *context, const char *proof, const char *about), void (*end)(void *context)) {
    void *context = plan->context;
    begin(context, "compare", "the device against ref in f64, on the same stored inputs; the error is relative, in L2");
    proof_compare(plan, device);
    end(context);
    begin(context, "invariants", "algebraic properties of the device's results; the error is relative");
    proof_invariants(plan, device);
    end(context);
    if (strcmp(vjp_device_name(device), "cpu") == 0) {
        begin(context, "bits",
              "threads, pools and instruction sets against one thread; the error counts differing elements");
        proof_bits(plan);
        end(context);
    }
    if (device->backend->measure) {
        begin(context, "repeats",
              "twenty runs and a recorded one against the first; the error counts differing elements");
        proof_repeats(plan, device);
        end(context);
    }
    begin(context, "differences", "ref against central differences in double");
    proof_differences(plan);
    end(context);
}
