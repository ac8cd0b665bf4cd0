/* ref against central differences, and the algebraic invariants on ref and cpu: one test an op. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "proof_sink.h"

static void differences(void **state) {
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
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
    const struct CMUnitTest tests[] = {
        {"differences: layer_norm", differences, NULL, NULL, "layer_norm"},
        {"differences: rms_norm", differences, NULL, NULL, "rms_norm"},
        {"differences: group_norm", differences, NULL, NULL, "group_norm"},
        {"differences: rope", differences, NULL, NULL, "rope"},
        {"differences: cumsum", differences, NULL, NULL, "cumsum"},
        {"differences: gather", differences, NULL, NULL, "gather"},
        {"differences: maxpool2d", differences, NULL, NULL, "maxpool2d"},
        {"differences: linear", differences, NULL, NULL, "linear"},
        {"differences: attention", differences, NULL, NULL, "attention"},
        {"invariants: ref", invariants, NULL, NULL, "ref"},
        {"invariants: cpu", invariants, NULL, NULL, "cpu"},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
