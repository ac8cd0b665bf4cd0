/* SPDX-License-Identifier: MIT */
/*
 * vjp eval's evaluate(): the loss of a text, and of the answers of documents, against one computed here, window by
 * window, from the logits in double; the same for any batch, and the same bits for any number of threads; what it
 * refuses.
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

#include "little_llama.h"
#include "scratch.h"
#include "train/job/evaluate.h"

enum { BYTES = 101 };

static char text_path[256], short_path[256], set_path[256], bad_path[256];
static unsigned char text[BYTES];

/* Lines of a .jsonl file: completions, and texts, which have no prompt. Some are longer than a window. */
static const struct {
    const char *prompt, *answer;
} documents[] = {{"two and two", "four"}, {"", "a text of its own, in several windows"},   {"a", "b"}, {"", "xy"},
                 {"nine ", "ten"},        {"a question that is longer than a window", "?"}};

enum { DOCUMENTS = sizeof documents / sizeof documents[0] };
static checkpoint from;
static llama_config config; /* of one layer that reads bytes */

static vjp_device *open_cpu(int threads) {
    vjp_device *device;
    const vjp_options options = {.struct_size = sizeof options, .threads = threads};
    if (vjp_open("cpu", &options, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

/* The logits of one window, with random weights that depend on their names only. */
typedef struct predictor {
    vjp_device *device;
    train_model model;
    vjp_program *program;
} predictor;

static predictor open_predictor(void) {
    predictor p = {.device = open_cpu(1)};
    const llama_options options = {.batch = 1, .context = CONTEXT, .dtype = VJP_F32};
    llama_build(&p.model, &config, &options);
    if (vjp_compile(p.device, p.model.graph, &p.model.logits, 1, NULL, &p.program) != VJP_OK)
        fail_msg("%s", vjp_error(p.device));
    for (int i = 0; i < p.model.parameters; i++) /* wide, so that the losses of tokens differ */
        assert_int_equal(vjp_program_init_normal(p.program, p.model.parameter[i].value, 0, 0.5, 3), VJP_OK);
    return p;
}

static void close_predictor(predictor *p) {
    vjp_program_destroy(p->program);
    model_free(&p->model);
    vjp_close(p->device);
}

static void save_checkpoint(const predictor *p) {
    char error[TRAIN_ERROR], *json = llama_config_write(&config);
    safetensors_tensor *list = calloc((size_t)p->model.parameters, sizeof *list);
    for (int i = 0; i < p->model.parameters; i++) {
        vjp_tensor tensor;
        assert_int_equal(vjp_program_tensor(p->program, p->model.parameter[i].value, &tensor), VJP_OK);
        list[i] = (safetensors_tensor){.name = p->model.parameter[i].name,
                                       .dtype = VJP_F32,
                                       .ndim = tensor.ndim,
                                       .data = (char *)tensor.data + tensor.offset};
        memcpy(list[i].shape, tensor.shape, sizeof tensor.shape);
    }
    const checkpoint_content content = {
        .step = 1, .config = json, .model = list, .model_count = (size_t)p->model.parameters};
    if (!checkpoint_save(path_of("run"), 1, &content, error)) fail_msg("%s", error);
    free(json);
    free(list);
}

static int begin(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH];
    if (make_scratch(NULL) != 0) return 1;
    config = little_config(256, 1);
    for (int i = 0; i < BYTES; i++)
        text[i] = (unsigned char)('a' + (i * i + i / 7) % 26);
    write_file("text", text, BYTES);
    snprintf(text_path, sizeof text_path, "%s", path_of("text"));
    write_file("short", text, 1);
    snprintf(short_path, sizeof short_path, "%s", path_of("short"));
    char lines[1024] = "";
    for (int i = 0; i < DOCUMENTS; i++) {
        size_t used = strlen(lines);
        const char *prompt = documents[i].prompt, *answer = documents[i].answer;
        if (*prompt)
            snprintf(lines + used, sizeof lines - used, "{\"prompt\": \"%s\", \"completion\": \"%s\"}\n", prompt,
                     answer);
        else
            snprintf(lines + used, sizeof lines - used, "{\"text\": \"%s\"}\n", answer);
    }
    write_file("set.jsonl", lines, strlen(lines));
    snprintf(set_path, sizeof set_path, "%s", path_of("set.jsonl"));
    strncat(lines, "{}\n", sizeof lines - strlen(lines) - 1);
    write_file("bad.jsonl", lines, strlen(lines));
    snprintf(bad_path, sizeof bad_path, "%s", path_of("bad.jsonl"));
    predictor p = open_predictor();
    save_checkpoint(&p);
    close_predictor(&p);
    return !checkpoint_open_newest(path_of("run"), path, &from, error);
}

static int end(void **unused) {
    (void)unused;
    checkpoint_close(&from);
    return remove_scratch(NULL);
}

/* The sum of the losses of bytes 1 to `count`, each predicted from those before it. Only those from `given` on count.
 */
static double window_loss(const predictor *p, const char *bytes, int count, int given) {
    float *logits = malloc(CONTEXT * 256 * sizeof *logits);
    int32_t tokens[CONTEXT] = {0};
    double sum = 0;
    for (int i = 0; i < count; i++)
        tokens[i] = (unsigned char)bytes[i];
    assert_int_equal(vjp_program_write(p->program, p->model.input, tokens, sizeof tokens), VJP_OK);
    assert_int_equal(vjp_program_run(p->program), VJP_OK);
    assert_int_equal(vjp_program_read(p->program, p->model.logits, logits, CONTEXT * 256 * sizeof *logits), VJP_OK);
    for (int i = 0; i < count; i++) {
        double total = 0;
        for (int k = 0; k < 256; k++)
            total += exp(logits[256 * i + k]);
        if (i + 1 >= given) sum += log(total) - logits[256 * i + (unsigned char)bytes[i + 1]];
    }
    free(logits);
    return sum;
}

/* The sum over a text but for its first `given` bytes, at least one, in windows of `context`. */
static double text_loss(const predictor *p, const char *bytes, int count, int given, int context) {
    double sum = 0;
    for (int at = 0; at + 1 < count; at += context)
        sum += window_loss(p, bytes + at, context < count - 1 - at ? context : count - 1 - at, given - at);
    return sum;
}

static double loss_by_hand(int context) {
    predictor p = open_predictor();
    double sum = text_loss(&p, (const char *)text, BYTES, 1, context);
    close_predictor(&p);
    return sum / (BYTES - 1);
}

static evaluate_result measure_file(const char *path, int threads, int64_t batch, int64_t context, bool skip_bad) {
    char error[TRAIN_ERROR];
    evaluate_result result;
    const evaluate_options options = {.batch = batch, .context = context, .dtype = VJP_F32, .skip_bad = skip_bad};
    vjp_device *device = open_cpu(threads);
    if (!evaluate(device, &from, path, &options, &result, error)) fail_msg("%s", error);
    vjp_close(device);
    return result;
}

static evaluate_result measure(int threads, int64_t batch, int64_t context) {
    return measure_file(text_path, threads, batch, context, false);
}

static void every_token_once(void **unused) {
    (void)unused;
    static const int contexts[] = {CONTEXT, 4, 1};
    for (size_t k = 0; k < 3; k++) {
        double expected = loss_by_hand(contexts[k]);
        for (int64_t batch = 0; batch <= 30; batch += 5) {
            evaluate_result r = measure(1, batch, contexts[k]);
            assert_int_equal(r.tokens, BYTES - 1);
            assert_int_equal(r.bytes, BYTES - 1);
            assert_int_equal(r.windows, (BYTES - 2) / contexts[k] + 1);
            if (fabs(r.loss - expected) > 1e-6 * expected)
                fail_msg("batch %d, context %d: %.9g instead of %.9g", (int)batch, contexts[k], r.loss, expected);
        }
    }
    evaluate_result r = measure(1, 0, 0);
    assert_int_equal(r.context, CONTEXT);
    assert_true(fabs(evaluate_perplexity(&r) - exp(r.loss)) <= 1e-12 * exp(r.loss));
    assert_true(fabs(evaluate_bits_per_byte(&r) - r.loss / log(2)) < 1e-12 * r.loss);
    /* Tokens of several bytes. */
    r = (evaluate_result){.tokens = 10, .bytes = 40, .loss = log(16)};
    assert_true(fabs(evaluate_bits_per_byte(&r) - 1) < 1e-12);
}

static void every_answer_once(void **unused) {
    (void)unused;
    static const int contexts[] = {CONTEXT, 4};
    for (size_t k = 0; k < 2; k++) {
        predictor p = open_predictor();
        double sum = 0;
        int tokens = 0;
        for (int i = 0; i < DOCUMENTS; i++) {
            char line[128];
            int given = (int)strlen(documents[i].prompt);
            int count = snprintf(line, sizeof line, "%s%s", documents[i].prompt, documents[i].answer);
            if (given == 0) given = 1; /* nothing predicts the first token */
            sum += text_loss(&p, line, count, given, contexts[k]);
            tokens += count - given;
        }
        close_predictor(&p);
        for (int64_t batch = 1; batch <= 7; batch += 3) {
            evaluate_result r = measure_file(set_path, 1, batch, contexts[k], false);
            assert_int_equal(r.tokens, tokens);
            assert_int_equal(r.bytes, tokens);
            assert_int_equal(r.documents, DOCUMENTS);
            if (fabs(r.loss - sum / tokens) > 1e-6 * r.loss)
                fail_msg("batch %d, context %d: %.9g instead of %.9g", (int)batch, contexts[k], r.loss, sum / tokens);
        }
    }
    const double all = measure_file(set_path, 1, 2, 0, false).loss;
    evaluate_result r = measure_file(bad_path, 2, 2, 0, true);
    assert_true(r.loss == all && r.bad == 1);
}

static void threads_give_the_same_bits(void **unused) {
    (void)unused;
    const double first = measure(1, 3, CONTEXT).loss;
    for (int threads = 2; threads <= 5; threads++)
        assert_true(measure(threads, 3, CONTEXT).loss == first);
}

static void refuses(void **unused) {
    (void)unused;
    const struct {
        const char *text;
        int64_t context;
        const char *sentence;
        bool skip_bad;
    } rows[] = {
        {short_path, 0, "has one token; at least two are needed", false},
        {text_path, CONTEXT + 1, "a context of 10 is too long; the model was made for at most 9", false},
        {"/tmp/vjp-evaluate-absent", 0, "No such file", false},
        {"/dev/null", 0, "only regular files are read", false},
        {text_path, 0, "--skip-bad is for .jsonl files", true},
        {bad_path, 0, "bad.jsonl: line 7: ", false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char error[TRAIN_ERROR] = "";
        evaluate_result result;
        const evaluate_options options = {.context = rows[i].context, .dtype = VJP_F32, .skip_bad = rows[i].skip_bad};
        vjp_device *device = open_cpu(1);
        assert_false(evaluate(device, &from, rows[i].text, &options, &result, error));
        if (!strstr(error, rows[i].sentence)) fail_msg("expected \"%s\"; got \"%s\"", rows[i].sentence, error);
        vjp_close(device);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_once),
        cmocka_unit_test(every_answer_once),
        cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
