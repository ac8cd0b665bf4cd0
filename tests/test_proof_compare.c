/* SPDX-License-Identifier: MIT */
/*
 * Every case of the table, on cpu and on ref, in every storage type: one test per op and device. Of a part of the tests
 * (parts.h) every third op has its large cases, too.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/core.h"
#include "op/op.h"
#include "parts.h"
#include "proof_sink.h"

static void compare(const char *device_name, size_t op, bool quick) {
    vjp_device *device;
    assert_int_equal(vjp_open(device_name, NULL, &device), VJP_OK);
    proof_tally tally = {0, 0};
    proof_plan plan = {.op = vjp_op_at(op), .dtype = -1, .quick = quick, .row = proof_sink, .context = &tally};
    proof_compare(&plan, device);
    vjp_close(device);
    assert_true(tally.rows > (quick ? 10 : 20));
    assert_int_equal(tally.failed, 0);
}

static void cpu(void **state) {
    const size_t *op = *state;
    compare("cpu", *op, !in_part(*op, 3));
}

/* Compares ref in each storage type with itself in f64: rounding, aliasing, accumulation; the small cases are enough.
 */
static void ref(void **state) {
    const size_t *op = *state;
    compare("ref", *op, true);
}

int main(void) {
    struct CMUnitTest tests[2 * VJP_OP_COUNT];
    size_t number[VJP_OP_COUNT];
    for (size_t i = 0; i < VJP_OP_COUNT; i++) {
        const char *op = vjp_op_describe(vjp_op_at(i))->name;
        number[i] = i;
        tests[2 * i] = (struct CMUnitTest){op, cpu, NULL, NULL, &number[i]};
        tests[2 * i + 1] = (struct CMUnitTest){op, ref, NULL, NULL, &number[i]};
    }
    return cmocka_run_group_tests_name("every case, on cpu and on ref", tests, NULL, NULL);
}
