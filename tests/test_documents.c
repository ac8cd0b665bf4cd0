/* SPDX-License-Identifier: MIT */
/*
 * .jsonl files as training data: the tokens of a line and which of them are trained on; lines that are refused; the
 * cache, whole or made again; rows and their order; and that documents which share a row have the gradients that they
 * have alone.
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
#include <sys/stat.h>

#include "scratch.h"
#include "train/data/jsonl.h"
#include "train/data/packed.h"
#include "train/model/llama.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* Tokens are the special ones, from 0 on, and characters; a tokenizer that needs no regular expressions. */
static model_tokenizer make_tokenizer(const char *const *special, int32_t count) {
    char error[TRAIN_ERROR];
    json_writer w = {0};
    int32_t id = 0;
    json_put_object(&w, NULL);
    json_put_array(&w, "added_tokens");
    for (; id < count; id++) {
        json_put_object(&w, NULL);
        json_put_integer(&w, "id", id);
        json_put_text(&w, "content", special[id]);
        json_put_boolean(&w, "special", true);
        json_put_object_end(&w);
    }
    json_put_array_end(&w);
    json_put_object(&w, "decoder");
    json_put_text(&w, "type", "Fuse");
    json_put_object_end(&w);
    json_put_object(&w, "model");
    json_put_text(&w, "type", "BPE");
    json_put_object(&w, "vocab");
    json_put_integer(&w, "\n", id++);
    json_put_integer(&w, "\xc3\xa9", id++);
    for (char c = ' '; c < 127; c++)
        json_put_integer(&w, (const char[]){c, 0}, id++);
    json_put_object_end(&w);
    json_put_array(&w, "merges");
    json_put_array_end(&w);
    json_put_object_end(&w);
    json_put_object_end(&w);
    model_tokenizer t = {.begin = -1, .end = 0, .json = json_take(&w)};
    assert_non_null(t.json);
    t.tokens = tokenizer_parse(t.json, strlen(t.json), error);
    if (!t.tokens) fail_msg("%s", error);
    return t;
}

static model_tokenizer chatml(void) {
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    return make_tokenizer(special, 3);
}

static model_tokenizer llama3(void) {
    static const char *const special[] = {"<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>",
                                          "<|end_header_id|>", "<|eot_id|>"};
    return make_tokenizer(special, 5);
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* The text of a document; what is trained on is in brackets. */
static char *show(const model_tokenizer *t, const document *d) {
    byte_list text = {0};
    char error[TRAIN_ERROR];
    bool inside = false;
    for (size_t i = 0; i < d->tokens.count; i++) {
        int32_t word = d->tokens.ids[i], id = word & DOCUMENT_TOKEN;
        bool trained = !(word & DOCUMENT_GIVEN);
        assert_int_equal((word & DOCUMENT_BEGINS) != 0, i == 0);
        if (trained != inside) assert_true(byte_list_add(&text, trained ? "[" : "]", 1));
        inside = trained;
        char byte = (char)id;
        if (t->tokens)
            assert_true(tokenizer_decode(t->tokens, &id, 1, true, &text, error));
        else
            assert_true(byte_list_add(&text, &byte, 1));
    }
    assert_true(byte_list_add(&text, inside ? "]" : "", 2 - !inside));
    return text.bytes;
}

static const struct {
    int kind; /* 0: bytes, 1: ChatML, 2: Llama 3 */
    const char *line, *shown;
    bool whole;
} good[] = {
    {0, "{\"text\": \"one\\ntwo\"}", "[one\ntwo]", false},
    {1, "{\"text\": \"one\"}", "[one<|endoftext|>]", false},
    {1, "  {\"id\": [1, {}], \"text\": \"\\u00e9\"} \r", "[\xc3\xa9<|endoftext|>]", false},
    {0, "{\"prompt\": \"2+2=\", \"completion\": \"4\"}", "2+2=[4]", true},
    {1, "{\"prompt\": \"2+2=\", \"completion\": \"4\"}", "2+2=[4<|endoftext|>]", true},
    {1, "{\"completion\": \"\", \"prompt\": \"2+2=\"}", "2+2=[<|endoftext|>]", true},
    {1, "{\"messages\": [{\"role\": \"user\", \"content\": \" Hi \"}, {\"role\": \"assistant\", \"content\": \"Ho\"}]}",
     "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Ho<|im_end|>]", true},
    {1,
     "{\"messages\": [{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": \"a\"}, {\"role\": "
     "\"assistant\", \"content\": \"b\", \"n\": 1}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": "
     "\"assistant\", \"content\": \"d\"}, {\"role\": \"user\", \"content\": \"e\"}]}",
     "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
     "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]",
     true},
    {2, "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Ho\"}]}",
     "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
     "<|end_header_id|>\n\n[Ho<|eot_id|>]",
     true},
};

static void good_lines(void **unused) {
    (void)unused;
    model_tokenizer kinds[] = {{.begin = -1, .end = -1}, chatml(), llama3()};
    document d = {0};
    for (size_t i = 0; i < COUNT(good); i++) {
        char error[TRAIN_ERROR];
        const model_tokenizer *t = &kinds[good[i].kind];
        if (!document_encode(t, good[i].line, strlen(good[i].line), &d, error)) fail_msg("%zu: %s", i, error);
        char *text = show(t, &d);
        assert_string_equal(text, good[i].shown);
        assert_int_equal(d.whole, good[i].whole);
        free(text);
    }
    document_free(&d);
    for (size_t i = 0; i < COUNT(kinds); i++)
        model_tokenizer_free(&kinds[i]);
}

#define LINE(text) text, sizeof(text) - 1

static const struct {
    int kind;
    const char *line;
    size_t length;
    const char *says;
} bad[] = {
    {0, LINE("{"), "it ends at byte 1"},
    {0, LINE("x"), "at byte 0"},
    {0, LINE("[]"), "it is []; it must be an object"},
    {0, LINE("\"text\""), "it must be an object"},
    {0, LINE("{\"text\": \"a\"} {}"), "byte 14"},
    {0, LINE("{\"text\": \"a\" \0}"), "byte 13"},
    {0, LINE("{\"text\": \"a\\u0000\"}"), "byte"},
    {0, LINE("{\"text\": \"\xff\"}"), "byte 10"},
    {0, LINE("{\"text\": \"\\ud800\"}"), "byte"},
    {0, LINE("{\"text\": \"a\", \"text\": \"b\"}"), "\"text\""},
    {0, LINE("{}"), "it has none of \"text\", \"messages\" and \"prompt\" with \"completion\""},
    {0, LINE("{\"txt\": \"a\"}"), "it has none of"},
    {0, LINE("{\"text\": null}"), "\"text\" is null; it must be a text"},
    {0, LINE("{\"text\": [\"a\"]}"), "\"text\" is [...]; it must be a text"},
    {0, LINE("{\"text\": \"\"}"), "there is nothing in it to train on"},
    {0, LINE("{\"text\": \"a\"}"), "there is nothing in it to train on"},
    {1, LINE("{\"text\": \"\"}"), "there is nothing in it to train on"},
    {0, LINE("{\"text\": \"ab\", \"prompt\": \"a\"}"), "more than one of"},
    {0, LINE("{\"prompt\": \"a\"}"), "\"completion\" is missing"},
    {0, LINE("{\"completion\": \"a\"}"), "\"prompt\" is missing"},
    {0, LINE("{\"prompt\": \"a\", \"completion\": 4}"), "\"completion\" is 4; it must be a text"},
    {0, LINE("{\"prompt\": \"abc\", \"completion\": \"\"}"), "there is nothing in it to train on"},
    {0, LINE("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"), "no chat template that vjp knows"},
    {1, LINE("{\"messages\": []}"), "\"messages\" is []; it must be a list of messages"},
    {1, LINE("{\"messages\": {\"role\": \"user\"}}"), "\"messages\" is {...}; it must be a list"},
    {1, LINE("{\"messages\": [\"a\"]}"), "message 1 is \"a\"; it must be an object"},
    {1, LINE("{\"messages\": [{\"role\": \"user\"}]}"), "message 1: \"content\" is missing"},
    {1, LINE("{\"messages\": [{\"content\": \"a\"}]}"), "message 1: \"role\" is missing"},
    {1,
     LINE("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": null}]}"),
     "message 2: \"content\" is null; it must be a text"},
    {1, LINE("{\"messages\": [{\"role\": \"bot\", \"content\": \"a\"}]}"),
     "message 1: \"role\" is \"bot\"; it must be system, user or assistant"},
    {1, LINE("{\"messages\": [{\"role\": 7, \"content\": \"a\"}]}"), "message 1: \"role\" is 7; it must be a text"},
    {1, LINE("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"), "there is nothing in it to train on"},
};

static void bad_lines(void **unused) {
    (void)unused;
    model_tokenizer kinds[] = {{.begin = -1, .end = -1}, chatml()};
    document d = {0};
    char error[TRAIN_ERROR];
    for (size_t i = 0; i < COUNT(bad); i++) {
        if (document_encode(&kinds[bad[i].kind], bad[i].line, bad[i].length, &d, error)) fail_msg("%s", bad[i].line);
        if (!strstr(error, bad[i].says)) fail_msg("line %zu, %s: %s", i, bad[i].line, error);
    }
    char *deep = malloc(200000);
    memset(deep, '[', 200000);
    assert_false(document_encode(&kinds[0], deep, 200000, &d, error));
    free(deep);
    document_free(&d);
    model_tokenizer_free(&kinds[1]);
}

/* ---- The cache --------------------------------------------------------------------------------------- */

static const model_tokenizer bytes = {.begin = -1, .end = -1};

static jsonl_result open_set(const char *name, bool skip_bad) {
    char error[TRAIN_ERROR];
    jsonl_result result;
    if (!jsonl_open(path_of(name), &bytes, &(jsonl_options){.skip_bad = skip_bad}, &result, error))
        fail_msg("%s", error);
    return result;
}

static void expect_refused(const char *name, bool skip_bad, const char *says) {
    char error[TRAIN_ERROR];
    jsonl_result result;
    assert_false(jsonl_open(path_of(name), &bytes, &(jsonl_options){.skip_bad = skip_bad}, &result, error));
    if (!strstr(error, says)) fail_msg("%s", error);
    assert_null(result.tokens.map);
}

/* The one file of tokens in the folder of the cache. */
static const char *cache_file(void) {
    static char found[256];
    char command[256];
    snprintf(command, sizeof command, "ls %s/.vjp-cache/*.tokens", scratch);
    FILE *list = popen(command, "r");
    assert_non_null(list);
    assert_non_null(fgets(found, sizeof found, list));
    found[strcspn(found, "\n")] = 0;
    pclose(list);
    return found;
}

static void sets_of_files(void **unused) {
    (void)unused;
    static const char lines[] = "{\"text\": \"abc\"}\n\n \t\r\n{\"prompt\": \"x\", \"completion\": \"yz\"}";
    write_file("a.jsonl", lines, sizeof lines - 1);
    assert_true(jsonl_is_set(path_of("a.jsonl")) && jsonl_is_set(scratch));
    assert_false(jsonl_is_set(path_of("a.txt")) || jsonl_is_set("/"));
    jsonl_result r = open_set("a.jsonl", false);
    assert_true(r.made && r.files == 1 && r.tokens.has.documents == 2 && r.tokens.has.tokens == 6);
    static const int32_t wanted[] = {'a' | DOCUMENT_BEGINS, 'b', 'c', 'x' | DOCUMENT_BEGINS | DOCUMENT_GIVEN, 'y', 'z'};
    assert_memory_equal(r.tokens.token, wanted, sizeof wanted);
    assert_true(r.tokens.end[0] == 3 && r.tokens.end[1] == (6 | TOKEN_CACHE_WHOLE));
    uint64_t content = r.tokens.has.content;
    token_cache_close(&r.tokens);
    r = open_set("a.jsonl", false);
    assert_true(!r.made && r.tokens.has.content == content);
    token_cache_close(&r.tokens);

    /* Damaged in any way it is made again, and other data make another one. */
    char file[256];
    snprintf(file, sizeof file, "%s", cache_file());
    struct stat about;
    assert_int_equal(stat(file, &about), 0);
    assert_int_equal(truncate(file, about.st_size - 1), 0);
    r = open_set("a.jsonl", false);
    assert_true(r.made && r.tokens.has.content == content);
    token_cache_close(&r.tokens);
    for (long at = 0; at < 64; at += 8) { /* the header */
        FILE *stream = fopen(file, "r+b");
        assert_int_equal(fseek(stream, at, SEEK_SET), 0);
        int c = getc(stream);
        assert_int_equal(fseek(stream, at, SEEK_SET), 0);
        putc(c ^ 1, stream);
        fclose(stream);
        r = open_set("a.jsonl", false);
        if (!r.made || r.tokens.has.content != content) fail_msg("byte %ld of the header is not checked", at);
        token_cache_close(&r.tokens);
    }
    FILE *stream = fopen(file, "r+b");
    assert_int_equal(fseek(stream, -8, SEEK_END), 0);
    putc(99, stream); /* the end of the last document */
    fclose(stream);
    r = open_set("a.jsonl", false);
    assert_true(r.made && r.tokens.has.content == content);
    token_cache_close(&r.tokens);

    write_file("b.jsonl", "{\"text\": \"hello\"}\n", 18);
    r = open_set("", false);
    assert_true(r.made && r.files == 2 && r.tokens.has.documents == 3 && r.tokens.has.content != content);
    token_cache_close(&r.tokens);
    assert_int_equal(remove(path_of("b.jsonl")), 0);
}

static void bad_sets(void **unused) {
    (void)unused;
    static const char lines[] = "{\"text\": \"abc\"}\n{\"text\": \"abc\"\n{\"text\": \"def\"}\n{\"no\": 1}\n";
    expect_refused("missing.jsonl", false, "missing.jsonl: it cannot be opened");
    write_file("c.jsonl", "", 0);
    expect_refused("c.jsonl", false, "c.jsonl: there is no document in it");
    write_file("c.jsonl", "{}\n", 3);
    expect_refused("c.jsonl", true, "c.jsonl: there is no document in it: every line was skipped");
    write_file("c.jsonl", lines, sizeof lines - 1);
    expect_refused("c.jsonl", false, "c.jsonl: line 2: it ");
    jsonl_result r = open_set("c.jsonl", true);
    assert_true(r.tokens.has.documents == 2 && r.tokens.has.bad == 2);
    assert_non_null(strstr(r.first_bad, "c.jsonl: line 2: "));
    token_cache_close(&r.tokens);
    r = open_set("c.jsonl", true);
    assert_true(!r.made && r.tokens.has.bad == 2 && !r.first_bad[0]);
    token_cache_close(&r.tokens);

    /* A line that is longer than any text may be is not held in memory. */
    FILE *file = fopen(path_of("c.jsonl"), "wb");
    for (int i = 0; i < JSON_MAX_BYTES + 100000; i++)
        putc(i == 0 ? '"' : 'x', file);
    fputs("\"\n{\"text\": \"after\"}\n", file);
    fclose(file);
    expect_refused("c.jsonl", false, "c.jsonl: line 1: ");
    r = open_set("c.jsonl", true);
    assert_true(r.tokens.has.documents == 1 && r.tokens.has.bad == 1);
    token_cache_close(&r.tokens);
    assert_int_equal(remove(path_of("c.jsonl")), 0);
}

/* ---- Rows -------------------------------------------------------------------------------------------- */

/* A cache in memory: documents of so many tokens, negative for one with an answer, of which `given` are given. */
typedef struct made_cache {
    token_cache cache;
    int32_t token[512];
    uint64_t end[64];
} made_cache;

static void make_cache(made_cache *m, const int *length, size_t count, int given) {
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        for (int k = 0; k < abs(length[i]); k++, at++)
            m->token[at] =
                (int32_t)(at % 250) | (k ? 0 : DOCUMENT_BEGINS) | (length[i] < 0 && k < given ? DOCUMENT_GIVEN : 0);
        m->end[i] = at | (length[i] < 0 ? TOKEN_CACHE_WHOLE : 0);
    }
    m->cache = (token_cache){.has = {.tokens = at, .documents = count}, .token = m->token, .end = m->end};
}

static const struct {
    int length[5];
    int given;
    bool pack;
    const char *rows; /* of 8 places: the first token of each document in a row, and how many places it has */
    int split, unusable;
} plans[] = {
    {{4, 5, 6}, 0, true, "0+3 4+4 9+1|10+4", 0, 0}, {{4, 5, 6}, 0, false, "0+3|4+4|9+5", 0, 0},
    {{-4, -5, -6}, 1, true, "0+3 4+4|9+5", 0, 0},   {{-4, -7, -3}, 1, true, "0+3|4+6 11+2", 0, 0},
    {{-9, -9}, 1, true, "0+8|9+8", 0, 0},           {{20}, 0, true, "0+8|8+8|16+3", 0, 0},
    {{20}, 0, false, "0+8|8+8|16+3", 0, 0},         {{-20, 4}, 1, true, "0+8|8+8|16+3 20+3", 1, 0},
    {{-20, 4}, 10, true, "8+8|16+3 20+3", 1, 1},    {{-20, 4}, 18, false, "16+3|20+3", 1, 2},
};

static void rows_of_documents(void **unused) {
    (void)unused;
    enum { CONTEXT = 8 };
    static made_cache m;
    for (size_t i = 0; i < COUNT(plans); i++) {
        char error[TRAIN_ERROR], text[256] = "";
        packed_data d;
        size_t count = 0;
        while (count < 5 && plans[i].length[count])
            count++;
        make_cache(&m, plans[i].length, count, plans[i].given);
        if (!packed_plan(&d, &m.cache, CONTEXT, true, error)) fail_msg("%s", error); /* to have `first` */
        bool masks = plans[i].pack;
        packed_free(&d);
        if (!packed_plan(&d, &m.cache, CONTEXT, masks, error)) fail_msg("%s", error);
        d.masks = true;
        assert_true(d.split == plans[i].split && d.unusable == plans[i].unusable);
        train_source source;
        packed_source(&d, 1, 1, 1, &source);
        /* Rows as the cache has them, not in the order of the training: the batch whose row is the next. */
        for (int64_t row = 0; row < d.count; row++)
            for (uint64_t part = 0; part < (uint64_t)d.trained; part++) {
                int32_t input[CONTEXT], target[2 * CONTEXT], *first = target + CONTEXT;
                if ((int64_t)packed_permute(part, (uint64_t)d.trained, 1, 0) != row) continue;
                source.fill(source.context, false, part, input, target);
                if (row) strcat(text, "|");
                for (int at = 0, size; at < CONTEXT; at += size) {
                    for (size = 1; at + size < CONTEXT && first[at + size] == at; size++)
                        ;
                    if (target[at] == -100 && input[at] == 0 && at) continue;
                    snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d+%d", at ? " " : "", input[at],
                             size);
                    for (int k = at; k < at + size; k++) {
                        assert_int_equal(first[k], at);
                        bool given = m.token[input[k] + 1] & DOCUMENT_GIVEN;
                        assert_int_equal(input[k], input[at] + k - at);
                        assert_int_equal(target[k], given ? -100 : input[k] + 1);
                    }
                }
            }
        if (strcmp(text, plans[i].rows) != 0) fail_msg("plan %zu: %s instead of %s", i, text, plans[i].rows);
        packed_free(&d);
    }
}

/* Every epoch has every row once, no two epochs or seeds have the same order, and shards change nothing. */
static void orders(void **unused) {
    (void)unused;
    for (uint64_t count = 1; count < 70; count++) {
        uint64_t other = 0;
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            bool seen[70] = {0};
            for (uint64_t i = 0; i < count; i++) {
                uint64_t at = packed_permute(i, count, 5, epoch);
                assert_true(at < count && !seen[at]);
                seen[at] = true;
                other += at != packed_permute(i, count, 6, epoch) && at != packed_permute(i, count, 5, epoch + 1);
            }
        }
        if (count > 20) assert_true(other > count);
    }
    uint64_t large = packed_permute(12345, (uint64_t)1 << 40, 1, 0);
    assert_true(large < (uint64_t)1 << 40 && large > 1 << 20);

    enum { CONTEXT = 4, BATCH = 4, ROWS = 45 };
    static made_cache m;
    int length[ROWS];
    for (int i = 0; i < ROWS; i++)
        length[i] = CONTEXT + 1;
    make_cache(&m, length, ROWS, 0);
    char error[TRAIN_ERROR];
    packed_data d;
    assert_true(packed_plan(&d, &m.cache, CONTEXT, true, error));
    assert_true(d.count == ROWS && d.trained == ROWS - 2);
    bool trained[ROWS] = {0};
    for (uint64_t batch = 0; batch < 20; batch++) {
        int32_t whole[BATCH * CONTEXT], part[BATCH * CONTEXT], target[2 * BATCH * CONTEXT];
        train_source source;
        packed_source(&d, BATCH, 1, 9, &source);
        source.fill(source.context, false, batch, whole, target);
        for (int row = 0; row < BATCH; row++)
            trained[whole[row * CONTEXT] / (CONTEXT + 1)] = true;
        for (int64_t shards = 2; shards <= BATCH; shards *= 2) {
            packed_source(&d, BATCH, shards, 9, &source);
            for (int64_t shard = 0; shard < shards; shard++) {
                int64_t size = BATCH / shards * CONTEXT;
                source.fill(source.context, false, batch * (uint64_t)shards + (uint64_t)shard, part + shard * size,
                            target);
            }
            assert_memory_equal(part, whole, sizeof whole);
        }
    }
    for (int row = 0; row < ROWS; row++)
        assert_int_equal(trained[row], row % 20 != 19);
    train_source source;
    packed_source(&d, 1, 1, 9, &source);
    assert_int_equal(source.validation_parts, 2);
    for (uint64_t part = 0; part < 2; part++) {
        int32_t input[CONTEXT], target[2 * CONTEXT];
        source.fill(source.context, true, part, input, target);
        assert_int_equal(input[0] / (CONTEXT + 1), 20 * part + 19);
    }
    packed_free(&d);
}

/* ---- Gradients --------------------------------------------------------------------------------------- */

enum { PLACES = 24, DOCUMENTS = 4, PARAMETERS = 64 };

typedef struct gradients {
    double loss;
    float *data[PARAMETERS];
    size_t bytes[PARAMETERS];
    int count;
} gradients;

/* The loss of a row and its gradients, of a small model with the same weights every time. */
static gradients differentiate(const int32_t *input, const int32_t *target, const int32_t *first) {
    const llama_config config = {.vocab_size = 40,
                                 .hidden_size = 16,
                                 .intermediate_size = 24,
                                 .layers = 2,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 4,
                                 .max_positions = PLACES,
                                 .norm_eps = 1e-5,
                                 .rope_theta = 10000};
    train_model model;
    vjp_device *device;
    vjp_program *program;
    llama_build(&model, &config,
                &(llama_options){.batch = 1, .context = PLACES, .dtype = VJP_F64, .masks = first != NULL});
    gradients g = {.count = model.parameters};
    vjp_value wrt[PARAMETERS], results[PARAMETERS + 1];
    assert_true(g.count < PARAMETERS);
    for (int i = 0; i < g.count; i++)
        wrt[i] = model.parameter[i].value;
    vjp_graph_grad(model.graph, model.loss, wrt, (size_t)g.count, NULL, 0, results);
    results[g.count] = model.loss;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    if (vjp_compile(device, model.graph, results, (size_t)g.count + 1, NULL, &program) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    for (int i = 0; i < g.count; i++)
        assert_int_equal(vjp_program_init_normal(program, wrt[i], model.parameter[i].centre, 0.3, 7), VJP_OK);
    size_t size = PLACES * sizeof *input;
    assert_int_equal(vjp_program_write(program, model.input, input, size), VJP_OK);
    assert_int_equal(vjp_program_write(program, model.target, target, size), VJP_OK);
    if (first) assert_int_equal(vjp_program_write(program, model.first, first, size), VJP_OK);
    if (vjp_program_run(program) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_program_read(program, model.loss, &g.loss, sizeof g.loss), VJP_OK);
    for (int i = 0; i < g.count; i++) {
        vjp_tensor at = vjp_graph_describe(model.graph, results[i]);
        g.bytes[i] = vjp_dtype_size((vjp_dtype)at.dtype);
        for (int axis = 0; axis < at.ndim; axis++)
            g.bytes[i] *= (size_t)at.shape[axis];
        g.data[i] = malloc(g.bytes[i]);
        assert_int_equal(vjp_program_read(program, results[i], g.data[i], g.bytes[i]), VJP_OK);
    }
    vjp_program_destroy(program);
    model_free(&model);
    vjp_close(device);
    return g;
}

/* Sum of (one - other)^2 and of other^2 over all gradients, in f64; `one` is of a row, `other` a weighted sum. */
static double distance(const gradients *one, const gradients *other, const double *share, int count) {
    double difference = 0, norm = 0;
    for (int i = 0; i < one->count; i++)
        for (size_t k = 0; k < one->bytes[i] / sizeof(double); k++) {
            double sum = 0, d;
            for (int n = 0; n < count; n++)
                sum += share[n] * ((const double *)(const void *)other[n].data[i])[k];
            d = ((const double *)(const void *)one->data[i])[k] - sum;
            difference += d * d;
            norm += sum * sum;
        }
    return sqrt(difference / norm);
}

static void free_gradients(gradients *g) {
    for (int i = 0; i < g->count; i++)
        free(g->data[i]);
}

static void packed_is_alone(void **unused) {
    (void)unused;
    static const int length[DOCUMENTS] = {6, -9, 3, -7};
    static made_cache m;
    char error[TRAIN_ERROR];
    packed_data d;
    train_source source;
    make_cache(&m, length, DOCUMENTS, 4);
    for (uint64_t i = 0; i < m.cache.has.tokens; i++)
        m.token[i] = (m.token[i] & ~DOCUMENT_TOKEN) | (int32_t)((i * i + 7) % 40);
    int32_t input[PLACES], target[2 * PLACES];
    assert_true(packed_plan(&d, &m.cache, PLACES, true, error));
    assert_int_equal(d.count, 1);
    packed_source(&d, 1, 1, 1, &source);
    source.fill(source.context, false, 0, input, target);
    gradients packed = differentiate(input, target, target + PLACES), open = differentiate(input, target, NULL);
    packed_free(&d);

    gradients alone[DOCUMENTS];
    double share[DOCUMENTS], loss = 0, targets = 0;
    assert_true(packed_plan(&d, &m.cache, PLACES, false, error));
    assert_int_equal(d.count, DOCUMENTS);
    packed_source(&d, 1, 1, 1, &source);
    for (int i = 0; i < DOCUMENTS; i++) {
        source.fill(source.context, false, (uint64_t)i, input, target);
        alone[i] = differentiate(input, target, NULL);
        share[i] = 0;
        for (int k = 0; k < PLACES; k++)
            share[i] += target[k] >= 0;
        targets += share[i];
    }
    for (int i = 0; i < DOCUMENTS; i++)
        loss += (share[i] /= targets) * alone[i].loss;
    assert_int_equal(targets, 5 + 5 + 2 + 3);
    /* Positions of the rotations differ, and with them the last bits. */
    if (!(fabs(loss / packed.loss - 1) < 1e-6)) fail_msg("losses %.17g and %.17g", loss, packed.loss);
    double off = distance(&packed, alone, share, DOCUMENTS), crossing = distance(&open, alone, share, DOCUMENTS);
    if (!(off < 1e-6)) fail_msg("the gradients are off by %g", off);
    if (!(crossing > 1e-2)) fail_msg("without the mask they are off by %g only", crossing);
    free_gradients(&packed);
    free_gradients(&open);
    for (int i = 0; i < DOCUMENTS; i++)
        free_gradients(&alone[i]);
    packed_free(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_lines),      cmocka_unit_test(bad_lines),         cmocka_unit_test(sets_of_files),
        cmocka_unit_test(bad_sets),        cmocka_unit_test(rows_of_documents), cmocka_unit_test(orders),
        cmocka_unit_test(packed_is_alone),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
