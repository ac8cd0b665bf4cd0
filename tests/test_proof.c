/* SPDX-License-Identifier: MIT */
/*
 * The proofs' own parts: rows are read as they are written, numbers are the same for the same seed, errors are measured
 * by the rules of error.h, and faults are detected, by a device that makes mistakes on purpose.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/core.h"
#include "op/op.h"
#include "proof/error.h"
#include "proof/values.h"
#include "proof_sink.h"

static proof_setup read_setup(const char *op, const char *text) {
    proof_setup setup;
    char error[TEXT_ERROR];
    assert_true(proof_setup_read(&setup, vjp_op_find(op), text, error));
    return setup;
}

static void rows_are_read(void **state) {
    (void)state;
    proof_setup s = read_setup("layer_norm", "x=[7,65] eps=0.5 -gamma beta=f32 data=offset only=f32,f16 bound=1e-6");
    const vjp_op_info *info = vjp_op_describe(s.op);
    assert_true(((vjp_layer_norm_attributes *)s.attributes.bytes)->eps == 0.5);
    assert_true(s.data == PROOF_OFFSET && s.bound == 1e-6 && s.only == (1u << VJP_F32 | 1u << VJP_F16));
    const proof_choice *x = proof_choice_of(&s, &info->pass[VJP_FORWARD].slots[3]);
    assert_true(x && x->shaped && x->ndim == 2 && x->shape[0] == 7 && x->shape[1] == 65);
    assert_true(proof_choice_of(&s, &info->pass[VJP_FORWARD].slots[4])->absent);
    assert_int_equal(proof_choice_of(&s, &info->pass[VJP_FORWARD].slots[5])->dtype, VJP_F32);
    s = read_setup("layer_norm", "x=[7,65] top=x bottom=dy*8 top=gamma/64 param=f32");
    const proof_extreme *at = proof_extreme_of(&s, &info->pass[VJP_FORWARD].slots[4]);
    assert_true(s.extremes == 3 && at && at->end == PROOF_TOP && at->share == 64 && proof_is_adversarial(&s));
    assert_null(proof_extreme_of(&s, &info->pass[VJP_FORWARD].slots[5]));
    const char *const wrong[] = {"z=[3]", "-x",    "x=[3",  "x=f99",   "data=odd",   "only=",  "eps=much",
                                 "gamma", "top=z", "top=y", "top=x*3", "bottom=x/3", "top=x/0"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char error[TEXT_ERROR];
        assert_false(proof_setup_read(&s, vjp_op_find("layer_norm"), wrong[i], error));
        assert_true(error[0]);
    }
}

static void table_makes_sense(void **state) {
    (void)state;
    vjp_device *ref = proof_open_ref();
    proof_plan all = {.dtype = -1};
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        proof_problem p;
        char error[TEXT_ERROR];
        assert_int_equal(proof_plan_takes(&all, ref, &proof_cases[i], &setup), !(proof_cases[i].marks & PROOF_ON_CUDA));
        if (!proof_problem_shape(&p, ref, &setup, VJP_F32, error))
            fail_msg("%s %s: %s", proof_cases[i].op, proof_cases[i].text, error);
    }
    vjp_close(ref);
}

/* A problem of three numbers in y, to measure made-up results with. */
static void make_problem(proof_problem *p, vjp_device *ref, vjp_dtype dtype) {
    proof_setup setup = read_setup("cumsum", "x=[1000]");
    char error[TEXT_ERROR];
    assert_true(proof_problem_make(p, ref, &setup, dtype, 1, error));
}

static void errors_are_seen(void **state) {
    (void)state;
    vjp_device *ref = proof_open_ref();
    const vjp_dtype dtypes[] = {VJP_F32, VJP_BF16, VJP_F16, VJP_F64};
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        proof_problem p;
        make_problem(&p, ref, dtypes[d]);
        const double *want = p.slot[VJP_FORWARD][0].exact;
        void *got = proof_to_stored(want, dtypes[d], 1000);
        double bound = proof_bound(&p, VJP_FORWARD, 0);
        proof_error e = proof_measure(&p, VJP_FORWARD, 0, got, want);
        assert_true(e.relative <= bound && !e.why[0]);
        /* One element a few units in its last place off: too little for the norm, but not for its own bound. */
        proof_put(got, dtypes[d], 500, want[500] * 1.02);
        e = proof_measure(&p, VJP_FORWARD, 0, got, want);
        assert_true(e.why[0]);
        assert_non_null(strstr(e.why, "element 500"));
        /* NaN where there should be none, infinity, and a NaN that is missing. */
        proof_put(got, dtypes[d], 500, NAN);
        assert_true(isinf(proof_measure(&p, VJP_FORWARD, 0, got, want).relative));
        proof_put(got, dtypes[d], 500, INFINITY);
        assert_true(isinf(proof_measure(&p, VJP_FORWARD, 0, got, want).relative));
        proof_put(got, dtypes[d], 500, want[500]);
        p.slot[VJP_FORWARD][0].exact[500] = NAN;
        assert_true(isinf(proof_measure(&p, VJP_FORWARD, 0, got, want).relative));
        free(got);
        proof_problem_free(&p);
    }
    vjp_close(ref);
}

/* A denormal number that became 0 is an error, except on a device that may flush it; a normal one always is. */
static void underflow_is_seen(void **state) {
    (void)state;
    vjp_device *ref = proof_open_ref();
    proof_problem p;
    make_problem(&p, ref, VJP_F32);
    double *want = p.slot[VJP_FORWARD][0].exact;
    for (int i = 0; i < 1000; i++)
        want[i] = i == 500 ? 1e-39 : 1e-36;
    float *got = proof_to_stored(want, VJP_F32, 1000);
    assert_false(proof_measure(&p, VJP_FORWARD, 0, got, want).why[0]);
    got[500] = 0;
    assert_true(proof_measure(&p, VJP_FORWARD, 0, got, want).why[0]);
    p.flushes = true;
    proof_error e = proof_measure(&p, VJP_FORWARD, 0, got, want);
    assert_true(e.relative < 1e-6 && !e.why[0]);
    got[10] = 0;
    assert_true(proof_measure(&p, VJP_FORWARD, 0, got, want).why[0]);
    free(got);
    proof_problem_free(&p);
    vjp_close(ref);
}

static void bits_are_compared(void **state) {
    (void)state;
    float one[4] = {1, 2, NAN, 0}, other[4] = {1, 2, -NAN, -0.0f};
    assert_int_equal(proof_different(one, other, VJP_F32, 3), 0); /* all NaN are equal */
    assert_int_equal(proof_different(one, other, VJP_F32, 4), 1); /* -0 is not 0 */
}

/* ---- A device that makes mistakes on purpose------------------------------------------------------------ */

typedef enum wrong { RIGHT, WRITES_PAST, WRITES_BEFORE, SKIPS_ONE, SKIPS_ACCUMULATE, CHANGES_INPUT, NEEDS_MORE } wrong;

static wrong how;

/* cumsum's formula with one mistake at a time. */
static vjp_status wrong_run(const vjp_work *work) {
    float *y = vjp_data(work, 0), *x = vjp_data(work, 1), sum = 0;
    const vjp_shape *shape = &work->shape[1];
    int64_t length = shape->size[shape->ndim - 1], rows = vjp_shape_product(shape, 0, shape->ndim - 1);
    bool reverse = work->pass == VJP_BACKWARD, adds = vjp_accumulates(work, 0) && how != SKIPS_ACCUMULATE;
    for (int64_t i = 0; i < rows * length; i++) {
        int64_t at = reverse ? rows * length - 1 - i : i;
        if (i % length == 0) sum = 0;
        sum += x[at];
        if (how == SKIPS_ONE && i == rows * length - 1) continue;
        y[at] = adds ? y[at] + sum : sum;
    }
    if (how == WRITES_PAST) y[rows * length] = 0;
    if (how == WRITES_BEFORE) y[-1] = 0;
    if (how == CHANGES_INPUT && x != y) x[0] = -x[0];
    if (how == NEEDS_MORE) memset(work->workspace, 0, 65);
    return VJP_OK;
}

static size_t wrong_workspace(const vjp_work *work) {
    (void)work;
    return 64;
}

static const vjp_kernel wrong_kernels[VJP_PASS_COUNT] = {{wrong_run, wrong_workspace, VJP_BIT_F32},
                                                         {wrong_run, wrong_workspace, VJP_BIT_F32}};

static const vjp_kernel *wrong_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    return op->id == OP_ID(cumsum) ? &wrong_kernels[pass] : NULL;
}

static vjp_status wrong_open(vjp_device *device, const vjp_options *options) {
    (void)device;
    (void)options;
    return VJP_OK;
}

static void wrong_close(vjp_device *device) {
    (void)device;
}

static const vjp_backend wrong_backend = {
    .name = "wrong",
    .host_memory = true,
    .open = wrong_open,
    .close = wrong_close,
    .kernel = wrong_kernel,
    .alloc = vjp_host_alloc,
    .free = vjp_host_free,
    .upload = vjp_host_upload,
    .download = vjp_host_download,
    .synchronize = vjp_host_synchronize,
};

static void count_row(void *context, const proof_row *row) {
    proof_tally *tally = context;
    tally->rows++;
    tally->failed += !row->ok;
}

static void faults_are_seen(void **state) {
    (void)state;
    for (how = RIGHT; how <= NEEDS_MORE; how++) {
        proof_setup setup = read_setup("cumsum", "x=[7,65]");
        proof_tally tally = {0, 0};
        vjp_device *device;
        assert_int_equal(vjp_device_create("wrong", &device), VJP_OK);
        assert_int_equal(vjp_device_start(device, &wrong_backend, NULL), VJP_OK);
        proof_plan plan = {.op = setup.op, .dtype = VJP_F32, .row = count_row, .context = &tally};
        proof_compare_setup(&plan, device, &setup);
        vjp_close(device);
        assert_true(tally.rows > 4);
        if (how == RIGHT)
            assert_int_equal(tally.failed, 0);
        else if (tally.failed == 0)
            fail_msg("mistake %d was not seen", (int)how);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_read),     cmocka_unit_test(table_makes_sense), cmocka_unit_test(errors_are_seen),
        cmocka_unit_test(underflow_is_seen), cmocka_unit_test(bits_are_compared), cmocka_unit_test(faults_are_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
