/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers: each file that vjp cannot follow is refused with its own sentence; a small model gives tokens that can be
 * worked out by hand; long words, which take another path, give the tokens of a plain implementation; Unicode's normal
 * form, broken UTF-8 and expressions follow their definitions. test_tokenizer.py compares with the package that defines
 * the format.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/nfc.h"
#include "text/pattern.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))
#define MODEL       "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<unk>\":3},\"merges\":[\"a b\"]}"

static tokenizer *parse(const char *json, char *error) {
    return tokenizer_parse(json, strlen(json), error);
}

/* ---- Refusals ---------------------------------------------------------------------------------------- */

static const struct {
    const char *json;
    const char *says; /* part of the sentence; NULL: the file is good */
} files[] = {
    {"{" MODEL "}", NULL},
    {"[]", "it is not an object"},
    {"{}", "it has no model"},
    {"{\"model\":{\"type\":\"WordPiece\"}}", "its model is \"WordPiece\", which is not supported"},
    {"{\"extra\":1," MODEL "}", "it has the unknown member \"extra\""},
    {"{\"truncation\":{}," MODEL "}", "it has truncation, which is not supported"},
    {"{\"padding\":{}," MODEL "}", "it has padding"},
    {"{\"model\":{\"vocab\":[],\"merges\":[]}}", "its model has no \"vocab\""},
    {"{\"model\":{\"vocab\":{},\"merges\":{}}}", "\"merges\" of its model is {}; it must be a list"},
    {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", "a token has no number between 0 and"},
    {"{\"model\":{\"vocab\":{\"a\":99999999999},\"merges\":[]}}", "a token has no number between 0 and"},
    {"{\"model\":{\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", "a token has no number between 0 and"},
    {"{\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "its tokens \"a\" and \"b\" have the same number, 0"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", "its merge 0, \"a\" and \"a\", needs a token"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", "its merge 0 is not two tokens"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "its merge 0 is not two tokens"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.5}}", "\"dropout\" of its model is 0.5"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}", "\"end_of_word_suffix\""},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"?\"}}", "its unknown token \"?\" is not in"},
    {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"new\":1}}", "its model has the unknown member \"new\""},
    {"{\"normalizer\":{\"type\":\"NFKC\"}," MODEL "}", "its normalizer is \"NFKC\", which is not supported"},
    {"{\"normalizer\":[]," MODEL "}", "its normalizer is not an object"},
    {"{\"normalizer\":{\"type\":\"Prepend\"}," MODEL "}", "its normalizer has no \"prepend\""},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"\"}," MODEL "}", "empty text"},
    {"{\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}," MODEL "}", "its pre_tokenizer is \"BertPreTokenizer\""},
    {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"x\"},\"behavior\":\"Up\"}," MODEL "}",
     "\"behavior\" of its pre_tokenizer is \"Up\""},
    {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"xy\"}," MODEL "}", "is not one character"},
    {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"often\"}," MODEL "}",
     "\"prepend_scheme\" of its pre_tokenizer is \"often\""},
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\",\"use_regex\":false},"
     "{\"type\":\"Metaspace\",\"replacement\":\"_\"}]}," MODEL "}",
     "has Metaspace behind ByteLevel, which must be the last"},
    {"{\"decoder\":{\"type\":\"CTC\"}," MODEL "}", "its decoder is \"CTC\", which is not supported"},
    {"{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":-1,\"stop\":0}," MODEL "}",
     "\"start\" of its decoder"},
    {"{\"post_processor\":{\"type\":\"BertProcessing\"}," MODEL "}", "its post_processor is \"BertProcessing\""},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}," MODEL "}",
     "has the text 0 times, not once"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}]}," MODEL "}",
     "has no \"ids\" of the special token \"x\""},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}},"
     "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"x\":{\"ids\":[77]}}}," MODEL "}",
     "adds the token 77, which it does not have"},
    {"{\"added_tokens\":{}," MODEL "}", "its added_tokens are not a list"},
    {"{\"added_tokens\":[{\"id\":0,\"content\":\"x\"}]," MODEL "}", "has the number 0, which \"a\" has"},
    {"{\"added_tokens\":[{\"id\":9,\"content\":\"a\"}]," MODEL "}", "has the number 9, and in the vocabulary 0"},
    {"{\"added_tokens\":[{\"id\":9,\"content\":\"\"}]," MODEL "}", "its added token 9 is an empty text"},
    {"{\"added_tokens\":[{\"id\":9,\"content\":\"x\",\"odd\":1}]," MODEL "}", "an added token has the unknown member"},
};

static void refuses_what_it_cannot_follow(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(files); i++) {
        char error[FILE_ERROR] = "";
        tokenizer *t = parse(files[i].json, error);
        if (!files[i].says && t) {
            tokenizer_free(t);
            continue;
        }
        if (t || !files[i].says || !strstr(error, files[i].says))
            fail_msg("%s: \"%s\" should have \"%s\"", files[i].json, error, files[i].says ? files[i].says : "");
    }
    /* A sequence inside a sequence, up to the limit of steps. */
    char error[FILE_ERROR], json[8192] = "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"}";
    for (int i = 0; i < 40; i++)
        strcat(json, ",{\"type\":\"NFC\"}");
    strcat(json, "]}," MODEL "}");
    assert_null(parse(json, error));
    assert_non_null(strstr(error, "has more than 32 steps"));
}

/* ---- Tokens ------------------------------------------------------------------------------------------ */

static void expect_ids(tokenizer *t, const char *text, bool around, const char *ids) {
    token_list list = {0};
    char error[FILE_ERROR] = "", shown[1024] = "";
    if (!tokenizer_encode(t, text, strlen(text), around, &list, error)) fail_msg("%s: %s", text, error);
    for (size_t i = 0; i < list.count; i++)
        snprintf(shown + strlen(shown), sizeof shown - strlen(shown), "%s%d", i ? " " : "", (int)list.ids[i]);
    if (strcmp(shown, ids) != 0) fail_msg("%s: %s instead of %s", text, shown, ids);
    token_list_free(&list);
}

static void expect_text(const tokenizer *t, const int32_t *ids, size_t count, bool special, const char *text) {
    byte_list list = {0};
    char error[FILE_ERROR] = "";
    assert_true(tokenizer_decode(t, ids, count, special, &list, error));
    assert_int_equal(list.count, strlen(text));
    assert_memory_equal(list.bytes, text, list.count);
    byte_list_free(&list);
}

/* A word that the model has no token for, twice: the second time from the cache, into a list without memory. */
static void a_word_may_have_no_tokens(void **state) {
    (void)state;
    char error[FILE_ERROR] = "";
    tokenizer *t = parse("{" MODEL "}", error);
    if (!t) fail_msg("%s", error);
    expect_ids(t, "z", false, "");
    expect_ids(t, "z", false, "");
    expect_ids(t, "ab", false, "2");
    tokenizer_free(t);
}

/* Byte fallback, unknown characters, tokens around the text, added tokens that take the spaces beside them. */
static void gives_tokens_worked_out_by_hand(void **state) {
    (void)state;
    static const char json[] =
        "{\"added_tokens\":[{\"id\":8,\"content\":\"<s>\",\"special\":true,\"normalized\":false},"
        "{\"id\":9,\"content\":\"<m>\",\"lstrip\":true,\"rstrip\":true,\"normalized\":false},"
        "{\"id\":10,\"content\":\"<m>x\",\"normalized\":false}],"
        "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"},"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},"
        "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[8]}}},"
        "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"_\"},"
        "\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]},"
        "\"model\":{\"byte_fallback\":true,\"fuse_unk\":true,\"unk_token\":\"?\",\"vocab\":{\"?\":0,\"a\":1,\"b\":2,"
        "\"ab\":3,\"_\":4,\"_a\":5,\"<0xC3>\":6,\"<0xA9>\":7},\"merges\":[[\"a\",\"b\"],[\"_\",\"a\"]]}}";
    char error[FILE_ERROR] = "";
    tokenizer *t = parse(json, error);
    if (!t) fail_msg("%s", error);
    assert_int_equal(tokenizer_size(t), 11);
    assert_int_equal(tokenizer_find(t, "<m>x"), 10);
    assert_true(tokenizer_is_special(t, 8) && !tokenizer_is_special(t, 9));
    expect_ids(t, "", false, "");
    expect_ids(t, "", true, "8");
    expect_ids(t, "aba", true, "8 3 1");
    expect_ids(t, "a ab a", false, "1 4 3 5"); /* the merge of a and b ranks before that of _ and a */
    expect_ids(t, "\xc3\xa9", false, "6 7");
    expect_ids(t, "axyzb", false, "1 0 2");
    expect_ids(t, "xaz", false, "0 1 0");
    expect_ids(t, "a  <m>  b", false, "1 9 2");
    expect_ids(t, "<m>xa", false, "10 1"); /* the longest */
    expect_ids(t, "<s", false, "0");
    expect_ids(t, "a\xff", false, "1 0"); /* U+FFFD has no token of its own, and not all of its bytes have one */
    expect_text(t, (const int32_t[]){8, 5, 6, 7, 6, 99, -1}, 7, true, "<s> a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    expect_text(t, (const int32_t[]){8, 5, 6, 7}, 4, false, " a\xc3\xa9");
    tokenizer_free(t);
}

/* Merges of a plain implementation, one at a time, over the text of tokens a, b, aa, ab, ... of random ranks. */
enum { TOKENS = 62, MERGES = TOKENS - 2 };

static void agrees_with_a_plain_implementation(void **state) {
    (void)state;
    /* Tokens 0 and 1 are a and b; token i is made of two earlier ones, and ranks are in another order than numbers. */
    int left[TOKENS], right[TOKENS];
    char text[TOKENS][4096] = {"a", "b"}, json[1 << 16] = "{\"model\":{\"vocab\":{\"a\":0,\"b\":1",
         merges[1 << 15] = "";
    uint32_t random = 1;
    int made = 2;
    while (made < TOKENS) {
        random = random * 1664525u + 1013904223u;
        int a = (int)(random >> 8) % made, b = (int)(random >> 20) % made;
        if (strlen(text[a]) + strlen(text[b]) > 12) a %= 8, b %= 8;
        char both[4096];
        snprintf(both, sizeof both, "%.2000s%.2000s", text[a], text[b]);
        memcpy(text[made], both, sizeof both);
        bool known = false;
        for (int i = 0; i < made; i++)
            known = known || strcmp(text[i], text[made]) == 0;
        if (known) continue;
        left[made] = a, right[made] = b;
        snprintf(json + strlen(json), sizeof json - strlen(json), ",\"%s\":%d", text[made], made);
        made++;
    }
    for (int i = 0; i < MERGES; i++) { /* ranks: every seventh, a permutation */
        int of = 2 + i * 7 % MERGES;
        snprintf(merges + strlen(merges), sizeof merges - strlen(merges), "%s[\"%s\",\"%s\"]", i ? "," : "",
                 text[left[of]], text[right[of]]);
    }
    snprintf(json + strlen(json), sizeof json - strlen(json), "},\"merges\":[%s]}}", merges);
    char error[FILE_ERROR] = "";
    tokenizer *t = parse(json, error);
    if (!t) fail_msg("%s", error);
    token_list ids = {0};
    for (int row = 1; row < 600; row++) { /* every short length, then long words */
        int length = row < 130 ? row : 100 + row % 97;
        char word[400];
        int plain[400], count = length;
        for (int i = 0; i < length; i++) {
            random = random * 1664525u + 1013904223u;
            plain[i] = (random >> 24) % 3 == 0;
            word[i] = plain[i] ? 'b' : 'a';
        }
        for (;;) {
            int best = -1, rank = MERGES, product = 0;
            for (int i = 0; i + 1 < count; i++)
                for (int r = 0; r < rank; r++)
                    if (left[2 + r * 7 % MERGES] == plain[i] && right[2 + r * 7 % MERGES] == plain[i + 1])
                        best = i, rank = r, product = 2 + r * 7 % MERGES;
            if (best < 0) break;
            plain[best] = product;
            memmove(plain + best + 1, plain + best + 2, (size_t)(count - best - 2) * sizeof *plain);
            count--;
        }
        for (int again = 0; again < 2; again++) { /* the second time from the cache */
            ids.count = 0;
            assert_true(tokenizer_encode(t, word, (size_t)length, false, &ids, error));
            assert_int_equal(ids.count, count);
            for (int i = 0; i < count; i++)
                assert_int_equal(ids.ids[i], plain[i]);
        }
    }
    token_list_free(&ids);
    tokenizer_free(t);
}

/* More different words than the cache holds: their tokens stay right when it is emptied. */
static void empties_a_full_cache(void **state) {
    (void)state;
    char error[FILE_ERROR], json[1024] = "{\"model\":{\"merges\":[],\"vocab\":{";
    for (int i = 0; i < 10; i++)
        snprintf(json + strlen(json), sizeof json - strlen(json), "%s\"%d\":%d", i ? "," : "", i, i);
    strcat(json, "}}}");
    tokenizer *t = parse(json, error);
    assert_non_null(t);
    token_list ids = {0};
    for (int i = 0; i < 600000; i++) {
        char word[16];
        int length = snprintf(word, sizeof word, "%d", i % 550000);
        ids.count = 0;
        assert_true(tokenizer_encode(t, word, (size_t)length, false, &ids, error));
        assert_int_equal(ids.count, length);
        for (int k = 0; k < length; k++)
            assert_int_equal(ids.ids[k], word[k] - '0');
    }
    token_list_free(&ids);
    tokenizer_free(t);
}

/* ---- Unicode ----------------------------------------------------------------------------------------- */

static void normalizes(void **state) {
    (void)state;
    static const struct {
        const char *text, *normal;
    } rows[] = {
        {"abc", "abc"},
        {"e\xcc\x81", "\xc3\xa9"}, /* e, acute */
        {"xe\xcc\x81y", "x\xc3\xa9y"},
        {"\xe2\x84\xab", "\xc3\x85"},                             /* the angstrom sign */
        {"a\xcc\x87\xcc\xa3", "\xe1\xba\xa1\xcc\x87"},            /* the dot below first, then the one above */
        {"\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"}, /* Hangul: three letters, one syllable */
        {"\xea\xb0\x80\xe1\x86\xa8", "\xea\xb0\x81"},             /* a syllable and its last letter */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},             /* excluded from composition */
        {"\xcc\x81"
         "a",
         "\xcc\x81"
         "a"},                                     /* a mark without a base */
        {"a\xcc\xb4\xcc\x81", "\xc3\xa1\xcc\xb4"}, /* the overlay does not block the acute */
        {"\xe1\xba\x9b\xcc\xa3", "\xe1\xba\x9b\xcc\xa3"},
        {"a\xcc\xbd\xcc\x81", "a\xcc\xbd\xcc\x81"}, /* the x above blocks the acute: both are above */
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        byte_list out = {0};
        assert_true(nfc_normalize(rows[i].text, strlen(rows[i].text), &out));
        if (out.count != strlen(rows[i].normal) || memcmp(out.bytes, rows[i].normal, out.count) != 0)
            fail_msg("row %zu", i);
        byte_list_free(&out);
    }
    /* A long run of marks is sorted, too: 40 dots below and above, in turn. */
    byte_list run = {0}, out = {0};
    assert_true(byte_list_add(&run, "q", 1));
    for (int i = 0; i < 40; i++)
        assert_true(byte_list_add(&run, "\xcc\x87\xcc\xa3", 4));
    assert_true(nfc_normalize(run.bytes, run.count, &out));
    assert_int_equal(out.count, run.count);
    for (int i = 0; i < 80; i++)
        assert_memory_equal(out.bytes + 1 + 2 * i, i < 40 ? "\xcc\xa3" : "\xcc\x87", 2);
    byte_list_free(&run);
    byte_list_free(&out);
}

static void repairs_broken_text(void **state) {
    (void)state;
#define BAD "\xef\xbf\xbd"
    static const struct {
        const char *text, *repaired;
    } rows[] = {
        {"a\xff"
         "b",
         "a" BAD "b"},
        {"\xc3", BAD},
        {"\xe2\x82"
         "x",
         BAD "x"},
        {"\xf0\x9f\x98", BAD},
        {"\xf0\x9f\xff", BAD BAD},
        {"\xed\xa0\x80", BAD BAD BAD},
        {"\xc0\xaf", BAD BAD},
        {"\xf4\x90\x80\x80", BAD BAD BAD BAD},
        {"\xe0\x80\xaf", BAD BAD BAD},
        {"12345678\xc3\xa9"
         "123456789\x80",
         "12345678\xc3\xa9"
         "123456789" BAD},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        byte_list out = {0};
        assert_true(utf8_valid(rows[i].text, strlen(rows[i].text)) < strlen(rows[i].text));
        assert_true(utf8_repair(rows[i].text, strlen(rows[i].text), &out));
        assert_int_equal(out.count, strlen(rows[i].repaired));
        assert_memory_equal(out.bytes, rows[i].repaired, out.count);
        assert_int_equal(utf8_valid(out.bytes, out.count), out.count);
        byte_list_free(&out);
    }
}

/* ---- Expressions ------------------------------------------------------------------------------------- */

static void reads_expressions_as_oniguruma_does(void **state) {
    (void)state;
    static const struct {
        const char *pattern;
        const char *text; /* begins with the match; NULL: the pattern is refused */
        int end;          /* -1: no match at all */
        const char *says;
    } rows[] = {
        {"\\s+", " \t\xc2\xa0x", 4, NULL},
        {"\\s", "\xe1\xa0\x8e", -1, NULL}, /* U+180E, a space for PCRE2 and not for Unicode */
        {"\\S+", "ab c", 2, NULL},
        {"\\w+", "a_1\xcc\x81-", 5, NULL}, /* a mark belongs to a word */
        {"[^\\s\\p{L}]+", "12a", 2, NULL},
        {"\\p{N}{1,3}", "1234", 3, NULL},
        {"(?i:'s)", "'\xc5\xbf", 3, NULL}, /* the long s */
        {".+", "ab\ncd", 2, NULL},
        {"a\\{", "a{", 2, NULL},
        {"^a", NULL, 0, "an anchor"},
        {"a$", NULL, 0, "an anchor"},
        {"\\bx", NULL, 0, "the escape \\b"},
        {"\\h", NULL, 0, "the escape \\h"},
        {"(?m:a)", NULL, 0, "a group of an unknown kind"},
        {"[a[b]]", NULL, 0, "a class inside a class"},
        {"[a&&b]", NULL, 0, "an intersection of classes"},
        {"[a", NULL, 0, "a class without an end"},
        {"a{,3}", NULL, 0, "a brace that is no count"},
        {"a{1,3}+", NULL, 0, "a plus after a count of repeats"},
        {"a\\", NULL, 0, "a backslash at its end"},
        {"\\pL", NULL, 0, "an escape without braces"},
        {"(a", NULL, 0, "is refused"},
        {"\\p{Nothing}", NULL, 0, "is refused"},
    };
    char error[FILE_ERROR] = "";
    pattern *any = pattern_compile("a", error);
    if (!any) {
        assert_non_null(strstr(error, "built without PCRE2"));
        skip();
    }
    pattern_free(any);
    for (size_t i = 0; i < COUNT(rows); i++) {
        pattern *p = pattern_compile(rows[i].pattern, error);
        if (!rows[i].text) {
            if (p || !strstr(error, rows[i].says)) fail_msg("%s: %s", rows[i].pattern, error);
            continue;
        }
        if (!p) fail_msg("%s: %s", rows[i].pattern, error);
        size_t begin = 1, end = 0;
        pattern_result found = pattern_find(p, rows[i].text, strlen(rows[i].text), 0, &begin, &end);
        if (rows[i].end < 0 ? found != PATTERN_NONE
                            : found != PATTERN_FOUND || begin != 0 || end != (size_t)rows[i].end)
            fail_msg("%s: found %d, %zu to %zu", rows[i].pattern, (int)found, begin, end);
        pattern_free(p);
    }
    /* An expression that would backtrack for years is given up. */
    pattern *slow = pattern_compile("(a|aa)+[bd]", error);
    assert_non_null(slow);
    size_t begin, end;
    assert_int_equal(pattern_find(slow, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", 41, 0, &begin, &end),
                     PATTERN_FAILED);
    pattern_free(slow);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_it_cannot_follow),
        cmocka_unit_test(a_word_may_have_no_tokens),
        cmocka_unit_test(gives_tokens_worked_out_by_hand),
        cmocka_unit_test(agrees_with_a_plain_implementation),
        cmocka_unit_test(empties_a_full_cache),
        cmocka_unit_test(normalizes),
        cmocka_unit_test(repairs_broken_text),
        cmocka_unit_test(reads_expressions_as_oniguruma_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
