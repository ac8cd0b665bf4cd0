/* SPDX-License-Identifier: MIT */
/* Ops, attributes, shapes and numbers to text and back: tables of what is accepted and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/real.h"
#include "proof/text.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static void test_attributes(void **state) {
    (void)state;
    static const struct {
        const char *op, *text;
        const char *result; /* all attributes afterwards, or part of the sentence */
        bool ok;
    } rows[] = {
        {"layer_norm", "", "axes=1 eps=1e-5", true},
        {"layer_norm", " axes=2\n eps=0.5 ", "axes=2 eps=0.5", true},
        {"layer_norm", "eps=1e-300", "axes=1 eps=1e-300", true},
        {"layer_norm", "axes=-3", "axes=-3 eps=1e-5", true},
        {"cumsum", "exclusive=1 reverse=true", "axis=-1 exclusive=true reverse=true", true},
        {"cumsum", "exclusive=true exclusive=false", "axis=-1 exclusive=false reverse=false", true},
        {"rope", "pairing=interleaved", "n_rot=0 pairing=interleaved", true},
        {"linear", "activation=gelu_erf", "activation=gelu_erf transpose_b=false zero_nan=false", true},
        {"layer_norm", "axes", "write name=value", false},
        {"layer_norm", "Axes=1", "it has axes, eps", false},
        {"layer_norm", "=1", "it has axes, eps", false},
        {"layer_norm", "axes=", "it must be an integer", false},
        {"layer_norm", "axes=1.5", "it must be an integer", false},
        {"layer_norm", "axes=99999999999999999999", "it must be an integer", false},
        {"layer_norm", "axes=0x1", "it must be an integer", false},
        {"layer_norm", "eps=", "it must be a number", false},
        {"layer_norm", "eps=1e-5f", "it must be a number", false},
        {"layer_norm", "eps=1e999", "it must be a number", false},
        {"cumsum", "exclusive=yes", "true or false", false},
        {"rope", "pairing=1", "one of half, interleaved", false},
        {"rope", "pairing=", "one of half, interleaved", false},
        {"layer_norm", "axes=2 eps=x", "it must be a number", false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        const vjp_op *op = vjp_op_find(rows[i].op);
        assert_non_null(op);
        text_values values, before;
        char error[TEXT_ERROR] = "", text[512];
        vjp_op_defaults(op, values.bytes);
        before = values;
        size_t bytes = vjp_op_describe(op)->attribute_bytes;
        if (text_set_attributes(op, values.bytes, rows[i].text, error) != rows[i].ok)
            fail_msg("%s %s: %s", rows[i].op, rows[i].text, error);
        if (rows[i].ok) {
            assert_string_equal(text_attributes(op, values.bytes, false, text, sizeof text), rows[i].result);
        } else {
            if (!strstr(error, rows[i].result)) fail_msg("\"%s\" does not say \"%s\"", error, rows[i].result);
            assert_memory_equal(values.bytes, before.bytes, bytes);
        }
    }
}

/* Every default of every op reads back as itself, and none counts as changed. */
static void test_all_defaults(void **state) {
    (void)state;
    for (size_t i = 0; i < vjp_op_count(); i++) {
        const vjp_op *op = vjp_op_at(i);
        text_values values, again = {0};
        char text[512], error[TEXT_ERROR] = "";
        assert_true(vjp_op_describe(op)->attribute_bytes <= sizeof values);
        vjp_op_defaults(op, values.bytes);
        text_attributes(op, values.bytes, false, text, sizeof text);
        memcpy(again.bytes, values.bytes, sizeof(uint64_t)); /* struct_size, which is not an attribute */
        if (!text_set_attributes(op, again.bytes, text, error)) fail_msg("%s", error);
        assert_memory_equal(values.bytes, again.bytes, vjp_op_describe(op)->attribute_bytes);
        assert_string_equal(text_attributes(op, values.bytes, true, text, sizeof text), "");
        if (!vjp_op_describe(op)->attribute_count) continue;
        const vjp_attribute *first = &vjp_op_describe(op)->attributes[0];
        int64_t other = first->type == VJP_REAL ? 0 : first->integer + 1;
        memcpy(values.bytes + first->offset, &other, 8);
        text_attributes(op, values.bytes, true, text, sizeof text);
        assert_int_equal(strncmp(text, first->name, strlen(first->name)), 0);
        assert_null(strchr(text, ' '));
    }
}

static void test_passes(void **state) {
    (void)state;
    const vjp_op *op;
    vjp_pass pass;
    char error[TEXT_ERROR];
    assert_true(text_parse_pass("rope.backward", &op, &pass, error));
    assert_ptr_equal(op, vjp_op_find("rope"));
    assert_int_equal(pass, VJP_BACKWARD);
    static const char *const wrong[] = {"rope", "rope.", "rope.back", "rope.backward.", "", ".forward", "rop.forward"};
    for (size_t i = 0; i < COUNT(wrong); i++)
        if (text_parse_pass(wrong[i], &op, &pass, error)) fail_msg("\"%s\" was taken", wrong[i]);
    assert_non_null(strstr(error, "layer_norm, rms_norm"));
}

static void test_shapes(void **state) {
    (void)state;
    static const struct {
        const char *text, *result;
    } good[] = {{"[7,65]", "[7, 65]"},
                {"7,65", "[7, 65]"},
                {" [ 7 , 65 ] ", "[7, 65]"},
                {"[]", "[]"},
                {"[0]", "[0]"},
                {"3", "[3]"},
                {"[1,2,3,4,5,6,7,8]", "[1, 2, 3, 4, 5, 6, 7, 8]"}};
    static const char *const bad[] = {"",       "[",
                                      "[7",     "7]",
                                      "[7,]",   "[,7]",
                                      "[-1]",   "[1.5]",
                                      "[7]x",   "[[]",
                                      "[7 5]",  "[1,2,3,4,5,6,7,8,9]",
                                      "7,65 x", "[99999999999999999999]"};
    int ndim = -5;
    int64_t shape[VJP_MAX_DIMS];
    char error[TEXT_ERROR], text[TEXT_SHAPE];
    for (size_t i = 0; i < COUNT(good); i++) {
        if (!text_parse_shape(good[i].text, &ndim, shape, error)) fail_msg("%s: %s", good[i].text, error);
        assert_string_equal(text_shape(ndim, shape, text), good[i].result);
    }
    ndim = -5;
    for (size_t i = 0; i < COUNT(bad); i++) {
        if (text_parse_shape(bad[i], &ndim, shape, error)) fail_msg("\"%s\" was taken", bad[i]);
        assert_int_equal(ndim, -5);
    }
}

static void test_reals(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } rows[] = {{0, "0"},
                {-0.0, "-0"},
                {0.1, "0.1"},
                {1e-5, "1e-5"},
                {1e20, "1e20"},
                {1e100, "1e100"},
                {-2.5, "-2.5"},
                {1.0 / 3, "0.3333333333333333"},
                {NAN, "nan"},
                {INFINITY, "inf"},
                {DBL_MAX, "1.7976931348623157e308"},
                {5e-324, "5e-324"}};
    char text[TEXT_VALUE];
    for (size_t i = 0; i < COUNT(rows); i++) {
        assert_string_equal(text_real(rows[i].value, text), rows[i].text);
        double back = strtod(text, NULL);
        assert_true(back == rows[i].value || (isnan(back) && isnan(rows[i].value)));
    }
}

/* The fewest digits that read back, for all powers of two, their neighbours, and numbers of all lengths. */
static void test_shortest_reals(void **state) {
    (void)state;
    uint64_t random = 1;
    for (int i = 0; i < 4 * 2098; i++) {
        double power = ldexp(1, i / 4 - 1074), value = power;
        if (i % 4 == 1) value = nextafter(power, 0);
        if (i % 4 == 2) value = nextafter(power, INFINITY);
        if (i % 4 == 3) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            char some[64];
            snprintf(some, sizeof some, "%.*g", i % 17 + 1, power * (double)(random >> 11));
            value = strtod(some, NULL);
        }
        char text[TEXT_VALUE], shortest[64];
        text_real(value, text);
        for (int digits = 1; digits <= 17; digits++) {
            snprintf(shortest, sizeof shortest, "%.*g", digits, value);
            if (strtod(shortest, NULL) == value) break;
        }
        size_t length = strcspn(text, "e");
        if (strtod(text, NULL) != value || length != strcspn(shortest, "e") || strncmp(text, shortest, length) != 0)
            fail_msg("%.17g is written as %s, not as %s", value, text, shortest);
    }
}

static void test_nearest(void **state) {
    (void)state;
    static const char *const words[] = {"device", "threads", "dtype", "json", NULL};
    assert_string_equal(text_nearest("devise", words), "device");
    assert_string_equal(text_nearest("thread", words), "threads");
    assert_string_equal(text_nearest("dtypes", words), "dtype");
    assert_null(text_nearest("quick", words));
    assert_null(text_nearest("", words));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attributes), cmocka_unit_test(test_all_defaults), cmocka_unit_test(test_passes),
        cmocka_unit_test(test_shapes),     cmocka_unit_test(test_reals),        cmocka_unit_test(test_shortest_reals),
        cmocka_unit_test(test_nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
