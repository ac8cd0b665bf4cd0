/* Every case of the table, on cpu and on ref, in every storage type: one test an op and device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "proof_sink.h"

static void compare(const char *device_name, const char *op) {
    vjp_device *device;
    assert_int_equal(vjp_open(device_name, NULL, &device), VJP_OK);
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(op), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_compare(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > 100);
    assert_int_equal(tally.failed, 0);
}

static void cpu(void **state) {
    compare("cpu", *state);
}

/* ref in each storage type against itself in f64: rounding, aliasing, accumulation; the small cases are enough. */
static void ref(void **state) {
    vjp_device *device;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .quick = true, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_compare(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > 50);
    assert_int_equal(tally.failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"cpu: layer_norm", cpu, NULL, NULL, "layer_norm"},
        {"ref: layer_norm", ref, NULL, NULL, "layer_norm"},
        {"cpu: rms_norm", cpu, NULL, NULL, "rms_norm"},
        {"ref: rms_norm", ref, NULL, NULL, "rms_norm"},
        {"cpu: group_norm", cpu, NULL, NULL, "group_norm"},
        {"ref: group_norm", ref, NULL, NULL, "group_norm"},
        {"cpu: rope", cpu, NULL, NULL, "rope"},
        {"ref: rope", ref, NULL, NULL, "rope"},
        {"cpu: cumsum", cpu, NULL, NULL, "cumsum"},
        {"ref: cumsum", ref, NULL, NULL, "cumsum"},
        {"cpu: gather", cpu, NULL, NULL, "gather"},
        {"ref: gather", ref, NULL, NULL, "gather"},
        {"cpu: maxpool2d", cpu, NULL, NULL, "maxpool2d"},
        {"ref: maxpool2d", ref, NULL, NULL, "maxpool2d"},
        {"cpu: linear", cpu, NULL, NULL, "linear"},
        {"ref: linear", ref, NULL, NULL, "linear"},
        {"cpu: attention", cpu, NULL, NULL, "attention"},
        {"ref: attention", ref, NULL, NULL, "attention"},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
