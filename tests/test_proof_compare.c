/* SPDX-License-Identifier: MIT */
/* Every case of the table, on cpu and on ref, in every storage type: one test per op and device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/core.h"
#include "op/op.h"
#include "proof_sink.h"

static void compare(const char *device_name, const char *op) {
    vjp_device *device;
    assert_int_equal(vjp_open(device_name, NULL, &device), VJP_OK);
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(op), .dtype = -1, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_compare(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > 20);
    assert_int_equal(tally.failed, 0);
}

static void cpu(void **state) {
    compare("cpu", *state);
}

/* Compares ref in each storage type with itself in f64: rounding, aliasing, accumulation; the small cases are enough.
 */
static void ref(void **state) {
    vjp_device *device;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_find(*state), .dtype = -1, .quick = true, .row = proof_sink, .context = &tally};
    assert_non_null(plan.op);
    proof_compare(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > 10);
    assert_int_equal(tally.failed, 0);
}

int main(void) {
    struct CMUnitTest tests[2 * VJP_OP_COUNT];
    for (size_t i = 0; i < VJP_OP_COUNT; i++) {
        const char *op = vjp_op_describe(vjp_op_at(i))->name;
        tests[2 * i] = (struct CMUnitTest){op, cpu, NULL, NULL, (void *)op};
        tests[2 * i + 1] = (struct CMUnitTest){op, ref, NULL, NULL, (void *)op};
    }
    return cmocka_run_group_tests_name("every case, on cpu and on ref", tests, NULL, NULL);
}
