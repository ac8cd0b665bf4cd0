/* SPDX-License-Identifier: MIT */
/*
 * Models of each family against transformers: the folders in tests/golden/families, which golden/families.py made with
 * it, give the same logits, loss, gradients of every parameter, and losses over 20 steps of AdamW. And folders that are
 * broken or whose config does not fit are refused with a sentence.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <sys/wait.h>

#include "core/system.h"
#include "model_run.h"
#include "scratch.h"
#include "train/job/fit.h"
#include "train/trainer/trainer.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static const char *const families[] = {"llama2", "llama3", "llama-linear", "mistral",     "mistral-full",
                                       "qwen2",  "qwen3",  "gemma3",       "gemma3-plain"};

static const double LOGITS_BOUND = 1e-5, GRADIENT_BOUND = 1e-5, LOSS_BOUND = 1e-5;

typedef struct golden {
    char folder[512];
    safetensors_file expected;
    int64_t batch, context;
    const int32_t *rows; /* [batch, context + 1] */
} golden;

static const safetensors_tensor *find(const golden *g, const char *name) {
    const safetensors_tensor *tensor = safetensors_find(&g->expected, name);
    if (!tensor) fail_msg("%s has no %s", g->folder, name);
    return tensor;
}

static void open_golden(golden *g, const char *family) {
    char path[600], error[SAFETENSORS_ERROR];
    snprintf(g->folder, sizeof g->folder, "%s/families/%s", VJP_GOLDEN_DIR, family);
    snprintf(path, sizeof path, "%s/expected.safetensors", g->folder);
    if (!safetensors_read(path, &g->expected, error)) fail_msg("%s", error);
    const safetensors_tensor *tokens = find(g, "tokens");
    g->batch = tokens->shape[0];
    g->context = tokens->shape[1] - 1;
    g->rows = tokens->data;
}

/* The relative L2 error. */
static double error_of(const safetensors_tensor *is, const safetensors_tensor *must_be) {
    const float *a = is->data, *b = must_be->data;
    double error = 0, norm = 0;
    assert_true(is->bytes == must_be->bytes && must_be->dtype == VJP_F32);
    for (size_t i = 0; i < is->bytes / sizeof *a; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    assert_true(norm > 0);
    return sqrt(error / norm);
}

static void compare_results(const golden *g, const char *device) {
    char error[TRAIN_ERROR] = "";
    model_run r;
    if (!model_run_open(&r, device, g->folder, g->batch, g->context, error) || !model_run_compute(&r, g->rows, error))
        fail_msg("%s on %s: %s", g->folder, device, error);
    assert_int_equal(g->expected.count, 4 + r.model.parameters); /* tokens, logits, loss, losses */
    double worst = 0;
    for (size_t i = 0; i < 2 + (size_t)r.model.parameters; i++) {
        char name[MODEL_NAME + 8];
        snprintf(name, sizeof name,
                 i == 0   ? "logits"
                 : i == 1 ? "loss"
                          : "grad.%s",
                 r.model.parameter[i < 2 ? 0 : i - 2].name);
        safetensors_tensor result = model_run_result(&r, i);
        assert_non_null(result.data);
        double off = error_of(&result, find(g, name)), bound = i == 0   ? LOGITS_BOUND
                                                               : i == 1 ? LOSS_BOUND
                                                                        : GRADIENT_BOUND;
        if (!(off <= bound)) fail_msg("%s on %s: %s is off by %g", g->folder, device, name, off);
        if (i != 1 && off > worst) worst = off;
        free((void *)result.data);
    }
    print_message("%s on %s: worst error %.2g\n", strrchr(g->folder, '/') + 1, device, worst);
    model_run_close(&r);
}

static void same_results(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(families); i++) {
        golden g;
        open_golden(&g, families[i]);
        compare_results(&g, "cpu");
        compare_results(&g, "ref");
        safetensors_free(&g.expected);
    }
}

/* ---- Training ---------------------------------------------------------------------------------------- */

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    const golden *g = context;
    (void)validation, (void)part;
    for (int64_t row = 0; row < g->batch; row++) {
        const int32_t *from = g->rows + row * (g->context + 1);
        memcpy((int32_t *)input + row * g->context, from, (size_t)g->context * sizeof *from);
        memcpy(target + row * g->context, from + 1, (size_t)g->context * sizeof *from);
    }
}

static void train(golden *g) {
    /* As in golden/families.py. */
    const trainer_options options = {.steps = 20,
                                     .accumulate = 1,
                                     .rate = 1e-2,
                                     .last_rate = 1,
                                     .weight_decay = 0.1,
                                     .max_norm = 0.5,
                                     .beta1 = 0.9,
                                     .beta2 = 0.95,
                                     .eps = 1e-8};
    const float *losses = find(g, "losses")->data;
    char error[TRAIN_ERROR] = "", path[CHECKPOINT_PATH];
    vjp_device *device;
    checkpoint from;
    llama_config config;
    train_model model;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    if (!checkpoint_open_newest(g->folder, path, &from, error) || !llama_config_read(from.config.root, &config, error))
        fail_msg("%s", error);
    llama_build(&model, &config, &(llama_options){.batch = g->batch, .context = g->context, .dtype = VJP_F32});
    trainer *t = trainer_create(device, &model, &options, error);
    if (!t) fail_msg("%s", error);
    for (int i = 0; i < model.parameters; i++)
        if (!trainer_load(t, checkpoint_tensor(&from, model.parameter[i].name), error)) fail_msg("%s", error);
    const train_source source = {.context = g, .fill = fill};
    for (int64_t step = 1; step <= options.steps; step++) {
        trainer_step_result result;
        if (!trainer_step(t, &source, step, &result, error)) fail_msg("%s", error);
        double off = fabs(result.loss / losses[step - 1] - 1);
        if (!(off <= LOSS_BOUND)) fail_msg("%s: the loss of step %d is off by %g", g->folder, (int)step, off);
    }
    assert_true(losses[options.steps - 1] < 0.9f * losses[0]);
    trainer_destroy(t);
    model_free(&model);
    checkpoint_close(&from);
    vjp_close(device);
}

static void same_steps(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(families); i++) {
        golden g;
        open_golden(&g, families[i]);
        train(&g);
        safetensors_free(&g.expected);
    }
}

/* ---- Broken folders ---------------------------------------------------------------------------------- */

/* A copy of a folder, with one text replaced in one of its files, or the file cut off. */
static const struct {
    const char *family, *file;
    const char *from, *to; /* to NULL: the file loses its last byte; from NULL, too: the file is removed */
    const char *says;
} broken[] = {
    {"mistral", "model-00002-of-00007.safetensors", "", NULL, "model-00002-of-00007.safetensors: it is cut off"},
    {"mistral", "model-00003-of-00007.safetensors", NULL, NULL,
     "model-00003-of-00007.safetensors: it cannot be opened"},
    {"mistral", "model.safetensors.index.json", "\"model.norm.weight\"", "\"model.norm.other\"",
     "tensor \"model.norm.other\" is listed in"},
    {"mistral", "model.safetensors.index.json", "\"model.norm.weight\": \"model", "\"model.norm.weight\": \"nodel",
     "it cannot be opened"},
    {"mistral", "model.safetensors.index.json", "\"model.norm.weight\": \"model", "\"model.norm.weight\": \"../del",
     "must be the name of a file in this folder"},
    {"mistral", "model.safetensors.index.json", "weight_map", "weight_mop", "it has no object \"weight_map\""},
    {"mistral", "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2",
     "the checkpoint has a tensor model.layers.2."},
    {"mistral", "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4",
     "the checkpoint has no tensor model.layers.3.input_layernorm.weight"},
    {"mistral", "config.json", "\"head_dim\": 8", "\"head_dim\": 6",
     "tensor model.layers.0.self_attn.q_proj.weight is [32, 24] in the file; by config.json it is [24, 24]"},
    {"mistral", "config.json", "\"vocab_size\": 40", "\"vocab_size\": 41",
     "tensor model.embed_tokens.weight is [40, 24] in the file; by config.json it is [41, 24]"},
    {"mistral", "config.json", "\"sliding_window\": 5", "\"sliding_windov\": 5",
     "\"sliding_windov\" is 5; vjp does not know this setting"},
    {"qwen2", "config.json", "\"qwen2\"", "\"qwen7\"", "\"model_type\" is \"qwen7\"; vjp takes"},
    {"llama-linear", "config.json", "\"attention_bias\": true", "\"attention_bias\": false",
     "the checkpoint has a tensor model.layers.0.self_attn."},
    {"llama3", "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
     "the checkpoint has no tensor lm_head.weight"},
    {"llama3", "config.json", "\"llama3\"", "\"yarn\"", "\"rope_parameters.rope_type\" is \"yarn\"; vjp takes"},
};

static char *read_all(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    char *text = malloc(1 << 20);
    *bytes = fread(text, 1, (1 << 20) - 1, file);
    text[*bytes] = 0;
    fclose(file);
    return text;
}

static void refusals(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(broken); i++) {
        char command[1024], folder[64], name[128], error[TRAIN_ERROR] = "";
        snprintf(folder, sizeof folder, "broken-%zu", i);
        snprintf(command, sizeof command, "cp -r '%s/families/%s' '%s'", VJP_GOLDEN_DIR, broken[i].family,
                 path_of(folder));
        assert_int_equal(system(command), 0);
        snprintf(name, sizeof name, "%s/%s", folder, broken[i].file);
        size_t bytes;
        char *text = read_all(path_of(name), &bytes);
        remove(path_of(name));
        if (broken[i].to) {
            char *at = strstr(text, broken[i].from), *whole = malloc(bytes + strlen(broken[i].to) + 1);
            assert_non_null(at);
            size_t before = (size_t)(at - text);
            memcpy(whole, text, before);
            strcpy(whole + before, broken[i].to);
            strcat(whole, at + strlen(broken[i].from));
            write_file(name, whole, strlen(whole));
            free(whole);
        } else if (broken[i].from) {
            write_file(name, text, bytes - 1);
        }
        free(text);
        model_run r;
        bool ok = model_run_open(&r, "cpu", path_of(folder), 1, 8, error);
        if (ok) fail_msg("row %zu of the broken folders was taken", i);
        if (!strstr(error, broken[i].says)) fail_msg("\"%s\" does not say \"%s\"", error, broken[i].says);
        model_run_close(&r);
    }
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

enum { LARGE_TOKENS = 40000, LARGE_WIDTH = 512, SMALL_WIDTH = 64 };

/* A model in bf16 that is little more than its embedding, [40000, 512]: a copy of that would be half as much again. */
static void save_large(const char *folder) {
    const llama_config config = {.vocab_size = LARGE_TOKENS,
                                 .hidden_size = LARGE_WIDTH,
                                 .intermediate_size = SMALL_WIDTH,
                                 .layers = 1,
                                 .heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = SMALL_WIDTH,
                                 .max_positions = 8,
                                 .rope_theta = 10000,
                                 .norm_eps = 1e-5,
                                 .tied = true,
                                 .dtype = VJP_BF16,
                                 .begin_token = -1};
    enum { MAX_WEIGHTS = 16 };
    llama_weight weights[MAX_WEIGHTS];
    safetensors_tensor tensors[MAX_WEIGHTS];
    char *text = llama_config_write(&config), error[TRAIN_ERROR] = "";
    uint16_t *zeros = calloc(LARGE_TOKENS, LARGE_WIDTH * sizeof *zeros);
    size_t count = (size_t)llama_weight_count(&config);
    assert_true(text && zeros && count <= MAX_WEIGHTS);
    for (size_t i = 0; i < count; i++) {
        weights[i] = llama_weight_at(&config, (int64_t)i);
        tensors[i] = (safetensors_tensor){.name = weights[i].name, .dtype = VJP_BF16, .ndim = weights[i].ndim};
        memcpy(tensors[i].shape, weights[i].shape, sizeof weights[i].shape);
        tensors[i].data = zeros;
    }
    const checkpoint_content content = {.config = text, .model = tensors, .model_count = count};
    if (!checkpoint_save(folder, 1, &content, error)) fail_msg("%s", error);
    free(zeros);
    free(text);
}

/* Of this program alone: what getrusage() says includes the program that started it. */
static double peak_bytes(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    double kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %lf kB", &kib) == 1) break;
    if (file) fclose(file);
    return kib > 0 ? kib * 1024 : system_peak_bytes();
}

static void loading_copies_nothing(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR] = "", path[CHECKPOINT_PATH];
    model_run r = {0};
    pid_t child = fork(); /* whose memory is not counted */
    if (!child) {
        save_large(path_of("large"));
        _exit(0);
    }
    int status = 1;
    assert_true(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    if (!checkpoint_open_newest(path_of("large"), path, &r.from, error) ||
        !llama_config_read(r.from.config.root, &r.config, error))
        fail_msg("%s", error);
    llama_build(&r.model, &r.config, &(llama_options){.batch = 1, .context = 1, .dtype = VJP_F32});
    assert_int_equal(vjp_open("cpu", NULL, &r.device), VJP_OK);
    double before = peak_bytes(), model = 4 * (double)llama_size(&r.config);
    assert_int_equal(vjp_compile(r.device, r.model.graph, &r.model.logits, 1, NULL, &r.program), VJP_OK);
    if (!model_run_load(&r, error)) fail_msg("%s", error);
    double grown = peak_bytes() - before;
    print_message("loading %.0f MiB of weights: %.0f MiB more in memory\n", model / 1048576, grown / 1048576);
    /* A sanitizer has memory of its own, and keeps what was freed. */
    if (sizeof VJP_SANITIZE == 1) assert_true(grown >= model && grown <= 1.1 * model);
    model_run_close(&r);
}

/* Weights that are there and a context that no machine holds: both numbers are named, and nothing is allocated. */
static void too_large_is_refused(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR] = "";
    vjp_device *device;
    train_model model;
    llama_config config = llama_preset_find("7B", error)->config;
    config.layers = 512;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    llama_build(&model, &config, &(llama_options){.batch = 4096, .context = 64, .dtype = VJP_F32});
    assert_false(fit_program(device, model.graph, &model.logits, 1, "this model", error));
    double needed = 0, available = 0;
    if (sscanf(error, "this model needs %lf GiB of memory, and %lf GiB are available", &needed, &available) != 2)
        fail_msg("%s", error);
    assert_true(needed * 1024 * 1024 * 1024 > 4 * (double)llama_size(&config) && available > 0 && available < needed);
    model_free(&model);
    llama_build(&model, &llama_preset_find("tiny", error)->config,
                &(llama_options){.batch = 1, .context = 8, .dtype = VJP_F32});
    if (!fit_program(device, model.graph, &model.logits, 1, "this model", error)) fail_msg("%s", error);
    model_free(&model);
    vjp_close(device);
}

int main(void) {
    /* The peak of memory first, before others raise it. */
    const struct CMUnitTest tests[] = {cmocka_unit_test(loading_copies_nothing), cmocka_unit_test(too_large_is_refused),
                                       cmocka_unit_test(same_results), cmocka_unit_test(same_steps),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
