/* SPDX-License-Identifier: MIT */
/*
 * Checkpoints: what is saved is found and opens the same; each way to break a folder is refused with its own sentence;
 * and a save that is killed at any of its system calls, or at any moment, or whose disk is full at any byte, leaves a
 * whole checkpoint behind, with `latest` on it.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>

#include "killing.h"
#endif

#include "train/files/checkpoint.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* ---- A folder of our own for each test --------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state) {
    (void)state;
    /* In memory, where there is such a place: a disk takes its time to be sure of hundreds of checkpoints. */
    bool memory = access("/dev/shm", W_OK) == 0;
    snprintf(folder, sizeof folder, "%s/test_checkpoint.XXXXXX", memory ? "/dev/shm" : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(path);
}

static void remove_tree(const char *path) {
    nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static int remove_folder(void **state) {
    (void)state;
    remove_tree(folder);
    return 0;
}

static const char *path_of(const char *name, char path[512]) {
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}

static void put_file(const char *name, const char *text) {
    char path[512];
    FILE *out = fopen(path_of(name, path), "wb");
    assert_non_null(out);
    fputs(text, out);
    assert_int_equal(fclose(out), 0);
}

static bool exists(const char *name) {
    char path[512];
    struct stat status;
    return lstat(path_of(name, path), &status) == 0;
}

/* Names in the folder that begin so; NULL: the hidden ones. */
static int count_names(const char *prefix) {
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

static bool save(int64_t step, int keep, char *error) {
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

static bool holds_step(const safetensors_tensor *tensor, int64_t step, size_t count) {
    float number[NUMBERS];
    char error[TRAIN_ERROR];
    if (!tensor || tensor->bytes != count * sizeof *number ||
        !safetensors_fetch(tensor, 0, tensor->bytes, number, error))
        return false;
    for (size_t i = 0; i < count; i++)
        if (number[i] != (float)step) return false;
    return true;
}

/* The step of the checkpoint that is opened, if all its files belong together; -1, with a sentence, if there is none.
 */
static int64_t opened_step(char error[TRAIN_ERROR]) {
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
static int64_t whole_step(char error[TRAIN_ERROR]) {
    char config[512];
    struct stat status;
    if (stat(path_of("latest/config.json", config), &status) != 0) return train_fail(error, "latest leads nowhere") - 1;
    return opened_step(error);
}

static void require_whole(int64_t one, int64_t other, const char *when) {
    char error[TRAIN_ERROR] = "";
    int64_t step = whole_step(error);
    if (step != one && step != other)
        fail_msg("%s: step %lld instead of %lld or %lld: %s", when, (long long)step, (long long)one, (long long)other,
                 error);
}

static void require_saved(int64_t step, int keep) {
    char error[TRAIN_ERROR] = "";
    if (!save(step, keep, error)) fail_msg("%s", error);
    require_whole(step, step, "after saving");
}

/* The same where there may be no `latest`. */
static void require_opened(int64_t step) {
    char error[TRAIN_ERROR] = "";
    if (!save(step, 2, error) || opened_step(error) != step) fail_msg("step %lld: %s", (long long)step, error);
}

/* ---- Saving and opening ------------------------------------------------------------------------------ */

static void test_round_trip(void **state) {
    (void)state;
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR], target[64] = "", link[512];
    require_saved(100, 2);
    assert_int_equal(readlink(path_of("latest", link), target, sizeof target - 1), 19);
    assert_string_equal(target, "checkpoint-00000100");
    assert_int_equal(count_names(NULL), 0);
    assert_true(checkpoint_find(folder, path, error));
    assert_string_equal(strrchr(path, '/'), "/checkpoint-00000100");
    checkpoint c;
    assert_true(checkpoint_open(path, &c, error));
    assert_int_equal(c.step, 100);
    assert_string_equal(json_member(c.config.root, "model_type")->text, "test");
    assert_string_equal(safetensors_metadata(&c.files[0].tensors, "format"), "pt");
    assert_int_equal(c.model_count, 2);
    assert_string_equal(c.model[0]->name, "b");
    assert_int_equal(checkpoint_tensor(&c, "w")->shape[1], NUMBERS / 2);
    assert_null(checkpoint_tensor(&c, "W"));
    assert_null(checkpoint_tensor(&c, "w.exp_avg"));
    checkpoint_close(&c);
    assert_null(checkpoint_tensor(&c, "w"));

    /* What is not given is not there. */
    const checkpoint_content bare = {.step = 123456789, .config = "{}"};
    snprintf(path, sizeof path, "%s/a//b/c", folder);
    if (!checkpoint_save(path, 1, &bare, error)) fail_msg("%s", error);
    char found[CHECKPOINT_PATH];
    assert_true(checkpoint_find(path, found, error));
    assert_non_null(strstr(found, "checkpoint-123456789"));
    assert_true(checkpoint_open(found, &c, error));
    assert_true(c.step == 123456789 && !c.trainer.root && !c.optimizer.tensors.stream && !c.model_count);
    checkpoint_close(&c);
}

static void test_keep(void **state) {
    (void)state;
    for (int64_t step = 10; step <= 40; step += 10)
        require_saved(step, 2);
    assert_int_equal(count_names("checkpoint-"), 2);
    assert_true(exists("checkpoint-00000030") && exists("checkpoint-00000040"));
    require_saved(40, 2); /* again */
    assert_int_equal(count_names("checkpoint-"), 2);
    require_saved(35, 2); /* 40 is another run's */
    assert_true(exists("checkpoint-00000030") && exists("checkpoint-00000035") && exists("checkpoint-00000040"));
    require_saved(36, 1);
    assert_int_equal(count_names("checkpoint-"), 2);
    require_saved(50, 0); /* the new one stays in any case */
    assert_int_equal(count_names("checkpoint-"), 1);
    assert_int_equal(count_names(NULL), 0);
}

#ifdef __linux__
/* In the place of libc's: a file system without links. */
static bool has_no_links;

int symlink(const char *target, const char *path) {
    if (!has_no_links) return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
    errno = EPERM;
    return -1;
}
#endif

/* `best` leads to a whole checkpoint of that step. */
static void require_best(int64_t step) {
    char path[512], found[CHECKPOINT_PATH], error[TRAIN_ERROR];
    checkpoint c;
    if (!checkpoint_open_newest(path_of("best", path), found, &c, error)) fail_msg("%s", error);
    assert_int_equal(c.step, step);
    checkpoint_close(&c);
}

static void test_best(void **state) {
    (void)state;
    char name[512], target[64] = "", error[TRAIN_ERROR], found[CHECKPOINT_PATH];
    best = 10;
    for (int64_t step = 10; step <= 30; step += 10) {
        require_saved(step, 1);
        require_best(10);
    }
    assert_true(exists("checkpoint-00000010") && exists("checkpoint-00000030") && !exists("checkpoint-00000020"));
    assert_int_equal(readlink(path_of("best", name), target, sizeof target - 1), 19);
    assert_string_equal(target, "checkpoint-00000010");
    /* One that a killed save did not name is named by the next; what was the best before is no longer kept. */
    best = 30;
    require_saved(40, 1);
    require_best(30);
    assert_true(!exists("checkpoint-00000010") && exists("checkpoint-00000030"));
    /* One that is not there any more is not named. */
    best = 35;
    require_saved(45, 1);
    assert_int_equal(readlink(path_of("best", name), target, sizeof target - 1), 19);
    assert_string_equal(target, "checkpoint-00000030");
    best = 45;
    require_saved(45, 1);
    require_best(45);
    /* In a copy made by cp -rL it is a folder. */
    char command[1200];
    snprintf(command, sizeof command, "cd '%s' && cp -rL best copy && rm best && mv copy best", folder);
    assert_int_equal(system(command), 0);
    require_best(45);
    best = 50;
    require_saved(50, 1);
    require_best(50);
    assert_int_equal(readlink(path_of("best", name), target, sizeof target - 1), 19);
    assert_int_equal(count_names("checkpoint-"), 1);
    assert_int_equal(count_names(NULL), 0);
#ifdef __linux__
    assert_int_equal(unlink(path_of("latest", name)), 0);
    has_no_links = true;
    best = 55;
    require_opened(55);
    require_best(55);
    require_opened(60); /* the file is replaced by one of the same name */
    require_best(55);
    has_no_links = false;
    assert_int_equal(readlink(path_of("best", name), target, sizeof target - 1), -1);
#endif
    /* Such a file may name nothing else. */
    assert_int_equal(unlink(path_of("best", name)), 0);
    static const char *const others[] = {"", "checkpoint-55", "../checkpoint-00000055", "latest",
                                         "checkpoint-00000099"};
    for (size_t i = 0; i < COUNT(others); i++) {
        checkpoint c;
        put_file("best", others[i]);
        assert_false(checkpoint_open_newest(path_of("best", name), found, &c, error));
    }
    best = 0;
}

static void test_leftovers(void **state) {
    (void)state;
    char path[512];
    require_saved(1, 2);
    assert_int_equal(mkdir(path_of(".checkpoint-00000002.tmp", path), 0700), 0);
    put_file(".checkpoint-00000002.tmp/model.safetensors.1.0.tmp", "half");
    assert_int_equal(mkdir(path_of(".checkpoint-00000001.old.tmp", path), 0700), 0);
    assert_int_equal(symlink("nowhere", path_of(".checkpoint-latest.tmp", path)), 0);
    static const char *const others[] = {".notes.tmp", "checkpoint-", "checkpoint-1", "checkpoint-abcdefgh", "a.tmp"};
    for (size_t i = 0; i < COUNT(others); i++)
        put_file(others[i], "not ours");
    require_whole(1, 1, "beside leftovers");
    require_saved(2, 1);
    assert_int_equal(count_names(".checkpoint"), 0);
    for (size_t i = 0; i < COUNT(others); i++)
        assert_true(exists(others[i]));
}

static void test_save_refusals(void **state) {
    (void)state;
    char path[512], error[TRAIN_ERROR];
    assert_false(save(-1, 2, error));
    const checkpoint_content content = {.step = 1, .config = "{}"};
    put_file("file", "");
    assert_false(checkpoint_save(path_of("file", path), 1, &content, error));
    assert_non_null(strstr(error, "/file: the folder cannot be created: Not a directory"));
    assert_false(checkpoint_save(path_of("file/deep", path), 1, &content, error));
    assert_non_null(strstr(error, "/file: the folder cannot be created: Not a directory"));
    assert_false(checkpoint_save("", 1, &content, error));
    assert_non_null(strstr(error, "empty"));
    char longer[CHECKPOINT_PATH + 10];
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = 0;
    assert_false(checkpoint_save(longer, 1, &content, error));
    assert_non_null(strstr(error, "too long"));

    require_saved(1, 2);
    /* A folder where the link should be is not ours to remove; the checkpoint itself is saved. */
    unlink(path_of("latest", path));
    assert_int_equal(mkdir(path, 0700), 0);
    put_file("latest/mine", "");
    assert_false(save(2, 2, error));
    assert_non_null(strstr(error, "latest: the link cannot be moved there"));
    assert_true(exists("latest/mine") && exists("checkpoint-00000002") && exists("checkpoint-00000001"));
    assert_int_equal(count_names(NULL), 0);
    /* A file with a checkpoint's name is not removed either. */
    put_file("checkpoint-00000003", "");
    assert_false(save(3, 1, error));
    assert_non_null(strstr(error, "checkpoint-00000003: it cannot be renamed to this"));
    assert_true(exists("checkpoint-00000003") && exists("checkpoint-00000001"));
    assert_int_equal(count_names(NULL), 0);

    if (geteuid() != 0) {
        chmod(folder, 0500);
        assert_false(save(4, 1, error));
        assert_non_null(strstr(error, "Permission denied"));
        chmod(folder, 0700);
    }
}

/* `cp -rL` turns the link `latest` into a folder. It is not newer than checkpoints saved since, and a save replaces it.
 */
static void test_copied_link(void **state) {
    (void)state;
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR], one[512], other[512];
    require_saved(1, 9);
    require_saved(2, 9);
    for (int only_copy = 0; only_copy < 2; only_copy++) {
        /* `latest` is a folder of step 2, with and without a checkpoint-00000002 beside it. */
        unlink(path_of("latest", one));
        assert_int_equal(rename(path_of("checkpoint-00000002", one), path_of("latest", other)), 0);
        assert_true(checkpoint_find(folder, path, error));
        assert_string_equal(path, other);
        require_saved(2 + only_copy, 9);
        assert_int_equal(count_names("checkpoint-"), 2 + only_copy);
        assert_int_equal(count_names(NULL), 0);
        assert_true(readlink(path_of("latest", one), path, sizeof path) > 0);
    }
    /* An older copy under the name `latest`, with newer checkpoints beside it. */
    unlink(path_of("latest", one));
    assert_int_equal(rename(path_of("checkpoint-00000001", one), path_of("latest", other)), 0);
    assert_true(checkpoint_find(folder, path, error));
    assert_non_null(strstr(path, "checkpoint-00000003"));
    require_saved(4, 9);
    assert_true(exists("checkpoint-00000001"));
    /* An incomplete copy, or an empty one, is replaced; a folder with anything else in it stays. */
    static const char *const left[] = {"latest/model.safetensors", NULL, "latest/notes"};
    for (size_t i = 0; i < COUNT(left); i++) {
        unlink(path_of("latest", one));
        assert_int_equal(mkdir(one, 0700), 0);
        if (left[i]) put_file(left[i], "half");
        if (i < 2) {
            require_saved(5 + (int64_t)i, 9);
            assert_int_equal(count_names(NULL), 0);
        } else {
            assert_false(save(7, 9, error));
            assert_non_null(strstr(error, "latest: the link cannot be moved there: Is a directory"));
            assert_true(exists("latest/notes"));
        }
    }
}

/* A copy that was made while a checkpoint was removed has all of its files but the last. */
static void test_torn_copy(void **state) {
    (void)state;
    char error[TRAIN_ERROR], path[512], other[512];
    require_saved(1, 9);
    require_saved(2, 9);
    require_saved(3, 9);
    unlink(path_of("latest", path));
    assert_int_equal(rename(path_of("checkpoint-00000003", path), path_of("latest", other)), 0);
    assert_int_equal(opened_step(error), 3);
    assert_int_equal(unlink(path_of("latest/optimizer.safetensors", path)), 0);
    assert_int_equal(opened_step(error), 2);
    assert_int_equal(unlink(path_of("checkpoint-00000002/optimizer.safetensors", path)), 0);
    assert_int_equal(opened_step(error), 1);
    /* Without any that is whole, the newest: its weights are of use. */
    assert_int_equal(unlink(path_of("checkpoint-00000001/optimizer.safetensors", path)), 0);
    char newest[CHECKPOINT_PATH];
    assert_true(checkpoint_find(folder, newest, error));
    assert_string_equal(newest, other);
}

/* One run at a time; the sentence names the process, and the lock ends with it. */
static void test_lock(void **state) {
    (void)state;
    char error[TRAIN_ERROR] = "", pid[64], path[512];
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a failed check below must not leave it behind */
        int lock = checkpoint_lock(path_of("deep/run", path), error);
        if (write(ready[1], lock < 0 ? "n" : "y", 1) != 1) _exit(1);
        pause();
    }
    char answer = 0;
    assert_int_equal(read(ready[0], &answer, 1), 1);
    assert_int_equal(answer, 'y');
    assert_int_equal(checkpoint_lock(path_of("deep/run", path), error), -1);
    snprintf(pid, sizeof pid, "another run is training there (process %lld)", (long long)child);
    if (!strstr(error, pid)) fail_msg("\"%s\"", error);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    int lock = checkpoint_lock(path, error);
    assert_true(lock >= 0);
    close(lock);
    close(ready[0]);
    close(ready[1]);
    put_file("file", "");
    assert_int_equal(checkpoint_lock(path_of("file", path), error), -1);
    assert_non_null(strstr(error, "Not a directory"));
}

/* ---- Finding ----------------------------------------------------------------------------------------- */

static void test_find(void **state) {
    (void)state;
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR], name[512];
    assert_false(checkpoint_find(path_of("none", name), path, error));
    assert_non_null(strstr(error, "/none: it cannot be opened: No such file"));
    put_file("file", "");
    assert_false(checkpoint_find(path_of("file", name), path, error));
    assert_non_null(strstr(error, "not a folder"));
    assert_false(checkpoint_find(folder, path, error));
    assert_non_null(strstr(error, "neither a config.json nor a checkpoint"));

    require_saved(1, 9);
    require_saved(2, 9);
    require_saved(3, 9);
    assert_true(checkpoint_find(folder, path, error));
    assert_non_null(strstr(path, "checkpoint-00000003"));
    /* Without a link, and with one that leads nowhere: the highest that opens. */
    remove_tree(path_of("checkpoint-00000003", name));
    assert_true(checkpoint_find(folder, path, error));
    assert_non_null(strstr(path, "checkpoint-00000002"));
    unlink(path_of("latest", name));
    put_file("checkpoint-00000002/trainer.json", "{");
    assert_true(checkpoint_find(folder, path, error));
    assert_non_null(strstr(path, "checkpoint-00000001"));
    put_file("checkpoint-00000001/model.safetensors", "");
    assert_false(checkpoint_find(folder, path, error));
    assert_non_null(strstr(error, "none of its checkpoints can be opened"));
    assert_non_null(strstr(error, "checkpoint-00000001/model.safetensors: it is cut off"));
    /* A link to elsewhere is followed; a plain folder is itself. */
    assert_int_equal(symlink("/", path_of("latest", name)), 0);
    assert_true(checkpoint_find(folder, path, error));
    assert_string_equal(path, "/");
    put_file("config.json", "{}");
    assert_true(checkpoint_find(folder, path, error));
    assert_string_equal(path, folder);
}

/* ---- Folders that are refused ------------------------------------------------------------------------ */

static void write_shard(const char *name, const char *tensor, const char *step) {
    char path[512], error[TRAIN_ERROR];
    static const float numbers[2] = {1, 2};
    const safetensors_tensor t = {.name = tensor, .dtype = VJP_F32, .ndim = 1, .shape = {2}, .data = numbers};
    const safetensors_pair pair = {"step", step};
    assert_true(safetensors_write(path_of(name, path), &t, 1, &pair, step != NULL, error));
}

static const char right_index[] = "{\"metadata\": {}, \"weight_map\": {\"a\": \"m-1\", \"b\": \"m-2\"}}";

static void make_right(void) {
    remove_tree(folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    put_file("config.json", "{}");
    put_file("model.safetensors.index.json", right_index);
    write_shard("m-1", "a", NULL);
    write_shard("m-2", "b", NULL);
}

static const struct {
    const char *file, *text; /* text NULL: removed; "/": a folder instead */
    const char *says;        /* NULL: it opens */
} damages[] = {
    {"other", "", NULL},
    {"config.json", NULL, "/config.json: it cannot be opened: No such file"},
    {"config.json", "", "/config.json: it ends at byte 0"},
    {"config.json", "[]", "/config.json: it must be a JSON object"},
    {"config.json", "/", "/config.json: it is a folder"},
    {"model.safetensors.index.json", NULL, "/model.safetensors: it cannot be opened: No such file"},
    {"model.safetensors.index.json", "{", "index.json: it ends"},
    {"model.safetensors.index.json", "{}", "no object \"weight_map\""},
    {"model.safetensors.index.json", "{\"weight_map\": []}", "no object \"weight_map\""},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": 1}}", "\"a\" is listed in 1, which must be"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"\"}}",
     "which must be the name of a file in this folder"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"../x\"}}",
     "which must be the name of a file in this folder"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"/etc/passwd\"}}",
     "which must be the name of a file in this folder"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"x/y\"}}",
     "which must be the name of a file in this folder"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"m-2\"}}",
     "\"a\" is listed in \"m-2\", which does not"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"m-1\", \"b\": \"m-1\"}}", "which does not have it"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"m-2\", \"b\": \"m-1\"}}", "which does not have it"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"m-1\", \"b\": \"m-2\", \"c\": \"m-1\"}}",
     "\"c\" is listed in \"m-1\", which does not have it"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"m-3\"}}", "/m-3: it cannot be opened"},
    {"m-2", "/", "/m-2: it is not a regular file"},
    {"m-2", "", "/m-2: it is cut off"},
    {"trainer.json", "1", "/trainer.json: it must be a JSON object"},
    {"trainer.json", "{\"step\": 1.5}", "/trainer.json: its step is \"1.5\""},
    {"trainer.json", "{\"step\": -1}", "/trainer.json: its step is \"-1\""},
    {"optimizer.safetensors", "x", "/optimizer.safetensors: it is cut off"},
};

static void test_damages(void **state) {
    (void)state;
    char path[512], error[TRAIN_ERROR];
    checkpoint c;
    for (size_t i = 0; i < COUNT(damages); i++) {
        make_right();
        if (damages[i].text) unlink(path_of(damages[i].file, path));
        if (!damages[i].text)
            unlink(path_of(damages[i].file, path));
        else if (strcmp(damages[i].text, "/") == 0)
            assert_int_equal(mkdir(path, 0700), 0);
        else
            put_file(damages[i].file, damages[i].text);
        error[0] = 0;
        bool ok = checkpoint_open(folder, &c, error);
        if (ok != !damages[i].says || (!ok && !strstr(error, damages[i].says)))
            fail_msg("%s = %s: \"%s\" does not say \"%s\"", damages[i].file, damages[i].text, error, damages[i].says);
        if (ok) {
            assert_true(c.step == -1 && c.model_count == 2 && checkpoint_tensor(&c, "b")->shape[0] == 2);
            checkpoint_close(&c);
        }
    }
    make_right();
    write_shard("m-2", "a", NULL);
    assert_false(checkpoint_open(folder, &c, error));
    assert_non_null(strstr(error, "two of its files have a tensor \"a\""));
    make_right();
    write_shard("m-1", "a", "7");
    write_shard("optimizer.safetensors", "a", "8");
    assert_false(checkpoint_open(folder, &c, error));
    assert_non_null(strstr(error, "optimizer.safetensors is of step 8, but the files beside it are of step 7"));
    write_shard("optimizer.safetensors", "a", "7");
    assert_true(checkpoint_open(folder, &c, error));
    assert_int_equal(c.step, 7);
    checkpoint_close(&c);
    unlink(path_of("model.safetensors.index.json", path));
    put_file("pytorch_model.bin", "");
    assert_false(checkpoint_open(folder, &c, error));
    assert_non_null(strstr(error, "pytorch_model.bin only"));
    write_shard("model.safetensors", "a", "7"); /* one file goes before several */
    put_file("model.safetensors.index.json", "{");
    assert_true(checkpoint_open(folder, &c, error));
    assert_int_equal(c.model_count, 1);
    checkpoint_close(&c);

    /* Cut off at every byte. */
    make_right();
    unlink(path_of("model.safetensors.index.json", path));
    write_shard("model.safetensors", "a", NULL);
    struct stat status;
    assert_int_equal(stat(path_of("model.safetensors", path), &status), 0);
    for (off_t size = status.st_size - 1; size >= 0; size--) {
        assert_int_equal(truncate(path, size), 0);
        assert_false(checkpoint_open(folder, &c, error));
        assert_non_null(strstr(error, "/model.safetensors: it is cut off"));
    }
}

/* ---- Killed ------------------------------------------------------------------------------------------ */

/* Every folder that calls itself a checkpoint is one. */
static void require_all_whole(const char *when) {
    char path[512], error[TRAIN_ERROR];
    checkpoint c;
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries && (e = readdir(entries));) {
        if (strncmp(e->d_name, "checkpoint-", 11) != 0) continue;
        if (!checkpoint_open(path_of(e->d_name, path), &c, error)) fail_msg("%s: %s", when, error);
        if (!c.trainer.root || !c.optimizer.tensors.stream)
            fail_msg("%s: %s has some of its files only", when, e->d_name);
        checkpoint_close(&c);
    }
    if (entries) closedir(entries);
}

#ifdef PTRACE_GET_SYSCALL_INFO
static outcome kill_save(int64_t step, int calls) {
    pid_t child = fork();
    if (child == 0) {
        char error[TRAIN_ERROR];
        let_parent_kill();
        _exit(save(step, 1, error) ? 0 : 1);
    }
    return kill_at_call(child, calls);
}

/* Steps of their own, and the same step again and again. Each trial begins without leftovers, so that the calls are the
 * same each time and none of them is passed over. */
static void test_killed_at_each_call(void **state) {
    (void)state;
    enum { FEWEST_CALLS = 20, MAX_CALLS = 1000 };
    for (int same = 0; same < 2; same++) {
        int64_t last = 1;
        outcome how = KILLED;
        int calls = 0;
        for (; how == KILLED && calls < MAX_CALLS; calls++) {
            char when[64];
            best = last;
            require_saved(last, 1);
            assert_true(count_names(NULL) == 0 && count_names("checkpoint-") == 1);
            best = last + !same;
            how = kill_save(best, calls + 1);
            if (how == FORBIDDEN) skip(); /* the system allows no tracing */
            snprintf(when, sizeof when, "killed at call %d", calls + 1);
            require_whole(last, last + !same, when);
            require_all_whole(when);
            if (!exists("best/config.json")) fail_msg("%s: best leads nowhere", when);
            last += !same;
        }
        best = 0;
        assert_true(how == ENDED && calls > FEWEST_CALLS);
        remove_tree(folder);
    }
}
#endif

static void test_killed_at_any_moment(void **state) {
    (void)state;
    enum { KILLS = 40, LONGEST_MICROSECONDS = 20000 };
    char error[TRAIN_ERROR];
    uint64_t seed = 1;
    int64_t last = 1;
    require_saved(last, 2);
    for (int i = 0; i < KILLS; i++) {
        pid_t child = fork();
        if (child == 0)
            for (int64_t step = last + 1;; step++)
                if (!save(step, 2, error)) _exit(1);
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        nanosleep(&(struct timespec){.tv_nsec = (long)(seed >> 33) % LONGEST_MICROSECONDS * 1000}, NULL);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        assert_true(WIFSIGNALED(status));
        int64_t step = whole_step(error);
        if (step < last) fail_msg("step %lld after %lld: %s", (long long)step, (long long)last, error);
        last = step;
        require_all_whole("killed");
    }
    assert_true(last > 1); /* some saves came to their end */
}

/* A reader finds a whole checkpoint while another process replaces it as fast as it can. */
static void test_read_while_saving(void **state) {
    (void)state;
    enum { READS = 1000 };
    char error[TRAIN_ERROR];
    require_saved(1, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a failed check below must not leave it behind */
        for (int64_t step = 2;; step++)
            if (!save(step, 1, error)) _exit(1);
    }
    for (int i = 0; i < READS; i++)
        if (opened_step(error) < 1) fail_msg("read %d: %s", i, error);
    kill(child, SIGKILL);
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
}

/* ---- A full disk ------------------------------------------------------------------------------------- */

static void require_failed(bool ok, const char *error, const char *reason) {
    if (ok || !strstr(error, "/.checkpoint-") || !strstr(error, reason))
        fail_msg("%s instead of a file's name and \"%s\"", ok ? "success" : error, reason);
    require_whole(1, 1, "on a full disk");
    assert_int_equal(count_names(NULL), 0);
    assert_int_equal(count_names("checkpoint-"), 1);
}

/* Files that may not grow past a limit, for many limits. */
static void test_file_limits(void **state) {
    (void)state;
    enum { STRIDE = 13 };
    require_saved(1, 2);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    bool ok = false;
    int failures = 0;
    for (rlim_t bytes = 0; !ok; bytes += STRIDE) {
        char error[TRAIN_ERROR] = "";
        limit = before;
        limit.rlim_cur = bytes;
        setrlimit(RLIMIT_FSIZE, &limit);
        ok = save(2, 2, error);
        setrlimit(RLIMIT_FSIZE, &before);
        if (ok) break;
        failures++;
        require_failed(ok, error, "File too large");
    }
    signal(SIGXFSZ, handler);
    assert_true(failures > PADDING / STRIDE);
    require_whole(2, 2, "after the limit was raised");
}

#ifdef __linux__
static bool write_line(const char *path, const char *line) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = file >= 0 && write(file, line, strlen(line)) == (ssize_t)strlen(line);
    if (file >= 0) close(file);
    return ok;
}

/* Whether this process may mount from now on: as root, or as the only user of a namespace of its own. */
static bool own_mounts(void) {
    char user[64], group[64];
    snprintf(user, sizeof user, "0 %lld 1", (long long)geteuid());
    snprintf(group, sizeof group, "0 %lld 1", (long long)getegid());
    if (unshare(CLONE_NEWNS) == 0) return true;
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_line("/proc/self/setgroups", "deny") &&
           write_line("/proc/self/uid_map", user) && write_line("/proc/self/gid_map", group);
}

/* A small file system of our own that has room for some more pages, or files, than it holds now. */
static bool full_disk(void) {
    char options[64], error[TRAIN_ERROR] = "";
    if (!own_mounts() || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return false;
    if (mount("tmpfs", folder, "tmpfs", 0, "size=1m,nr_inodes=100") != 0) return false;
    require_saved(1, 2);
    for (int files = 0; files < 2; files++) {
        int failures = 0;
        for (int more = 0;; more++) {
            /* What is in use cannot be told beforehand; the first limit that is taken is the tightest. */
            snprintf(options, sizeof options, files ? "size=1m,nr_inodes=%d" : "size=%dk", files ? 1 + more : 4 * more);
            if (more == 0 || mount("tmpfs", folder, "tmpfs", MS_REMOUNT, options) != 0) continue;
            bool ok = save(2, 2, error);
            if (ok) break;
            failures++;
            require_failed(ok, error, "No space left");
        }
        assert_true(failures > 2);
        char path[512];
        remove_tree(path_of("checkpoint-00000002", path));
        mount("tmpfs", folder, "tmpfs", MS_REMOUNT, "size=1m,nr_inodes=100");
        require_saved(1, 2);
    }
    return true;
}

static void test_full_disk(void **state) {
    (void)state;
    enum { NOT_ALLOWED = 77 };
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(full_disk() ? 0 : NOT_ALLOWED); /* a failed check jumps out of here, to the end of the child's main() */
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_ALLOWED) skip();
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),
        TEST(test_keep),
        TEST(test_best),
        TEST(test_leftovers),
        TEST(test_save_refusals),
        TEST(test_find),
        TEST(test_damages),
        TEST(test_copied_link),
        TEST(test_torn_copy),
        TEST(test_lock),
        TEST(test_killed_at_any_moment),
        TEST(test_file_limits),
        TEST(test_read_while_saving),
#ifdef __linux__
        TEST(test_killed_at_each_call),
        TEST(test_full_disk),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
