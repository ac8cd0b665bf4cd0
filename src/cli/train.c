/* SPDX-License-Identifier: MIT */
/*
 * vjp train: trains a model and shows its progress. The run itself is in src/train/job/job.c, what is printed in
 * screen.c; here are the options and the signals that stop a run.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli/screen.h"
#include "comm/group.h"
#include "core/system.h"
#include "train/trainer/loss_scale.h"

#ifndef VJP_SOURCES
#define VJP_SOURCES ""
#endif

/* ---- Stopping ---------------------------------------------------------------------------------------- */

/*
 * The first signal lets the step finish, the second stops it between two calls; both save. In a group a step is never
 * stopped halfway: the other processes would wait for it.
 */
static volatile sig_atomic_t asked_to_stop;
static trainer *running; /* NULL: none that could be stopped halfway */

static void stop(void) {
    if (asked_to_stop++ && running) trainer_interrupt(running);
}

static void handle_signals(const job *j) {
    running = vjp_group_size(j->settings.trainer.group) == 1 ? j->trainer : NULL;
    system_on_stop(stop);
}

/*
 * Ends a run that failed, before or after it `began`. A failure that all processes know is printed by rank 0, one that
 * only this process knows by this one; if the communication failed, by the lowest rank that is known to be alive, while
 * the others give it time. In the last two cases the launcher ends the other processes, which may be waiting.
 */
static int fail_run(const job *j, const char *error, bool began) {
    enum { GRACE_SECONDS = 3 };
    const char *more = j->saved >= 0 ? "; the last checkpoint is intact" : "; nothing had been saved";
    if (!began) more = "";
    vjp_group *group = j->settings.trainer.group;
    if (vjp_group_size(group) == 1 || (j->together && job_is_first(j))) return cli_fail("train", "%s%s", error, more);
    if (j->together) return CLI_FAILURE;
    if (!vjp_group_has_failed(group))
        cli_fail("train", "rank %d: %s%s", (int)vjp_group_rank(group), error, more);
    else if (vjp_group_reporter(group) == vjp_group_rank(group))
        cli_fail("train", "%s%s", error, more);
    else
        system_sleep((int64_t)GRACE_SECONDS * 1000000000);
    vjp_group_abort(group, CLI_FAILURE);
    return CLI_FAILURE;
}

/* ---- The run ----------------------------------------------------------------------------------------- */

static int train(job *j, screen *s, int64_t stop_at) {
    char error[TRAIN_ERROR];
    bool alone = vjp_group_size(j->settings.trainer.group) == 1;
    s->begun = system_seconds();
    s->first_step = j->step;
    while (job_is_ahead(j) ||
           (j->step < stop_at && !job_stops(j, asked_to_stop || cli_write_error() || job_is_over(j)))) {
        metrics_row row;
        if (!job_step(j, asked_to_stop ? j->step : stop_at, &row, error)) {
            if (asked_to_stop && alone) break;
            if (s->terminal && job_is_first(j)) putchar('\n');
            return fail_run(j, error, true);
        }
        if (job_is_first(j)) screen_step(s, j, &row);
        if (job_save_is_due(j) && j->step < stop_at && !job_save(j, error)) return fail_run(j, error, true);
    }
    /* A run that had nothing left to do saves, too, which removes what a killed run may have left behind. */
    if ((j->saved != j->step || j->step == s->first_step) && !job_save(j, error)) return fail_run(j, error, true);
    if (!s->json && job_is_first(j)) screen_end(s, j, asked_to_stop);
    if (!cli_write_error()) return CLI_OK;
    return cli_fail("train", "standard output cannot be written: %s; the run is saved at step %lld",
                    strerror(cli_write_error()), (long long)j->step);
}

/* ---- Options ----------------------------------------------------------------------------------------- */

typedef struct arguments {
    cli_device_options on;
    const char *model, *preset, *out, *from, *tokenizer, *cache, *memory, *optimizer, *schedule, *loss_scale;
    const char *lora_targets, *base;
    int dtype, residual, moments, gradients;
    double momentum, decay_share, lora_alpha; /* -1: not given */
    bool pack, no_pack, skip_bad;
    bool resume, allow_other_bits, recompute, save_best, json;
    int64_t stop_at, seed;
    const char *group, *zero, *overlap;
    job_processes processes;
    char data[CHECKPOINT_PATH]; /* of a run that is resumed, where they were moved to; "": nowhere */
    double timeout;
    job_settings settings;
} arguments;

/*
 * A resumed run takes its settings from the checkpoint: options that would change them are misuse. --products, which
 * would change bits alone, needs --allow-other-bits.
 */
static const struct {
    const char *name;
    bool takes_value;
} with_resume[] = {{"--resume", false}, {"--out", true},     {"-o", true},        {"--device", true},
                   {"--threads", true}, {"--json", false},   {"--stop-at", true}, {"--allow-other-bits", false},
                   {"--group", true},   {"--timeout", true}, {"--zero", true},    {"--overlap", true},
                   {"--base", true},    {"--products", true}};

static const char *not_with_resume(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        bool known = argv[i][0] != '-'; /* DATA, which may have been moved */
        size_t length = strcspn(argv[i], "=");
        for (size_t k = 0; k < sizeof with_resume / sizeof with_resume[0]; k++)
            if (strlen(with_resume[k].name) == length && memcmp(argv[i], with_resume[k].name, length) == 0) {
                known = true;
                if (with_resume[k].takes_value && !argv[i][length]) i++;
                break;
            }
        if (!known && i < argc) return argv[i];
    }
    return NULL;
}

static bool copy_text(char *to, size_t room, const char *from) {
    return !from || snprintf(to, room, "%s", from) < (int)room;
}

/* Whether this build and machine have a BLAS of that name. */
static bool has_blas(const char *name) {
    char blas[32] = "";
    vjp_device *cpu;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = 1;
    options.workspace_bytes = 64;
    if (vjp_open("cpu", &options, &cpu) == VJP_OK) vjp_device_property(cpu, "blas", blas, sizeof blas);
    vjp_close(cpu);
    return blas[0] && strcmp(blas, name) == 0;
}

/*
 * Chooses the device that computes the bits that were recorded, as far as this machine has it; job_resume() checks. Of
 * a device without a record of instructions, which only the cpu has, the products are as it names its own choice.
 */
static void choose_recorded(cli_device_options *on, const job_arithmetic *was) {
    if (!on->device && was->device[0]) on->device = was->device;
    if (!on->device || !job_same_kind(on->device, was->device)) return;
    if (strcmp(was->instructions, "plain") == 0) on->instruction_set = "plain";
    if (was->products[0] && (!was->instructions[0] || strcmp(was->products, "builtin") == 0))
        on->matrix_products = was->products;
    else if (has_blas(was->products))
        on->matrix_products = "blas";
}

/* The absolute path of a folder, which is created: a run may be resumed from another place. False: it was printed. */
static bool absolute_folder(const char *folder, char *to, size_t room) {
    char error[TRAIN_ERROR];
    if (!checkpoint_make_folders(folder, error)) return cli_fail("train", "%s", error), false;
    char *absolute = system_absolute_path(folder);
    bool fits = absolute && copy_text(to, room, absolute);
    if (!fits) cli_fail("train", "%s: %s", folder, absolute ? "the path is too long" : strerror(errno));
    free(absolute);
    return fits;
}

/* What cannot be found is left to the job, which tells the other processes: they may be waiting for this one. */
static int copy_data(char to[CHECKPOINT_PATH], const char *data) {
    char *absolute = system_absolute_path(data);
    bool fits = copy_text(to, CHECKPOINT_PATH, absolute ? absolute : data);
    free(absolute);
    return fits ? CLI_CONTINUE : cli_misuse("train", "the path of DATA is too long");
}

static int copy_settings(arguments *a, const char *data) {
    job_settings *s = &a->settings;
    int status = copy_data(s->data, data);
    if (status != CLI_CONTINUE) return status;
    if (!copy_text(s->model, sizeof s->model, a->model) || !copy_text(s->preset, sizeof s->preset, a->preset) ||
        !copy_text(s->from, sizeof s->from, a->from) || !copy_text(s->tokenizer, sizeof s->tokenizer, a->tokenizer) ||
        !copy_text(s->lora_targets, sizeof s->lora_targets, a->lora_targets))
        return cli_misuse("train", "an argument is too long");
    if (a->cache && !absolute_folder(a->cache, s->cache, sizeof s->cache)) return CLI_FAILURE;
    s->dtype = a->dtype < 0 ? VJP_F32 : (vjp_dtype)a->dtype;
    s->residual = a->residual < 0 ? s->dtype : (vjp_dtype)a->residual;
    s->recompute = a->recompute ? LLAMA_ALL_BLOCKS : 0;
    s->skip_bad = a->skip_bad;
    if (a->pack || a->no_pack) s->pack = a->pack;
    s->trainer.seed = (uint64_t)a->seed;
    s->save_best = a->save_best || s->patience;
    if (s->trainer.warmup > s->trainer.steps) s->trainer.warmup = s->trainer.steps;
    return CLI_CONTINUE;
}

static int run_on(arguments *a, vjp_device *device, vjp_group *group);

/* A process that others wait for cannot join them: the launcher must end them. */
static int fail_to_join(const arguments *a) {
    vjp_device *device;
    vjp_group *group;
    if (!vjp_group_launcher() || vjp_open("cpu", NULL, &device) != VJP_OK) return CLI_FAILURE;
    const vjp_group_options options = {.struct_size = sizeof options, .timeout = a->timeout};
    if (vjp_group_open(device, "auto", &options, &group) == VJP_OK && vjp_group_size(group) > 1)
        vjp_group_abort(group, CLI_FAILURE);
    vjp_group_close(group);
    vjp_close(device);
    return CLI_FAILURE;
}

static int run(arguments *a, const char *data) {
    char ignored[TRAIN_ERROR]; /* job_resume() fails, too, together with all processes */
    job_settings *s = &a->settings;
    if (!a->resume) {
        int status = copy_settings(a, data);
        if (status != CLI_CONTINUE) return status;
    } else if (job_recorded(a->out, s, ignored) && !a->allow_other_bits) {
        choose_recorded(&a->on, &s->arithmetic);
    }
    if (!a->on.device) a->on.device = "cpu";
    cli_share_cores(&a->on);
    vjp_device *device = cli_open("train", &a->on);
    if (!device) return fail_to_join(a);
    vjp_group *group;
    const vjp_group_options options = {.struct_size = sizeof options, .timeout = a->timeout};
    int status = CLI_FAILURE;
    if (vjp_group_open(device, a->group, &options, &group) == VJP_OK)
        status = run_on(a, device, group);
    else
        cli_fail("train", "%s", vjp_error(device));
    vjp_group_close(group);
    vjp_close(device);
    return status;
}

static int run_on(arguments *a, vjp_device *device, vjp_group *group) {
    char error[TRAIN_ERROR];
    job_settings *s = &a->settings;
    job j;
    const job_arithmetic arithmetic = job_arithmetic_of(device, s->dtype);
    if (!a->resume) s->arithmetic = arithmetic;
    int status = a->memory ? cli_memory("train", a->memory, device, &s->memory) : CLI_CONTINUE;
    if (status != CLI_CONTINUE) return status;
    a->processes.group = s->trainer.group = group;
    s->trainer.zero = a->processes.zero;
    if (!a->overlap) a->processes.overlap = vjp_device_is_host(device);
    s->trainer.overlap = a->processes.overlap;
    double begun = system_seconds(), shown = begun;
    if (!a->json && cli_is_terminal()) {
        s->progress = screen_encoding;
        s->progress_context = &shown;
    }
    const job_places places = {.base = a->base, .data = a->data[0] ? a->data : NULL};
    bool ok = a->resume
                  ? job_resume(&j, device, &a->processes, &arithmetic, a->allow_other_bits, &places, a->out, error)
                  : job_begin(&j, device, s, a->out, error);
    if (shown > begun) fprintf(stderr, "\r\033[K");
    if (ok) {
        handle_signals(&j);
        cli_defer_write_errors();
        screen seen = {.json = a->json, .terminal = cli_is_terminal(), .width = system_output_width()};
        if (!a->json && job_is_first(&j)) screen_job(&j);
        int64_t steps = j.settings.trainer.steps;
        status = train(&j, &seen, a->stop_at >= 0 && a->stop_at < steps ? a->stop_at : steps);
        running = NULL;
    } else {
        status = fail_run(&j, error, false);
    }
    job_close(&j);
    return status;
}

/* The number of a name; -1: misuse, which has been printed. */
static int choose(const char *option, const char *const *names, const char *name) {
    int choice = job_choice(names, name);
    char list[128] = "";
    for (int i = 0; choice < 0 && names[i]; i++)
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? names[i + 1] ? ", " : " or " : "",
                 names[i]);
    if (choice < 0) cli_misuse("train", "--%s is \"%s\"; it must be %s", option, name, list);
    return choice;
}

/* The optimiser, the schedule and what belongs to them. */
static int check_optimizer(arguments *a) {
    trainer_options *t = &a->settings.trainer;
    int optimizer = a->optimizer ? choose("optimizer", job_optimisers, a->optimizer) : TRAINER_ADAMW;
    if (optimizer < 0) return CLI_MISUSE;
    int schedule = a->schedule ? choose("schedule", job_schedules, a->schedule) : TRAINER_COSINE;
    if (schedule < 0) return CLI_MISUSE;
    t->optimiser = (trainer_optimiser)optimizer;
    t->schedule = (trainer_schedule)schedule;
    if (a->momentum >= 0 && t->optimiser == TRAINER_ADAMW)
        return cli_misuse("train", "--momentum is for --optimizer muon and sgd");
    if (a->momentum >= 1) return cli_misuse("train", "--momentum is %g; it must be less than 1", a->momentum);
    if (a->momentum >= 0) t->momentum = a->momentum;
    if (a->decay_share >= 0 && t->schedule != TRAINER_WSD)
        return cli_misuse("train", "--decay-share is for --schedule wsd");
    if (a->decay_share >= 0) t->decay_share = a->decay_share;
    if (t->average > JOB_MAX_AVERAGE)
        return cli_misuse("train", "--average is %g; it must be at most %g", t->average, JOB_MAX_AVERAGE);
    if ((a->settings.patience || a->save_best) && !a->settings.validate_every)
        return cli_misuse("train", "%s needs validation, which --validate-every 0 switches off",
                          a->settings.patience ? "--patience" : "--save-best");
    return CLI_CONTINUE;
}

/* The dtypes of moments and gradients, and the scale of the loss. */
static int check_precision(arguments *a) {
    trainer_options *t = &a->settings.trainer;
    int status = cli_precision("train", a->dtype, a->moments, a->gradients, t);
    if (status != CLI_CONTINUE) return status;
    const char *scale = a->loss_scale ? a->loss_scale : a->dtype == VJP_F16 ? "auto" : "off";
    t->loss_scale = strcmp(scale, "auto") == 0 ? LOSS_SCALE_FIRST : 0;
    t->loss_scale_steps = strcmp(scale, "auto") == 0 ? LOSS_SCALE_STEPS : 0;
    if (t->loss_scale == 0 && strcmp(scale, "off") != 0) {
        char *end;
        t->loss_scale = strtod(scale, &end);
        if (*end || !(t->loss_scale > 0 && t->loss_scale <= JOB_MAX_LOSS_SCALE))
            return cli_misuse("train", "--loss-scale is \"%s\"; it must be auto, off or a number above 0, at most %g",
                              scale, JOB_MAX_LOSS_SCALE);
    }
    if (t->loss_scale != 0 && t->steps > LOSS_SCALE_MAX_STEPS)
        return cli_misuse("train", "--steps is %lld; with a loss scale it must be at most %d", (long long)t->steps,
                          (int)LOSS_SCALE_MAX_STEPS);
    return CLI_CONTINUE;
}

/* Adapters, and what belongs to them. */
static int check_lora(arguments *a) {
    job_settings *s = &a->settings;
    uint32_t adapts;
    char error[TRAIN_ERROR];
    if (a->base && !a->resume)
        return cli_misuse("train", "--base is for --resume; a new run names its model by --from");
    if (!s->lora && (a->lora_targets || a->lora_alpha >= 0))
        return cli_misuse("train", "%s is for --lora", a->lora_targets ? "--lora-targets" : "--lora-alpha");
    if (!s->lora) return CLI_CONTINUE;
    if (a->model && strcmp(a->model, "llama") != 0) return cli_misuse("train", "--lora is for the llama");
    if (!a->from && !a->resume) return cli_misuse("train", "--lora adapts a model, which --from must name");
    if (!a->lora_targets) a->lora_targets = "all";
    if (!lora_read_targets(a->lora_targets, &adapts, error)) return cli_misuse("train", "--lora-targets: %s", error);
    if (a->lora_alpha == 0) return cli_misuse("train", "--lora-alpha is 0; it must be above 0");
    s->lora_alpha = a->lora_alpha > 0 ? a->lora_alpha : 2 * (double)s->lora;
    return CLI_CONTINUE;
}

/* Values that no option's limits can check. */
static int check_arguments(arguments *a, const cli_operands *operands) {
    char error[TRAIN_ERROR];
    if (check_optimizer(a) != CLI_CONTINUE || check_lora(a) != CLI_CONTINUE) return CLI_MISUSE;
    if (a->dtype >= 0 && a->dtype != VJP_F32 && a->dtype != VJP_BF16 && a->dtype != VJP_F16)
        return cli_misuse("train", "--dtype is %s; it must be f32, bf16 or f16", vjp_dtype_name((vjp_dtype)a->dtype));
    if (cli_residual("train", a->dtype, a->residual) != CLI_CONTINUE) return CLI_MISUSE;
    if (check_precision(a) != CLI_CONTINUE) return CLI_MISUSE;
    if (a->model && strcmp(a->model, "llama") != 0 && strcmp(a->model, "convnet") != 0)
        return cli_misuse("train", "unknown model \"%s\"; models are llama and convnet", a->model);
    if (a->preset && !llama_preset_find(a->preset, error)) return cli_misuse("train", "%s", error);
    if (operands->count && !operands->item[0][0])
        return cli_misuse("train", "DATA is empty; it must be a file or a folder");
    if (a->pack && a->no_pack) return cli_misuse("train", "--pack and --no-pack exclude each other");
    if (a->memory && a->recompute)
        return cli_misuse("train", "--memory chooses the blocks to recompute; --recompute recomputes all of them");
    if (a->memory && cli_memory("train", a->memory, NULL, NULL) != CLI_CONTINUE) return CLI_MISUSE;
    if (cli_shards("train", a->settings.trainer.shards) != CLI_CONTINUE) return CLI_MISUSE;
    if (cli_switch("train", "zero", a->zero, &a->processes.zero) != CLI_CONTINUE) return CLI_MISUSE;
    if (cli_switch("train", "overlap", a->overlap, &a->processes.overlap) != CLI_CONTINUE) return CLI_MISUSE;
    if (a->allow_other_bits && !a->resume) return cli_misuse("train", "--allow-other-bits is for --resume");
    return CLI_CONTINUE;
}

int cli_train(int argc, char **argv) {
    enum { MANY = 1000000000 };
    arguments a = {.out = "vjp-run",
                   .dtype = -1,
                   .residual = -1,
                   .moments = -1,
                   .gradients = -1,
                   .momentum = -1,
                   .decay_share = -1,
                   .lora_alpha = -1,
                   .stop_at = -1,
                   .seed = 1,
                   .group = "auto",
                   .processes = {.zero = true},
                   .settings = job_defaults()};
    job_settings *s = &a.settings;
    trainer_options *t = &s->trainer;
    const cli_option options[] = {
        CLI_OPTION_HEADING("Choose the model and where it begins:"),
        {"model", 0, "M", "llama (text) or convnet (pictures); default llama", CLI_TEXT, &a.model, 0, 0},
        {"preset", 0, "P", LLAMA_PRESETS "; default tiny", CLI_TEXT, &a.preset, 0, 0},
        {"dim", 0, "N", "numbers per token of a llama; default, as of the next four: the preset's", CLI_INTEGER,
         &s->sizes.hidden, 1, MANY},
        {"layers", 0, "N", "blocks of a llama", CLI_INTEGER, &s->sizes.layers, 1, MANY},
        {"heads", 0, "N", "heads of attention, each with --dim / N numbers", CLI_INTEGER, &s->sizes.heads, 1, MANY},
        {"kv-heads", 0, "N", "heads of keys and values; default: as many as --heads", CLI_INTEGER, &s->sizes.kv_heads,
         1, MANY},
        {"ffn", 0, "N", "inner numbers of the feed-forward network", CLI_INTEGER, &s->sizes.intermediate, 1, MANY},
        {"from", 0, "DIR", "start with the weights of a Hugging Face model (docs/models.md)", CLI_TEXT, &a.from, 0, 0},
        {"tokenizer", 0, "DIR", "the folder of a tokenizer.json; default: that of --from, or bytes", CLI_TEXT,
         &a.tokenizer, 0, 0},
        {"seed", 0, "S", "initial weights and order of the data; default 1", CLI_INTEGER, &a.seed, 0, INT64_MAX},
        CLI_OPTION_HEADING("Read .jsonl files (docs/data.md):"),
        {"skip-bad", 0, NULL, "leave out lines that cannot be used, and count them", CLI_FLAG, &a.skip_bad, 0, 0},
        {"pack", 0, NULL, "documents share rows; the default", CLI_FLAG, &a.pack, 0, 0},
        {"no-pack", 0, NULL, "each document has rows of its own", CLI_FLAG, &a.no_pack, 0, 0},
        {"cache", 0, "DIR", "the folder for encoded data; default .vjp-cache beside the data", CLI_TEXT, &a.cache, 0,
         0},
        CLI_OPTION_HEADING("Fine-tune with adapters (docs/fine-tuning.md):"),
        {"lora", 0, "R", "freeze the weights of --from, and train adapters of rank R", CLI_INTEGER, &s->lora, 1,
         LORA_MAX_RANK},
        {"lora-alpha", 0, "A", "adapters are multiplied by A / R; default 2 R", CLI_REAL, &a.lora_alpha, 0, MANY},
        {"lora-targets", 0, "L", "of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj; default all", CLI_TEXT,
         &a.lora_targets, 0, 0},
        CLI_OPTION_HEADING("Choose how long and on how much at once:"),
        {"steps", 0, "N", "length of the run; default 1200", CLI_INTEGER, &t->steps, 1, MANY},
        {"batch", 0, "B", "rows per batch; default: the preset's", CLI_INTEGER, &s->batch, 1, MANY},
        {"context", 0, "T", "tokens per row; default: the preset's, or that of --from, at most 1024", CLI_INTEGER,
         &s->context, 1, MANY},
        {"accumulate", 0, "N", "batches per step, whose gradients are summed; default 1", CLI_INTEGER, &t->accumulate,
         1, MANY},
        CLI_OPTION_HEADING("Tune how it learns (docs/optimisers.md):"),
        {"optimizer", 0, "O", "adamw, muon (hidden matrices, adamw for the rest) or sgd; default adamw", CLI_TEXT,
         &a.optimizer, 0, 0},
        {"lr", 0, "R", "peak learning rate; default 3e-3", CLI_REAL, &t->rate, 0, 1000},
        {"schedule", 0, "S", "how the rate falls: cosine, linear, wsd (late) or constant; default cosine", CLI_TEXT,
         &a.schedule, 0, 0},
        {"warmup", 0, "N", "steps over which the rate rises; default 20", CLI_INTEGER, &t->warmup, 0, MANY},
        {"last-lr", 0, "S", "the rate at the end, as a share of --lr; default 0.1", CLI_REAL, &t->last_rate, 0, 1},
        {"decay-share", 0, "S", "of wsd: the last steps, as a share of all, in which it falls; default 0.2", CLI_REAL,
         &a.decay_share, 0, 1},
        {"average", 0, "D", "keep an average of the weights, of which a step keeps the share D: 0.99", CLI_REAL,
         &t->average, 0, 1},
        {"weight-decay", 0, "W", "of matrices; default 0.1", CLI_REAL, &t->weight_decay, 0, 1000},
        {"clip", 0, "C", "largest norm of the gradients; 0: no limit; default 1", CLI_REAL, &t->max_norm, 0, MANY},
        {"beta2", 0, "B", "decay of AdamW's second moment; default 0.95", CLI_REAL, &t->beta2, 0, 1},
        {"momentum", 0, "M", "of muon and sgd; default 0.95", CLI_REAL, &a.momentum, 0, 1},
        {"label-smoothing", 0, "S", "share of the target spread over all classes; default 0", CLI_REAL,
         &s->label_smoothing, 0, 1},
        CLI_OPTION_HEADING("Fit the machine:"),
        CLI_OPTION_DEVICE(a.on),
        CLI_OPTION_THREADS(a.on),
        CLI_OPTION_PRODUCTS(a.on),
        {"dtype", 0, "D", "f32, bf16 or f16: dtype of the matrix products; default f32", CLI_DTYPE, &a.dtype, 0, 0},
        CLI_OPTION_RESIDUAL(a.residual),
        CLI_OPTION_MOMENTS(a.moments),
        CLI_OPTION_GRADIENTS(a.gradients),
        {"loss-scale", 0, "S", "auto, off or a number: keeps f16 gradients in range; default auto with f16", CLI_TEXT,
         &a.loss_scale, 0, 0},
        CLI_OPTION_MEMORY(a.memory),
        {"recompute", 0, NULL, "recompute all blocks in the backward pass: less memory", CLI_FLAG, &a.recompute, 0, 0},
        CLI_OPTION_HEADING("Train on several processes (docs/scale.md):"),
        CLI_OPTION_SHARDS(t->shards),
        {"group", 0, "G", "self, mpi, openmpi, mpich, nccl; default: mpi if a launcher started it, else self", CLI_TEXT,
         &a.group, 0, 0},
        CLI_OPTION_ZERO(a.zero),
        CLI_OPTION_OVERLAP(a.overlap),
        {"timeout", 0, "S", "seconds after which a process that does not answer ends the run; default 600", CLI_REAL,
         &a.timeout, 0, MANY},
        CLI_OPTION_HEADING("Validate, save and stop:"),
        {"out", 'o', "DIR", "where checkpoints, metrics.jsonl and loss.svg go; default vjp-run", CLI_TEXT, &a.out, 0,
         0},
        {"validate-every", 0, "N", "steps between validations; 0: never; default 200", CLI_INTEGER, &s->validate_every,
         0, MANY},
        {"save-every", 0, "N", "steps between checkpoints; 0: only at the end; default 400", CLI_INTEGER,
         &s->save_every, 0, MANY},
        {"keep", 0, "N", "checkpoints to keep; default 2", CLI_INTEGER, &s->keep, 1, 1000},
        {"save-best", 0, NULL, "save each new lowest validation loss, and keep it as DIR/best", CLI_FLAG, &a.save_best,
         0, 0},
        {"patience", 0, "N", "end after N validations in a row without a new lowest loss; saves the best", CLI_INTEGER,
         &s->patience, 1, MANY},
        {"stop-at", 0, "N", "save and stop after this step, as Ctrl-C would; 0: before the first", CLI_INTEGER,
         &a.stop_at, 0, MANY},
        CLI_OPTION_HEADING("Continue a run:"),
        {"resume", 0, NULL, "continue from the newest checkpoint in --out, bit for bit", CLI_FLAG, &a.resume, 0, 0},
        {"allow-other-bits", 0, NULL, "resume even with other last bits: of this machine, or of --products", CLI_FLAG,
         &a.allow_other_bits, 0, 0},
        CLI_OPTION_BASE(a.base),
        CLI_OPTION_HEADING("Other:"),
    };
    const cli_command command = {
        .name = "train",
        .usage = "train [DATA] [--model llama|convnet] [--preset tiny] [--steps N] [--out DIR] [--resume]",
        .about =
            "Trains a model. DATA is a text file or a folder of them, read as bytes or by a tokenizer, or a .jsonl\n"
            "file or a folder of them, whose lines are texts, conversations, or prompts with completions; for the\n"
            "convnet, a folder with IDX files or with a folder of pictures for each class. Without DATA: the sources\n"
            "that vjp was built from.\n"
            "Ctrl-C, a closed terminal or a closed pipe save and stop. The same seed gives the same losses to the "
            "last\n"
            "bit for any number of threads and, with --shards, of processes: mpirun -n 4 vjp train --shards 4 ...",
        .more = "Examples:\n"
                "  vjp train                                     a minute on this program's own sources\n"
                "  vjp train book.txt --preset small --steps 2000 --out book\n"
                "  vjp train --resume --out book                 continues where it stopped\n"
                "  vjp train moved.txt --resume --out book       the same, after its data were moved\n"
                "  vjp train more.txt --from book --out tuned    starts with the weights of another run\n"
                "  vjp train more.txt --from book --lora 16 --out adapters\n"
                "  vjp train book.txt --optimizer muon --average 0.99 --patience 5 --out book2\n"
                "  vjp runs book book2                           compares both",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 0,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    status = check_arguments(&a, &operands);
    if (status != CLI_CONTINUE) return status;
    const char *extra = a.resume ? not_with_resume(argc, argv) : NULL;
    if (extra)
        return cli_misuse("train", "%s cannot be used with --resume: a run keeps the settings it began with", extra);
    if (a.resume && a.on.matrix_products && !a.allow_other_bits)
        return cli_misuse("train", "--products cannot be used with --resume: a run keeps the products it began with, "
                                   "unless --allow-other-bits is given");
    status = a.resume && operands.count ? copy_data(a.data, operands.item[0]) : CLI_CONTINUE;
    if (status != CLI_CONTINUE) return status;
    const char *data = operands.count ? operands.item[0] : VJP_SOURCES;
    if (!a.resume && !data[0])
        return cli_misuse("train", "DATA is missing: this program does not know its own sources");
    return cli_outlive("train", &status) ? status : run(&a, data);
}
