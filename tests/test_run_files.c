/* SPDX-License-Identifier: MIT */
/*
 * What a run reads and what it records: text from files and folders, windows that stay inside of it; the lines of
 * metrics.jsonl and which of them a resumed run drops; loss.svg; and what is synced to the disk.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files/safetensors.h"
#include "merging.h"
#include "scratch.h"
#include "train/data/text.h"
#include "train/files/metrics.h"
#include "train/job/job.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static char *read_file(const char *name) {
    char *text = calloc(1, 1 << 20);
    FILE *file = fopen(path_of(name), "rb");
    if (!file) fail_msg("%s is missing", name);
    assert_true(fread(text, 1, (1 << 20) - 1, file) < (1 << 20) - 1);
    fclose(file);
    return text;
}

static void folder(const char *name) {
    assert_int_equal(mkdir(path_of(name), 0777), 0);
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static void expect_text(const char *name, const char *bytes, size_t count, int files, int left_out) {
    char error[TRAIN_ERROR];
    text_data text;
    if (!text_read(path_of(name), &text, error)) fail_msg("%s", error);
    assert_int_equal(text.count, count);
    assert_memory_equal(text.bytes, bytes, count);
    assert_int_equal(text.files, files);
    assert_int_equal(text.left_out, left_out);
    assert_int_equal(text.trained, count - count / 20);
    text_free(&text);
}

static void expect_refused(const char *name, const char *says) {
    char error[TRAIN_ERROR] = "";
    text_data text;
    assert_false(text_read(path_of(name), &text, error));
    if (!strstr(error, says) || strncmp(error, path_of(name), strlen(path_of(name))) != 0) fail_msg("\"%s\"", error);
    assert_null(text.bytes);
}

static void text_is_read(void **unused) {
    (void)unused;
    write_file("one", "some\0bytes", 10);
    expect_text("one", "some\0bytes", 10, 1, 0); /* a file that is named is read as it is */
    write_file("empty", "", 0);
    expect_refused("empty", "there is no text in it");
    expect_refused("absent", "it cannot be opened: No such file");
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0);
    expect_refused("pipe", "it is a pipe; only regular files are read");
    write_file("huge", "", 0);
    assert_int_equal(truncate(path_of("huge"), ((off_t)1 << 34) + 1), 0); /* all of it a hole */
    expect_refused("huge", "it has 17179869185 bytes; at most 17179869184 are read");

    folder("nested");
    folder("nested/b");
    folder("nested/b/deep");
    folder("nested/nothing");
    write_file("nested/c", "third", 5);
    write_file("nested/a", "first", 5);
    write_file("nested/b/deep/x", "second", 6);
    write_file("nested/b/picture", "P5\0\0", 4); /* no text */
    write_file("nested/.hidden", "never", 5);
    assert_int_equal(symlink(scratch, path_of("nested/round")), 0); /* would make a cycle */
    expect_text("nested", "firstsecondthird", 16, 3, 1);

    folder("binary");
    expect_refused("binary", "there is no text in it");
    write_file("binary/one", "\0", 1);
    expect_refused("binary", "every file has zero bytes in it");

    char deep[200] = "deep";
    folder(deep);
    for (int i = 0; i < 34; i++) {
        snprintf(deep + strlen(deep), 3, "/d");
        folder(deep);
    }
    char error[TRAIN_ERROR];
    text_data text;
    assert_false(text_read(path_of("deep"), &text, error));
    assert_non_null(strstr(error, "nested more than"));
}

/* Larger than what is read at once, so that it arrives in parts. */
static void long_text_is_whole(void **unused) {
    (void)unused;
    enum { LONG = 300007 };
    char *bytes = malloc(LONG);
    for (int i = 0; i < LONG; i++)
        bytes[i] = (char)('a' + i % 23);
    write_file("long", bytes, LONG);
    expect_text("long", bytes, LONG, 1, 0);
    free(bytes);
}

/* Every byte of the text differs, so a window shows where it begins. */
static void windows_stay_inside(void **unused) {
    (void)unused;
    enum { BYTES = 240, TRAINED = 228, BATCH = 3 };
    unsigned char bytes[BYTES];
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)i;
    write_file("ramp", bytes, BYTES);
    char error[TRAIN_ERROR];
    text_data text;
    assert_true(text_read(path_of("ramp"), &text, error));
    assert_int_equal(text.trained, TRAINED);
    static const int contexts[] = {1, 3, 50, TRAINED - 1};
    for (size_t c = 0; c < COUNT(contexts); c++) {
        int context = contexts[c], least = BYTES, most = 0;
        train_source source;
        if (!text_source(&text, BATCH, 1, context, 77, &source, error)) fail_msg("%s", error);
        int32_t *input = malloc(sizeof(int32_t) * (size_t)(BATCH * context)),
                *target = malloc(sizeof(int32_t) * (size_t)(BATCH * context));
        for (uint64_t part = 0; part < 400; part++) {
            source.fill(source.context, false, part, input, target);
            for (int i = 0; i < BATCH * context; i++) {
                assert_int_equal(input[i], input[i / context * context] + i % context);
                assert_int_equal(target[i], input[i] + 1);
                assert_true(target[i] < TRAINED);
                least = input[i] < least ? input[i] : least;
                most = target[i] > most ? target[i] : most;
            }
        }
        assert_int_equal(least, 0); /* and the whole text is covered */
        assert_int_equal(most, TRAINED - 1);
        /* Validation goes through its part once, in order. */
        assert_int_equal(source.validation_parts, (BYTES - TRAINED - 1) / context / BATCH);
        int next = TRAINED;
        for (int64_t part = 0; part < source.validation_parts; part++) {
            source.fill(source.context, true, (uint64_t)part, input, target);
            for (int i = 0; i < BATCH * context; i++) {
                assert_int_equal(input[i], next++);
                assert_int_equal(target[i], next);
                assert_true(target[i] < BYTES);
            }
        }
        free(input);
        free(target);
    }
    train_source source;
    assert_false(text_source(&text, BATCH, 1, TRAINED, 77, &source, error));
    assert_non_null(strstr(error, "228 bytes to train on; a context of 228 needs at least 229"));
    /* The seed and the number of a part decide; nothing else does. */
    int32_t one[BATCH * 3], other[BATCH * 3], target[BATCH * 3];
    assert_true(text_source(&text, BATCH, 1, 3, 5, &source, error));
    source.fill(source.context, false, 8, one, target);
    source.fill(source.context, false, 9, other, target);
    assert_memory_not_equal(one, other, sizeof one);
    source.fill(source.context, false, 8, other, target);
    assert_memory_equal(one, other, sizeof one);
    assert_true(text_source(&text, BATCH, 1, 3, 6, &source, error));
    source.fill(source.context, false, 8, other, target);
    assert_memory_not_equal(one, other, sizeof one);
    /* The shards of a batch have its rows, for validation, too. */
    for (int validation = 0; validation < 2; validation++) {
        int32_t whole[12], split[12], next[12];
        assert_true(text_source(&text, 4, 1, 1, 5, &source, error));
        int64_t parts = source.validation_parts;
        source.fill(source.context, validation, 1, whole, next);
        assert_true(text_source(&text, 4, 4, 1, 5, &source, error));
        assert_int_equal(source.validation_parts, 4 * parts);
        for (int shard = 0; shard < 4; shard++)
            source.fill(source.context, validation, (uint64_t)(4 + shard), split + shard, next);
        assert_memory_equal(whole, split, 4 * sizeof whole[0]);
    }
    text_free(&text);
}

/* ---- The record -------------------------------------------------------------------------------------- */

static metrics *open_record(const char *name, int64_t step) {
    char error[TRAIN_ERROR];
    mkdir(path_of(name), 0777);
    metrics *m = metrics_open(path_of(name), step, error);
    if (!m) fail_msg("%s", error);
    return m;
}

static metrics_row row_of(int64_t step) {
    return (metrics_row){.step = step,
                         .loss = 5.0 / (double)step,
                         .validation = step % 2 ? NAN : 4.0 / (double)step,
                         .rate = 1e-3,
                         .norm = 0.1 * (double)step,
                         .tokens = step << 33,
                         .seconds = 0.3 * (double)step};
}

static void add_rows(metrics *m, int64_t first, int64_t last) {
    char error[TRAIN_ERROR];
    for (int64_t step = first; step <= last; step++) {
        metrics_row row = row_of(step);
        if (!metrics_add(m, &row, error)) fail_msg("%s", error);
    }
}

/* A resumed record is, byte for byte, one that was never interrupted. */
static void a_record_is_resumed(void **unused) {
    (void)unused;
    metrics *m = open_record("whole", 0);
    assert_int_equal(metrics_last(m).step, 0);
    add_rows(m, 1, 9);
    metrics_close(m);
    char *whole = read_file("whole/metrics.jsonl");
    assert_non_null(strstr(whole, "{\"step\": 1, \"loss\": 5"));

    static const struct {
        const char
            *behind; /* what a killed process left after the lines of steps 1 to 6; NULL: zeros, too many to read */
        int64_t step, last;
    } rows[] = {
        {"", 6, 6},
        {"", 4, 4}, /* lines past the checkpoint are dropped */
        {"{\"step\": 7, \"lo", 6, 6},
        {"{\"step\": 7, \"loss\": 1, \"smoothed\": 1, \"rate\": 1, \"norm\": 1, \"tokens\": 1, \"seconds\": 1}", 7, 6},
        {"\n\n", 6, 6},
        {"no JSON at all\n", 8, 6},
        {"{\"step\": 3, \"loss\": 1, \"smoothed\": 1, \"rate\": 1, \"norm\": 1, \"tokens\": 1, \"seconds\": 1}\n", 9,
         6},
        {"[1, 2]\n{\"step\": \"7\"}\n", 9, 6},
        {NULL, 9, 6},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        m = open_record("cut", 0);
        add_rows(m, 1, 6);
        metrics_close(m);
        FILE *file = fopen(path_of("cut/metrics.jsonl"), "ab");
        if (rows[i].behind)
            fputs(rows[i].behind, file);
        else
            assert_int_equal(ftruncate(fileno(file), (off_t)1 << 40), 0);
        fclose(file);
        m = open_record("cut", rows[i].step);
        metrics_row last = metrics_last(m);
        assert_int_equal(last.step, rows[i].last);
        assert_true(last.loss == row_of(last.step).loss && last.tokens == row_of(last.step).tokens &&
                    last.seconds == row_of(last.step).seconds);
        add_rows(m, rows[i].last + 1, 9);
        metrics_close(m);
        char *cut = read_file("cut/metrics.jsonl");
        if (strcmp(whole, cut) != 0) fail_msg("row %zu:\n%s", i, cut);
        free(cut);
    }
    free(whole);
    /* A new run starts an empty record. */
    metrics_close(open_record("cut", 0));
    char *none = read_file("cut/metrics.jsonl");
    assert_string_equal(none, "");
    free(none);
}

static void records_are_refused(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR] = "";
    write_file("file", "", 0);
    assert_null(metrics_open(path_of("file"), 0, error));
    assert_non_null(strstr(error, "Not a directory"));
    assert_null(metrics_open(path_of("absent"), 0, error));
    assert_non_null(strstr(error, "No such file"));
    /* A record that would never end. */
    folder("endless");
    assert_int_equal(mkfifo(path_of("endless/metrics.jsonl"), 0600), 0);
    assert_null(metrics_open(path_of("endless"), 1, error));
    assert_non_null(strstr(error, "it is a pipe; only regular files are read"));
}

/* ---- The disk ---------------------------------------------------------------------------------------- */

enum { MAX_SYNCED = 256 };
static ino_t synced[MAX_SYNCED];
static int synced_count;
static int failing_sync; /* 1: the next one fails, 2: the one after that, and so on; 0: none */

/* In place of the system's: notes what is synced, and syncs it. */
int fsync(int file) {
    struct stat status;
    if (failing_sync > 0 && --failing_sync == 0) {
        errno = EIO;
        return -1;
    }
    if (fstat(file, &status) == 0 && synced_count < MAX_SYNCED) synced[synced_count++] = status.st_ino;
    return (int)syscall(SYS_fsync, file);
}

static bool was_synced(const char *path) {
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    for (int i = 0; i < synced_count; i++)
        if (synced[i] == status.st_ino) return true;
    return false;
}

/* A checkpoint is of no use if the folder that holds it, or its record, is lost in a power failure. */
static void a_save_is_synced(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], out[512];
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}, &device),
                     VJP_OK);
    write_file("book", "twenty bytes of text and then some", 34);
    job_settings settings = job_defaults();
    settings.batch = 1;
    settings.context = 4;
    snprintf(settings.data, sizeof settings.data, "%s", path_of("book"));
    snprintf(out, sizeof out, "%s", path_of("shelf/run"));
    job j;
    metrics_row row;
    synced_count = 0;
    if (!job_begin(&j, device, &settings, out, error) || !job_step(&j, 1, &row, error)) fail_msg("%s", error);
    assert_true(was_synced(path_of("shelf")) && was_synced(scratch));
    assert_false(was_synced(path_of("shelf/run/metrics.jsonl")));
    if (!job_save(&j, error)) fail_msg("%s", error);
    assert_true(was_synced(path_of("shelf/run/metrics.jsonl")) && was_synced(out));
    assert_true(was_synced(path_of("shelf/run/latest/trainer.json")));
    job_close(&j);
    vjp_close(device);
}

/* A run of 9 steps with validations and checkpoints, and the bytes of its record and last weights. */
static void run_job(vjp_device *device, const char *name, bool stops) {
    enum { LAST = 9 };
    char error[TRAIN_ERROR], out[512];
    job_settings settings = job_defaults();
    settings.batch = 1;
    settings.context = 4;
    settings.validate_every = 4;
    settings.save_every = 3;
    settings.trainer.steps = LAST;
    snprintf(settings.data, sizeof settings.data, "%s", path_of("book"));
    snprintf(out, sizeof out, "%s", path_of(name));
    job j;
    metrics_row row;
    if (!job_begin(&j, device, &settings, out, error)) fail_msg("%s", error);
    /* A signal after step 4 lets what is queued finish; then the run is resumed, as the command line does it. */
    for (int turn = 0; turn < 2; turn++) {
        while (job_is_ahead(&j) || (j.step < LAST && !(stops && turn == 0 && j.step >= 4))) {
            int64_t last = stops && turn == 0 && j.step >= 4 ? j.step : LAST;
            if (!job_step(&j, last, &row, error)) fail_msg("%s", error);
            assert_int_equal(row.step, j.step);
            if (j.step % 3 == 0 && !job_save(&j, error)) fail_msg("%s", error);
        }
        if (!job_save(&j, error)) fail_msg("%s", error);
        if (turn) break;
        job_arithmetic arithmetic = j.settings.arithmetic;
        job_close(&j);
        if (!job_resume(&j, device, &(job_processes){0}, &arithmetic, true, &(job_places){0}, out, error))
            fail_msg("%s", error);
    }
    job_close(&j);
}

/* Steps that are queued ahead give the same record and the same checkpoints, whether or not the run is stopped. */
static void a_run_ahead_is_the_same_run(void **unused) {
    (void)unused;
    static const char *const runs[] = {"plain", "ahead", "stopped"};
    static const char *const files[] = {
        "checkpoint-00000006/model.safetensors", "checkpoint-00000009/model.safetensors",
        "checkpoint-00000009/optimizer.safetensors", "checkpoint-00000009/trainer.json"};
    char text[2048];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('a' + i * i % 23);
    write_file("book", text, sizeof text);
    double losses[3][9];
    for (int r = 0; r < 3; r++) {
        vjp_device *device;
        vjp_backend backend;
        assert_int_equal(vjp_open("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}, &device),
                         VJP_OK);
        if (r) merge_calls(device, &backend);
        run_job(device, runs[r], r == 2);
        vjp_close(device);
        char path[1024];
        snprintf(path, sizeof path, "%s/metrics.jsonl", path_of(runs[r]));
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        int lines = 0;
        for (char line[512]; fgets(line, sizeof line, file); lines++) {
            const char *loss = strstr(line, "\"loss\": ");
            assert_true(lines < 9 && loss);
            losses[r][lines] = strtod(loss + 8, NULL);
        }
        fclose(file);
        assert_int_equal(lines, 9);
        assert_memory_equal(losses[0], losses[r], sizeof losses[r]);
        for (size_t f = 0; f < sizeof files / sizeof files[0]; f++) {
            char command[2200], plain[600];
            snprintf(plain, sizeof plain, "%s", path_of("plain"));
            snprintf(command, sizeof command, "cmp '%s/%s' '%s/%s'", plain, files[f], path_of(runs[r]), files[f]);
            if (system(command) != 0) fail_msg("%s", command);
        }
    }
}

/* A file and its folder are synced, and either can fail; the file is whole all the same. */
static void a_failed_sync_is_reported(void **unused) {
    (void)unused;
    float numbers[] = {1, 2, 3};
    const safetensors_tensor tensor = {.name = "x", .dtype = VJP_F32, .ndim = 1, .shape = {3}, .data = numbers};
    char error[SAFETENSORS_ERROR], path[512];
    snprintf(path, sizeof path, "%s", path_of("synced.safetensors"));
    int failures = 0;
    for (bool written = false; !written; failures += !written) {
        error[0] = 0;
        failing_sync = failures + 1;
        written = safetensors_write(path, &tensor, 1, NULL, 0, error);
        if (!written && !strstr(error, "Input/output error")) fail_msg("%s", error);
    }
    failing_sync = 0;
    assert_int_equal(failures, 2);
    safetensors_file file;
    if (!safetensors_read(path, &file, error)) fail_msg("%s", error);
    safetensors_free(&file);
}

/* ---- The curve --------------------------------------------------------------------------------------- */

/* Whether every element ends where it should, and nothing but an entity begins with "&". */
static void expect_xml(const char *text) {
    char open[16][32];
    int depth = 0;
    for (const char *c = text; *c; c++) {
        if (*c == '&' && strncmp(c, "&amp;", 5) != 0 && strncmp(c, "&lt;", 4) != 0) fail_msg("%.40s", c);
        if (*c != '<') continue;
        bool ends = c[1] == '/', quoted = false;
        char name[32] = "";
        for (c += ends ? 2 : 1; isalnum(*c); c++)
            snprintf(name + strlen(name), sizeof name - strlen(name), "%c", *c);
        if (!name[0]) fail_msg("no name: %.40s", c);
        bool alone = false;
        for (; *c && (quoted || *c != '>'); c++) {
            if (*c == '"') quoted = !quoted;
            if (*c == '<') fail_msg("%s is not closed", name);
            alone = !quoted && *c == '/';
        }
        assert_int_equal(*c, '>');
        if (ends) {
            assert_true(depth > 0);
            assert_string_equal(open[--depth], name);
        } else if (!alone) {
            assert_true(depth < 16);
            snprintf(open[depth++], sizeof open[0], "%s", name);
        }
    }
    assert_int_equal(depth, 0);
}

/* Of a loss that falls as those of real runs do: the average follows it from the first steps on. */
static void the_average_follows_the_loss(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR];
    metrics *m = open_record("falling", 0);
    for (int64_t step = 1; step <= 1000; step++) {
        metrics_row row = row_of(step);
        row.loss = 1.5 + 4 / sqrt((double)step);
        if (!metrics_add(m, &row, error)) fail_msg("%s", error);
        if (step == 1) assert_true(row.smoothed == row.loss);
        assert_true(row.smoothed >= row.loss && row.smoothed < 1.1 * row.loss);
    }
    metrics_close(m);
    /* Reading it does not change it. */
    m = metrics_read(path_of("falling"), error);
    assert_non_null(m);
    size_t count;
    const metrics_row *rows = metrics_rows(m, &count);
    assert_true(count == 1000 && rows[999].step == 1000);
    metrics_close(m);
    assert_null(metrics_read(path_of("nowhere"), error));
    assert_non_null(strstr(error, "metrics.jsonl: it cannot be opened"));
}

static void curves_are_xml(void **unused) {
    (void)unused;
    static const int64_t lengths[] = {0, 1, 2, 9, 5000};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        char error[TRAIN_ERROR];
        metrics *m = open_record("curve", 0);
        for (int64_t step = 1; step <= lengths[i]; step++) {
            metrics_row row = row_of(step);
            row.tokens = step;
            if (i == 2) row.loss = row.validation = 3; /* a line without height */
            if (!metrics_add(m, &row, error)) fail_msg("%s", error);
        }
        if (!metrics_draw(m, "a < b & \"c\"", error)) fail_msg("%s", error);
        metrics_close(m);
        char *text = read_file("curve/loss.svg");
        assert_true(strncmp(text, "<svg ", 5) == 0);
        expect_xml(text);
        assert_non_null(strstr(text, "a &lt; b &amp; \"c\""));
        if (strstr(text, "nan") || strstr(text, "inf,") || strstr(text, "-inf")) fail_msg("a number that is none");
        if (i == 4) assert_true(strlen(text) < 300000); /* a long run is drawn by columns */
        free(text);
        assert_int_equal(access(path_of("curve/loss.svg.tmp"), F_OK), -1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_read),
        cmocka_unit_test(long_text_is_whole),
        cmocka_unit_test(windows_stay_inside),
        cmocka_unit_test(a_record_is_resumed),
        cmocka_unit_test(records_are_refused),
        cmocka_unit_test(the_average_follows_the_loss),
        cmocka_unit_test(curves_are_xml),
        cmocka_unit_test(a_save_is_synced),
        cmocka_unit_test(a_run_ahead_is_the_same_run),
        cmocka_unit_test(a_failed_sync_is_reported),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
