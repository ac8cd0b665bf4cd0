/* SPDX-License-Identifier: MIT */
/* The same bits for every thread count, pool and instruction set: one test per op. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/core.h"
#include "op/op.h"
#include "proof_sink.h"

static void bits(void **state) {
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_bits(&plan);
    assert_true(tally.rows > 10);
    assert_int_equal(tally.failed, 0);
}

int main(void) {
    struct CMUnitTest tests[VJP_OP_COUNT];
    for (size_t i = 0; i < VJP_OP_COUNT; i++) {
        const char *op = vjp_op_describe(vjp_op_at(i))->name;
        tests[i] = (struct CMUnitTest){op, bits, NULL, NULL, (void *)op};
    }
    return cmocka_run_group_tests_name("bits", tests, NULL, NULL);
}
