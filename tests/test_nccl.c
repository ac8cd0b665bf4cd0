/* SPDX-License-Identifier: MIT */
/*
 * The carrier of NCCL on one card: a process that sends to itself receives the same bytes, for sizes around those of a
 * block; a group "nccl" opens without a launcher, and a device of another kind is refused. Status 77: no card here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka needs those before it. */
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"
#include "vjp_engine.h"

static vjp_device *card;

static const vjp_carrier *load(void) {
    char file[VJP_LIBRARY_FILE];
    void *library = vjp_library_open("nccl", file);
    if (!library) fail_msg("%s", system_library_error());
    const vjp_carrier *(*entry)(int32_t);
    *(void **)&entry = system_library_find(library, "vjp_carrier_entry");
    assert_non_null(entry);
    assert_null(entry(VJP_ENGINE_INTERFACE + 1));
    return entry(VJP_ENGINE_INTERFACE);
}

static void expect_bytes(const vjp_carrier *carrier, void *state, size_t bytes) {
    char sentence[VJP_ERROR_BYTES] = "";
    vjp_engine_failure failure = {.sentence = sentence, .bytes = sizeof sentence, .reporter = -1};
    unsigned char *host = malloc(2 * bytes);
    void *from, *to;
    assert_non_null(host);
    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)(i * 31 + i / 251);
    assert_int_equal(vjp_alloc(card, bytes, &from), VJP_OK);
    assert_int_equal(vjp_alloc(card, bytes, &to), VJP_OK);
    assert_int_equal(vjp_upload(card, from, 0, host, bytes), VJP_OK);
    const vjp_message message = {.peer = 0, .send = from, .send_bytes = bytes, .receive = to, .receive_bytes = bytes};
    if (carrier->exchange(state, &message, 20, &failure) != VJP_OK) fail_msg("%zu bytes: %s", bytes, sentence);
    assert_int_equal(vjp_download(card, host + bytes, to, 0, bytes), VJP_OK);
    assert_memory_equal(host, host + bytes, bytes);
    vjp_free(card, from);
    vjp_free(card, to);
    free(host);
}

static void a_card_sends_to_itself(void **unused) {
    static const size_t sizes[] = {1, 4, 1000, 1 << 18, (1 << 25) - 4, 1 << 25};
    (void)unused;
    const vjp_carrier *carrier = load();
    unsigned char id[VJP_CARRIER_ID_BYTES] = {0};
    char sentence[VJP_ERROR_BYTES] = "";
    vjp_engine_failure failure = {.sentence = sentence, .bytes = sizeof sentence, .reporter = -1};
    void *state = NULL;
    assert_non_null(carrier);
    assert_string_equal(carrier->kind, "cuda");
    if (carrier->make_id(id, &failure) != VJP_OK) fail_msg("%s", sentence);
    if (carrier->join(&state, id, 0, 1, vjp_device_name(card), &failure) != VJP_OK) fail_msg("%s", sentence);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        expect_bytes(carrier, state, sizes[i]);
    carrier->leave(state, 0);
}

static void one_card_is_a_group(void **unused) {
    (void)unused;
    vjp_group *group;
    void *data;
    const float x = 3;
    float y = 0;
    if (vjp_group_open(card, "nccl", NULL, &group) != VJP_OK) fail_msg("%s", vjp_error(card));
    assert_int_equal(vjp_group_size(group), 1);
    assert_int_equal(vjp_alloc(card, sizeof x, &data), VJP_OK);
    assert_int_equal(vjp_upload(card, data, 0, &x, sizeof x), VJP_OK);
    const vjp_tensor tensor = vjp_tensor_of(data, VJP_F32, 0, NULL);
    assert_int_equal(vjp_group_sum(group, &tensor), VJP_OK);
    assert_int_equal(vjp_download(card, &y, data, 0, sizeof y), VJP_OK);
    assert_true(y == x);
    vjp_free(card, data);
    vjp_group_close(group);
}

static void another_device_is_refused(void **unused) {
    (void)unused;
    vjp_device *cpu;
    vjp_group *group;
    assert_int_equal(vjp_open("cpu", NULL, &cpu), VJP_OK);
    assert_int_equal(vjp_group_open(cpu, "nccl", NULL, &group), VJP_NO_DEVICE);
    assert_non_null(strstr(vjp_error(cpu), "group nccl: it moves the memory of cuda devices; this one is cpu"));
    vjp_close(cpu);
}

int main(void) {
    const struct CMUnitTest everywhere[] = {cmocka_unit_test(another_device_is_refused)};
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_card_sends_to_itself), cmocka_unit_test(one_card_is_a_group)};
    int failed = cmocka_run_group_tests(everywhere, NULL, NULL);
    if (failed) return failed;
    if (vjp_open("cuda", NULL, &card) != VJP_OK) {
        printf("there is no card: %s\n", vjp_error(card));
        vjp_close(card);
        return 77;
    }
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    vjp_close(card);
    return failed;
}
