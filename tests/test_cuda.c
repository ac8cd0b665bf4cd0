/*
 * The CUDA backend as a library of its own. What needs no GPU runs everywhere: its entry, the kernels it lists, and the
 * sentence that says why there is no device. With a GPU: every pass recorded in a CUDA graph and replayed, bad indices
 * found on the device, and refusals that write nothing. Where there is none, those are skipped, and it says so.
 */
#include "device_tests.h"

static void the_library_has_one_entry_and_knows_its_version(void **state) {
    (void)state;
    check_library(VJP_CUDA_LIBRARY, "cuda");
}

static void every_pass_has_kernels_with_or_without_a_gpu(void **state) {
    (void)state;
    every_pass_has_kernels("cuda");
}

static void a_name_that_is_none_is_refused_with_a_sentence(void **state) {
    (void)state;
    static const char *const names[] = {"cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda:99999"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        vjp_device *none;
        assert_int_equal(vjp_open(names[i], NULL, &none), VJP_NO_DEVICE);
        assert_non_null(strstr(vjp_error(none), names[i]));
        vjp_close(none);
    }
}

static void without_a_gpu_the_sentence_says_why(void **state) {
    (void)state;
    if (device) skip();
    assert_true(strstr(why_none, "NVIDIA") || strstr(why_none, "CUDA"));
    vjp_device *none;
    assert_int_equal(vjp_open("cuda:0", NULL, &none), VJP_NO_DEVICE);
    assert_int_equal(vjp_synchronize(none), VJP_NO_DEVICE);
    void *data;
    assert_int_equal(vjp_alloc(none, 64, &data), VJP_NO_DEVICE);
    vjp_close(none);
}

/* An element of a b, where a is 1 + 2^-12 throughout and b is 1: all of it is exact in f32. */
static float sum_with(const char *products) {
    enum { SIDE = 256, COUNT = SIDE * SIDE };
    static float a[COUNT], b[COUNT], y[COUNT];
    static const int64_t shape[2] = {SIDE, SIDE};
    vjp_device *own;
    for (int i = 0; i < COUNT; i++) {
        a[i] = 1 + 0x1p-12f;
        b[i] = 1;
    }
    vjp_tensor on[3] = {on_device(VJP_F32, 2, shape, y, sizeof y), on_device(VJP_F32, 2, shape, a, sizeof a),
                        on_device(VJP_F32, 2, shape, b, sizeof b)};
    assert_int_equal(
        vjp_open("cuda", &(vjp_options){.struct_size = sizeof(vjp_options), .matrix_products = products}, &own),
        VJP_OK);
    const vjp_tensor *tensors[LINEAR_BIAS + 1] = {[LINEAR_Y] = &on[0], [LINEAR_A] = &on[1], [LINEAR_B] = &on[2]};
    assert_int_equal(vjp_call(own, &vjp_op_linear, VJP_FORWARD, tensors, LINEAR_BIAS + 1, NULL), VJP_OK);
    assert_int_equal(vjp_download(own, y, on[0].data, 0, sizeof y), VJP_OK);
    vjp_close(own);
    for (int i = 0; i < 3; i++)
        vjp_free(device, on[i].data);
    for (int i = 1; i < COUNT; i++)
        assert_true(y[i] == y[0]);
    return y[0];
}

/* TF32 has ten bits of fraction: it takes 1 + 2^-12 for 1. */
static void products_are_f32_unless_tf32_is_asked_for(void **state) {
    (void)state;
    need_device();
    assert_true(sum_with(NULL) == 256.0625f);
    assert_true(sum_with("f32") == 256.0625f);
    assert_true(sum_with("tf32") == 256);
    vjp_device *none;
    assert_int_equal(
        vjp_open("cuda", &(vjp_options){.struct_size = sizeof(vjp_options), .matrix_products = "f16"}, &none),
        VJP_INVALID);
    assert_non_null(strstr(vjp_error(none), "f32 or tf32"));
    vjp_close(none);
}

int main(void) {
    device_start("cuda");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        cmocka_unit_test(a_name_that_is_none_is_refused_with_a_sentence),
        cmocka_unit_test(without_a_gpu_the_sentence_says_why),
        cmocka_unit_test(products_are_f32_unless_tf32_is_asked_for),
        DEVICE_TESTS,
    };
    int failed = cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
    vjp_close(device);
    return failed;
}
