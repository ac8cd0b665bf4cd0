/* A training run: beginning, going on, stepping, saving. */
#include "train/job.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool is_llama(const job *j) {
    return strcmp(j->settings.model, "llama") == 0;
}

job_settings job_defaults(void) {
    return (job_settings){.model = "llama",
                          .preset = "tiny",
                          .validate_every = 200,
                          .validate_parts = 8,
                          .save_every = 400,
                          .keep = 2,
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
                                      .seed = 1}};
}

/* ---- Settings as JSON -------------------------------------------------------------------------------- */

/* One list of all settings, for writing and for reading; a number that is read must be within its limits. */
typedef struct setting {
    const char *key;
    enum { INTEGER, REAL, TEXT, BOOLEAN, DTYPE } type;
    void *place;
    size_t room; /* of a text */
    double least, most;
} setting;

enum { SETTINGS = 24 };

static int list_settings(job_settings *s, setting list[SETTINGS]) {
    static const double many = 1e9;
    const setting all[] = {
        {"data", TEXT, s->data, sizeof s->data, 0, 0},
        {"model", TEXT, s->model, sizeof s->model, 0, 0},
        {"preset", TEXT, s->preset, sizeof s->preset, 0, 0},
        {"from", TEXT, s->from, sizeof s->from, 0, 0},
        {"batch", INTEGER, &s->batch, 0, 1, many},
        {"context", INTEGER, &s->context, 0, 1, many},
        {"validate_every", INTEGER, &s->validate_every, 0, 0, many},
        {"validate_parts", INTEGER, &s->validate_parts, 0, 1, many},
        {"save_every", INTEGER, &s->save_every, 0, 0, many},
        {"keep", INTEGER, &s->keep, 0, 1, 1000},
        {"dtype", DTYPE, &s->dtype, 0, 0, 0},
        {"recompute", BOOLEAN, &s->recompute, 0, 0, 0},
        {"label_smoothing", REAL, &s->label_smoothing, 0, 0, 1},
        {"steps", INTEGER, &s->trainer.steps, 0, 1, many},
        {"warmup", INTEGER, &s->trainer.warmup, 0, 0, many},
        {"accumulate", INTEGER, &s->trainer.accumulate, 0, 1, many},
        {"rate", REAL, &s->trainer.rate, 0, 0, many},
        {"last_rate", REAL, &s->trainer.last_rate, 0, 0, 1},
        {"weight_decay", REAL, &s->trainer.weight_decay, 0, 0, many},
        {"max_norm", REAL, &s->trainer.max_norm, 0, 0, many},
        {"beta1", REAL, &s->trainer.beta1, 0, 0, 1},
        {"beta2", REAL, &s->trainer.beta2, 0, 0, 1},
        {"eps", REAL, &s->trainer.eps, 0, 0, many},
        {"seed", INTEGER, &s->trainer.seed, 0, -0x1p63, 0x1p63},
    };
    _Static_assert(sizeof all / sizeof all[0] == SETTINGS, "one row a setting");
    memcpy(list, all, sizeof all);
    return SETTINGS;
}

static void put_settings(json_writer *w, job_settings *s) {
    setting list[SETTINGS];
    int count = list_settings(s, list);
    for (int i = 0; i < count; i++) {
        const setting *one = &list[i];
        switch (one->type) {
        case INTEGER: json_put_integer(w, one->key, *(int64_t *)one->place); break;
        case REAL: json_put_real(w, one->key, *(double *)one->place); break;
        case TEXT: json_put_text(w, one->key, one->place); break;
        case BOOLEAN: json_put_boolean(w, one->key, *(bool *)one->place); break;
        case DTYPE: json_put_text(w, one->key, vjp_dtype_name(*(vjp_dtype *)one->place)); break;
        }
    }
}

static bool is_number(const setting *one, const json_value *value) {
    return value && value->type == JSON_NUMBER && value->number >= one->least && value->number <= one->most;
}

static bool get_setting(const setting *one, const json_value *value) {
    switch (one->type) {
    case INTEGER:
        if (!is_number(one, value) || !value->exact) return false;
        *(int64_t *)one->place = value->integer;
        return true;
    case REAL:
        if (!is_number(one, value)) return false;
        *(double *)one->place = value->number;
        return true;
    case TEXT:
        if (!value || value->type != JSON_STRING || strlen(value->text) >= one->room) return false;
        memcpy(one->place, value->text, strlen(value->text) + 1);
        return true;
    case BOOLEAN:
        if (!value || value->type != JSON_BOOLEAN) return false;
        *(bool *)one->place = value->boolean;
        return true;
    case DTYPE: {
        int dtype = value && value->type == JSON_STRING ? vjp_dtype_find(value->text) : -1;
        bool takes = dtype == VJP_F32 || dtype == VJP_BF16 || dtype == VJP_F16;
        if (takes) *(vjp_dtype *)one->place = (vjp_dtype)dtype;
        return takes;
    }
    }
    return false;
}

static bool get_settings(const json_value *root, job_settings *s, char error[TRAIN_ERROR]) {
    setting list[SETTINGS];
    int count = list_settings(s, list);
    for (int i = 0; i < count; i++)
        if (!get_setting(&list[i], json_member(root, list[i].key)))
            return train_fail(error, "trainer.json: \"%s\" is missing or is not what it should be", list[i].key);
    return true;
}

/* ---- Data and model ---------------------------------------------------------------------------------- */

/* FNV-1a: tells whether the data of a run that goes on are the ones it began with. */
static uint64_t hash_bytes(const void *bytes, size_t count) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

static bool open_data(job *j, char error[TRAIN_ERROR]) {
    if (is_llama(j)) {
        if (!text_read(j->settings.data, &j->text, error)) return false;
        j->data_hash = hash_bytes(j->text.bytes, j->text.count);
        return true;
    }
    if (strcmp(j->settings.model, "convnet") != 0)
        return train_fail(error, "there is no model \"%s\"; there are llama and convnet", j->settings.model);
    if (!images_read(j->settings.data, &j->images, error)) return false;
    const image_data *i = &j->images;
    j->data_hash = hash_bytes(i->pixels, (size_t)(i->count * i->height * i->width * i->channels)) ^
                   hash_bytes(i->label, (size_t)i->count * sizeof *i->label);
    return true;
}

/* The sizes of the network for pictures, by preset. */
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

static bool choose_llama(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    if (from) {
        if (!llama_config_read(from->config.root, &j->llama, error)) return false;
        j->llama.dtype = VJP_F32; /* what checkpoints of this run will hold */
        if (!text_is_for(from, j->llama.vocab_size, error)) return false;
    } else {
        const llama_preset *preset = llama_preset_find(j->settings.preset, error);
        if (!preset) return false;
        j->llama = preset->config;
    }
    if (!j->settings.batch) j->settings.batch = JOB_USUAL_BATCH;
    if (!j->settings.context) j->settings.context = j->llama.max_positions;
    if (!from) j->llama.max_positions = j->settings.context;
    if (j->settings.context > j->llama.max_positions)
        return train_fail(error, "a context of %lld; the model was made for %lld at most",
                          (long long)j->settings.context, (long long)j->llama.max_positions);
    /* Before the model is built: its tables are as long as the context. */
    if (!text_source(&j->text, j->settings.batch, j->settings.context, j->settings.trainer.seed, &j->source, error))
        return false;
    const llama_options options = {.batch = j->settings.batch,
                                   .context = j->settings.context,
                                   .dtype = j->settings.dtype,
                                   .recompute = j->settings.recompute,
                                   .label_smoothing = j->settings.label_smoothing};
    llama_build(&j->model, &j->llama, &options);
    return true;
}

static bool choose_convnet(job *j, char error[TRAIN_ERROR]) {
    int64_t batch = 0;
    if (!convnet_preset(j->settings.preset, &j->convnet, &batch))
        return train_fail(error, "there is no preset \"%s\"; there are tiny, small, medium and large",
                          j->settings.preset);
    if (!j->settings.batch) j->settings.batch = batch;
    j->settings.context = 1;
    j->convnet.height = j->images.height;
    j->convnet.width = j->images.width;
    j->convnet.channels = j->images.channels;
    j->convnet.classes = j->images.classes;
    const convnet_options options = {
        .batch = j->settings.batch, .dtype = j->settings.dtype, .label_smoothing = j->settings.label_smoothing};
    convnet_build(&j->model, &j->convnet, &options);
    return images_source(&j->images, j->settings.batch, j->settings.trainer.seed, &j->source, error);
}

static bool choose_model(job *j, const checkpoint *from, char error[TRAIN_ERROR]) {
    return is_llama(j) ? choose_llama(j, from, error) : choose_convnet(j, error);
}

/* ---- Beginning and going on -------------------------------------------------------------------------- */

static bool load(job *j, const checkpoint *from, bool optimiser, char error[TRAIN_ERROR]) {
    for (int i = 0; i < j->model.parameters; i++) {
        const char *name = j->model.parameter[i].name;
        const safetensors_tensor *tensor = checkpoint_tensor(from, name);
        if (!tensor) return train_fail(error, "the checkpoint has no tensor %s", name);
        if (!trainer_load(j->trainer, tensor, error)) return false;
    }
    if (!optimiser) return true;
    if (!from->optimizer.tensors.stream)
        return train_fail(error, "the checkpoint has no optimizer.safetensors to go on from");
    size_t count = from->optimizer.tensors.count;
    if (count != 2 * (size_t)j->model.parameters)
        return train_fail(error, "optimizer.safetensors holds %zu tensors; the model needs %d", count,
                          2 * j->model.parameters);
    for (size_t i = 0; i < count; i++)
        if (!trainer_load(j->trainer, &from->optimizer.tensors.tensors[i], error)) return false;
    return true;
}

static bool start(job *j, const checkpoint *from, bool optimiser, char error[TRAIN_ERROR]) {
    if (!choose_model(j, from, error)) return false;
    j->trainer = trainer_create(j->device, &j->model, &j->settings.trainer, error);
    if (!j->trainer || (from && !load(j, from, optimiser, error))) return false;
    j->metrics = metrics_open(j->out, j->step, error);
    if (!j->metrics) return false;
    j->seconds = metrics_last(j->metrics).seconds;
    return true;
}

static bool set_out(job *j, vjp_device *device, const char *out, char error[TRAIN_ERROR]) {
    *j = (job){.device = device, .saved = -1};
    if (snprintf(j->out, sizeof j->out, "%s", out) >= (int)sizeof j->out)
        return train_fail(error, "the path of the folder for the results is too long");
    return true;
}

bool job_begin(job *j, vjp_device *device, const job_settings *settings, const char *out, char error[TRAIN_ERROR]) {
    if (!set_out(j, device, out, error)) return false;
    j->settings = *settings;
    if (!settings->from[0]) return open_data(j, error) && start(j, NULL, false, error);
    char path[CHECKPOINT_PATH];
    checkpoint from = {0};
    bool ok = checkpoint_find(settings->from, path, error) && checkpoint_open(path, &from, error);
    if (ok && !is_llama(j)) ok = train_fail(error, "only a llama begins with another checkpoint's weights");
    ok = ok && open_data(j, error) && start(j, &from, false, error);
    checkpoint_close(&from);
    return ok;
}

/* What a checkpoint of ours says of the run, beside the settings. */
static bool get_state(job *j, const checkpoint *c, uint64_t *data_hash, char error[TRAIN_ERROR]) {
    const json_value *root = c->trainer.root, *hash = json_member(root, "data_hash");
    if (!root) return train_fail(error, "the checkpoint has no trainer.json: vjp did not make it; begin with --from");
    if (!get_settings(root, &j->settings, error)) return false;
    if (!hash || hash->type != JSON_STRING) return train_fail(error, "trainer.json: \"data_hash\" is missing");
    *data_hash = strtoull(hash->text, NULL, 16);
    j->step = j->saved = c->step;
    return true;
}

bool job_resume(job *j, vjp_device *device, const char *out, char error[TRAIN_ERROR]) {
    if (!set_out(j, device, out, error)) return false;
    char path[CHECKPOINT_PATH];
    checkpoint from = {0};
    uint64_t data_hash = 0;
    bool ok = checkpoint_find(out, path, error) && checkpoint_open(path, &from, error) &&
              get_state(j, &from, &data_hash, error) && open_data(j, error);
    if (ok && data_hash != j->data_hash)
        ok = train_fail(
            error, "%s has changed since this run began: it cannot go on bit for bit (a new run can begin with --from)",
            j->settings.data);
    ok = ok && start(j, &from, true, error);
    checkpoint_close(&from);
    return ok;
}

void job_close(job *j) {
    metrics_close(j->metrics);
    trainer_destroy(j->trainer);
    model_free(&j->model);
    text_free(&j->text);
    images_free(&j->images);
    *j = (job){0};
}

/* ---- Stepping and saving ----------------------------------------------------------------------------- */

int64_t job_items(const job *j) {
    return j->settings.batch * j->settings.context * j->settings.trainer.accumulate;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool job_step(job *j, metrics_row *row, char error[TRAIN_ERROR]) {
    double begin = now();
    trainer_step_result result;
    if (!trainer_step(j->trainer, &j->source, j->step + 1, &result, error)) return false;
    j->step++;
    j->seconds += now() - begin;
    *row = (metrics_row){.step = j->step,
                         .loss = result.loss,
                         .validation = NAN,
                         .rate = result.rate,
                         .norm = result.norm,
                         .tokens = j->step * job_items(j),
                         .seconds = j->seconds};
    bool due = j->settings.validate_every &&
               (j->step % j->settings.validate_every == 0 || j->step == j->settings.trainer.steps);
    if (due && j->source.validation_parts &&
        !trainer_evaluate(j->trainer, &j->source, j->settings.validate_parts, &row->validation, error))
        return false;
    return metrics_add(j->metrics, row, error);
}

static char *config_text(const job *j) {
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
    char hash[32];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)j->data_hash);
    json_writer w = {.indented = true};
    json_put_object(&w, NULL);
    json_put_integer(&w, "step", j->step);
    json_put_text(&w, "data_hash", hash);
    put_settings(&w, &j->settings);
    json_put_object_end(&w);
    return json_take(&w);
}

bool job_save(job *j, char error[TRAIN_ERROR]) {
    checkpoint_content content = {.step = j->step};
    char *config = config_text(j), *trainer_json = trainer_text(j), title[160];
    bool ok = (config && trainer_json) || train_fail(error, "no memory for a checkpoint");
    content.config = config;
    content.trainer = trainer_json;
    ok = ok && trainer_tensors(j->trainer, &content.model, &content.model_count, &content.optimizer,
                               &content.optimizer_count, error);
    ok = ok && checkpoint_save(j->out, (int)j->settings.keep, &content, error);
    free(config);
    free(trainer_json);
    if (!ok) return false;
    j->saved = j->step;
    snprintf(title, sizeof title, "%s %s, %.3g M parameters", j->settings.model, j->settings.preset,
             (double)model_size(&j->model) / 1e6);
    return metrics_draw(j->metrics, title, error);
}
