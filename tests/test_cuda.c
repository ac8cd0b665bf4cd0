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

int main(void) {
    device_start("cuda");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        cmocka_unit_test(a_name_that_is_none_is_refused_with_a_sentence),
        cmocka_unit_test(without_a_gpu_the_sentence_says_why),
        DEVICE_TESTS,
    };
    int failed = cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
    vjp_close(device);
    return failed;
}
