/* SPDX-License-Identifier: MIT */
/*
 * Checkpoints: what is saved is found and opens the same, which ones are kept and which is the best; each way to break
 * a folder is refused with its own sentence. test_checkpoint_faults.c has saves that do not come to their end.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include "checkpoints.h"

/* Saves a checkpoint that must open, though there may be no `latest`. */
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

/* A copy that was made while a checkpoint was removed has some of its files. */
static void test_torn_copy(void **state) {
    (void)state;
    char error[TRAIN_ERROR], path[512], other[512];
    for (int64_t step = 1; step <= 4; step++)
        require_saved(step, 9);
    unlink(path_of("latest", path));
    assert_int_equal(rename(path_of("checkpoint-00000004", path), path_of("latest", other)), 0);
    assert_int_equal(opened_step(error), 4);
    assert_int_equal(unlink(path_of("latest/optimizer.safetensors", path)), 0);
    assert_int_equal(opened_step(error), 3);
    assert_int_equal(unlink(path_of("checkpoint-00000003/trainer.json", path)), 0);
    assert_int_equal(opened_step(error), 2);
    assert_int_equal(unlink(path_of("checkpoint-00000002/optimizer.safetensors", path)), 0);
    assert_int_equal(opened_step(error), 1);
    /* Without any that is whole, the newest: its weights are of use. */
    assert_int_equal(unlink(path_of("checkpoint-00000001/optimizer.safetensors", path)), 0);
    char newest[CHECKPOINT_PATH];
    assert_true(checkpoint_find(folder, newest, error));
    assert_string_equal(newest, other);
}

/* The same in a copy that has kept the link `latest`; a link to elsewhere is followed whatever is there. */
static void test_torn_target(void **state) {
    (void)state;
    static const char *const missing[] = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"};
    char error[TRAIN_ERROR], path[512], file[600], found[CHECKPOINT_PATH];
    require_saved(1, 9);
    require_saved(2, 9);
    for (size_t i = 0; i < COUNT(missing); i++) {
        require_saved(3, 9);
        snprintf(file, sizeof file, "%s/%s", path_of("checkpoint-00000003", path), missing[i]);
        assert_int_equal(unlink(file), 0);
        if (opened_step(error) != 2) fail_msg("without %s: %s", missing[i], error);
    }
    /* A file that is damaged is not replaced in silence. */
    require_saved(3, 9);
    put_file("checkpoint-00000003/model.safetensors", "half");
    assert_int_equal(opened_step(error), -1);
    assert_non_null(strstr(error, "checkpoint-00000003/model.safetensors: it is cut off"));
    /* Without any that is whole, what the link names. */
    assert_int_equal(unlink(path_of("checkpoint-00000003/config.json", path)), 0);
    assert_int_equal(unlink(path_of("checkpoint-00000001/trainer.json", path)), 0);
    assert_int_equal(unlink(path_of("checkpoint-00000002/trainer.json", path)), 0);
    assert_true(checkpoint_find(folder, found, error));
    assert_string_equal(found, path_of("checkpoint-00000003", path));
    require_saved(2, 9);
    assert_int_equal(unlink(path_of("latest", path)), 0);
    assert_int_equal(symlink("/", path), 0);
    assert_true(checkpoint_find(folder, found, error));
    assert_string_equal(strrchr(found, '/'), "/");
}

/* A torn checkpoint is not one of those that are kept, whichever file it lacks. */
static void test_keep_torn(void **state) {
    (void)state;
    static const char *const missing[] = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"};
    char path[128], file[256];
    for (int i = 0; i < (int)COUNT(missing); i++) {
        int64_t step = 10 * i;
        for (int k = 1; k <= 3; k++)
            require_saved(step + k, 3);
        snprintf(path, sizeof path, "%s/checkpoint-%08d", folder, (int)step + 3);
        snprintf(file, sizeof file, "%s/%s", path, missing[i]);
        assert_int_equal(unlink(file), 0);
        require_saved(step + 4, 2);
        snprintf(file, sizeof file, "checkpoint-%08d", (int)step + 2);
        if (!exists(file)) fail_msg("without %s: the last whole one was removed", missing[i]);
        require_saved(step + 5, 2);
        assert_int_equal(count_names("checkpoint-"), 2);
        snprintf(file, sizeof file, "checkpoint-%08d", (int)step + 4);
        assert_true(exists(file));
    }
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
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"x\\\\..\\\\..\\\\y\"}}",
     "which must be the name of a file in this folder"},
    {"model.safetensors.index.json", "{\"weight_map\": {\"a\": \"C:x\"}}",
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

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),    TEST(test_keep),        TEST(test_best),      TEST(test_leftovers),
        TEST(test_save_refusals), TEST(test_find),        TEST(test_damages),   TEST(test_copied_link),
        TEST(test_torn_copy),     TEST(test_torn_target), TEST(test_keep_torn), TEST(test_lock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
