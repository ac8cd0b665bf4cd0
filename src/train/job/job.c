/* SPDX-License-Identifier: MIT */
/* A training run: start, resume, step, save. job_settings.c has its settings, job_group.c what processes agree on. */
#include "train/job/job.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/group.h"
#include "core/system.h"
#include "train/job/group.h"

static bool is_llama(const job *j) {
    return strcmp(j->settings.model, "llama") == 0;
}

bool job_is_text(const job *j) {
    return is_llama(j);
}

/* ---- Data and model ---------------------------------------------------------------------------------- */

/* While lines are encoded: shows it, and tells the other processes every few seconds. */
typedef struct encoding {
    job *job;
    double told;
} encoding;

static bool show_encoding(void *context, int64_t done, int64_t all) {
    static const double EVERY = 2; /* seconds */
    encoding *e = context;
    const job_settings *s = &e->job->settings;
    double now = system_seconds();
    bool due = now - e->told >= EVERY;
    if (due) e->told = now;
    return (!s->progress || s->progress(s->progress_context, done, all)) && (!due || job_is_busy(e->job));
}

/* Rank 0 encodes the data; the others wait, and then have its cache, or make one where they do not see it. */
static bool open_documents(job *j, char error[TRAIN_ERROR]) {
    encoding e = {.job = j, .told = system_seconds()};
    const jsonl_options options = {.cache = j->settings.cache,
                                   .skip_bad = j->settings.skip_bad,
                                   .progress = show_encoding,
                                   .progress_context = &e};
    bool ok = !job_is_first(j) || jsonl_open(j->settings.data, &j->tokenizer, &options, &j->documents, error);
    if (!job_agree(j, ok, error)) return false;
    e.told = system_seconds();
    ok = job_is_first(j) || jsonl_open(j->settings.data, &j->tokenizer, &options, &j->documents, error);
    if (!job_agree(j, ok, error)) return false;
    j->data_hash = j->documents.tokens.has.content;
    if (j->tokenizer.json) j->data_hash ^= job_hash(j->tokenizer.json, strlen(j->tokenizer.json));
    return true;
}

/* A resumed run must have the data that it began with. */
static bool open_data(job *j, char error[TRAIN_ERROR]) {
    if (is_llama(j) && jsonl_is_set(j->settings.data)) return open_documents(j, error);
    if (is_llama(j)) {
        if (!text_read(j->settings.data, &j->text, error)) return false;
        j->data_hash = job_hash(j->text.bytes, j->text.count);
        if (j->tokenizer.json) j->data_hash ^= job_hash(j->tokenizer.json, strlen(j->tokenizer.json));
        return model_tokenizer_encode(&j->tokenizer, &j->text, error);
    }
    if (strcmp(j->settings.model, "convnet") != 0)
        return train_fail(error, "unknown model \"%s\"; models are llama and convnet", j->settings.model);
    if (!images_read(j->settings.data, &j->images, error)) return false;
    const image_data *i = &j->images;
    j->data_hash = job_hash(i->pixels, (size_t)(i->count * i->height * i->width * i->channels)) ^
                   job_hash(i->label, (size_t)i->count * sizeof *i->label);
    return true;
}

/* The sizes of the convnet, by preset. */
static bool convnet_preset(const char *name, convnet_config *config, int64_t *batch) {
    static const struct {
        const char *name;
        int64_t features, stages, batch;
    } presets[] = {{"tiny", 16, 3, 64}, {"small", 32, 3, 64}, {"medium", 64, 4, 64}, {"large", 96, 4, 128}};
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strcmp(name, presets[i].name) == 0) {
            config->features = presets[i].features;
            config->stages = presets[i].stages;
            *batch = presets[i].batch;
            return true;
        }
    return false;
}

/* Once the batch is known. */
static bool require_whole_shards(const job *j, char error[TRAIN_ERROR]) {
    int64_t batch = j->settings.batch, shards = j->settings.trainer.shards;
    return batch % shards == 0 ||
           train_fail(error, "a batch of %lld rows cannot be split into %lld shards: it must be a multiple of them",
                      (long long)batch, (long long)shards);
}

static llama_options llama_options_of(const job *j) {
    const job_settings *s = &j->settings;
    return (llama_options){.batch = s->batch / s->trainer.shards,
                           .context = s->context,
                           .dtype = s->dtype,
                           .recompute = s->recompute,
                           .recompute_mlp = s->recompute_mlp,
                           .wide_residual = s->residual != s->dtype,
                           .label_smoothing = s->label_smoothing,
                           .masks = s->pack,
                           .lora = j->lora};
}

/* The adapters: as the settings want them, or as a run that is resumed has them. Their base must stay as it is. */
static bool configure_lora(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    const job_settings *s = &j->settings;
    lora_config own = {.rank = s->lora, .alpha = s->lora_alpha};
    if (!s->lora) return true;
    if (!lora_read_targets(s->lora_targets, &own.adapts, error) || !lora_suits(&own, &j->llama, error) ||
        !lora_of(from, &j->llama, &j->lora, error) || !job_hash_model(from, &j->base_hash, error))
        return false;
    if (j->lora.rank && (j->lora.rank != own.rank || j->lora.alpha != own.alpha || j->lora.adapts != own.adapts))
        return train_fail(error, "trainer.json and adapter_config.json are not of the same run: their adapters differ");
    j->lora = own;
    return true;
}

static bool resize(const job_sizes *sizes, llama_config *config, char error[TRAIN_ERROR]) {
    if (!sizes->hidden && !sizes->intermediate && !sizes->layers && !sizes->heads && !sizes->kv_heads) return true;
    if (sizes->hidden) config->hidden_size = sizes->hidden;
    if (sizes->intermediate) config->intermediate_size = sizes->intermediate;
    if (sizes->layers) config->layers = sizes->layers;
    if (sizes->heads) config->heads = config->kv_heads = sizes->heads;
    if (sizes->kv_heads) config->kv_heads = sizes->kv_heads;
    if (config->heads < 1 || config->hidden_size % config->heads)
        return train_fail(error, "%lld numbers per token cannot be split into %lld heads: they must be a multiple",
                          (long long)config->hidden_size, (long long)config->heads);
    config->head_dim = config->hidden_size / config->heads;
    return llama_config_check(config, error);
}

/* The sizes of the Llama, its batch and its context. */
static bool configure_llama(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    int64_t batch = LLAMA_USUAL_BATCH;
    if (from) {
        if (!llama_config_read(from->config.root, &j->llama, error)) return false;
        j->llama.dtype = VJP_F32; /* in which this run saves its weights */
        if (!model_tokenizer_fits(&j->tokenizer, from, j->llama.vocab_size, error) ||
            !llama_require_weights(&j->llama, from, error) || !configure_lora(j, from, error))
            return false;
    } else {
        const llama_preset *preset = llama_preset_find(j->settings.preset, error);
        if (!preset) return false;
        j->llama = preset->config;
        if (!resize(&j->settings.sizes, &j->llama, error)) return false;
        if (j->tokenizer.tokens) {
            j->llama.vocab_size = tokenizer_size(j->tokenizer.tokens);
            j->llama.begin_token = j->tokenizer.begin;
            j->llama.end_tokens[0] = j->tokenizer.end;
            j->llama.end_count = j->tokenizer.end >= 0;
        }
        batch = preset->batch;
    }
    if (!j->settings.batch) j->settings.batch = batch;
    if (!require_whole_shards(j, error)) return false;
    if (!j->settings.context)
        j->settings.context = from ? vjp_min(j->llama.max_positions, LLAMA_USUAL_CONTEXT) : j->llama.max_positions;
    if (!from) j->llama.max_positions = j->settings.context;
    if (j->settings.context > j->llama.max_positions)
        return train_fail(error, "a context of %lld is too long; the model was made for at most %lld",
                          (long long)j->settings.context, (long long)j->llama.max_positions);
    j->settings.recompute = vjp_min(j->settings.recompute, j->llama.layers);
    j->settings.recompute_mlp = vjp_min(j->settings.recompute_mlp, j->llama.layers);
    return true;
}

static fit_run run_of(const job *j) {
    return (fit_run){j->device, &j->settings.trainer, j->settings.validate_every > 0};
}

/*
 * Whether the model fits, before anything is allocated. A new run with a limit chooses what is recomputed and what
 * waits in the host's memory; a resumed one has both from its settings.
 */
static bool fit_into_memory(job *j, const fit_model *model, bool resumes, char error[TRAIN_ERROR]) {
    const fit_limit limit = {.asked = (size_t)j->settings.memory, .free = fit_free(j->device)};
    const fit_run run = run_of(j);
    if (!limit.asked && !limit.free) return true;
    if (!limit.asked || resumes) {
        if (fit_check(&run, model, &limit, &j->fit, error)) return true;
        /* A run may be resumed on a device that cannot keep in the host's memory what the first one did. */
        if (!limit.asked || !j->settings.trainer.arena_limit) return false;
    }
    if (!fit_choose(&run, model, &limit, &j->fit, error)) return false;
    j->settings.recompute = j->fit.recompute;
    j->settings.recompute_mlp = j->fit.recompute_mlp;
    j->settings.trainer.arena_limit = j->fit.arena_limit;
    return true;
}

/* Whether it fits into what the system has left, for a device that uses that: asked last, when the data are read. */
static bool fit_into_host(const job *j, const fit_model *model, char error[TRAIN_ERROR]) {
    const fit_limit host = {.free = vjp_device_is_host(j->device) ? fit_available(j->device) : 0};
    const fit_run run = run_of(j);
    fit_result ignored;
    return !host.free || fit_check(&run, model, &host, &ignored, error);
}

static bool build_llama(job *j, char error[TRAIN_ERROR]) {
    /* Before the model is built: its tables are as long as the context. */
    const job_settings *s = &j->settings;
    if (!j->documents.tokens.map) {
        if (!text_source(&j->text, s->batch, s->trainer.shards, s->context, s->trainer.seed, &j->source, error))
            return false;
    } else {
        if (!packed_plan(&j->packed, &j->documents.tokens, s->context, s->pack, error)) return false;
        packed_source(&j->packed, s->batch, s->trainer.shards, s->trainer.seed, &j->source);
    }
    const llama_options options = llama_options_of(j);
    if (!fit_into_host(j, &(fit_model){.llama = &j->llama, .llama_options = &options}, error)) return false;
    llama_build(&j->model, &j->llama, &options);
    return true;
}

static bool build_convnet(job *j, bool resumes, char error[TRAIN_ERROR]) {
    int64_t batch = 0;
    if (!convnet_preset(j->settings.preset, &j->convnet, &batch))
        return train_fail(error, "unknown preset \"%s\"; presets are tiny, small, medium, large", j->settings.preset);
    if (!j->settings.batch) j->settings.batch = batch;
    if (!require_whole_shards(j, error)) return false;
    j->settings.context = 1;
    j->convnet.height = j->images.height;
    j->convnet.width = j->images.width;
    j->convnet.channels = j->images.channels;
    j->convnet.classes = j->images.classes;
    const convnet_options options = {.batch = j->settings.batch / j->settings.trainer.shards,
                                     .dtype = j->settings.dtype,
                                     .label_smoothing = j->settings.label_smoothing};
    const fit_model model = {.convnet = &j->convnet, .convnet_options = &options};
    if (!fit_into_memory(j, &model, resumes, error) || !fit_into_host(j, &model, error)) return false;
    convnet_build(&j->model, &j->convnet, &options);
    return images_source(&j->images, j->settings.batch, j->settings.trainer.shards, j->settings.trainer.seed,
                         &j->source, error);
}

/* The hash of that name in trainer.json. */
static bool read_hash(const json_value *root, const char *key, uint64_t *hash, char error[TRAIN_ERROR]) {
    const json_value *value = json_member(root, key);
    if (!value || value->type != JSON_STRING) return train_fail(error, "trainer.json: \"%s\" is missing", key);
    *hash = strtoull(value->text, NULL, 16);
    return true;
}

static bool require_same_data(const job *j, const json_value *root, char error[TRAIN_ERROR]) {
    uint64_t data = 0, base = 0;
    if (!read_hash(root, "data_hash", &data, error) || (j->lora.rank && !read_hash(root, "base_hash", &base, error)))
        return false;
    if (j->lora.rank && base != j->base_hash)
        return train_fail(error, "%.300s is not the base model that this run began with", j->base);
    return data == j->data_hash ||
           train_fail(error,
                      "%.300s has changed since this run began, so it cannot be continued bit for bit; start a new run "
                      "with --from",
                      j->settings.data);
}

/* A run that is resumed has its tokenizer in its checkpoints. */
static bool open_tokenizer(job *j, const checkpoint *from, bool resumes, char error[TRAIN_ERROR]) {
    bool named = j->settings.tokenizer[0];
    if (!is_llama(j)) return !named || train_fail(error, "--tokenizer is for the llama");
    if (named && !resumes) return model_tokenizer_read(j->settings.tokenizer, &j->tokenizer, error);
    return !from || model_tokenizer_of(from, &j->tokenizer, error);
}

/* Only documents are packed. */
static bool choose_packing(job *j, char error[TRAIN_ERROR]) {
    job_settings *s = &j->settings;
    bool documents = is_llama(j) && jsonl_is_set(s->data);
    if (!documents && (s->pack == 1 || s->skip_bad || s->cache[0]))
        return train_fail(error, "%.300s: %s is for .jsonl files", s->data,
                          s->pack == 1  ? "--pack"
                          : s->skip_bad ? "--skip-bad"
                                        : "--cache");
    if (s->pack == JOB_PACK_DOCUMENTS) s->pack = documents;
    return true;
}

/* The data and the model; `from`: with its sizes. */
static bool prepare(job *j, const checkpoint *from, bool resumes, char error[TRAIN_ERROR]) {
    if (!open_tokenizer(j, from, resumes, error) || (!resumes && !choose_packing(j, error))) return false;
    if (is_llama(j)) {
        if (!configure_llama(j, from, error)) return false;
        const llama_options options = llama_options_of(j);
        if (!fit_into_memory(j, &(fit_model){.llama = &j->llama, .llama_options = &options}, resumes, error))
            return false;
    }
    if (!open_data(j, error) || (resumes && !require_same_data(j, from->trainer.root, error))) return false;
    return is_llama(j) ? build_llama(j, error) : build_convnet(j, resumes, error);
}

/* ---- Starting and resuming --------------------------------------------------------------------------- */

static bool load_weights(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    bool new_adapters = j->lora.rank && !from->adapter_config.root;
    for (int i = 0; i < j->model.parameters; i++) {
        const char *name = j->model.parameter[i].name;
        if (new_adapters && !j->model.parameter[i].frozen) continue;
        const safetensors_tensor *tensor = checkpoint_tensor(from, name);
        if (!tensor) return train_fail(error, "the checkpoint has no tensor %s", name);
        if (!trainer_load(j->trainer, tensor, error)) return false;
    }
    return true;
}

/* The file must hold what the optimiser keeps and nothing else: any other name could overwrite a weight. */
static bool load_moments(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    const safetensors_file *file = &from->optimizer.tensors;
    char name[TRAINER_NAME];
    size_t count = 0;
    if (!from->optimizer.tensors.stream)
        return train_fail(error, "the checkpoint has no optimizer.safetensors to resume from");
    while (trainer_state_name(j->trainer, count, name))
        count++;
    if (file->count != count)
        return train_fail(error, "optimizer.safetensors has %zu tensors; the model needs %zu", file->count, count);
    for (size_t i = 0; trainer_state_name(j->trainer, i, name); i++) {
        const safetensors_tensor *tensor = safetensors_find(file, name);
        if (!tensor) return train_fail(error, "optimizer.safetensors has no tensor %s", name);
        if (!trainer_load(j->trainer, tensor, error)) return false;
    }
    return true;
}

static bool create_trainer(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    j->trainer = trainer_create(j->device, &j->model, &j->settings.trainer, error);
    return j->trainer && (!from || (load_weights(j, from, error) && trainer_begin_average(j->trainer, error)));
}

static bool lock_out(job *j, char error[TRAIN_ERROR]) {
    if (!job_is_first(j)) return true;
    j->lock = checkpoint_lock(j->out, error);
    return j->lock >= 0;
}

static void note_validation(job *j, const metrics_row *row) {
    if (isnan(row->validation)) return;
    bool lowest = !j->best_step || row->validation < j->best_loss;
    j->worse = lowest ? 0 : j->worse + 1;
    if (!lowest) return;
    j->best_step = row->step;
    j->best_loss = row->validation;
}

static bool open_record(job *j, char error[TRAIN_ERROR]) {
    if (!job_is_first(j)) return true;
    j->metrics = metrics_open(j->out, j->step, error);
    if (!j->metrics) return false;
    j->seconds = metrics_last(j->metrics).seconds;
    size_t count;
    const metrics_row *rows = metrics_rows(j->metrics, &count);
    for (size_t i = 0; i < count; i++)
        note_validation(j, &rows[i]);
    return true;
}

static bool set_out(job *j, vjp_device *device, const char *out, char error[TRAIN_ERROR]) {
    *j = (job){.device = device, .saved = -1, .lock = -1, .loss_hash = job_hash(NULL, 0)};
    if (snprintf(j->out, sizeof j->out, "%s", out) < (int)sizeof j->out) return true;
    return train_fail(error, "the path of the folder for the results is too long");
}

/* PEFT takes a path that is not absolute from wherever it is started. */
static bool set_base(job *j, const char *path, char error[TRAIN_ERROR]) {
    char *absolute = system_absolute_path(path);
    bool fits = absolute && snprintf(j->base, sizeof j->base, "%s", absolute) < (int)sizeof j->base;
    free(absolute);
    return fits || train_fail(error, "%.300s: its absolute path cannot be found, or is too long", path);
}

/* A run that is in progress is named as such. */
static bool require_no_run(const char *out, bool locked, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    if (!checkpoint_find(out, path, error)) return true;
    int lock = locked ? -1 : checkpoint_lock(out, error);
    if (!locked && lock < 0) return false;
    if (lock >= 0) system_close(lock);
    return train_fail(error, "%.300s already holds a run: continue it with --resume, or choose another --out", out);
}

/* A model to begin from. Adapters are added to it, if the run is to train those. */
static bool open_from(job *j, checkpoint *from, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    if (j->settings.lora && !is_llama(j)) return train_fail(error, "--lora is for the llama");
    if (!j->settings.from[0])
        return !j->settings.lora || train_fail(error, "--lora adapts a model, which --from must name");
    if (!checkpoint_open_newest(j->settings.from, path, from, error)) return false;
    if (!is_llama(j))
        return train_fail(error, "--from is for the llama; a %s starts from random weights", j->settings.model);
    if (from->adapter_config.root)
        return train_fail(error,
                          "%.200s has adapters and not a model: `vjp merge` makes one of it to begin from, and "
                          "--resume continues the run that made it",
                          path);
    return set_base(j, path, error);
}

bool job_begin(job *j, vjp_device *device, const job_settings *settings, const char *out, char error[TRAIN_ERROR]) {
    bool ok = set_out(j, device, out, error) && require_no_run(out, false, error);
    j->settings = *settings;
    checkpoint from = {0};
    ok = ok && open_from(j, &from, error);
    const checkpoint *weights = settings->from[0] ? &from : NULL;
    ok = ok && prepare(j, weights, false, error) && create_trainer(j, weights, error);
    if (ok && (settings->patience || settings->save_best) && !j->source.validation_parts)
        ok = train_fail(error, "--patience and --save-best need validation, and %.300s has too few data for it",
                        settings->data);
    /* The folder is created last, so that a refused run leaves none; by now another run may have come first. */
    ok = ok && lock_out(j, error) && require_no_run(out, true, error) && open_record(j, error);
    checkpoint_close(&from);
    return job_meet(j, ok, error);
}

/* Opens the newest checkpoint of a run and reads its settings. Close it in any case. */
static bool open_newest(const char *out, checkpoint *from, job_settings *settings, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    *from = (checkpoint){0};
    if (checkpoint_is_one(out))
        return train_fail(error,
                          "%.200s is a single checkpoint: continue its run with --resume --out and the folder that "
                          "holds it, or start a new run with --from",
                          out);
    if (!checkpoint_open_newest(out, path, from, error)) return false;
    if (!from->trainer.root)
        return train_fail(error, "%.300s has no trainer.json, so vjp did not make it: start a new run with --from",
                          path);
    return job_settings_read(from->trainer.root, settings, error);
}

bool job_recorded(const char *out, job_settings *settings, char error[TRAIN_ERROR]) {
    checkpoint from;
    bool ok = open_newest(out, &from, settings, error);
    checkpoint_close(&from);
    return ok;
}

static const char *describe(const job_arithmetic *a, char text[JOB_ARITHMETIC_TEXT]) {
    const char *by = a->instructions[0] ? " and products by " : " with products by ";
    snprintf(text, JOB_ARITHMETIC_TEXT, "%s%s%s%s%s", a->device, a->instructions[0] ? " with " : "", a->instructions,
             a->products[0] ? by : "", a->products);
    return text;
}

/* Whether results have the same bits as recorded. What an older checkpoint did not record is not checked. */
static bool same_bits(const job_arithmetic *was, const job_arithmetic *is, char error[TRAIN_ERROR]) {
    bool same = !was->device[0] ||
                (job_same_kind(was->device, is->device) && strcmp(was->instructions, is->instructions) == 0 &&
                 strcmp(was->products, is->products) == 0);
    char before[JOB_ARITHMETIC_TEXT], here[JOB_ARITHMETIC_TEXT];
    return same || train_fail(error,
                              "this run was computed on %s; here it would continue on %s, and its losses would differ "
                              "in their last bits; --allow-other-bits continues all the same",
                              describe(was, before), describe(is, here));
}

/* What is no setting of the run: it may be other than when the run began. */
static void set_processes(job *j, const job_processes *processes) {
    j->settings.trainer.group = processes->group;
    j->settings.trainer.zero = processes->zero;
    j->settings.trainer.overlap = processes->overlap;
}

bool job_resume(job *j, vjp_device *device, const job_processes *processes, const job_arithmetic *arithmetic,
                bool allow_other_bits, const job_places *places, const char *out, char error[TRAIN_ERROR]) {
    checkpoint from = {0};
    /* The first look creates no folder and no lock where there is no run. */
    bool ok = set_out(j, device, out, error) && job_recorded(out, &j->settings, error);
    set_processes(j, processes);
    ok = ok && lock_out(j, error) && open_newest(out, &from, &j->settings, error);
    set_processes(j, processes);
    bool same = ok && same_bits(&j->settings.arithmetic, arithmetic, error);
    if (ok && !same) describe(&j->settings.arithmetic, j->computed_on);
    ok = ok && (same || allow_other_bits);
    if (ok) {
        const json_value *hash = json_member(from.trainer.root, "loss_hash"); /* older checkpoints have none */
        j->loss_hash = hash && hash->type == JSON_STRING ? strtoull(hash->text, NULL, 16) : 0;
        j->settings.arithmetic = *arithmetic;
        j->step = j->saved = j->queued = from.step;
    }
    if (ok && !j->settings.lora != !from.adapter_config.root)
        ok = train_fail(error, "trainer.json is of a run %s adapters, and the files beside it are not",
                        j->settings.lora ? "with" : "without");
    ok = ok && checkpoint_open_base(&from, places->base, error) && (!j->settings.lora || set_base(j, from.base, error));
    if (ok && places->data &&
        snprintf(j->settings.data, sizeof j->settings.data, "%s", places->data) >= (int)sizeof j->settings.data)
        ok = train_fail(error, "the path of the data is too long");
    ok = ok && prepare(j, &from, true, error) && create_trainer(j, &from, error) && load_moments(j, &from, error) &&
         open_record(j, error);
    checkpoint_close(&from);
    return job_meet(j, ok, error);
}

void job_close(job *j) {
    metrics_close(j->metrics);
    trainer_destroy(j->trainer);
    model_free(&j->model);
    text_free(&j->text);
    packed_free(&j->packed);
    token_cache_close(&j->documents.tokens);
    model_tokenizer_free(&j->tokenizer);
    images_free(&j->images);
    if (j->lock >= 0) system_close(j->lock);
    *j = (job){.lock = -1};
}

/* ---- Stepping and saving ----------------------------------------------------------------------------- */

int64_t job_items(const job *j) {
    return j->settings.batch * j->settings.context * j->settings.trainer.accumulate;
}

static bool is_due(int64_t step, int64_t every) {
    return every && step % every == 0;
}

static bool validates(const job *j, int64_t step) {
    return j->source.validation_parts && j->settings.validate_every &&
           (is_due(step, j->settings.validate_every) || step == j->settings.trainer.steps);
}

bool job_is_over(const job *j) {
    return j->step >= j->settings.trainer.steps || (j->settings.patience && j->worse >= j->settings.patience);
}

bool job_save_is_due(const job *j) {
    return is_due(j->step, j->settings.save_every) || (j->settings.save_best && j->best_step == j->step);
}

bool job_is_ahead(const job *j) {
    return j->queued > j->step;
}

/* Queues the next step, if it is not queued yet, and the one after it if it need not wait. */
static bool queue_steps(job *j, int64_t last, char error[TRAIN_ERROR]) {
    int64_t next = j->step + 1;
    if (j->later[0]) return train_fail(error, "%s", j->later);
    if (!job_is_ahead(j)) {
        if (!trainer_queue(j->trainer, &j->source, next, error)) return false;
        j->queued = next;
    }
    bool awaited = validates(j, next) || is_due(next, j->settings.save_every);
    if (trainer_depth(j->trainer) > 1 && next < last && !awaited &&
        trainer_queue(j->trainer, &j->source, next + 1, j->later))
        j->queued = next + 1;
    return true;
}

bool job_step(job *j, int64_t last, metrics_row *row, char error[TRAIN_ERROR]) {
    double begin = system_seconds();
    trainer_step_result result;
    if (!queue_steps(j, last, error) || !trainer_collect(j->trainer, &j->source, &result, error)) {
        j->queued = j->step;
        return trainer_failed_together(j->trainer) ? job_agree(j, false, error) : false;
    }
    j->step++;
    const float loss = (float)result.loss;
    if (j->loss_hash) j->loss_hash = job_hash_more(j->loss_hash, &loss, sizeof loss);
    j->seconds += system_seconds() - begin;
    *row = (metrics_row){.step = j->step,
                         .loss = result.loss,
                         .validation = NAN,
                         .rate = result.rate,
                         .norm = result.norm,
                         .loss_scale = result.loss_scale,
                         .skipped = result.skipped,
                         .tokens = j->step * job_items(j),
                         .seconds = j->seconds};
    if (validates(j, j->step) &&
        !trainer_evaluate(j->trainer, &j->source, j->settings.validate_parts, &row->validation, error))
        return false;
    note_validation(j, row);
    return !j->metrics || metrics_add(j->metrics, row, error);
}

static char *config_text(const job *j) {
    if (j->lora.rank) return lora_config_write(&j->lora, j->base);
    if (is_llama(j)) return llama_config_write(&j->llama);
    json_writer w = {.indented = true};
    json_put_object(&w, NULL);
    json_put_text(&w, "model_type", "vjp_convnet");
    json_put_integer(&w, "height", j->convnet.height);
    json_put_integer(&w, "width", j->convnet.width);
    json_put_integer(&w, "channels", j->convnet.channels);
    json_put_integer(&w, "classes", j->convnet.classes);
    json_put_integer(&w, "features", j->convnet.features);
    json_put_integer(&w, "stages", j->convnet.stages);
    json_put_object_end(&w);
    return json_take(&w);
}

static char *trainer_text(job *j) {
    char hash[32], losses[32];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)j->data_hash);
    snprintf(losses, sizeof losses, "%016llx", (unsigned long long)j->loss_hash);
    json_writer w = {.indented = true};
    json_put_object(&w, NULL);
    json_put_integer(&w, "step", j->step);
    json_put_text(&w, "data_hash", hash);
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)j->base_hash);
    if (j->lora.rank) json_put_text(&w, "base_hash", hash);
    if (j->loss_hash) json_put_text(&w, "loss_hash", losses);
    job_settings_write(&w, &j->settings);
    json_put_object_end(&w);
    return json_take(&w);
}

static bool agree(void *context, bool ok, char error[TRAIN_ERROR]) {
    return job_agree(context, ok, error);
}

/* Saves tensors, which all processes call, and some may have failed to list (`ok`). */
static bool save_to(job *j, checkpoint_content content, bool ok, const char *out, char error[TRAIN_ERROR]) {
    vjp_group *group = j->settings.trainer.group;
    const checkpoint_group together = {vjp_group_rank(group), j, agree};
    char *config = config_text(j), *trainer_json = trainer_text(j);
    ok = ok && ((config && trainer_json) || train_fail(error, "there is no memory for a checkpoint"));
    content.config = config;
    content.is_adapter = j->lora.rank > 0;
    content.trainer = trainer_json;
    content.tokenizer_json = j->tokenizer.json;
    content.tokenizer_config = j->tokenizer.config;
    /* The record first: a checkpoint must not be newer than its record. */
    ok = ok && (!j->metrics || metrics_sync(j->metrics, error));
    content.group = vjp_group_size(group) > 1 ? &together : NULL;
    ok = job_agree(j, ok, error) && checkpoint_save(out, (int)j->settings.keep, &content, error);
    free(config);
    free(trainer_json);
    return ok;
}

bool job_copy(job *j, const char *out, char error[TRAIN_ERROR]) {
    checkpoint_content content = {.step = j->step, .best = j->settings.save_best ? j->best_step : 0};
    bool ok = trainer_tensors(j->trainer, &content.model, &content.model_count, &content.optimizer,
                              &content.optimizer_count, error);
    return save_to(j, content, ok, out, error);
}

static bool save(job *j, checkpoint_content content, bool ok, char error[TRAIN_ERROR]) {
    char title[160];
    if (!save_to(j, content, ok, j->out, error)) return false;
    if (!job_is_first(j)) return true;
    snprintf(title, sizeof title, "%s %s, %.3g M parameters", j->settings.model, j->settings.preset,
             (double)model_size(&j->model) / 1e6);
    return metrics_draw(j->metrics, title, error);
}

bool job_save(job *j, char error[TRAIN_ERROR]) {
    checkpoint_content content = {.step = j->step, .best = j->settings.save_best ? j->best_step : 0};
    double begin = system_seconds();
    if (!job_has_same_weights(j, error)) return false;
    bool ok = trainer_tensors(j->trainer, &content.model, &content.model_count, &content.optimizer,
                              &content.optimizer_count, error);
    ok = save(j, content, ok, error);
    if (vjp_group_has_failed(j->settings.trainer.group)) return false;
    if (!job_agree(j, ok, error)) return false;
    j->saved = j->step;
    j->saves++;
    j->save_seconds += system_seconds() - begin;
    return true;
}
