/* SPDX-License-Identifier: MIT */
/*
 * Generation: the logits of a decoder, which keeps keys and values, against those of the whole graph, bit for bit, for
 * any grouping of the tokens into calls and texts. Draws against the probabilities that the options leave. Texts of
 * a sampler: each as if it were alone, ended where they should be, and shown in whole characters. Chat templates.
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

#include "core/half.h"
#include "core/philox.h"
#include "scratch.h"
#include "text/chat.h"
#include "text/utf8.h"
#include "train/generate/decoder.h"
#include "train/generate/draw.h"
#include "train/generate/sampler.h"
#include "train/model/llama.h"

/* ---- Models with weights from a hash of their names ---------------------------------------------------- */

static float number_of(const char *name, int64_t i) {
    uint32_t hash = 5381;
    for (const char *c = name; *c; c++)
        hash = hash * 33 + (unsigned char)*c;
    vjp_philox words = vjp_philox4x32_10((vjp_philox){{(uint32_t)i, hash, 0, 0}}, 7, 0);
    float uniform = (float)words.word[0] * 0x1p-32f - 0.5f;
    return strstr(name, "norm") ? 1 + 0.2f * uniform : 0.5f * uniform;
}

static int64_t count_of(const vjp_tensor *t) {
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++)
        count *= t->shape[i];
    return count;
}

static bool load_hash(void *context, const char *name, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]) {
    (void)context, (void)error;
    for (int64_t i = 0; i < count_of(want); i++) {
        float x = number_of(name, i);
        if (want->dtype == VJP_F32)
            ((float *)to)[i] = x;
        else
            ((uint16_t *)to)[i] = want->dtype == VJP_BF16 ? vjp_f32_to_bf16(x) : vjp_f32_to_f16(x);
    }
    return true;
}

typedef struct shape {
    const char *about;
    vjp_dtype dtype;
    int64_t context, hidden, inner, heads, kv_heads, head_dim, vocabulary;
    bool tied, gemma;
    const char *products; /* as in vjp_options */
} shape;

static void build(train_model *model, const shape *s) {
    llama_config config = {.vocab_size = s->vocabulary,
                           .hidden_size = s->hidden,
                           .intermediate_size = s->inner,
                           .layers = 2,
                           .heads = s->heads,
                           .kv_heads = s->kv_heads,
                           .head_dim = s->head_dim,
                           .max_positions = s->context,
                           .rope_theta = 10000,
                           .norm_eps = 1e-5,
                           .tied = s->tied,
                           .dtype = s->dtype};
    const llama_options options = {.batch = 1, .context = s->context, .dtype = s->dtype};
    if (s->gemma) {
        config.gemma = config.head_norms = true;
        config.window = 9;
        config.windowed[0] = 1; /* the first layer, with a rotation of its own */
        config.local_theta = 100;
        config.query_scalar = 20;
    }
    llama_build(model, &config, &options);
}

static vjp_device *open_fixed(int threads, const char *products) {
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    vjp_device *device;
    options.threads = threads;
    options.fixed_rows = 1;
    options.matrix_products = products;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    return device;
}

static int32_t token_at(int64_t text, int64_t i, int64_t vocabulary) {
    return (int32_t)(vjp_philox4x32_10((vjp_philox){{(uint32_t)i, (uint32_t)text, 1, 0}}, 3, 0).word[0] %
                     (uint32_t)vocabulary);
}

/* The logits of a whole text by the compiled graph, as f32. */
static float *whole_logits(vjp_device *device, const shape *s, int64_t text) {
    train_model model;
    build(&model, s);
    vjp_program *program;
    assert_int_equal(vjp_compile(device, model.graph, &model.logits, 1, NULL, &program), VJP_OK);
    for (int p = 0; p < model.parameters; p++) {
        vjp_tensor own = vjp_graph_describe(model.graph, model.parameter[p].value);
        size_t bytes = (size_t)count_of(&own) * sizeof(float);
        float *numbers = malloc(bytes);
        load_hash(NULL, model.parameter[p].name, &own, numbers, NULL);
        assert_int_equal(vjp_program_write(program, model.parameter[p].value, numbers, bytes), VJP_OK);
        free(numbers);
    }
    int32_t *tokens = malloc((size_t)s->context * sizeof *tokens);
    for (int64_t i = 0; i < s->context; i++)
        tokens[i] = token_at(text, i, s->vocabulary);
    int64_t count = s->context * s->vocabulary;
    size_t bytes = (size_t)count * vjp_dtype_size(s->dtype);
    float *logits = malloc((size_t)count * sizeof *logits);
    char *raw = malloc(bytes);
    assert_int_equal(vjp_program_write(program, model.input, tokens, (size_t)s->context * sizeof *tokens), VJP_OK);
    assert_int_equal(vjp_program_run(program), VJP_OK);
    assert_int_equal(vjp_program_read(program, model.logits, raw, bytes), VJP_OK);
    for (int64_t i = 0; i < count; i++)
        logits[i] = s->dtype == VJP_F32    ? ((float *)(void *)raw)[i]
                    : s->dtype == VJP_BF16 ? vjp_bf16_to_f32(((uint16_t *)(void *)raw)[i])
                                           : vjp_f16_to_f32(((uint16_t *)(void *)raw)[i]);
    free(raw);
    free(tokens);
    vjp_program_destroy(program);
    model_free(&model);
    return logits;
}

static void assert_same_bits(const char *about, int64_t at, const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: logit %lld after token %lld is %.9g with the cache and %.9g without", about, (long long)i,
                     (long long)at, (double)a[i], (double)b[i]);
}

/* ---- Logits ------------------------------------------------------------------------------------------ */

/* Products of 16 bits have an engine of their own from 32 rows on; those of 4096 terms are split along K up to 1920. */
static const shape shapes[] = {
    {"f32", VJP_F32, 150, 64, 96, 4, 2, 16, 71, true, false, NULL},
    {"f32, K split", VJP_F32, 1930, 48, 4200, 3, 1, 16, 40, false, false, NULL},
    {"bf16", VJP_BF16, 150, 64, 96, 4, 2, 16, 71, false, false, NULL},
    {"bf16, K split", VJP_BF16, 1930, 64, 4160, 4, 4, 16, 64, true, false, NULL},
    {"bf16, odd sizes", VJP_BF16, 70, 72, 333, 3, 3, 24, 129, false, false, NULL},
    {"f16", VJP_F16, 70, 64, 96, 4, 1, 16, 71, true, false, NULL},
    {"Gemma, f32", VJP_F32, 70, 64, 96, 4, 2, 16, 71, true, true, NULL},
    {"Gemma, bf16", VJP_BF16, 70, 64, 96, 4, 1, 16, 71, false, true, NULL},
    {"bf16, by FMA of f32", VJP_BF16, 150, 64, 96, 4, 2, 16, 71, false, false, "builtin"},
    {"bf16, by FMA of f32, odd sizes", VJP_BF16, 70, 76, 333, 3, 3, 24, 129, false, false, "builtin"},
};

enum { SHAPES = sizeof shapes / sizeof shapes[0], TEXTS = 3, MAX_STEPS = 120 };

/* A prompt in one call, then token by token; prompts of several lengths; several texts in one step. */
static void test_bits(void **unused) {
    (void)unused;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (strlen(VJP_SANITIZE) > 0 && s->context > 1000) continue; /* they take minutes */
        char error[TRAIN_ERROR] = "";
        vjp_device *device = open_fixed(2, s->products);
        float *whole[TEXTS], *logits = malloc((size_t)(s->context * s->vocabulary) * sizeof *logits);
        for (int t = 0; t < TEXTS; t++)
            whole[t] = whole_logits(device, s, t);
        train_model model;
        build(&model, s);
        decoder *d =
            decoder_open(device, &model, &(decoder_options){.texts = TEXTS, .rows = 33}, load_hash, NULL, error);
        if (!d) fail_msg("%s: %s", s->about, error);
        const int64_t prompt[TEXTS] = {1, 35, 7};
        int32_t *tokens = malloc((size_t)s->context * sizeof *tokens);
        for (int64_t t = 0; t < TEXTS; t++) {
            for (int64_t k = 0; k < s->context; k++)
                tokens[k] = token_at(t, k, s->vocabulary);
            assert_true(decoder_append(d, t, tokens, prompt[t], logits, error));
            assert_same_bits(s->about, prompt[t] - 1, logits, whole[t] + (prompt[t] - 1) * s->vocabulary,
                             s->vocabulary);
        }
        int64_t longest = 35;
        for (int64_t step = 0; step < MAX_STEPS && longest + step < s->context; step++) {
            int64_t texts[TEXTS], count = 0;
            int32_t next[TEXTS];
            for (int64_t t = TEXTS - 1; t >= 0; t--)
                if (step % 3 != t) { /* not all texts take part in each step */
                    next[count] = token_at(t, decoder_length(d, t), s->vocabulary);
                    texts[count++] = t;
                }
            assert_true(decoder_step(d, texts, next, count, logits, error));
            for (int64_t t = 0; t < count; t++) {
                int64_t at = decoder_length(d, texts[t]) - 1;
                assert_same_bits(s->about, at, logits + t * s->vocabulary, whole[texts[t]] + at * s->vocabulary,
                                 s->vocabulary);
            }
        }
        decoder_close(d);
        /* Every logit of one text, in chunks of 32 rows and more. */
        d = decoder_open(device, &model, &(decoder_options){.texts = 1, .rows = 33, .all_logits = true}, load_hash,
                         NULL, error);
        assert_non_null(d);
        for (int64_t k = 0; k < s->context; k++)
            tokens[k] = token_at(0, k, s->vocabulary);
        assert_true(decoder_append(d, 0, tokens, s->context, logits, error));
        for (int64_t k = 0; k < s->context; k++)
            assert_same_bits(s->about, k, logits + k * s->vocabulary, whole[0] + k * s->vocabulary, s->vocabulary);
        /* A full context is refused, and a text that was forgotten begins again. */
        assert_false(decoder_append(d, 0, tokens, 1, logits, error));
        assert_non_null(strstr(error, "context"));
        assert_int_equal(decoder_length(d, 0), s->context);
        decoder_clear(d, 0);
        assert_true(decoder_append(d, 0, tokens, 2, logits, error));
        assert_same_bits(s->about, 1, logits + s->vocabulary, whole[0] + s->vocabulary, s->vocabulary);
        decoder_close(d);
        model_free(&model);
        free(tokens);
        free(logits);
        for (int t = 0; t < TEXTS; t++)
            free(whole[t]);
        vjp_close(device);
    }
}

static bool must_not_load(void *context, const char *name, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]) {
    (void)context, (void)want, (void)to, (void)error;
    fail_msg("%s is loaded, of a model that does not fit", name);
    return false;
}

/* 6 TiB of weights are refused before any is read. */
static void a_model_that_does_not_fit(void **unused) {
    (void)unused;
    const shape s = {"large", VJP_F32, 8, 1 << 19, 1 << 19, 4, 2, 16, 71, true, false, NULL};
    char error[TRAIN_ERROR] = "";
    train_model model;
    build(&model, &s);
    vjp_device *device = open_fixed(1, NULL);
    assert_null(decoder_open(device, &model, &(decoder_options){.texts = 1, .rows = 1}, must_not_load, NULL, error));
    if (!strstr(error, "sampling this model needs 614")) fail_msg("%s", error);
    model_free(&model);
    vjp_close(device);
}

/* ---- Draws ------------------------------------------------------------------------------------------- */

enum { CHOICES = 6 };
static const float logits[CHOICES] = {0.5f, -1, 2, 1.5f, -30, 1};

static void count_draws(const draw_options *options, int draws, double share[CHOICES]) {
    draw_candidate candidates[CHOICES];
    memset(share, 0, sizeof *share * CHOICES);
    for (int i = 0; i < draws; i++) {
        int byte = draw_token(logits, CHOICES, options, (uint64_t)i, candidates);
        assert_in_range(byte, 0, CHOICES - 1);
        assert_int_equal(byte, draw_token(logits, CHOICES, options, (uint64_t)i, candidates));
        share[byte] += 1.0 / draws;
    }
}

static void the_likeliest_is_drawn(void **unused) {
    (void)unused;
    double share[CHOICES];
    count_draws(&(draw_options){.temperature = 0}, 50, share);
    assert_true(share[2] > 0.999);
    count_draws(&(draw_options){.temperature = 5, .top_k = 1}, 50, share);
    assert_true(share[2] > 0.999);
    /* Of equals, the first. */
    static const float equal[3] = {1, 1, 1};
    draw_candidate candidates[3];
    assert_int_equal(draw_token(equal, 3, &(draw_options){.temperature = 0}, 9, candidates), 0);
}

/* How often each comes is the softmax of logits / temperature over those that take part. */
static void draws_follow_the_softmax(void **unused) {
    (void)unused;
    enum { DRAWS = 40000 };
    static const struct {
        double temperature;
        int64_t top_k;
        bool in[CHOICES];
    } rows[] = {
        {1, 0, {1, 1, 1, 1, 1, 1}},
        {0.5, 3, {0, 0, 1, 1, 0, 1}},
        {3, 100, {1, 1, 1, 1, 1, 1}},
        {2, 2, {0, 0, 1, 1, 0, 0}},
    };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        const draw_options options = {.temperature = rows[r].temperature, .top_k = rows[r].top_k, .seed = r};
        double share[CHOICES], total = 0;
        count_draws(&options, DRAWS, share);
        for (int i = 0; i < CHOICES; i++)
            total += rows[r].in[i] ? exp(logits[i] / rows[r].temperature) : 0;
        for (int i = 0; i < CHOICES; i++) {
            double p = rows[r].in[i] ? exp(logits[i] / rows[r].temperature) / total : 0;
            if (fabs(share[i] - p) > 5 * sqrt(p * (1 - p) / DRAWS) + 1e-9)
                fail_msg("row %d: %d is drawn %.4f of the time, not %.4f", (int)r, i, share[i], p);
        }
    }
    /* Another seed, another text. */
    draw_candidate candidates[CHOICES];
    int differ = 0;
    for (uint64_t i = 0; i < 100; i++)
        differ += draw_token(logits, CHOICES, &(draw_options){.temperature = 1, .seed = 1}, i, candidates) !=
                  draw_token(logits, CHOICES, &(draw_options){.temperature = 1, .seed = 2}, i, candidates);
    assert_true(differ > 20);
}

/* What stays is known by hand: softmax of the logits is .10 .02 .45 .27 .00 .16, at 5: .19 .14 .25 .23 .00 .20. */
static void the_likeliest_stay(void **unused) {
    (void)unused;
    enum { DRAWS = 4000 };
    static const struct {
        draw_options options;
        bool in[CHOICES];
    } rows[] = {
        {{.temperature = 1, .top_p = 0.44}, {0, 0, 1, 0, 0, 0}},
        {{.temperature = 1, .top_p = 0.5}, {0, 0, 1, 1, 0, 0}},
        {{.temperature = 1, .top_p = 0.9}, {1, 0, 1, 1, 0, 1}},
        {{.temperature = 5, .top_p = 0.5}, {0, 0, 1, 1, 0, 1}},
        {{.temperature = 5, .top_p = 0.5, .top_k = 3}, {0, 0, 1, 1, 0, 0}},
        {{.temperature = 1, .min_p = 0.3}, {0, 0, 1, 1, 0, 1}},
        {{.temperature = 1, .min_p = 1}, {0, 0, 1, 0, 0, 0}},
        {{.temperature = 1, .top_p = 1, .min_p = 0}, {1, 1, 1, 1, 0, 1}},
    };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        double share[CHOICES];
        count_draws(&rows[r].options, DRAWS, share);
        for (int i = 0; i < CHOICES; i++)
            if ((share[i] > 0) != rows[r].in[i])
                fail_msg("row %d: token %d is drawn %.4f of the time", (int)r, i, share[i]);
    }
    float copy[CHOICES];
    draw_candidate candidates[CHOICES];
    memcpy(copy, logits, sizeof copy);
    draw_penalize(copy, CHOICES, (const int32_t[]){2, 1, 2, 99, -1}, 5, 4, candidates);
    const float penalized[CHOICES] = {0.5f, -4, 0.5f, 1.5f, -30, 1};
    assert_memory_equal(copy, penalized, sizeof copy);
    copy[3] = NAN;
    assert_int_equal(draw_token(copy, CHOICES, &rows[0].options, 0, candidates), -1);
    copy[3] = INFINITY;
    assert_int_equal(draw_token(copy, CHOICES, &rows[0].options, 0, candidates), -1);
}

/* ---- Texts ------------------------------------------------------------------------------------------- */

/* A byte-level model with weights of a hash, saved as a checkpoint. */
static void save_model(void) {
    const llama_config config = {.vocab_size = 256,
                                 .hidden_size = 32,
                                 .intermediate_size = 48,
                                 .layers = 2,
                                 .heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 16,
                                 .max_positions = 24,
                                 .rope_theta = 10000,
                                 .norm_eps = 1e-5,
                                 .tied = true,
                                 .dtype = VJP_F32,
                                 .begin_token = -1};
    char error[TRAIN_ERROR];
    int64_t count = llama_weight_count(&config);
    safetensors_tensor *tensors = calloc((size_t)count, sizeof *tensors);
    llama_weight *weights = calloc((size_t)count, sizeof *weights);
    for (int64_t i = 0; i < count; i++) {
        weights[i] = llama_weight_at(&config, i);
        vjp_tensor own = vjp_tensor_of(NULL, VJP_F32, weights[i].ndim, weights[i].shape);
        float *numbers = malloc((size_t)count_of(&own) * sizeof *numbers);
        load_hash(NULL, weights[i].name, &own, numbers, error);
        tensors[i] = (safetensors_tensor){.name = weights[i].name, .dtype = VJP_F32, .ndim = own.ndim, .data = numbers};
        memcpy(tensors[i].shape, own.shape, sizeof own.shape);
    }
    char *json = llama_config_write(&config);
    const checkpoint_content content = {.step = 1, .config = json, .model = tensors, .model_count = (size_t)count};
    if (!checkpoint_save(scratch, 1, &content, error)) fail_msg("%s", error);
    for (int64_t i = 0; i < count; i++)
        free((void *)tensors[i].data);
    free(tensors);
    free(weights);
    free(json);
}

static sampler *open_sampler(vjp_device *device, int64_t texts) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH];
    checkpoint from;
    if (!checkpoint_open_newest(scratch, path, &from, error)) fail_msg("%s", error);
    sampler *s = sampler_open(device, &from, &(sampler_settings){.texts = texts, .dtype = -1}, error);
    if (!s) fail_msg("%s", error);
    checkpoint_close(&from);
    return s;
}

static const sampler_prompt prompts[TEXTS] = {
    {"a", 1}, {"A prompt that is longer than the context", 40}, {"\xc3\xa9t\xc3\xa9", 5}};

/* Whether bytes [0, part) of a text, shown by themselves, are the beginning of what the text looks like as a whole. */
static bool shows_as_whole(const char *text, size_t count, size_t part) {
    byte_list all = {0}, some = {0};
    assert_true(utf8_repair(text, count, &all) && utf8_repair(text, part, &some));
    bool same = some.count <= all.count && (!some.count || memcmp(all.bytes, some.bytes, some.count) == 0);
    byte_list_free(&all);
    byte_list_free(&some);
    return same;
}

static void run_texts(sampler *s, const sampler_options *options, const sampler_prompt *list, int count) {
    enum { MAX_DRAWS = 100 };
    char error[TRAIN_ERROR];
    size_t ready[TEXTS][MAX_DRAWS] = {{0}};
    if (!sampler_begin(s, options, list, count, error)) fail_msg("%s", error);
    for (int n = 0, running = 1; running; n++) {
        running = 0;
        if (!sampler_next(s, error)) fail_msg("%s", error);
        for (int i = 0; i < count; i++) {
            sampler_answer a = sampler_answer_of(s, i);
            running += a.state == SAMPLER_RUNNING;
            if (a.state == SAMPLER_RUNNING && n < MAX_DRAWS) ready[i][n] = a.ready;
        }
    }
    for (int i = 0; i < count; i++) {
        sampler_answer a = sampler_answer_of(s, i);
        for (int n = 0; n < MAX_DRAWS; n++)
            if (!shows_as_whole(a.bytes, a.count, ready[i][n])) fail_msg("text %d: half a character is ready", i);
    }
}

/* A text is the same alone and among others, for any threads, beyond the context, and up to a stop string. */
static void test_texts(void **unused) {
    (void)unused;
    enum { BYTES = 90 };
    save_model();
    sampler_options options = {.draw = {.temperature = 3, .top_p = 0.99, .repetition = 1.1, .seed = 5},
                               .max_bytes = BYTES};
    vjp_device *one = open_fixed(1, NULL), *two = open_fixed(2, NULL);
    sampler *together = open_sampler(two, TEXTS), *alone = open_sampler(one, 1);
    run_texts(together, &options, prompts, TEXTS);
    for (int i = 0; i < TEXTS; i++) {
        sampler_answer a = sampler_answer_of(together, i);
        run_texts(alone, &options, &prompts[i], 1);
        sampler_answer b = sampler_answer_of(alone, 0);
        assert_int_equal(a.state, SAMPLER_LIMIT);
        assert_int_equal(a.count, BYTES);
        assert_int_equal(b.count, BYTES);
        assert_memory_equal(a.bytes, b.bytes, BYTES);
    }
    /* The text up to five bytes of its middle; what may be their beginning is not ready. */
    char stop[6] = {0}, whole[BYTES], error[TRAIN_ERROR];
    memcpy(whole, sampler_answer_of(together, 0).bytes, BYTES);
    memcpy(stop, whole + 40, 5);
    options.stop[0] = "never in the text";
    options.stop[1] = stop;
    options.stops = 2;
    assert_true(sampler_begin(alone, &options, prompts, 1, error));
    size_t ready = 0;
    for (sampler_answer a = sampler_answer_of(alone, 0); a.state == SAMPLER_RUNNING; a = sampler_answer_of(alone, 0)) {
        ready = a.ready;
        assert_true(sampler_next(alone, error));
    }
    sampler_answer a = sampler_answer_of(alone, 0);
    assert_int_equal(a.state, SAMPLER_STOP);
    assert_int_equal(a.count, 40);
    assert_true(ready <= 40);
    assert_memory_equal(a.bytes, whole, 40);
    /* A limit of tokens, and more prompts than there is room for. */
    run_texts(alone, &(sampler_options){.max_tokens = 3}, prompts, 1);
    assert_int_equal(sampler_answer_of(alone, 0).tokens, 3);
    assert_false(sampler_begin(alone, &options, prompts, 2, error));
    assert_non_null(strstr(error, "2 prompts"));
    sampler_close(together);
    sampler_close(alone);
    vjp_close(one);
    vjp_close(two);
}

/* ---- Chat -------------------------------------------------------------------------------------------- */

static tokenizer *with_tokens(const char *first, const char *second) {
    char json[512], error[FILE_ERROR];
    snprintf(json, sizeof json,
             "{\"added_tokens\": [{\"id\": 1, \"content\": \"%s\", \"special\": true}, {\"id\": 2, "
             "\"content\": \"%s\", \"special\": true}], \"model\": {\"type\": \"BPE\", \"vocab\": "
             "{\"a\": 0}, \"merges\": []}}",
             first, second);
    tokenizer *t = tokenizer_parse(json, strlen(json), error);
    if (!t) fail_msg("%s", error);
    return t;
}

/* As the chat templates of Llama 3 and of ChatML fill them in with add_generation_prompt. */
static void test_chat(void **unused) {
    (void)unused;
    static const struct {
        const char *first, *second, *expected;
    } rows[] = {
        {"<|start_header_id|>", "<|eot_id|>",
         "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHi\n there<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n"},
        {"<|im_start|>", "<|im_end|>",
         "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n there<|im_end|>\n<|im_start|>assistant\n"},
    };
    char error[FILE_ERROR];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        tokenizer *t = with_tokens(rows[i].first, rows[i].second);
        const chat_template *chat = chat_template_of(t, error);
        assert_non_null(chat);
        byte_list text = {0};
        assert_true(byte_list_add(&text, chat->begin, strlen(chat->begin)));
        assert_true(chat_add_message(chat, "system", "Be brief.", &text));
        assert_true(chat_add_message(chat, "user", " \nHi\n there ", &text));
        assert_true(chat_add_answer(chat, &text) && byte_list_add(&text, "", 1));
        assert_string_equal(text.bytes, rows[i].expected);
        byte_list_free(&text);
        tokenizer_free(t);
    }
    tokenizer *t = with_tokens("<|im_start|>", "<|eot_id|>");
    assert_null(chat_template_of(t, error));
    assert_non_null(strstr(error, "no chat template that vjp knows"));
    tokenizer_free(t);
    assert_null(chat_template_of(NULL, error));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(a_model_that_does_not_fit),
        cmocka_unit_test(the_likeliest_is_drawn),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(the_likeliest_stay),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_chat),
    };
    return cmocka_run_group_tests_name("sample", tests, make_scratch, remove_scratch);
}
