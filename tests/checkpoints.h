/* SPDX-License-Identifier: MIT */
/*
 * Checkpoints in a folder of each test's own, in which every number is the step, so that files of different saves are
 * told apart. Define _GNU_SOURCE before the first header, and include this after cmocka.h.
 */
#ifndef VJP_TESTS_CHECKPOINTS_H
#define VJP_TESTS_CHECKPOINTS_H

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train/files/checkpoint.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* ---- A folder of our own for each test --------------------------------------------------------------- */

static char folder[64];

static inline int make_folder(void **state) {
    (void)state;
    /* In memory, where there is such a place: a disk takes its time to be sure of hundreds of checkpoints. */
    bool memory = access("/dev/shm", W_OK) == 0;
    snprintf(folder, sizeof folder, "%s/test_checkpoint.XXXXXX", memory ? "/dev/shm" : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static inline int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(path);
}

static inline void remove_tree(const char *path) {
    nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static inline int remove_folder(void **state) {
    (void)state;
    remove_tree(folder);
    return 0;
}

/* A test with such a folder. */
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

static inline const char *path_of(const char *name, char path[512]) {
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}

static inline void put_file(const char *name, const char *text) {
    char path[512];
    FILE *out = fopen(path_of(name, path), "wb");
    assert_non_null(out);
    fputs(text, out);
    assert_int_equal(fclose(out), 0);
}

static inline bool exists(const char *name) {
    char path[512];
    struct stat status;
    return lstat(path_of(name, path), &status) == 0;
}

/* Names in the folder that begin so; NULL: the hidden ones. */
static inline int count_names(const char *prefix) {
    int count = 0;
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries && (e = readdir(entries));)
        count += prefix ? strncmp(e->d_name, prefix, strlen(prefix)) == 0
                        : e->d_name[0] == '.' && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    if (entries) closedir(entries);
    return count;
}

/* ---- Checkpoints whose every number is the step ------------------------------------------------------ */

/* Padding makes trainer.json the largest file: a limit can spare all others. */
enum { NUMBERS = 500, PADDING = 3000 };

static int64_t best; /* what the next checkpoint names as the best; 0: none */

static inline bool save(int64_t step, int keep, char *error) {
    float numbers[NUMBERS];
    char trainer[PADDING + 64];
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (float)step;
    snprintf(trainer, sizeof trainer, "{\"step\": %lld%*s}\n", (long long)step, PADDING, "");
    const safetensors_tensor model[] = {
        {.name = "w", .dtype = VJP_F32, .ndim = 2, .shape = {2, NUMBERS / 2}, .data = numbers},
        {.name = "b", .dtype = VJP_F32, .ndim = 1, .shape = {3}, .data = numbers},
    };
    const safetensors_tensor optimizer[] = {
        {.name = "w.exp_avg", .dtype = VJP_F32, .ndim = 1, .shape = {NUMBERS}, .data = numbers},
    };
    const checkpoint_content content = {.step = step,
                                        .best = best,
                                        .config = "{\"model_type\": \"test\"}\n",
                                        .trainer = trainer,
                                        .model = model,
                                        .model_count = COUNT(model),
                                        .optimizer = optimizer,
                                        .optimizer_count = COUNT(optimizer)};
    return checkpoint_save(folder, keep, &content, error);
}

static inline bool holds_step(const safetensors_tensor *tensor, int64_t step, size_t count) {
    float number[NUMBERS];
    char error[TRAIN_ERROR];
    if (!tensor || tensor->bytes != count * sizeof *number ||
        !safetensors_fetch(tensor, 0, tensor->bytes, number, error))
        return false;
    for (size_t i = 0; i < count; i++)
        if (number[i] != (float)step) return false;
    return true;
}

/* The step of the checkpoint that is opened, if its files belong together; -1, with a sentence, if there is none. */
static inline int64_t opened_step(char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    checkpoint c;
    if (!checkpoint_open_newest(folder, path, &c, error)) return -1;
    int64_t step = c.step;
    const json_value *said = json_member(c.trainer.root, "step");
    bool whole = said && said->integer == step && holds_step(checkpoint_tensor(&c, "w"), step, NUMBERS) &&
                 holds_step(checkpoint_tensor(&c, "b"), step, 3) &&
                 holds_step(safetensors_find(&c.optimizer.tensors, "w.exp_avg"), step, NUMBERS);
    checkpoint_close(&c);
    return whole ? step : train_fail(error, "%.300s: its files do not belong together", path) - 1;
}

/* The same, if `latest` also leads to a checkpoint, as a reader that knows nothing of us would open it. */
static inline int64_t whole_step(char error[TRAIN_ERROR]) {
    char config[512];
    struct stat status;
    if (stat(path_of("latest/config.json", config), &status) != 0) return train_fail(error, "latest leads nowhere") - 1;
    return opened_step(error);
}

static inline void require_whole(int64_t one, int64_t other, const char *when) {
    char error[TRAIN_ERROR] = "";
    int64_t step = whole_step(error);
    if (step != one && step != other)
        fail_msg("%s: step %lld instead of %lld or %lld: %s", when, (long long)step, (long long)one, (long long)other,
                 error);
}

static inline void require_saved(int64_t step, int keep) {
    char error[TRAIN_ERROR] = "";
    if (!save(step, keep, error)) fail_msg("%s", error);
    require_whole(step, step, "after saving");
}

#endif
