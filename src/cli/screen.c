/* SPDX-License-Identifier: MIT */
/* What `vjp train` prints: what is trained, the lines of progress, and where the results are. */
#include "cli/screen.h"

#include <math.h>
#include <string.h>

#include "core/system.h"

static const char *duration(double seconds, char text[32]) {
    long long s = (long long)(seconds + 0.5);
    if (s < 60)
        snprintf(text, 32, "%llds", s);
    else if (s < 3600)
        snprintf(text, 32, "%lldm%02llds", s / 60, s % 60);
    else
        snprintf(text, 32, "%lldh%02lldm", s / 3600, s / 60 % 60);
    return text;
}

static const char *thousands(double count, char text[32]) {
    if (count < 1e4)
        snprintf(text, 32, "%.0f", count);
    else if (count < 1e7)
        snprintf(text, 32, "%.1fk", count / 1e3);
    else
        snprintf(text, 32, "%.1fM", count / 1e6);
    return text;
}

static void show_json(const metrics_row *row) {
    cli_json_begin();
    cli_json_integer("step", row->step);
    cli_json_real("loss", row->loss);
    cli_json_real("smoothed", row->smoothed);
    if (!isnan(row->validation)) cli_json_real("validation", row->validation);
    cli_json_real("rate", row->rate);
    cli_json_real("norm", row->norm);
    if (row->loss_scale != 0) cli_json_real("loss_scale", row->loss_scale);
    if (row->skipped) cli_json_boolean("skipped", true);
    cli_json_integer("tokens", row->tokens);
    cli_json_real("seconds", row->seconds);
    cli_json_end();
}

/* The line of a step; `detail` 2 is all of it, and less fits into a narrow terminal. Returns its length. */
static int line_of(const screen *s, const job *j, const metrics_row *row, double now, int detail, char *text,
                   size_t room) {
    int64_t steps = j->settings.trainer.steps;
    double taken = (now - s->begun) / (double)(row->step - s->first_step);
    char left[32], speed[32], more[80] = "", rate[64] = "";
    if (detail > 1) snprintf(more, sizeof more, "  norm %5.2f  rate %.2e", row->norm, row->rate);
    if (detail > 0)
        snprintf(rate, sizeof rate, "  %s %s/s", thousands((double)job_items(j) / taken, speed),
                 job_is_text(j) ? "tokens" : "pictures");
    return snprintf(text, room, "step %*lld/%lld  loss %.4f  smoothed %.4f%s%s  %s left", steps > 99999 ? 7 : 5,
                    (long long)row->step, (long long)steps, row->loss, row->smoothed, more, rate,
                    duration(taken * (double)(steps - row->step), left));
}

/*
 * A terminal shows one line that changes a few times per second and is never wider than the terminal; anything else
 * gets about 20 lines. Lines with a validation loss always stay.
 */
void screen_step(screen *s, const job *j, const metrics_row *row) {
    enum { LINES = 20 };
    static const double REFRESH = 0.25;
    if (s->json) {
        show_json(row);
        return;
    }
    if (row->skipped) {
        printf("%sstep %lld was skipped: its gradients were not finite; the loss scale is now %g\n",
               s->terminal ? "\r\033[K" : "", (long long)row->step, row->loss_scale);
    }
    int64_t steps = j->settings.trainer.steps, every = steps > LINES ? steps / LINES : 1;
    bool stays =
        !isnan(row->validation) || row->step == steps || row->step == 1 || (!s->terminal && row->step % every == 0);
    double now = system_seconds();
    if (!stays && (!s->terminal || now - s->shown < REFRESH)) return;
    s->shown = now;
    char text[256];
    int detail = 2;
    while (line_of(s, j, row, now, detail, text, sizeof text) >= s->width && !stays && detail)
        detail--;
    printf("%s%s", s->terminal ? "\r\033[K" : "", text);
    if (!isnan(row->validation))
        printf("  %svalidation %.4f%s%s", cli_paint(CLI_GREEN), row->validation, cli_paint(CLI_PLAIN),
               j->settings.save_best && j->best_step == row->step ? ", the best" : "");
    if (stays || !s->terminal) putchar('\n');
    cli_flush();
}

/* The bar while .jsonl files are encoded, a few times per second. */
bool screen_encoding(void *context, int64_t done, int64_t all) {
    enum { WIDTH = 30 };
    static const double REFRESH = 0.25;
    static const char bar[] = "##############################";
    double now = system_seconds(), *shown = context;
    if (now - *shown < REFRESH) return true;
    *shown = now;
    int filled = all ? (int)(WIDTH * ((double)done / (double)all)) : 0;
    fprintf(stderr, "\r\033[Kencoding [%.*s%*s] %.0f of %.0f MB", filled, bar, WIDTH - filled, "", (double)done / 1e6,
            (double)all / 1e6);
    fflush(stderr);
    return true;
}

/* What was planned for a limit of memory, and the price. */
static void show_fit(const job *j) {
    char needs[CLI_BYTES_TEXT], allowed[CLI_BYTES_TEXT], what[FIT_TEXT];
    printf("memory: %s", cli_bytes((double)j->fit.needs.bytes, needs));
    if (j->settings.memory) printf(" of %s allowed", cli_bytes((double)j->settings.memory, allowed));
    if (fit_text(&j->fit, what)) printf("; %s", what);
    putchar('\n');
}

/* How the documents of .jsonl files fill the rows. */
static void show_documents(const job *j) {
    const packed_data *d = &j->packed;
    const token_cache_counts *has = &j->documents.tokens.has;
    char text[32], rows[32];
    printf("; %s documents in %lld files of %s, %s tokens\n", thousands((double)has->documents, text),
           (long long)j->documents.files, j->settings.data, thousands((double)has->tokens, rows));
    printf("%s rows, %.1f %% full: %s", thousands((double)d->count, rows),
           100 * (double)d->used / ((double)d->count * (double)d->context),
           d->masks ? "documents share rows, and attention does not cross from one to another"
                    : "each document has rows of its own");
    putchar('\n');
    if (d->split)
        printf("%lld documents with answers are longer than the context of %lld and were split\n", (long long)d->split,
               (long long)d->context);
    if (has->bad)
        printf("%llu bad lines were skipped%s%s\n", (unsigned long long)has->bad,
               j->documents.first_bad[0] ? ", the first: " : "", j->documents.first_bad);
}

void screen_job(const job *j) {
    const job_settings *s = &j->settings;
    vjp_program_report gradients = {.struct_size = sizeof gradients}, update = {.struct_size = sizeof update};
    vjp_program *programs[TRAINER_PROGRAMS];
    int last = trainer_programs(j->trainer, programs) - 1;
    double shared = 0, alone = 0; /* the arena of all programs, and of the one that needs the most, without reuse */
    for (int i = 0; i <= last; i++) {
        vjp_program_describe(programs[i], &update);
        if (i == 0) gradients = update;
        shared = fmax(shared, (double)update.arena_bytes);
        alone = fmax(alone, (double)update.intermediate_bytes);
    }
    char arena[CLI_BYTES_TEXT], whole[CLI_BYTES_TEXT], kept[CLI_BYTES_TEXT], size[32], text[32];
    printf("%s %s: %s parameters in %s", s->model, s->preset, thousands((double)model_size(&j->model), size),
           vjp_dtype_name(s->dtype));
    if (s->lora)
        printf(", of which %s are trained, in adapters of rank %lld",
               thousands((double)model_trained_size(&j->model), size), (long long)s->lora);
    printf(", batch %lld x %lld", (long long)s->batch, (long long)s->context);
    if (s->trainer.accumulate > 1) printf(" x %lld", (long long)s->trainer.accumulate);
    if (s->trainer.shards > 1)
        printf(" in %lld shards on %d process%s", (long long)s->trainer.shards, (int)vjp_group_size(s->trainer.group),
               vjp_group_size(s->trainer.group) == 1 ? "" : "es");
    if (j->text.count) {
        printf("; %s bytes of text in %lld files of %s", thousands((double)j->text.count, text),
               (long long)j->text.files, s->data);
        if (j->text.tokens.count) printf(", %s tokens", thousands((double)j->text.tokens.count, text));
        putchar('\n');
    } else if (j->packed.count) {
        show_documents(j);
    } else
        printf("; %lld pictures of %s\n", (long long)j->images.count, s->data);
    printf("%s; a step has %zu calls, %.3g GFLOP; arena %s (without reuse %s), parameters and moments %s%s\n",
           vjp_device_summary(j->device), gradients.calls + (last ? update.calls : 0),
           (gradients.cost.flops + (last ? update.cost.flops : 0)) * 1e-9, cli_bytes(shared, arena),
           cli_bytes(alone, whole), cli_bytes((double)update.persistent_bytes, kept),
           s->trainer.zero && vjp_group_size(s->trainer.group) > 1 ? " in the part of this process" : "");
    if (j->computed_on[0])
        printf("this run was computed on %s until now; its next losses have other last bits\n", j->computed_on);
    if (trainer_no_overlap(j->trainer)) printf("no overlap: %s\n", trainer_no_overlap(j->trainer));
    if (j->fit.needs.bytes) show_fit(j);
    char pipelines[32], seconds[32];
    if (vjp_device_property(j->device, "pipelines", pipelines, sizeof pipelines) == VJP_OK &&
        vjp_device_property(j->device, "pipeline_seconds", seconds, sizeof seconds) == VJP_OK)
        printf("%s pipelines were compiled in %s s\n", pipelines, seconds);
    cli_flush();
}

/* A name as a shell reads it: in quotes where it has other characters than these. */
static const char *quoted(const char *name, char text[CHECKPOINT_PATH + 16]) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-+:=@%";
    const char *quote = !name[strspn(name, plain)] && name[0] != '-' ? "" : strchr(name, '\'') ? "\"" : "'";
    snprintf(text, CHECKPOINT_PATH + 16, "%s%s%s", quote, name, quote);
    return text;
}

static int64_t count_skipped(const metrics *m) {
    size_t count;
    int64_t skipped = 0;
    const metrics_row *rows = metrics_rows(m, &count);
    for (size_t i = 0; i < count; i++)
        skipped += rows[i].skipped;
    return skipped;
}

void screen_end(const screen *s, const job *j, bool stopped) {
    char time[32], speed[32], count[32], out[CHECKPOINT_PATH + 16];
    const job_settings *set = &j->settings;
    const metrics_row last = metrics_last(j->metrics);
    bool early = j->step < set->trainer.steps && job_is_over(j), more = j->step < set->trainer.steps && !early;
    if (stopped && s->terminal) putchar('\n');
    quoted(j->out, out);
    printf("%s at step %lld, after %s; saved in %s/checkpoint-%08lld\n", more ? "stopped" : "done", (long long)j->step,
           duration(j->seconds, time), j->out, (long long)j->step);
    if (early)
        printf("ended early: %lld validations in a row were no better than %.4f at step %lld\n", (long long)j->worse,
               j->best_loss, (long long)j->best_step);
    if (last.step && j->seconds > 0)
        printf("loss:   %.4f, smoothed; %s %s at %s/s\n", last.smoothed, thousands((double)last.tokens, count),
               job_is_text(j) ? "tokens" : "pictures", thousands((double)last.tokens / j->seconds, speed));
    if (set->trainer.loss_scale != 0 && last.step)
        printf("scale:  the loss scale is %g; steps skipped: %lld\n", last.loss_scale,
               (long long)count_skipped(j->metrics));
    if (j->best_step)
        printf("best:   validation loss %.4f at step %lld%s%s%s\n", j->best_loss, (long long)j->best_step,
               set->save_best ? ", in " : "", set->save_best ? j->out : "", set->save_best ? "/best" : "");
    if (j->saves > 0)
        printf("saves:  %lld, %.3g s each on average\n", (long long)j->saves, j->save_seconds / (double)j->saves);
    if (j->loss_hash) printf("losses: %016llx\n", (unsigned long long)j->loss_hash);
    if (more) printf("resume: vjp train --resume --out %s\n", out);
    if (job_is_text(j)) {
        const char *best = set->save_best && j->best_step ? "/best" : "";
        printf("sample: vjp sample %s%s\n", out, best);
        printf("eval:   vjp eval %s%s TEXT\n", out, best);
        if (set->lora) printf("merge:  vjp merge %s%s -o MODEL\n", out, best);
    }
    printf("curve:  %s/loss.svg\n", j->out);
    cli_flush();
}
