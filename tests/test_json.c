/* SPDX-License-Identifier: MIT */
/*
 * The JSON reader and writer: each violation of the format is refused with its own sentence and byte, valid text gives
 * the right tree, thousands of randomly damaged texts crash nothing, and what is written reads back the same.
 */
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
#include <sys/stat.h>
#include <unistd.h>

#include "files/json.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* A copy without a terminating zero, so that a sanitizer detects a read past the end. */
static bool parse(const char *text, size_t length, json_document *document, char *error) {
    char *copy = malloc(length ? length : 1);
    memcpy(copy, text, length);
    bool ok = json_parse(copy, length, document, error);
    free(copy);
    return ok;
}

static const struct {
    const char *text;
    const char *says; /* part of the sentence; NULL: the text is good */
} texts[] = {
    /* good */
    {"null", NULL},
    {" \t\r\n{ } ", NULL},
    {"[]", NULL},
    {"[ [ ] , { } ]", NULL},
    {"\"\"", NULL},
    {"{\"a\":{\"a\":1},\"b\":{\"a\":2}}", NULL},
    {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\x7f\"", NULL},
    {"[0,-0,1.5,-1.5e+3,1E-2,1e400000000000000000000]", "no double can hold at byte 23"},
    {"[0,-0,1.5,-1.5e+3,1E-2,1e-400]", NULL},
    /* values */
    {"", "ends at byte 0, where value"},
    {"  ", "ends at byte 2, where value"},
    {"x", "no value at byte 0"},
    {"nul", "no value at byte 0"},
    {"True", "no value at byte 0"},
    {"NaN", "no value at byte 0"},
    {"Infinity", "no value at byte 0"},
    {"'a'", "no value at byte 0"},
    {"nullx", "has more text after its end at byte 4"},
    {"{} {}", "has more text after its end at byte 3"},
    {"/* no */ 1", "no value at byte 0"},
    {"\xef\xbb\xbf{}", "no value at byte 0"},
    /* lists and objects */
    {"[", "ends at byte 1, where value"},
    {"[1", "ends at byte 2, where comma or ]"},
    {"[1,", "ends at byte 3, where value"},
    {"[1,]", "no value at byte 3"},
    {"[,1]", "no value at byte 1"},
    {"[1 2]", "no comma or ] at byte 3"},
    {"[1}", "no comma or ] at byte 2"},
    {"{\"a\":1]", "no comma or } at byte 6"},
    {"{\"a\":1,}", "no key at byte 7"},
    {"{a:1}", "no key at byte 1"},
    {"{1:1}", "no key at byte 1"},
    {"{\"a\" 1}", "no colon at byte 5"},
    {"{\"a\":}", "no value at byte 5"},
    {"{\"a\"", "ends at byte 4, where colon"},
    {"[{\"a\":1,\"b\":2,\"\\u0061\":3}]", "object at byte 1 has two members \"a\""},
    /* strings */
    {"\"a", "ends at byte 2, where the end of a text"},
    {"\"a\\", "unknown escape"},
    {"\"\\q\"", "unknown escape at byte 2"},
    {"\"\\u12\"", "four hexadecimal digits at byte 5"},
    {"\"\\u", "ends at byte 3, where four"},
    {"\"\\ud800\"", "surrogate pair at byte 1"},
    {"\"\\ud800\\u0041\"", "surrogate pair at byte 1"},
    {"\"\\udc00\"", "surrogate pair at byte 1"},
    {"\"\\u0000\"", "zero character at byte 1"},
    {"\"\n\"", "control character inside a text at byte 1"},
    {"\"\xff\"", "UTF-8 at byte 1"},
    {"\"\x80\"", "UTF-8 at byte 1"},
    {"\"\xc0\x80\"", "UTF-8 at byte 1"},
    {"\"\xe0\x80\x80\"", "UTF-8 at byte 1"},
    {"\"\xed\xa0\x80\"", "UTF-8 at byte 1"},
    {"\"\xf4\x90\x80\x80\"", "UTF-8 at byte 1"},
    {"\"\xe2\x82", "UTF-8 at byte 1"},
    /* numbers */
    {"-", "ends at byte 1, where digit"},
    {"-a", "no digit at byte 1"},
    {"+1", "no value at byte 0"},
    {".5", "no value at byte 0"},
    {"1.", "ends at byte 2, where digit"},
    {"1.e5", "no digit at byte 2"},
    {"1e", "ends at byte 2, where digit"},
    {"1e+", "ends at byte 3, where digit"},
    {"01", "leading zero at byte 0"},
    {"-01", "leading zero at byte 0"},
    {"0x10", "has more text after its end at byte 1"},
    {"1e999", "no double can hold at byte 0"},
};

static void test_texts(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(texts); i++) {
        json_document document;
        char error[FILE_ERROR] = "";
        bool ok = parse(texts[i].text, strlen(texts[i].text), &document, error);
        if (ok != !texts[i].says) fail_msg("%s: %s", texts[i].text, ok ? "taken" : error);
        if (!ok && !strstr(error, texts[i].says))
            fail_msg("%s: \"%s\" does not say \"%s\"", texts[i].text, error, texts[i].says);
        if (!ok) assert_true(document.root == NULL && document.text == NULL);
        json_free(&document);
    }
    json_document document;
    char error[FILE_ERROR];
    assert_false(parse("[1\0]", 4, &document, error));
    assert_non_null(strstr(error, "at byte 2"));
}

static void test_tree(void **state) {
    (void)state;
    static const char text[] = "{\"a\": [1, 2.5, -9223372036854775808, 9223372036854775808, 1e2, -0], \"b\": "
                               "{\"c\": null, \"d\": true, \"\\u00e9\\ud83d\\ude00\": \"x\\ty\"}, \"e\": \"\"}";
    json_document document;
    char error[FILE_ERROR], shown[JSON_SHOWN];
    if (!parse(text, strlen(text), &document, error)) fail_msg("%s", error);
    const json_value *root = document.root, *list = json_member(root, "a");
    assert_int_equal(root->count, 3);
    assert_null(root->key);
    assert_int_equal(list->type, JSON_ARRAY);
    assert_int_equal(list->count, 6);
    static const struct {
        double number;
        bool exact;
        int64_t integer;
        const char *shown;
    } numbers[] = {{1, true, 1, "1"},
                   {2.5, false, 0, "2.5"},
                   {-9223372036854775808.0, true, INT64_MIN, "-9223372036854775808"},
                   {9223372036854775808.0, false, 0, "9.223372036854776e18"},
                   {100, false, 0, "1e2"},
                   {-0.0, false, 0, "-0.0"}};
    const json_value *v = list->first;
    for (size_t i = 0; i < COUNT(numbers); i++, v = v->next) {
        assert_int_equal(v->type, JSON_NUMBER);
        assert_memory_equal(&v->number, &numbers[i].number, sizeof v->number);
        assert_int_equal(v->exact, numbers[i].exact);
        assert_true(v->integer == numbers[i].integer);
        assert_string_equal(json_show(v, shown), numbers[i].shown);
    }
    assert_null(v);
    const json_value *object = json_member(root, "b");
    assert_int_equal(json_member(object, "c")->type, JSON_NULL);
    assert_false(json_has(object, "c"));
    assert_true(json_has(object, "d") && json_member(object, "d")->boolean);
    assert_string_equal(json_member(object, "\xc3\xa9\xf0\x9f\x98\x80")->text, "x\ty");
    assert_string_equal(json_member(root, "e")->text, "");
    assert_null(json_member(root, "c"));
    assert_null(json_member(list, "a"));
    assert_null(json_member(NULL, "a"));
    assert_string_equal(json_show(object, shown), "{...}");
    json_free(&document);
}

static void test_depth(void **state) {
    (void)state;
    char text[4 * JSON_DEPTH], error[FILE_ERROR];
    json_document document;
    for (int depth = JSON_DEPTH; depth <= JSON_DEPTH + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        bool ok = parse(text, 2 * (size_t)depth, &document, error);
        assert_int_equal(ok, depth == JSON_DEPTH);
        if (!ok) assert_non_null(strstr(error, "inside one another at byte 64"));
        json_free(&document);
    }
    /* Beside one another there may be any number. */
    strcpy(text, "[");
    for (int i = 0; i < JSON_DEPTH; i++)
        strcat(text, i ? ",[]" : "[]");
    strcat(text, "]");
    assert_true(parse(text, strlen(text), &document, error));
    json_free(&document);
}

/* The caller's limits on the bytes and on the values; brackets inside a string do not count. */
static void test_limits(void **state) {
    (void)state;
    enum { LENGTH = JSON_MAX_VALUES + 8 };
    char *text = malloc(LENGTH), error[FILE_ERROR];
    assert_non_null(text);
    json_document document;
    memset(text, ',', LENGTH);
    memcpy(text, "[\"\\\"", 4);
    memcpy(text + LENGTH - 2, "\"]", 2);
    assert_false(json_parse_up_to(LENGTH - 1, text, LENGTH, &document, error));
    assert_non_null(strstr(error, "it has 16777224 bytes; JSON here has at most 16777223"));
    if (!json_parse_up_to(LENGTH, text, LENGTH, &document, error)) fail_msg("%s", error);
    assert_int_equal(document.root->count, 1);
    assert_int_equal(strlen(document.root->first->text), LENGTH - 5);
    char *kept = json_take_texts(&document); /* the tree is freed, its texts are kept */
    assert_true(document.root == NULL && document.values == NULL && document.text == NULL);
    assert_int_equal(strspn(kept + 2, "\","), LENGTH - 5);
    free(kept);
    memset(text, ',', LENGTH);
    text[0] = '[';
    assert_false(json_parse_up_to(LENGTH, text, LENGTH, &document, error));
    assert_non_null(strstr(error, "it has more than 16777216 commas and brackets"));
    assert_true(document.values == NULL && document.text == NULL);
    free(text);
}

static uint32_t next_random(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static void test_random_damage(void **state) {
    (void)state;
    enum { TRIALS = 30000 };
    static const char signs[] = "{}[]\",:\\u019 -.e\x80";
    static const char good[] = "{\"a\":[1,-2.5e3,true,null],\"b\":{\"c\":\"v\\u00e9\\ud83d\\ude00\"},\"d\":[[],{}]}";
    uint64_t seed = 1;
    size_t accepted = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        char text[sizeof good], error[FILE_ERROR] = "";
        memcpy(text, good, sizeof good);
        for (uint32_t n = 1 + next_random(&seed) % 3; n; n--)
            text[next_random(&seed) % (sizeof good - 1)] =
                next_random(&seed) % 2 ? signs[next_random(&seed) % (sizeof signs - 1)] : (char)next_random(&seed);
        json_document document;
        bool ok = parse(text, sizeof good - 1 - next_random(&seed) % 2, &document, error);
        accepted += ok;
        if (!ok) assert_true(error[0] != 0 && document.values == NULL);
        json_free(&document);
    }
    assert_true(accepted > 0 && accepted < TRIALS); /* both outcomes occurred */
}

static void test_files(void **state) {
    (void)state;
    char folder[] = "/tmp/test_json.XXXXXX", path[256], error[FILE_ERROR];
    json_document document;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/x.json", folder);
    assert_false(json_read(path, &document, error));
    assert_non_null(strstr(error, "cannot be opened: No such file"));
    assert_ptr_equal(strstr(error, path), error);
    assert_false(json_read(folder, &document, error));
    assert_non_null(strstr(error, "it is a folder"));
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_false(json_read(path, &document, error));
    assert_non_null(strstr(error, "it is not a regular file"));
    unlink(path);

    /* As long as the read buffer, a byte less, and a byte more. */
    for (size_t length = (1 << 17) - 1; length <= (1 << 17) + 1; length++) {
        FILE *out = fopen(path, "wb");
        fprintf(out, "%*d", (int)length, 7);
        fclose(out);
        if (!json_read(path, &document, error)) fail_msg("%s", error);
        assert_int_equal(document.root->integer, 7);
        json_free(&document);
    }
    assert_int_equal(truncate(path, JSON_MAX_BYTES + 1), 0);
    assert_false(json_read(path, &document, error));
    assert_non_null(strstr(error, "/x.json: it has 16777217 bytes; JSON here has at most 16777216"));
    assert_int_equal(truncate(path, 4 * (off_t)JSON_MAX_BYTES), 0); /* is not read to its end */
    assert_false(json_read(path, &document, error));
    assert_non_null(strstr(error, "/x.json: JSON here has at most 16777216 bytes"));
    assert_int_equal(truncate(path, 0), 0);
    assert_false(json_read(path, &document, error));
    assert_non_null(strstr(error, "ends at byte 0"));
    unlink(path);
    rmdir(folder);
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

static void test_write(void **state) {
    (void)state;
    for (int indented = 0; indented < 2; indented++) {
        json_writer w = {.indented = indented};
        json_put_object(&w, NULL);
        json_put_text(&w, "t\"\\\n\x01", "\xc3\xa9\t\x7f");
        json_put_array(&w, "list");
        json_put_integer(&w, NULL, INT64_MIN);
        json_put_array(&w, NULL);
        json_put_array_end(&w);
        json_put_null(&w, NULL);
        json_put_array_end(&w);
        json_put_object(&w, "o");
        json_put_object_end(&w);
        json_put_boolean(&w, "b", true);
        json_put_text(&w, "none", NULL);
        json_put_object_end(&w);
        char *text = json_take(&w);
        assert_string_equal(text, indented
                                      ? "{\n  \"t\\\"\\\\\\n\\u0001\": \"\xc3\xa9\\t\\u007f\",\n  \"list\": [\n    "
                                        "-9223372036854775808,\n    [],\n    null\n  ],\n  \"o\": {},\n  \"b\": "
                                        "true,\n  \"none\": null\n}\n"
                                      : "{\"t\\\"\\\\\\n\\u0001\": \"\xc3\xa9\\t\\u007f\", \"list\": "
                                        "[-9223372036854775808, [], null], \"o\": {}, \"b\": true, \"none\": "
                                        "null}\n");
        json_document document;
        char error[FILE_ERROR];
        if (!json_parse(text, strlen(text), &document, error)) fail_msg("%s", error);
        assert_string_equal(json_member(document.root, "t\"\\\n\x01")->text, "\xc3\xa9\t\x7f");
        json_free(&document);
        free(text);
    }
}

static void test_reals(void **state) {
    (void)state;
    static const double reals[] = {
        0,     -0.0, 0.1, 1, -1e5, 1e-5, 1e20, 123456789.123, 1e6, DBL_MAX, DBL_MIN, 5e-324, 1.0 / 3, 9007199254740994,
        1e-300};
    json_writer w = {0};
    json_put_array(&w, NULL);
    for (size_t i = 0; i < COUNT(reals); i++)
        json_put_real(&w, NULL, reals[i]);
    json_put_real(&w, NULL, NAN);
    json_put_real(&w, NULL, -INFINITY);
    json_put_array_end(&w);
    char *text = json_take(&w), error[FILE_ERROR];
    json_document document;
    if (!json_parse(text, strlen(text), &document, error)) fail_msg("%s: %s", text, error);
    const json_value *v = document.root->first;
    for (size_t i = 0; i < COUNT(reals); i++, v = v->next) {
        assert_memory_equal(&v->number, &reals[i], sizeof reals[i]);
        assert_false(v->exact); /* a real stays one */
    }
    assert_string_equal(v->text, "NaN");
    assert_string_equal(v->next->text, "-Infinity");
    json_free(&document);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),  cmocka_unit_test(test_tree),          cmocka_unit_test(test_depth),
        cmocka_unit_test(test_limits), cmocka_unit_test(test_random_damage), cmocka_unit_test(test_files),
        cmocka_unit_test(test_write),  cmocka_unit_test(test_reals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
