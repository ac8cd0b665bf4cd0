/* SPDX-License-Identifier: MIT */
/*
 * The Metal backend without a Mac: its kernels run in tests/metal/emulate.cpp, its device talks to the stand-in of
 * tests/metal/stand_in.c, and both together are compared with `ref` as any device is. The emulator has its own tests in
 * test_metal_emulator.c, the device in test_metal_device.c.
 */
#include "attributes.h"
#include "gpu/metal/device.h"
#include "proof/problem.h"
#include "proof_sink.h"

/* After them: it names a variable `device`. */
#include "device_tests.h"
#include "gpu_tests.h"
#include "on_stand_in.h"
#include "rows_apart.h"

static size_t pipelines_of(const vjp_device *of) {
    (void)of;
    return (size_t)stand_in.pipelines;
}

static int launches_of(const vjp_device *of) {
    return ((const metal_state *)of->state)->launches;
}

/* ---- Proof ------------------------------------------------------------------------------------------- */

static bool has(const char *op) {
    return vjp_supports(device, vjp_op_find(op), VJP_FORWARD, VJP_F32) == VJP_OK;
}

static void compare_setup(const char *op, const char *text, int dtype) {
    proof_tally tally = {0};
    proof_plan plan = {.dtype = dtype, .row = proof_sink, .context = &tally};
    proof_setup setup;
    char error[TEXT_ERROR];
    if (!proof_setup_read(&setup, vjp_op_find(op), text, error)) fail_msg("%s", error);
    proof_compare_setup(&plan, device, &setup);
    assert_true(tally.rows > 0);
    assert_int_equal(tally.failed, 0);
}

/* Threads of a threadgroup as most devices give them, and few or odd ones; simdgroups as Apple's, and others. */
static const struct {
    unsigned long threads;
    unsigned width;
    int64_t most; /* elements of a case: every thread of 256 is switched to at every barrier, which takes its time */
} setups[] = {{1024, 32, 1100}, {1024, 24, 300}, {48, 32, 150}, {100, 8, 150}};

static int64_t elements_of(const proof_setup *setup) {
    int64_t most = 0;
    for (int i = 0; i < setup->choices; i++) {
        int64_t count = setup->choice[i].shaped;
        for (int d = 0; d < setup->choice[i].ndim; d++)
            count *= setup->choice[i].shape[d];
        most = count > most ? count : most;
    }
    return most;
}

/* A sanitized build is after the host's code, and several times slower. */
enum { SANITIZED = sizeof VJP_SANITIZE > 1, PARTS = SANITIZED ? 16 : 4, PARTS_OF_ONE_OP = SANITIZED ? 8 : 4 };

/* Every case of the table, or of one op, that is not too large and in this part, in a dtype or in every one. */
static void compare_all(int64_t most, const char *only, int dtype) {
    proof_tally tally = {0};
    proof_plan plan = {.dtype = dtype, .row = proof_sink, .context = &tally};
    size_t fitting = 0, parts = only ? PARTS_OF_ONE_OP : PARTS;
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        char error[TEXT_ERROR];
        if (!has(proof_cases[i].op) || (proof_cases[i].marks & (PROOF_ON_HOST | PROOF_ON_CUDA))) continue;
        if (only && strcmp(proof_cases[i].op, only) != 0) continue;
        if (!proof_setup_read(&setup, vjp_op_find(proof_cases[i].op), proof_cases[i].text, error))
            fail_msg("%s", error);
        if (elements_of(&setup) <= most && in_part(fitting++, parts)) proof_compare_setup(&plan, device, &setup);
    }
    printf("%d results; %zu cases fit\n", tally.rows, fitting);
    assert_true(fitting > parts && tally.rows > (only_a_part() ? 0 : 100));
    assert_int_equal(tally.failed, 0);
}

static void every_op_is_right(void **state) {
    (void)state;
    for (size_t w = 0; w < sizeof setups / sizeof setups[0]; w++) {
        start();
        stop();
        stand_in_reset();
        stand_in.max_threads = setups[w].threads;
        emulate_with.width = setups[w].width;
        if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
        assert_true(gpu_has_matrices(device) == (setups[w].threads >= GPU_THREADS && setups[w].width == 32));
        compare_all(SANITIZED ? setups[w].most / 8 : setups[w].most, NULL, -1);
        stop();
    }
}

/* Rows past a grid dimension, and columns past a threadgroup: what has broken others. */
static const struct {
    const char *op, *text;
    int dtype;
} shapes[] = {
    {"layer_norm", "x=[3001,3]", VJP_BF16},
    {"layer_norm", "x=[3,4097]", VJP_F32},
    {"layer_norm", "x=[5,9001]", VJP_BF16},
    {"layer_norm", "x=[9,65] data=nan", VJP_F32},
    {"layer_norm", "x=[1,70000] data=offset param=f32", VJP_F32},
    {"rms_norm", "x=[7001,2]", VJP_F32},
    {"rms_norm", "x=[2,257] gamma=f32", VJP_F16},
    {"rms_norm", "x=[33,65] data=mixed eps=0", VJP_F32},
    {"group_norm", "x=[2,12,65] groups=3", VJP_BF16},
    {"group_norm", "x=[1,4,4097] groups=2", VJP_F32},
    {"group_norm", "x=[3,257,10] groups=1 layout=channels_last", VJP_F32},
    {"group_norm", "x=[1,2,1025] groups=1 data=offset", VJP_F32},
    {"group_norm", "x=[1,1400,6] groups=2 data=offset layout=channels_last", VJP_F32},
    {"rope", "x=[7001,1,2] cosine=[7001,1]", VJP_F32},
    {"rope", "x=[65,3,130] cosine=[65,65]", VJP_BF16},
    {"cumsum", "x=[6553,3]", VJP_F32},
    {"cumsum", "x=[3,4097]", VJP_BF16},
    {"cumsum", "x=[2,1000,65] axis=1", VJP_F32},
    {"cumsum", "x=[9001] exclusive=1", VJP_BF16},
    {"sum_squares", "x=[9001]", VJP_F32},
    {"add", "a=[40,300] b=[300] param=f32", VJP_F32},
    {"mul", "a=[2500,5] b=[5]", VJP_BF16},
    {"mean", "x=[2,9001] axis=1", VJP_F32},
    {"gather", "table=[11,257] index=[1000]", VJP_F32},
    {"gather", "table=[7001,2] index=[6553]", VJP_BF16},
    {"maxpool2d", "x=[1,65,17,33] kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1", VJP_BF16},
    {"maxpool2d", "x=[1,3,65,257]", VJP_F32},
    {"linear", "a=[65,257] b=[257,130] activation=gelu_erf", VJP_F32},
    {"linear", "a=[7001,3] b=[3,2]", VJP_BF16},
    {"linear", "a=[3,66,9] b=[3,9,66]", VJP_F32},
    {"linear", "a=[64,66,9] b=[64,66,9] transpose_b=1", VJP_BF16},
    {"conv2d", "x=[1,12,9,8] weight=[264,3,1,1] groups=4", VJP_BF16},
    {"conv2d", "x=[1,9,8,192] weight=[4224,1,1,3] groups=64 layout=channels_last", VJP_F32},
    {"conv2d", "x=[1,70,4,5] weight=[66,70,3,3] padding_h=1 padding_w=1", VJP_BF16},
    {"conv2d", "x=[1,4,5,70] weight=[66,3,3,70] padding_h=1 padding_w=1 layout=channels_last", VJP_F32},
    {"conv2d", "x=[2,18,7,8] weight=[20,9,3,2] groups=2 stride_h=3 stride_w=2 padding_h=2 dilation_h=2", VJP_F32},
    {"conv2d", "x=[2,7,8,18] weight=[20,3,2,9] groups=2 stride_h=3 stride_w=2 padding_h=2 layout=channels_last",
     VJP_BF16},
    {"conv2d", "x=[3,8,21,20] weight=[9,8,1,1]", VJP_F32},
    {"conv2d", "x=[3,40,41,2] weight=[2,2,2,1] groups=2 stride_w=2 layout=channels_last", VJP_BF16},
    {"attention", "q=[1,3,1,7] k=[1,2100,1,7] causal=0", VJP_F32},
    {"attention", "q=[1,35,4,24] k=[1,70,2,24]", VJP_F32},
    {"attention", "q=[1,6,1,300] k=[1,7,1,300]", VJP_BF16},
    {"attention", "q=[1,70,1,4] k=[1,70,1,4] data=nan", VJP_F32},
    {"attention", "q=[1,40,2,8] k=[1,40,1,8] data=huge -lse", VJP_F32},
    {"attention", "q=[2,40,4,8] k=[2,140,2,8] window=37", VJP_F32},
    {"attention", "q=[1,140,1,4] k=[1,140,1,4] window=20 data=nan", VJP_F32},
    {"attention", "q=[1,5,2,3] k=[1,90,1,3] window=1", VJP_F16},
    {"attention", "q=[3,70,4,8] k=[3,90,2,8] first=i32", VJP_F32},
    {"attention", "q=[2,70,2,5] k=[2,70,1,5] first=i64 window=30", VJP_BF16},
    {"attention", "q=[1,140,1,4] k=[1,140,1,4] first=f32 data=nan", VJP_F32},
    {"attention", "q=[1,18,2,130] k=[1,34,1,130] causal=0", VJP_BF16},
    {"attention", "q=[1,68,1,68] k=[1,33,1,68] causal=0", VJP_F32},
    {"cross_entropy", "logits=[3001,2] target=[3001] data=ignored label_smoothing=0.1", VJP_BF16},
    {"cross_entropy", "logits=[3,4097] target=[3] label_smoothing=0.1", VJP_F32},
    {"cross_entropy", "logits=[5,1025] target=[5] data=minus_inf reduction=sum", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] data=minus_inf label_smoothing=0.1", VJP_BF16},
    {"cross_entropy", "logits=[9,65] target=[9] data=nan", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] data=inf", VJP_F16},
    {"cross_entropy", "logits=[9,65] target=[9] data=offset", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] top=logits label_smoothing=0.1", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] top=dloss", VJP_F32},
    {"linear_cross_entropy", "x=[70,17] weight=[130,17] target=[70] data=ignored label_smoothing=0.1", VJP_BF16},
};

/* The shaders of these, linear's of two, multiply matrices of simdgroups where they can. */
static bool has_products(const char *op) {
    return strcmp(op, "linear") == 0 || strcmp(op, "linear_cross_entropy") == 0 || strcmp(op, "conv2d") == 0 ||
           strcmp(op, "attention") == 0;
}

static void compare_shapes(bool only_products) {
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (has(shapes[i].op) && in_part(i / 2, 4) && (!only_products || (i % 2 == 0 && has_products(shapes[i].op))))
            compare_setup(shapes[i].op, shapes[i].text, shapes[i].dtype);
}

static void shapes_that_have_broken_others(void **state) {
    (void)state;
    start();
    compare_shapes(false);
    stop();
}

/*
 * A GPU whose simdgroups of 32 threads multiply no matrices. In the other setups above, none did. In f32, because
 * storage is widened before either multiplies; of the large shapes every second, for the time they take.
 */
static void products_in_registers_are_right_too(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.no_matrices = true;
    emulate_with = (emulate_settings){EMULATE_IN_TURN, 32};
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_false(gpu_has_matrices(device));
    raw_products_are_right(state);
    compare_all(SANITIZED ? 130 : 1100, "linear", VJP_F32);
    compare_all(SANITIZED ? 130 : 1100, "attention", VJP_F32);
    compare_shapes(true);
    stop();
}

/* Fewer threads have smaller tiles, and load several fours of each. */
static void tiles_of_conv2d_are_right_with_few_threads(void **state) {
    (void)state;
    static const unsigned long threads[] = {48, 100};
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        stand_in_reset();
        stand_in.max_threads = threads[i];
        if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
        refuse_raw_product(RAW_ROWS, "needs 256 threads");
        compare_setup("conv2d", "x=[2,9,5,6] weight=[17,9,2,3] stride_h=2 padding_w=1", VJP_F32);
        compare_setup("conv2d", "x=[2,5,6,9] weight=[17,2,3,9] stride_h=2 padding_w=1 layout=channels_last", VJP_BF16);
        stop();
    }
}

/* One thread a group, so that a few rows are more groups than a row of the grid holds. */
static void more_groups_than_a_row_of_the_grid_holds(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.max_threads = 1;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    compare_setup("rms_norm", "x=[70001,1] eps=0.5", VJP_F32);
    stop();
    stand_in_reset();
    stand_in.max_threads = 1;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    static float zero[70001 * 3];
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){70001, 3}, zero, sizeof zero);
    assert_int_equal(norm(&x, &x), VJP_OK);
    assert_int_equal(stand_in.grid[1], 2);
    assert_int_equal(stand_in.grid[0], 35001); /* one group too many, which does nothing */
    vjp_free(device, x.data);
    stop();
}

/* Sizes are integers all the way: as floats, 2^24 + 1 columns would be 2^24, and the last one lost. */
static void a_row_past_2_to_24_keeps_its_last_column(void **state) {
    (void)state;
    start();
    enum { DIM = (1 << 24) + 1 };
    uint16_t *host = malloc(DIM * sizeof *host);
    for (int i = 0; i < DIM; i++)
        host[i] = 0x3f80;   /* 1 */
    host[DIM - 1] = 0x4580; /* 4096: half of the sum of squares */
    float rstd = 0;
    vjp_tensor x = on_device(VJP_BF16, 2, (int64_t[]){1, DIM}, host, DIM * sizeof *host);
    vjp_tensor r = on_device(VJP_F32, 1, (int64_t[]){1}, &rstd, sizeof rstd);
    if (vjp_rms_norm_forward(device, NULL, &r, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 0)) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, &rstd, r.data, 0, sizeof rstd), VJP_OK);
    assert_true(fabs((double)rstd - sqrt(0.5)) < 1e-6);
    vjp_free(device, x.data);
    vjp_free(device, r.data);
    free(host);
    stop();
}

/* Orders of threads and groups change from launch to launch, and here the width of a simdgroup too: the same bits. */
static void results_do_not_depend_on_how_threads_run(void **state) {
    (void)state;
    static const int64_t dims[] = {65, 1025, 4097};
    static const unsigned widths[] = {1, 32, 64, 8, 24, 7};
    for (size_t t = 0; t < sizeof dims / sizeof dims[0]; t++) {
        enum { ROWS_HERE = 5, MAX_DIM = 4097 };
        static float x[ROWS_HERE * MAX_DIM], first[ROWS_HERE * MAX_DIM + MAX_DIM], again[ROWS_HERE * MAX_DIM + MAX_DIM];
        size_t count = (size_t)(ROWS_HERE * dims[t]);
        for (size_t i = 0; i < count; i++)
            x[i] = (float)(i * 2654435761u % 1999) / 1000 - 1;
        for (size_t run = 0; run < sizeof widths / sizeof widths[0]; run++) {
            start();
            emulate_with = (emulate_settings){EMULATE_IN_TURN, widths[run]};
            vjp_tensor tx = on_device(VJP_F32, 2, (int64_t[]){ROWS_HERE, dims[t]}, x, count * sizeof *x);
            vjp_tensor dy = on_device(VJP_F32, 2, (int64_t[]){ROWS_HERE, dims[t]}, x, count * sizeof *x);
            vjp_tensor dgamma = on_device(VJP_F32, 1, (int64_t[]){dims[t]}, x, (size_t)dims[t] * sizeof *x);
            assert_int_equal(vjp_layer_norm_backward(device, &dy, &dgamma, NULL, &dy, &tx, NULL, NULL, NULL, NULL),
                             VJP_OK);
            assert_int_equal(vjp_download(device, again, dy.data, 0, count * sizeof *again), VJP_OK);
            assert_int_equal(vjp_download(device, again + count, dgamma.data, 0, (size_t)dims[t] * sizeof *again),
                             VJP_OK);
            if (run == 0) memcpy(first, again, sizeof first);
            if (memcmp(first, again, (count + (size_t)dims[t]) * sizeof *again) != 0)
                fail_msg("%d columns: simdgroups of %u give other bits", (int)dims[t], widths[run]);
            vjp_free(device, tx.data), vjp_free(device, dy.data), vjp_free(device, dgamma.data);
            stop();
        }
    }
}

/* ---- What every device must do ------------------------------------------------------------------------ */

static void every_pass_has_kernels_with_or_without_a_gpu(void **state) {
    (void)state;
    if (!device) skip();
    every_pass_has_kernels("metal");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_op_is_right),
        cmocka_unit_test(shapes_that_have_broken_others),
        cmocka_unit_test(products_in_registers_are_right_too),
        cmocka_unit_test(tiles_of_conv2d_are_right_with_few_threads),
        cmocka_unit_test(more_groups_than_a_row_of_the_grid_holds),
        cmocka_unit_test(a_row_past_2_to_24_keeps_its_last_column),
        cmocka_unit_test(results_do_not_depend_on_how_threads_run),
    };
    const struct CMUnitTest of_any_device[] = {
        cmocka_unit_test(a_warmed_call_makes_no_pipeline),
        cmocka_unit_test(the_first_run_of_a_program_makes_no_pipeline),
        cmocka_unit_test(norms_are_right_near_the_largest_number),
        cmocka_unit_test(a_bad_counter_of_dropout_is_reported_and_writes_nothing),
        cmocka_unit_test(clip_takes_the_root_of_a_square_below_1e_38),
        cmocka_unit_test(a_bad_target_is_reported_and_its_row_ignored),
        cmocka_unit_test(the_loss_of_a_certain_target_keeps_its_digits),
        cmocka_unit_test(gradients_of_improbable_classes_are_not_lost),
        cmocka_unit_test(a_smoothed_loss_with_an_impossible_class_is_infinite),
        cmocka_unit_test(slices_of_one_tensor_give_the_bits_of_packed_ones),
        cmocka_unit_test(raw_products_are_right),
        cmocka_unit_test(a_gate_gives_the_bits_of_swiglu),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        DEVICE_TESTS,
    };
    int failed = cmocka_run_group_tests_name("metal", tests, NULL, NULL);
    start();
    failed += cmocka_run_group_tests_name("metal as any device", of_any_device, NULL, NULL);
    vjp_close(device);
    return failed;
}
