/* SPDX-License-Identifier: MIT */
/* What every proof starts with: the oracle, and the selected rows of the table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "proof/problem.h"

void proof_give_up(const vjp_device *failed) {
    fprintf(stderr, "proof: %s\n", failed ? vjp_error(failed) : "no memory for a device");
    exit(1);
}

vjp_device *proof_open_ref(void) {
    vjp_device *ref;
    if (vjp_open("ref", NULL, &ref) != VJP_OK) proof_give_up(ref);
    return ref;
}

bool proof_plan_takes(const proof_plan *plan, const vjp_device *device, const proof_case *row, proof_setup *setup) {
    const vjp_op *op = vjp_op_find(row->op);
    char error[TEXT_ERROR] = "unknown op";
    if (!op || !proof_setup_read(setup, op, row->text, error)) {
        fprintf(stderr, "proof: %s %s: %s\n", row->op, row->text, error); /* a mistake in the table itself */
        exit(1);
    }
    if ((row->marks & PROOF_ON_HOST) && !vjp_device_is_host(device)) return false;
    if ((row->marks & PROOF_ON_CUDA) && strcmp(device->backend->name, "cuda") != 0) return false;
    return (!plan->op || plan->op == op) && (!plan->quick || (row->marks & PROOF_QUICK));
}
