/* The same bits for every thread count, pool and instruction set: one test an op. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "proof_sink.h"

static void bits(void **state) {
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_bits(&plan);
    assert_true(tally.rows > 50);
    assert_int_equal(tally.failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"bits: layer_norm", bits, NULL, NULL, "layer_norm"}, {"bits: rms_norm", bits, NULL, NULL, "rms_norm"},
        {"bits: group_norm", bits, NULL, NULL, "group_norm"}, {"bits: rope", bits, NULL, NULL, "rope"},
        {"bits: cumsum", bits, NULL, NULL, "cumsum"},         {"bits: gather", bits, NULL, NULL, "gather"},
        {"bits: maxpool2d", bits, NULL, NULL, "maxpool2d"},   {"bits: linear", bits, NULL, NULL, "linear"},
        {"bits: attention", bits, NULL, NULL, "attention"},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
