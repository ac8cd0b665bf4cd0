/* SPDX-License-Identifier: MIT */
/* The settings of a run: their defaults, and their form in trainer.json. */
#include <stdio.h>
#include <string.h>

#include "train/job/job.h"
#include "train/trainer/loss_scale.h"
#include "train/trainer/shards.h"

const char *const job_optimisers[] = {"adamw", "muon", "sgd", NULL};
const char *const job_schedules[] = {"cosine", "linear", "wsd", "constant", NULL};

int job_choice(const char *const *names, const char *name) {
    for (int i = 0; names[i]; i++)
        if (strcmp(names[i], name) == 0) return i;
    return -1;
}

job_settings job_defaults(void) {
    return (job_settings){.model = "llama",
                          .preset = "tiny",
                          .validate_every = 200,
                          .validate_parts = 8,
                          .save_every = 400,
                          .keep = 2,
                          .pack = JOB_PACK_DOCUMENTS,
                          .dtype = VJP_F32,
                          .trainer = {.steps = 1200,
                                      .warmup = 20,
                                      .accumulate = 1,
                                      .rate = 3e-3,
                                      .last_rate = 0.1,
                                      .weight_decay = 0.1,
                                      .max_norm = 1,
                                      .beta1 = 0.9,
                                      .beta2 = 0.95,
                                      .eps = 1e-8,
                                      .seed = 1,
                                      .optimiser = TRAINER_ADAMW,
                                      .schedule = TRAINER_COSINE,
                                      .decay_share = 0.2,
                                      .momentum = 0.95,
                                      .shards = 1}};
}

bool job_same_kind(const char *device, const char *other) {
    size_t kind = strcspn(device, ":");
    return kind == strcspn(other, ":") && memcmp(device, other, kind) == 0;
}

/* AMX multiplies 16-bit operands only. */
job_arithmetic job_arithmetic_of(vjp_device *device, vjp_dtype dtype) {
    job_arithmetic is = {0};
    char set[16] = "", products[32] = "";
    snprintf(is.device, sizeof is.device, "%s", vjp_device_name(device));
    if (vjp_device_property(device, "matrix_products", products, sizeof products) != VJP_OK) return is;
    if (vjp_device_property(device, "instruction_set", set, sizeof set) != VJP_OK) {
        /* CUDA's usual f32 is not recorded, as in older checkpoints. */
        if (strcmp(products, "f32") != 0) snprintf(is.products, sizeof is.products, "%s", products);
        return is;
    }
    snprintf(is.instructions, sizeof is.instructions, "%s", strcmp(set, "plain") == 0 ? "plain" : "fma");
    if (strcmp(products, "blas") == 0)
        vjp_device_property(device, "blas", products, sizeof products);
    else if (dtype == VJP_F32)
        snprintf(products, sizeof products, "builtin"); /* AMX multiplies 16-bit numbers alone */
    snprintf(is.products, sizeof is.products, "%s", products);
    return is;
}

/* ---- Settings as JSON -------------------------------------------------------------------------------- */

/* All settings, for writing and for reading; a number that is read must be within its limits. */
typedef struct setting {
    const char *key;
    enum { INTEGER, REAL, TEXT, BLOCKS, DTYPE, CHOICE } type;
    void *place;
    size_t room; /* of a text */
    double min, max;
    const char *const *names; /* of a choice: the last is NULL */
} setting;

enum { SETTINGS = 50, REQUIRED = 24 }; /* older checkpoints lack those after the required ones */

static void list_settings(job_settings *s, setting list[SETTINGS]) {
    static const double many = 1e9;
    const setting all[] = {
        {"data", TEXT, s->data, sizeof s->data, 0, 0, NULL},
        {"model", TEXT, s->model, sizeof s->model, 0, 0, NULL},
        {"preset", TEXT, s->preset, sizeof s->preset, 0, 0, NULL},
        {"from", TEXT, s->from, sizeof s->from, 0, 0, NULL},
        {"batch", INTEGER, &s->batch, 0, 1, many, NULL},
        {"context", INTEGER, &s->context, 0, 1, many, NULL},
        {"validate_every", INTEGER, &s->validate_every, 0, 0, many, NULL},
        {"validate_parts", INTEGER, &s->validate_parts, 0, 1, many, NULL},
        {"save_every", INTEGER, &s->save_every, 0, 0, many, NULL},
        {"keep", INTEGER, &s->keep, 0, 1, 1000, NULL},
        {"dtype", DTYPE, &s->dtype, 0, 0, 0, NULL},
        {"recompute", BLOCKS, &s->recompute, 0, 0, LLAMA_ALL_BLOCKS, NULL},
        {"label_smoothing", REAL, &s->label_smoothing, 0, 0, 1, NULL},
        {"steps", INTEGER, &s->trainer.steps, 0, 1, many, NULL},
        {"warmup", INTEGER, &s->trainer.warmup, 0, 0, many, NULL},
        {"accumulate", INTEGER, &s->trainer.accumulate, 0, 1, many, NULL},
        {"rate", REAL, &s->trainer.rate, 0, 0, many, NULL},
        {"last_rate", REAL, &s->trainer.last_rate, 0, 0, 1, NULL},
        {"weight_decay", REAL, &s->trainer.weight_decay, 0, 0, many, NULL},
        {"max_norm", REAL, &s->trainer.max_norm, 0, 0, many, NULL},
        {"beta1", REAL, &s->trainer.beta1, 0, 0, 1, NULL},
        {"beta2", REAL, &s->trainer.beta2, 0, 0, 1, NULL},
        {"eps", REAL, &s->trainer.eps, 0, 0, many, NULL},
        {"seed", INTEGER, &s->trainer.seed, 0, -0x1p63, 0x1p63, NULL},
        {"tokenizer", TEXT, s->tokenizer, sizeof s->tokenizer, 0, 0, NULL},
        {"memory", INTEGER, &s->memory, 0, 0, 0x1p62, NULL},
        {"recompute_mlp", INTEGER, &s->recompute_mlp, 0, 0, LLAMA_ALL_BLOCKS, NULL},
        {"residual", DTYPE, &s->residual, 0, 0, 0, NULL},
        {"device", TEXT, s->arithmetic.device, sizeof s->arithmetic.device, 0, 0, NULL},
        {"instructions", TEXT, s->arithmetic.instructions, sizeof s->arithmetic.instructions, 0, 0, NULL},
        {"products", TEXT, s->arithmetic.products, sizeof s->arithmetic.products, 0, 0, NULL},
        {"optimizer", CHOICE, &s->trainer.optimiser, 0, 0, 0, job_optimisers},
        {"schedule", CHOICE, &s->trainer.schedule, 0, 0, 0, job_schedules},
        {"decay_share", REAL, &s->trainer.decay_share, 0, 0, 1, NULL},
        {"momentum", REAL, &s->trainer.momentum, 0, 0, 1, NULL},
        {"average", REAL, &s->trainer.average, 0, 0, JOB_MAX_AVERAGE, NULL},
        {"patience", INTEGER, &s->patience, 0, 0, many, NULL},
        {"save_best", INTEGER, &s->save_best, 0, 0, 1, NULL},
        {"shards", INTEGER, &s->trainer.shards, 0, 1, SHARDS_MAX, NULL},
        {"moments", DTYPE, &s->trainer.moments, 0, 0, 0, NULL},
        {"gradients", DTYPE, &s->trainer.gradients, 0, 0, 0, NULL},
        {"loss_scale", REAL, &s->trainer.loss_scale, 0, 0, JOB_MAX_LOSS_SCALE, NULL},
        {"loss_scale_steps", INTEGER, &s->trainer.loss_scale_steps, 0, 0, LOSS_SCALE_MAX_STEPS, NULL},
        {"lora", INTEGER, &s->lora, 0, 0, LORA_MAX_RANK, NULL},
        {"lora_alpha", REAL, &s->lora_alpha, 0, 0, LORA_MAX_ALPHA, NULL},
        {"lora_targets", TEXT, s->lora_targets, sizeof s->lora_targets, 0, 0, NULL},
        {"cache", TEXT, s->cache, sizeof s->cache, 0, 0, NULL},
        {"skip_bad", INTEGER, &s->skip_bad, 0, 0, 1, NULL},
        {"pack", INTEGER, &s->pack, 0, 0, 1, NULL},
        {"arena_limit", INTEGER, &s->trainer.arena_limit, 0, 0, 0x1p62, NULL},
    };
    _Static_assert(sizeof all / sizeof all[0] == SETTINGS, "one row per setting");
    memcpy(list, all, sizeof all);
}

/* ---- Texts: a path may hold bytes that are not UTF-8, which no JSON string can; it is then a list of its bytes ----
 */

static void put_text(json_writer *w, const char *key, const char *text) {
    size_t length = strlen(text), at = 0;
    for (size_t bytes; at < length && (bytes = json_character(text + at, length - at)); at += bytes)
        ;
    if (at == length) {
        json_put_text(w, key, text);
        return;
    }
    json_put_array(w, key);
    for (size_t i = 0; i < length; i++)
        json_put_integer(w, NULL, (unsigned char)text[i]);
    json_put_array_end(w);
}

static bool get_text(const json_value *value, char *text, size_t room) {
    if (value && value->type == JSON_STRING && strlen(value->text) < room) {
        memcpy(text, value->text, strlen(value->text) + 1);
        return true;
    }
    if (!value || value->type != JSON_ARRAY || value->count >= room) return false;
    size_t length = 0;
    for (const json_value *byte = value->first; byte; byte = byte->next) {
        if (byte->type != JSON_NUMBER || !byte->exact || byte->integer < 1 || byte->integer > 255) return false;
        text[length++] = (char)byte->integer;
    }
    text[length] = 0;
    return true;
}

/* ---- Writing and reading ----------------------------------------------------------------------------- */

void job_settings_write(json_writer *w, job_settings *s) {
    setting list[SETTINGS];
    list_settings(s, list);
    for (int i = 0; i < SETTINGS; i++) {
        const setting *one = &list[i];
        switch (one->type) {
        case INTEGER:
        case BLOCKS: json_put_integer(w, one->key, *(int64_t *)one->place); break;
        case REAL: json_put_real(w, one->key, *(double *)one->place); break;
        case TEXT: put_text(w, one->key, one->place); break;
        case DTYPE: json_put_text(w, one->key, vjp_dtype_name(*(vjp_dtype *)one->place)); break;
        case CHOICE: json_put_text(w, one->key, one->names[*(int *)one->place]); break;
        }
    }
}

static bool is_number(const setting *one, const json_value *value) {
    return value && value->type == JSON_NUMBER && value->number >= one->min && value->number <= one->max;
}

static bool get_integer(const setting *one, const json_value *value) {
    if (!is_number(one, value) || !value->exact) return false;
    *(int64_t *)one->place = value->integer;
    return true;
}

static bool get_setting(const setting *one, const json_value *value) {
    switch (one->type) {
    case INTEGER: return get_integer(one, value);
    case BLOCKS:
        /* Older checkpoints have all blocks recomputed, or none. */
        if (!value || value->type != JSON_BOOLEAN) return get_integer(one, value);
        *(int64_t *)one->place = value->boolean ? LLAMA_ALL_BLOCKS : 0;
        return true;
    case REAL:
        if (!is_number(one, value)) return false;
        *(double *)one->place = value->number;
        return true;
    case TEXT: return get_text(value, one->place, one->room);
    case DTYPE: {
        int dtype = value && value->type == JSON_STRING ? vjp_dtype_find(value->text) : -1;
        bool known = dtype == VJP_F32 || dtype == VJP_BF16 || dtype == VJP_F16;
        if (known) *(vjp_dtype *)one->place = (vjp_dtype)dtype;
        return known;
    }
    case CHOICE: {
        int choice = value && value->type == JSON_STRING ? job_choice(one->names, value->text) : -1;
        if (choice >= 0) *(int *)one->place = choice;
        return choice >= 0;
    }
    }
    return false;
}

bool job_settings_read(const json_value *root, job_settings *s, char error[TRAIN_ERROR]) {
    setting list[SETTINGS];
    *s = (job_settings){0};
    s->trainer.decay_share = job_defaults().trainer.decay_share;
    s->trainer.momentum = job_defaults().trainer.momentum;
    list_settings(s, list);
    for (int i = 0; i < SETTINGS; i++) {
        const json_value *value = json_member(root, list[i].key);
        char shown[JSON_SHOWN];
        if ((!value && i >= REQUIRED) || get_setting(&list[i], value)) continue;
        if (!value) return train_fail(error, "trainer.json: \"%s\" is missing", list[i].key);
        return train_fail(error, "trainer.json: \"%s\" is %s, which it cannot be", list[i].key,
                          json_show(value, shown));
    }
    if (!json_member(root, "residual")) s->residual = s->dtype;
    if (!s->trainer.shards) s->trainer.shards = 1;
    return true;
}
