/* SPDX-License-Identifier: MIT */
/*
 * Generation: the logits of a decoder, which keeps keys and values, against those of the whole graph, bit for bit, for
 * any grouping of the tokens into calls and texts.
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
#include "train/decoder.h"
#include "train/draw.h"
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
    bool tied;
} shape;

static void build(train_model *model, const shape *s) {
    const llama_config config = {.vocab_size = s->vocabulary,
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
    llama_build(model, &config, &options);
}

static vjp_device *open_fixed(int threads) {
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    vjp_device *device;
    options.threads = threads;
    options.fixed_rows = 1;
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
    {"f32", VJP_F32, 150, 64, 96, 4, 2, 16, 71, true},
    {"f32, K split", VJP_F32, 1930, 48, 4200, 3, 1, 16, 40, false},
    {"bf16", VJP_BF16, 150, 64, 96, 4, 2, 16, 71, false},
    {"bf16, K split", VJP_BF16, 1930, 64, 4160, 4, 4, 16, 64, true},
    {"bf16, odd sizes", VJP_BF16, 70, 72, 333, 3, 3, 24, 129, false},
    {"f16", VJP_F16, 70, 64, 96, 4, 1, 16, 71, true},
};

enum { SHAPES = sizeof shapes / sizeof shapes[0], TEXTS = 3, MAX_STEPS = 120 };

/* A prompt in one call, then token by token; prompts of several lengths; several texts in one step. */
static void test_bits(void **unused) {
    (void)unused;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        char error[TRAIN_ERROR] = "";
        vjp_device *device = open_fixed(2);
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

/* ---- Draws ------------------------------------------------------------------------------------------- */

enum { CHOICES = 6 };
static const float logits[CHOICES] = {0.5f, -1, 2, 1.5f, -30, 1};

static void count_draws(const draw_options *options, int draws, double share[CHOICES]) {
    draw_candidate scratch[CHOICES];
    memset(share, 0, sizeof *share * CHOICES);
    for (int i = 0; i < draws; i++) {
        int byte = draw_token(logits, CHOICES, options, (uint64_t)i, scratch);
        assert_in_range(byte, 0, CHOICES - 1);
        assert_int_equal(byte, draw_token(logits, CHOICES, options, (uint64_t)i, scratch));
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
    draw_candidate scratch[3];
    assert_int_equal(draw_token(equal, 3, &(draw_options){.temperature = 0}, 9, scratch), 0);
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
    draw_candidate scratch[CHOICES];
    int differ = 0;
    for (uint64_t i = 0; i < 100; i++)
        differ += draw_token(logits, CHOICES, &(draw_options){.temperature = 1, .seed = 1}, i, scratch) !=
                  draw_token(logits, CHOICES, &(draw_options){.temperature = 1, .seed = 2}, i, scratch);
    assert_true(differ > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(the_likeliest_is_drawn),
        cmocka_unit_test(draws_follow_the_softmax),
    };
    return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
