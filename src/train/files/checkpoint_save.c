/* SPDX-License-Identifier: MIT */
/*
 * Saving a checkpoint. Its files are written to DIR/.checkpoint-00000100.tmp/; one rename() makes it a checkpoint, a
 * second one moves the link `latest` to it. A folder that is removed is first renamed to a name that ends in .tmp, so
 * that no folder named checkpoint-... is ever incomplete.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/sync.h"
#include "train/files/checkpoint.h"
#include "train/files/checkpoint_names.h"

/* ---- Folders ----------------------------------------------------------------------------------------- */

bool checkpoint_make_folders(const char *dir, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    if (!checkpoint_path(path, error, "%s", dir)) return false;
    for (char *c = path + 1;; c++) {
        if (*c && !system_is_separator(*c)) continue;
        char sign = *c;
        *c = 0;
        system_status status;
        bool made = system_make_folder(path);
        if (!made && (errno != EEXIST || !system_status_of(path, &status) || status.kind != SYSTEM_FOLDER))
            return train_fail(error, "%.300s: the folder cannot be created: %s", path,
                              strerror(errno == EEXIST ? ENOTDIR : errno));
        if (made && !file_sync_parent(path, error)) return false;
        *c = sign;
        if (!sign) return true;
    }
}

int checkpoint_lock(const char *dir, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH];
    if (!checkpoint_make_folders(dir, error) || !checkpoint_path(path, error, "%s/.lock", dir)) return -1;
    int file = system_open_to_lock(path);
    if (file < 0) {
        train_fail(error, "%.300s: it cannot be created: %s", path, strerror(errno));
        return -1;
    }
    /* On a file system without locks the run continues unprotected. */
    int64_t holder;
    if (system_lock(file, &holder)) return file;
    char process[32] = "";
    if (holder) snprintf(process, sizeof process, " (process %lld)", (long long)holder);
    train_fail(error, "%.300s: another run is training there%s; wait for it, or choose another --out", dir, process);
    system_close(file);
    return -1;
}

/*
 * Removes the temporary names from `dir`: those of this save, and of earlier ones that failed or were killed. For what
 * cannot be removed the next save tries again.
 */
static void remove_leftovers(const char *dir) {
    system_folder *entries = system_folder_open(dir);
    char path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    for (const char *name; entries && (name = system_folder_next(entries));)
        if (checkpoint_is_temporary(name) && checkpoint_path(path, ignored, "%s/%s", dir, name))
            system_remove_tree(path);
    if (entries) system_folder_close(entries);
}

/* Takes a checkpoint out of the list by renaming it; remove_leftovers() then removes it. */
static bool set_aside(const char *dir, int64_t step, char aside[CHECKPOINT_PATH]) {
    char path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    return checkpoint_path(path, ignored, CHECKPOINT_FORMAT, dir, (long long)step) &&
           checkpoint_path(aside, ignored, CHECKPOINT_OLD_FORMAT, dir, (long long)step) && system_rename(path, aside);
}

/* A torn copy, which may have been there since before a resume, does not count as one that is kept. */
static void retire_older(const char *dir, int64_t newest, int64_t best, int keep) {
    char path[CHECKPOINT_PATH], aside[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    int64_t *steps;
    size_t count;
    int kept = 0;
    if (!checkpoint_list(dir, &steps, &count)) return;
    for (size_t i = 0; i < count; i++) {
        if (steps[i] > newest || !checkpoint_path(path, ignored, CHECKPOINT_FORMAT, dir, (long long)steps[i])) continue;
        if (steps[i] == newest || kept < keep)
            kept += steps[i] == newest || !checkpoint_lacks_files(path);
        else if (steps[i] != best)
            set_aside(dir, steps[i], aside);
    }
    free(steps);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

bool checkpoint_write_text(const char *path, const char *text, char error[TRAIN_ERROR]) {
    FILE *out = system_stream(path, "wbx");
    if (!out) return train_fail(error, "%.300s: it cannot be created: %s", path, strerror(errno));
    bool ok = fputs(text, out) != EOF && fflush(out) == 0 && system_sync(system_number_of(out));
    int reason = errno;
    if (fclose(out) != 0 && ok) ok = false, reason = errno;
    return ok || train_fail(error, "%.300s: it cannot be written: %s", path, strerror(reason));
}

/* The files with tensors: the model's, then the optimiser's. */
enum { TENSOR_FILES = 2 };

typedef struct tensor_file {
    char path[CHECKPOINT_PATH];
    const safetensors_tensor *tensors;
    size_t count;
} tensor_file;

/* How many there are; 0: a path is too long. */
static int tensor_files(tensor_file file[TENSOR_FILES], const char *folder, const checkpoint_content *c, char *error) {
    file[0].tensors = c->model;
    file[0].count = c->model_count;
    file[1].tensors = c->optimizer;
    file[1].count = c->optimizer_count;
    if (!checkpoint_path(file[0].path, error, "%s/%smodel.safetensors", folder, c->is_adapter ? "adapter_" : "") ||
        !checkpoint_path(file[1].path, error, "%s/optimizer.safetensors", folder))
        return 0;
    return c->optimizer ? 2 : 1;
}

/* What both say of themselves. transformers refuses weights whose metadata does not name a library. */
enum { PAIRS = 2, STEP_BYTES = 32 };

static void describe(safetensors_pair metadata[PAIRS], char step[STEP_BYTES], const checkpoint_content *c) {
    snprintf(step, STEP_BYTES, "%lld", (long long)c->step);
    metadata[0] = (safetensors_pair){"format", "pt"};
    metadata[1] = (safetensors_pair){"step", step};
}

static bool write_texts(const char *folder, const checkpoint_content *c, char *error) {
    char path[CHECKPOINT_PATH];
    return checkpoint_path(path, error, "%s/%sconfig.json", folder, c->is_adapter ? "adapter_" : "") &&
           checkpoint_write_text(path, c->config, error) &&
           (!c->trainer || (checkpoint_path(path, error, "%s/trainer.json", folder) &&
                            checkpoint_write_text(path, c->trainer, error))) &&
           (!c->tokenizer_json || (checkpoint_path(path, error, "%s/tokenizer.json", folder) &&
                                   checkpoint_write_text(path, c->tokenizer_json, error))) &&
           (!c->tokenizer_config || (checkpoint_path(path, error, "%s/tokenizer_config.json", folder) &&
                                     checkpoint_write_text(path, c->tokenizer_config, error)));
}

/* All of them; in a group the headers of those with tensors. */
static bool write_files(const char *folder, const checkpoint_content *c, char *error) {
    char step[STEP_BYTES];
    safetensors_pair metadata[PAIRS];
    describe(metadata, step, c);
    tensor_file file[TENSOR_FILES];
    int count = tensor_files(file, folder, c, error);
    bool ok = count && write_texts(folder, c, error);
    for (int i = 0; i < count && ok; i++)
        ok = (c->group ? safetensors_begin : safetensors_write)(file[i].path, file[i].tensors, file[i].count, metadata,
                                                                PAIRS, error);
    return ok;
}

/*
 * The own tensors, into files that are open. Every second process begins with the other file: a local file system lets
 * one process at a time write to a file.
 */
static bool write_own(const int *opened, const tensor_file *file, int count, const checkpoint_content *c, char *error) {
    char step[STEP_BYTES];
    safetensors_pair metadata[PAIRS];
    describe(metadata, step, c);
    for (int k = 0; k < count; k++) {
        int i = (k + c->group->rank) % count;
        if (!safetensors_write_own(opened[i], file[i].path, file[i].tensors, file[i].count, metadata, PAIRS, error))
            return false;
    }
    return true;
}

/*
 * The part of each process, after rank 0 has written the other files, or failed. All have opened the files before any
 * writes: a process that is stopped here for a long time then cannot open those of a later run in the same folder.
 */
static bool write_together(const char *dir, const char *folder, const checkpoint_content *c, bool ok, char *error) {
    const checkpoint_group *g = c->group;
    tensor_file file[TENSOR_FILES];
    int opened[TENSOR_FILES] = {-1, -1}, count = 0;
    char ignored[TRAIN_ERROR];
    if (!g->agree(g->context, ok, error)) return false;
    /* NFS may remember that a name is not there; opening the folder lets it look again. */
    (void)file_sync_folder(dir, ignored);
    ok = (count = tensor_files(file, folder, c, error)) > 0;
    for (int i = 0; i < count && ok; i++) {
        opened[i] = system_open_to_write(file[i].path);
        if (opened[i] < 0)
            ok = train_fail(error, "%.300s: it cannot be opened: %s; all processes write there", file[i].path,
                            strerror(errno));
    }
    bool agreed = g->agree(g->context, ok, error);
    ok = agreed && write_own(opened, file, count, c, error);
    for (int i = 0; i < count; i++)
        if (opened[i] >= 0 && !system_close(opened[i]) && ok)
            ok = train_fail(error, "%.300s: it cannot be written: %s", file[i].path, strerror(errno));
    return agreed && g->agree(g->context, ok, error);
}

/* ---- Names ------------------------------------------------------------------------------------------- */

/* Replaces a checkpoint of the same name: in one step, if the system can exchange two names. */
static bool replace(const char *dir, const char *folder, const char *path, int64_t step) {
    if (system_exchange(folder, path)) return true;
    char aside[CHECKPOINT_PATH];
    if (!set_aside(dir, step, aside)) return false;
    if (system_rename(folder, path)) return true;
    int reason = errno;
    (void)system_rename(aside, path);
    errno = reason;
    return false;
}

/* Gives the finished folder its name. */
static bool publish(const char *dir, const char *folder, int64_t step, char *error) {
    char path[CHECKPOINT_PATH];
    system_status status;
    if (!checkpoint_path(path, error, CHECKPOINT_FORMAT, dir, (long long)step)) return false;
    bool taken = system_status_of_link(path, &status) && status.kind == SYSTEM_FOLDER;
    if (taken ? replace(dir, folder, path, step) : system_rename(folder, path)) return true;
    return train_fail(error, "%.300s: it cannot be renamed to this: %s", path, strerror(errno));
}

/* Creates the new link under a temporary name, before the checkpoint gets its own: the disk may be full. */
static bool make_link(const char *fresh, int64_t step, bool *made, char *error) {
    char target[64];
    snprintf(target, sizeof target, CHECKPOINT_NAME, (long long)step);
    *made = system_make_link(target, fresh);
    /* On a file system without links checkpoint_find() takes the highest step. */
    if (*made || errno == EPERM || errno == ENOTSUP || errno == ENOSYS) return true;
    return train_fail(error, "%.300s: the link cannot be created: %s", fresh, strerror(errno));
}

/*
 * Whether a folder has no other files than a checkpoint's. One that does not open is then an incomplete copy, made
 * while a run was saving.
 */
static bool has_only_own_files(const char *path) {
    static const char *const names[] = {".",
                                        "..",
                                        "config.json",
                                        "model.safetensors",
                                        "adapter_config.json",
                                        "adapter_model.safetensors",
                                        "optimizer.safetensors",
                                        "trainer.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json"};
    system_folder *entries = system_folder_open(path);
    bool only = entries != NULL;
    for (const char *name; only && (name = system_folder_next(entries));) {
        only = false;
        for (size_t i = 0; i < sizeof names / sizeof names[0] && !only; i++)
            only = strcmp(name, names[i]) == 0;
    }
    only = only && errno == 0; /* all names were read */
    if (entries) system_folder_close(entries);
    return only;
}

/*
 * In a copy made by `cp -rL`, a link is a folder. It becomes the checkpoint of its step if there is none. If there is
 * one, or if the copy is incomplete, it is removed with the leftovers. Any other folder stays, and move_link() fails.
 */
static void retire_copied_link(const char *dir, const char *name, const char *link) {
    char path[CHECKPOINT_PATH], aside[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    system_status status;
    if (!system_status_of_link(link, &status) || status.kind != SYSTEM_FOLDER) return;
    int64_t step = checkpoint_step(link, ignored);
    if (!checkpoint_path(path, ignored, CHECKPOINT_FORMAT, dir, (long long)step) ||
        !checkpoint_path(aside, ignored, CHECKPOINT_LINK_OLD_FORMAT, dir, name))
        return;
    if (step >= 0)
        (void)system_rename(link, system_status_of_link(path, &status) ? aside : path);
    else if (step == -2 && has_only_own_files(link))
        (void)system_rename(link, aside);
}

static bool move_link(const char *dir, const char *name, const char *fresh, char *error) {
    char link[CHECKPOINT_PATH];
    if (!checkpoint_path(link, error, "%s/%s", dir, name)) return false;
    retire_copied_link(dir, name, link);
    if (!system_rename(fresh, link))
        return train_fail(error, "%.300s: the link cannot be moved there: %s", link, strerror(errno));
    return file_sync_folder(dir, error);
}

/* Lets `best` name the checkpoint of that step, if it is there. A save that was killed may have left it behind. */
static bool name_best(const char *dir, int64_t step, char *error) {
    char path[CHECKPOINT_PATH], fresh[CHECKPOINT_PATH], name[64];
    system_status status;
    bool linked;
    if (!checkpoint_path(path, error, CHECKPOINT_FORMAT, dir, (long long)step) ||
        !checkpoint_path(fresh, error, CHECKPOINT_LINK_FORMAT, dir, "best"))
        return false;
    if (!system_status_of_link(path, &status)) return true;
    if (!make_link(fresh, step, &linked, error)) return false;
    snprintf(name, sizeof name, CHECKPOINT_NAME "\n", (long long)step);
    return (linked || checkpoint_write_text(fresh, name, error)) && move_link(dir, "best", fresh, error);
}

/* ---- Saving -------------------------------------------------------------------------------------------- */

/* A folder under a temporary name, with all files but the tensors that other processes write. */
static bool prepare(const char *dir, const char *folder, const checkpoint_content *c, char *error) {
    if (!checkpoint_make_folders(dir, error)) return false;
    remove_leftovers(dir);
    if (!system_make_folder(folder))
        return train_fail(error, "%.300s: the folder cannot be created: %s", folder, strerror(errno));
    return write_files(folder, c, error);
}

bool checkpoint_save(const char *dir, int keep, const checkpoint_content *c, char error[TRAIN_ERROR]) {
    if (c->step < 0) return train_fail(error, "step %lld cannot be saved: it is negative", (long long)c->step);
    char folder[CHECKPOINT_PATH], fresh[CHECKPOINT_PATH];
    if (!checkpoint_path(folder, error, CHECKPOINT_TEMPORARY_FORMAT, dir, (long long)c->step) ||
        !checkpoint_path(fresh, error, CHECKPOINT_LINK_FORMAT, dir, "latest"))
        return false;
    bool linked = false, first = !c->group || c->group->rank == 0;
    bool ok = !first || prepare(dir, folder, c, error);
    if (c->group) ok = write_together(dir, folder, c, ok, error);
    if (!first) return ok;
    ok = ok && file_sync_folder(folder, error) && make_link(fresh, c->step, &linked, error);
    ok = ok && publish(dir, folder, c->step, error) && file_sync_folder(dir, error);
    ok = ok && (!linked || move_link(dir, "latest", fresh, error));
    ok = ok && (c->best <= 0 || name_best(dir, c->best, error));
    if (ok) retire_older(dir, c->step, c->best, keep);
    remove_leftovers(dir);
    return ok;
}
