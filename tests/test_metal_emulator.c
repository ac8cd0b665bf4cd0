/* SPDX-License-Identifier: MIT */
/*
 * The emulator that runs the Metal backend's kernels (tests/metal/emulate.cpp): it must report faulty kernels, and pass
 * correct ones; and the sums of threads that all kernels share must be right for any threadgroup and simdgroup.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "metal/emulate.h"

static const emulate_shader *shader_named(const char *name) {
    const emulate_shader *s = emulate_shaders;
    while (s && strcmp(s->name, name) != 0)
        s = s->next;
    assert_non_null(s);
    return s;
}

enum { UNIFORM_WORDS = 24, FIRST_PARAM = 16, MAX_FLOATS = 1024, F32_THERE = 1 };

/* Runs a kernel of a test's shader on buffers of floats, all of them f32; false and the message: something was seen. */
static bool run_kernel(const char *shader, const char *kernel, unsigned threads, unsigned param,
                       float buffer[][MAX_FLOATS], char message[EMULATE_MESSAGE]) {
    const emulate_shader *s = shader_named(shader);
    unsigned constant[64] = {0}, uniforms[UNIFORM_WORDS] = {[0] = 1, [3] = 1, [FIRST_PARAM] = param};
    emulate_launch l = {.shader = s, .constant = constant, .grid = {1, 1, 1}, .threads = threads};
    for (size_t i = 0; i < s->kernels; i++)
        if (strcmp(s->kernel[i].name, kernel) == 0) l.kernel = &s->kernel[i];
    assert_non_null(l.kernel);
    for (size_t i = 0; i < s->operands; i++) {
        constant[i] = F32_THERE;
        l.buffer[i] = (emulate_buffer){(char *)buffer[i], sizeof buffer[i], 0};
    }
    l.buffer[EMULATE_MAX_BUFFERS - 1] = (emulate_buffer){(char *)uniforms, sizeof uniforms, 0};
    return emulate_run(&l, message);
}

static const struct {
    const char *kernel, *words[3];
} faults[] = {
    {"read_too_early", {"a race: thread ", " reads at faults.metal:33", " writes at faults.metal:52"}},
    {"overwritten", {"a race: thread ", " reads at faults.metal:33", " writes at faults.metal:60"}},
    {"both_write", {"a race: thread ", "writes at faults.metal:", "no barrier between"}},
    {"atomic_and_plain", {"a race: thread ", "faults.metal:", ""}},
    {"other_barrier", {"threads diverge: thread ", " waits at common.metal:", "at faults.metal:"}},
    {"ended", {"threads diverge: thread ", " waits at common.metal:", "thread 5 has ended"}},
    {"simd_parts", {"threads diverge: thread ", "common.metal:", "faults.metal:"}},
    {"unwritten", {"reads at faults.metal:", "that no thread has written", ""}},
    {"outside", {"reads at common.metal:", "outside of every buffer", ""}},
    {"matrix_too_early",
     {"a race: ", "the matrix of a simdgroup reads at faults.metal:139", " writes at faults.metal:"}},
    {"matrix_overwritten",
     {"a race: ", " writes at faults.metal:148", "the matrix of a simdgroup reads at faults.metal:147"}},
    {"matrix_unread",
     {"a race: ", "the matrix of a simdgroup writes at faults.metal:155", " reads at faults.metal:156"}},
    {"matrix_twice", {"a race: the matrix of a simdgroup writes", "what the matrix of a simdgroup writes", ""}},
    {"matrix_parts", {"threads diverge: thread ", " waits at ", ""}},
    {"matrix_ended", {"the simdgroup of thread ", "has fewer than 32 threads for the matrix at faults.metal:", ""}},
};

/* y = a b^T + 2 and its transpose, of a and b in the first numbers of x. */
static void check_matrices(float buffer[2][MAX_FLOATS]) {
    char message[EMULATE_MESSAGE];
    if (!run_kernel("faults", "matrix_good", 64, 0, buffer, message)) fail_msg("%s", message);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            double sum = 2;
            for (int k = 0; k < 8; k++)
                sum += (double)(buffer[0][8 * i + k] * buffer[0][64 + 8 * j + k]);
            if ((double)buffer[1][8 * i + j] != sum || (double)buffer[1][64 + 8 * j + i] != sum)
                fail_msg("element %d, %d of the product is %g and %g, not %g", i, j, (double)buffer[1][8 * i + j],
                         (double)buffer[1][64 + 8 * j + i], sum);
        }
    emulate_with.width = 24;
    if (run_kernel("faults", "matrix_good", 64, 0, buffer, message)) fail_msg("a matrix of 24 threads passed");
    emulate_with.width = 32;
}

static void what_is_wrong_with_a_kernel_is_seen(void **state) {
    (void)state;
    float(*buffer)[MAX_FLOATS] = malloc(2 * sizeof buffer[0]); /* not among the program's own data, which is allowed */
    char message[EMULATE_MESSAGE];
    for (int i = 0; i < MAX_FLOATS; i++)
        buffer[0][i] = (float)i;
    for (emulate_order order = EMULATE_FORWARD; order <= EMULATE_SHUFFLED; order++) {
        emulate_with = (emulate_settings){order, 32};
        if (!run_kernel("faults", "good", 64, 0, buffer, message)) fail_msg("%s", message);
        assert_true(buffer[1][0] == 2 && buffer[1][63] == 1);
        check_matrices(buffer);
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
            if (run_kernel("faults", faults[i].kernel, 64, 0, buffer, message))
                fail_msg("%s() passed in order %d", faults[i].kernel, (int)order);
            for (int w = 0; w < 3; w++)
                if (!strstr(message, faults[i].words[w]))
                    fail_msg("\"%s\" does not say \"%s\"", message, faults[i].words[w]);
        }
    }
    free(buffer);
}

/* Any number of threads in teams of any size, of which some leave threads over; simdgroups of any width. */
static const unsigned sizes[][2] = {{48, 48},   {48, 16},  {48, 3},  {47, 47},   {50, 48},  {256, 256},
                                    {256, 32},  {256, 64}, {256, 1}, {256, 129}, {192, 96}, {96, 96},
                                    {224, 224}, {1, 1},    {33, 32}, {64, 64},   {255, 5},  {7, 2}};
static const unsigned widths[] = {1, 32, 64, 8, 24, 7, 20};

static void sums_are_right_for_any_team_and_the_same_for_any_width(void **state) {
    (void)state;
    static float buffer[4][MAX_FLOATS], first[4][MAX_FLOATS], again[4][MAX_FLOATS];
    char message[EMULATE_MESSAGE];
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++)
            for (emulate_order order = EMULATE_FORWARD; order <= EMULATE_SHUFFLED; order++) {
                unsigned threads = sizes[s][0], lanes = sizes[s][1], teams = threads / lanes;
                emulate_with = (emulate_settings){order, widths[w]};
                memset(buffer, 0, sizeof buffer);
                for (unsigned i = 0; i < threads; i++) /* positive, so that a sum's relative error is small */
                    buffer[0][i] = 1 + (float)(i * 2654435761u % 1000) / 999;
                memcpy(again, buffer, sizeof again);
                if (!run_kernel("trees", "sums", threads, lanes, buffer, message) ||
                    !run_kernel("trees", "twice", threads, lanes, again, message))
                    fail_msg("%u threads, teams of %u, simdgroups of %u: %s", threads, lanes, widths[w], message);
                if (w == 0 && order == EMULATE_FORWARD) memcpy(first, buffer, sizeof first);
                if (memcmp(first, buffer, sizeof first) != 0)
                    fail_msg("%u threads, teams of %u: a width of %u gives other bits", threads, lanes, widths[w]);
                for (unsigned i = 0; i < teams * lanes; i++) {
                    double sum = 0, most = 0, column = 0;
                    for (unsigned k = i / lanes * lanes; k < (i / lanes + 1) * lanes; k++) {
                        sum += (double)buffer[0][k];
                        most = fmax(most, (double)buffer[0][k]);
                    }
                    for (unsigned k = i; i < lanes && k < teams * lanes; k += lanes)
                        column += (double)buffer[0][k];
                    if (fabs((double)buffer[1][i] - sum) > 1e-6 * sum || (double)buffer[2][i] != most ||
                        fabs((double)buffer[3][i] - column) > 1e-6 * column ||
                        fabs((double)again[1][i] - sum) > 1e-6 * sum || again[2][i] != 2 * again[1][i])
                        fail_msg("%u threads, teams of %u, simdgroups of %u: thread %u has %g, %g, %g for %g, %g, %g",
                                 threads, lanes, widths[w], i, (double)buffer[1][i], (double)buffer[2][i],
                                 (double)buffer[3][i], sum, most, column);
                }
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_wrong_with_a_kernel_is_seen),
        cmocka_unit_test(sums_are_right_for_any_team_and_the_same_for_any_width),
    };
    return cmocka_run_group_tests_name("metal emulator", tests, NULL, NULL);
}
