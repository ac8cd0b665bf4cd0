/* SPDX-License-Identifier: MIT */
/*
 * Training in a page: the runs of `vjp train` (src/train/job/job.h) on files that are in the page's memory, so the same
 * settings give the same losses and checkpoints as the program, bit for bit.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"
#include "module.h"
#include "train/generate/sampler.h"
#include "train/job/job.h"

typedef struct web_trainer {
    vjp_device *device;
    job job;
    bool times_next; /* the next step's calls, on a device where that makes the step wait for each of them */
    double *seconds; /* [op][pass]: of the calls of all timed steps; on such a device of the last one */
    int64_t timed;   /* steps */
} web_trainer;

static const char sample_folder[] = "/sample"; /* removed once its model has been read */

/* ---- Settings ---------------------------------------------------------------------------------------- */

typedef struct setting {
    const char *key;
    enum { INTEGER, REAL, TEXT, DTYPE, CHOICE } type;
    void *place;
    double min, max; /* of a number; max: of a text its bytes */
    const char *const *names;
} setting;

static bool take_text(const setting *s, const json_value *value) {
    int number = -1;
    if (value->type != JSON_STRING) return web_fail("%s must be a text", s->key);
    if (s->type == TEXT) {
        if (strlen(value->text) >= (size_t)s->max) return web_fail("%s is too long", s->key);
        snprintf(s->place, (size_t)s->max, "%s", value->text);
        return true;
    }
    if (s->type == CHOICE) {
        number = job_choice(s->names, value->text);
        if (number >= 0) *(int *)s->place = number;
        return number >= 0 || web_fail("%s cannot be \"%.40s\"", s->key, value->text);
    }
    number = vjp_dtype_find(value->text);
    if (number != VJP_F32 && number != VJP_BF16 && number != VJP_F16)
        return web_fail("%s is \"%.40s\"; it must be f32, bf16 or f16", s->key, value->text);
    *(vjp_dtype *)s->place = (vjp_dtype)number;
    return true;
}

static bool take_setting(const setting *s, const json_value *value) {
    if (s->type != INTEGER && s->type != REAL) return take_text(s, value);
    if (value->type != JSON_NUMBER || (s->type == INTEGER && !value->exact))
        return web_fail("%s must be %s", s->key, s->type == INTEGER ? "an integer" : "a number");
    double number = s->type == INTEGER ? (double)value->integer : value->number;
    if (!(number >= s->min && number <= s->max))
        return web_fail("%s is %g; it must be %g to %g", s->key, number, s->min, s->max);
    if (s->type == INTEGER)
        *(int64_t *)s->place = value->integer;
    else
        *(double *)s->place = number;
    return true;
}

/* The defaults are those of `vjp train`, and so is what follows from other settings. */
static bool read_settings(const json_value *root, job_settings *s) {
    static const double many = 1e9;
    trainer_options *t = &s->trainer;
    const setting all[] = {
        {"data", TEXT, s->data, 0, sizeof s->data, NULL},
        {"from", TEXT, s->from, 0, sizeof s->from, NULL},
        {"preset", TEXT, s->preset, 0, sizeof s->preset, NULL},
        {"dim", INTEGER, &s->sizes.hidden, 1, many, NULL},
        {"layers", INTEGER, &s->sizes.layers, 1, many, NULL},
        {"heads", INTEGER, &s->sizes.heads, 1, many, NULL},
        {"kv_heads", INTEGER, &s->sizes.kv_heads, 1, many, NULL},
        {"ffn", INTEGER, &s->sizes.intermediate, 1, many, NULL},
        {"context", INTEGER, &s->context, 1, many, NULL},
        {"batch", INTEGER, &s->batch, 1, many, NULL},
        {"steps", INTEGER, &t->steps, 1, many, NULL},
        {"accumulate", INTEGER, &t->accumulate, 1, many, NULL},
        {"warmup", INTEGER, &t->warmup, 0, many, NULL},
        {"lr", REAL, &t->rate, 0, 1000, NULL},
        {"last_lr", REAL, &t->last_rate, 0, 1, NULL},
        {"weight_decay", REAL, &t->weight_decay, 0, 1000, NULL},
        {"clip", REAL, &t->max_norm, 0, many, NULL},
        {"beta2", REAL, &t->beta2, 0, 1, NULL},
        {"average", REAL, &t->average, 0, JOB_MAX_AVERAGE, NULL},
        {"momentum", REAL, &t->momentum, 0, 0.999999, NULL},
        {"label_smoothing", REAL, &s->label_smoothing, 0, 1, NULL},
        {"seed", INTEGER, &t->seed, 0, 0x1p53, NULL},
        {"dtype", DTYPE, &s->dtype, 0, 0, NULL},
        {"optimizer", CHOICE, &t->optimiser, 0, 0, job_optimisers},
        {"schedule", CHOICE, &t->schedule, 0, 0, job_schedules},
        {"validate_every", INTEGER, &s->validate_every, 0, many, NULL},
        {"save_every", INTEGER, &s->save_every, 0, many, NULL},
        {"keep", INTEGER, &s->keep, 1, 1000, NULL},
    };
    if (root->type != JSON_OBJECT) return web_fail("the settings must be an object");
    for (const json_value *value = root->first; value; value = value->next) {
        const setting *found = NULL;
        for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
            if (strcmp(all[i].key, value->key) == 0) found = &all[i];
        if (!found) return web_fail("there is no setting \"%.40s\"", value->key);
        if (!take_setting(found, value)) return false;
    }
    s->residual = s->dtype;
    if (t->warmup > t->steps) t->warmup = t->steps;
    return true;
}

/* ---- Beginning and ending ---------------------------------------------------------------------------- */

void vjp_web_trainer_end(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_end) void vjp_web_trainer_end(web_trainer *t) {
    if (!t) return;
    job_close(&t->job);
    vjp_close(t->device);
    free(t->seconds);
    free(t);
}

vjp_device *vjp_web_open(const char *name, int threads);
const char *vjp_web_property(vjp_device *device, const char *name);

static web_trainer *open_trainer(const char *device, int threads) {
    web_trainer *t = calloc(1, sizeof *t);
    double *seconds = calloc(vjp_op_count() * VJP_PASS_COUNT, sizeof *seconds);
    if (t && seconds) {
        *t = (web_trainer){.job.lock = -1, .seconds = seconds, .device = vjp_web_open(device, threads)};
        if (t->device) return t;
    } else {
        web_fail("out of memory");
    }
    free(seconds);
    free(t);
    return NULL;
}

static web_trainer *begun(web_trainer *t, bool ok, const char *error) {
    if (ok) return t;
    web_fail("%s", error);
    vjp_web_trainer_end(t);
    return NULL;
}

/* A new run on a device, in the folder `out`. `settings`: a JSON object, in which `data` is the path of the text. */
web_trainer *vjp_web_trainer_begin(const char *device, const char *settings, const char *out, int threads);
WEB_EXPORT(vjp_web_trainer_begin)
web_trainer *vjp_web_trainer_begin(const char *device, const char *settings, const char *out, int threads) {
    char error[TRAIN_ERROR];
    json_document document = {0};
    job_settings s = job_defaults();
    bool ok = json_parse(settings, strlen(settings), &document, error) || web_fail("%s", error);
    ok = ok && read_settings(document.root, &s);
    json_free(&document);
    web_trainer *t = ok ? open_trainer(device, threads) : NULL;
    if (!t) return NULL;
    s.arithmetic = job_arithmetic_of(t->device, s.dtype);
    return begun(t, job_begin(&t->job, t->device, &s, out, error), error);
}

/* Continues the run in `out`; `data`: where its text is now, NULL: where it was. */
web_trainer *vjp_web_trainer_resume(const char *device, const char *out, const char *data, bool allow_other_bits,
                                    int threads);
WEB_EXPORT(vjp_web_trainer_resume)
web_trainer *vjp_web_trainer_resume(const char *device, const char *out, const char *data, bool allow_other_bits,
                                    int threads) {
    char error[TRAIN_ERROR];
    job_settings recorded;
    if (!job_recorded(out, &recorded, error)) {
        web_fail("%s", error);
        return NULL;
    }
    web_trainer *t = open_trainer(device, threads);
    if (!t) return NULL;
    const job_arithmetic is = job_arithmetic_of(t->device, recorded.dtype);
    return begun(t,
                 job_resume(&t->job, t->device, &(job_processes){0}, &is, allow_other_bits, &(job_places){.data = data},
                            out, error),
                 error);
}

/* ---- Time per op ------------------------------------------------------------------------------------- */

/* On the host one step of so many is timed: with the clock reads of every call, a step takes 6 % longer in Firefox. */
enum { TIMED_EVERY = 8 };

static void profile(web_trainer *t, bool on) {
    vjp_program *programs[TRAINER_PROGRAMS];
    for (int i = trainer_programs(t->job.trainer, programs); i-- > 0;)
        vjp_program_profile(programs[i], on);
}

/* Adds the times of the last step, which was timed. */
static void take_times(web_trainer *t) {
    vjp_program *programs[TRAINER_PROGRAMS];
    if (!vjp_device_is_host(t->device)) {
        memset(t->seconds, 0, vjp_op_count() * VJP_PASS_COUNT * sizeof *t->seconds);
        t->timed = 0;
    }
    for (int i = trainer_programs(t->job.trainer, programs); i-- > 0;) {
        vjp_call_time call = {.struct_size = sizeof call};
        for (size_t k = 0; vjp_program_time(programs[i], k, &call) == VJP_OK; k++)
            if (call.runs)
                t->seconds[(size_t)call.op->id * VJP_PASS_COUNT + call.pass] += call.seconds / (double)call.runs;
    }
    t->timed++;
}

/*
 * Milliseconds per step, by op and pass: [{op, pass, ms}], longest first. On the host the mean of the steps that were
 * timed; on a GPU those of the last one, which is the one after a call of this function: none before the first.
 */
char *vjp_web_trainer_profile(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_profile) char *vjp_web_trainer_profile(web_trainer *t) {
    size_t count = vjp_op_count() * VJP_PASS_COUNT;
    double *seconds = malloc(count * sizeof *seconds);
    if (!seconds) {
        web_fail("out of memory");
        return NULL;
    }
    memcpy(seconds, t->seconds, count * sizeof *seconds);
    json_writer w = {.compact = true};
    json_put_array(&w, NULL);
    for (;;) {
        size_t longest = 0;
        for (size_t i = 1; i < count; i++)
            if (seconds[i] > seconds[longest]) longest = i;
        if (!(seconds[longest] > 0)) break;
        json_put_object(&w, NULL);
        json_put_text(&w, "op", vjp_op_describe(vjp_op_at(longest / VJP_PASS_COUNT))->name);
        json_put_text(&w, "pass", vjp_pass_name((vjp_pass)(longest % VJP_PASS_COUNT)));
        json_put_real(&w, "ms", 1e3 * seconds[longest] / (double)t->timed);
        json_put_object_end(&w);
        seconds[longest] = 0;
    }
    json_put_array_end(&w);
    free(seconds);
    t->times_next = !vjp_device_is_host(t->device);
    return web_take(&w);
}

/* ---- Training ---------------------------------------------------------------------------------------- */

static void put_row(json_writer *w, const metrics_row *row) {
    json_put_integer(w, "step", row->step);
    json_put_real(w, "loss", row->loss);
    json_put_real(w, "smoothed", row->smoothed);
    if (!isnan(row->validation)) json_put_real(w, "validation", row->validation);
    json_put_real(w, "norm", row->norm);
    json_put_real(w, "lr", row->rate);
    json_put_integer(w, "tokens", row->tokens);
    json_put_real(w, "seconds", row->seconds);
}

/* One step: {step, loss, smoothed, validation?, norm, lr, tokens, seconds, ms, over}. Validates when it is due. */
char *vjp_web_trainer_step(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_step) char *vjp_web_trainer_step(web_trainer *t) {
    char error[TRAIN_ERROR];
    metrics_row row;
    double begin = system_seconds();
    if (job_is_over(&t->job)) {
        web_fail("the run is over: all %lld steps are taken", (long long)t->job.settings.trainer.steps);
        return NULL;
    }
    /* On a GPU steps are queued one ahead: the last step of a run was run before, and the times of another one stay. */
    bool times = vjp_device_is_host(t->device) ? t->timed == 0 || t->job.step % TIMED_EVERY == 0
                                               : t->times_next && t->job.queued < t->job.settings.trainer.steps;
    if (times) profile(t, true);
    bool ok = job_step(&t->job, t->job.settings.trainer.steps, &row, error);
    if (times) profile(t, false);
    if (times && ok) take_times(t);
    t->times_next = t->times_next && !times;
    if (!ok) {
        web_fail("%s", error);
        return NULL;
    }
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    put_row(&w, &row);
    json_put_boolean(&w, "over", job_is_over(&t->job));
    json_put_real(&w, "ms", 1e3 * (system_seconds() - begin));
    json_put_object_end(&w);
    return web_take(&w);
}

/* The loss of the validation data; NaN: there are too few data, or a failure (see the sentence, which is "" before). */
double vjp_web_trainer_validate(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_validate) double vjp_web_trainer_validate(web_trainer *t) {
    char error[TRAIN_ERROR];
    double loss = NAN;
    job *j = &t->job;
    if (!j->source.validation_parts) {
        web_fail("the text is too short: nothing is left of it to validate on");
        return NAN;
    }
    if (trainer_evaluate(j->trainer, &j->source, j->settings.validate_parts, &loss, error)) return loss;
    web_fail("%s", error);
    return NAN;
}

/* The run: its settings, its sizes and what a step needs. */
char *vjp_web_trainer_describe(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_describe) char *vjp_web_trainer_describe(web_trainer *t) {
    job *j = &t->job;
    vjp_program *programs[TRAINER_PROGRAMS];
    int count = trainer_programs(j->trainer, programs);
    double arena = 0, kept = 0, flops = 0;
    size_t calls = 0;
    for (int i = 0; i < count; i++) {
        vjp_program_report report = {.struct_size = sizeof report};
        vjp_program_describe(programs[i], &report);
        arena = fmax(arena, (double)report.arena_bytes); /* the programs share it */
        kept = fmax(kept, (double)report.persistent_bytes);
        flops += report.cost.flops;
        calls += report.calls;
    }
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    json_put_integer(&w, "step", j->step);
    json_put_text(&w, "device", vjp_device_summary(t->device));
    json_put_integer(&w, "parameters", model_size(&j->model));
    json_put_integer(&w, "items", job_items(j));
    json_put_integer(&w, "calls", (int64_t)calls);
    json_put_real(&w, "flops", flops);
    json_put_real(&w, "arena", arena);
    json_put_real(&w, "kept", kept);
    json_put_integer(&w, "dim", j->llama.hidden_size);
    json_put_integer(&w, "layers", j->llama.layers);
    json_put_integer(&w, "heads", j->llama.heads);
    json_put_integer(&w, "kv_heads", j->llama.kv_heads);
    json_put_integer(&w, "ffn", j->llama.intermediate_size);
    json_put_object(&w, "settings");
    job_settings_write(&w, &j->settings);
    json_put_object_end(&w);
    json_put_object_end(&w);
    return web_take(&w);
}

/* Of the run's device, as vjp_web_property(). */
const char *vjp_web_trainer_property(web_trainer *t, const char *name);
WEB_EXPORT(vjp_web_trainer_property) const char *vjp_web_trainer_property(web_trainer *t, const char *name) {
    return vjp_web_property(t->device, name);
}

/* All steps so far, also those before the run was resumed. */
char *vjp_web_trainer_rows(const web_trainer *t);
WEB_EXPORT(vjp_web_trainer_rows) char *vjp_web_trainer_rows(const web_trainer *t) {
    size_t count = 0;
    const metrics_row *row = metrics_rows(t->job.metrics, &count);
    json_writer w = {.compact = true};
    json_put_array(&w, NULL);
    for (size_t i = 0; i < count; i++) {
        json_put_object(&w, NULL);
        put_row(&w, &row[i]);
        json_put_object_end(&w);
    }
    json_put_array_end(&w);
    return web_take(&w);
}

/* Of the losses of all steps, as `vjp train` prints it; "" if the run began with a version that kept none. */
const char *vjp_web_trainer_hash(const web_trainer *t);
WEB_EXPORT(vjp_web_trainer_hash) const char *vjp_web_trainer_hash(const web_trainer *t) {
    static char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)t->job.loss_hash);
    return t->job.loss_hash ? text : "";
}

/* Saves a checkpoint in the run's folder, as `vjp train` does when it stops. */
bool vjp_web_trainer_save(web_trainer *t);
WEB_EXPORT(vjp_web_trainer_save) bool vjp_web_trainer_save(web_trainer *t) {
    char error[TRAIN_ERROR];
    return job_save(&t->job, error) || web_fail("%s", error);
}

/* ---- Sampling ---------------------------------------------------------------------------------------- */

static bool sample(sampler *s, const sampler_options *options, const char *prompt, char **text, size_t *bytes,
                   char error[TRAIN_ERROR]) {
    const sampler_prompt prompts[] = {{prompt, strlen(prompt)}};
    if (!sampler_begin(s, options, prompts, 1, error)) return false;
    while (sampler_answer_of(s, 0).state == SAMPLER_RUNNING)
        if (!sampler_next(s, error)) return false;
    sampler_answer answer = sampler_answer_of(s, 0);
    *text = malloc(answer.count + 1);
    if (!*text) return train_fail(error, "there is no memory for the text");
    memcpy(*text, answer.bytes, answer.count);
    (*text)[answer.count] = 0;
    *bytes = answer.count;
    return true;
}

/* What the model writes after the prompt; *bytes is its length, since it may hold zeros. */
char *vjp_web_trainer_sample(web_trainer *t, const char *prompt, int tokens, double temperature, int top_k, int seed,
                             size_t *bytes);
WEB_EXPORT(vjp_web_trainer_sample)
char *vjp_web_trainer_sample(web_trainer *t, const char *prompt, int tokens, double temperature, int top_k, int seed,
                             size_t *bytes) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH], *text = NULL;
    const sampler_options options = {.draw = {.temperature = temperature, .top_k = top_k, .seed = (uint64_t)seed},
                                     .max_tokens = tokens};
    const sampler_settings settings = {.dtype = -1};
    vjp_options fixed = {.struct_size = sizeof fixed, .threads = 1, .fixed_rows = 1, .workspace_bytes = 1 << 20};
    checkpoint from = {0};
    vjp_device *device = NULL;
    sampler *s = NULL;
    system_remove_tree(sample_folder);
    bool ok = job_copy(&t->job, sample_folder, error) && checkpoint_open_newest(sample_folder, path, &from, error);
    if (ok && vjp_open("cpu", &fixed, &device) != VJP_OK)
        ok = train_fail(error, "%s", device ? vjp_error(device) : "out of memory");
    s = ok ? sampler_open(device, &from, &settings, error) : NULL;
    ok = s && sample(s, &options, prompt, &text, bytes, error);
    sampler_close(s);
    vjp_close(device);
    checkpoint_close(&from);
    system_remove_tree(sample_folder);
    if (!ok) web_fail("%s", error);
    return text;
}
