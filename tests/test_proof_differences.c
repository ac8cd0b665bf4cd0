/* SPDX-License-Identifier: MIT */
/* ref compared with central differences, and the algebraic invariants on ref and cpu: one test per op. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/core.h"
#include "op/op.h"
#include "proof_sink.h"

static void differences(void **state) {
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    if (vjp_passes(vjp_op_describe(plan.op)) < VJP_PASS_COUNT) skip();
    proof_differences(&plan);
    assert_true(tally.rows > 5);
    assert_int_equal(tally.failed, 0);
}

static void invariants(void **state) {
    vjp_device *device;
    proof_tally tally = {0, 0};
    proof_plan plan = {.dtype = -1, .row = proof_sink, .context = &tally};
    assert_int_equal(vjp_open(*state, NULL, &device), VJP_OK);
    proof_invariants(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > 50);
    assert_int_equal(tally.failed, 0);
}

int main(void) {
    struct CMUnitTest tests[VJP_OP_COUNT + 2] = {{"invariants: ref", invariants, NULL, NULL, "ref"},
                                                 {"invariants: cpu", invariants, NULL, NULL, "cpu"}};
    for (size_t i = 0; i < VJP_OP_COUNT; i++) {
        const char *op = vjp_op_describe(vjp_op_at(i))->name;
        tests[i + 2] = (struct CMUnitTest){op, differences, NULL, NULL, (void *)op};
    }
    return cmocka_run_group_tests_name("differences", tests, NULL, NULL);
}
