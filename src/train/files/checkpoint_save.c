/*
 * Saving a checkpoint. All of it grows in DIR/.checkpoint-00000100.tmp/; one rename() makes it a checkpoint, a second
 * one turns `latest` to it. What is removed is first renamed to a name that ends in .tmp, too: so that no folder called
 * checkpoint-... ever has some of its files only. A lock on DIR keeps two programs from removing each other's halves.
 */
#define _GNU_SOURCE /* nftw(), renameat2() */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train/files/checkpoint.h"
#include "train/files/checkpoint_names.h"

/* ---- Folders ----------------------------------------------------------------------------------------- */

/* `dir` and the folders above it, where they are missing. */
static bool make_folders(const char *dir, char *error) {
    char path[CHECKPOINT_PATH];
    if (!checkpoint_path(path, error, "%s", dir)) return false;
    for (char *c = path + 1;; c++) {
        if (*c && *c != '/') continue;
        char sign = *c;
        *c = 0;
        struct stat status;
        if (mkdir(path, 0777) != 0 && (errno != EEXIST || stat(path, &status) != 0 || !S_ISDIR(status.st_mode)))
            return train_fail(error, "%.300s: the folder cannot be made: %s", path,
                              strerror(errno == EEXIST ? ENOTDIR : errno));
        *c = sign;
        if (!sign) return true;
    }
}

static bool sync_folder(const char *path, char *error) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some file systems cannot force a folder to the disk; what they have is as safe as they can make it. */
    bool ok = file >= 0 && (fsync(file) == 0 || errno == EINVAL);
    int reason = errno;
    if (file >= 0) close(file);
    return ok || train_fail(error, "%.300s: it cannot be forced to the disk: %s", path, strerror(reason));
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(path);
}

/* What cannot be removed stays, and the next save tries again. */
static void remove_tree(const char *path) {
    enum { OPEN_FOLDERS = 8 };
    nftw(path, remove_one, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS);
}

/* Removes from `dir` what a save that died, a save that failed, or this one leaves: our names that end in .tmp. */
static void remove_leftovers(const char *dir) {
    DIR *entries = opendir(dir);
    char path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    for (struct dirent *e; entries && (e = readdir(entries));)
        if (checkpoint_is_temporary(e->d_name) && checkpoint_path(path, ignored, "%s/%s", dir, e->d_name))
            remove_tree(path);
    if (entries) closedir(entries);
}

/* A folder leaves the list of checkpoints at once; from the disk it goes with the leftovers. */
static bool set_aside(const char *dir, int64_t step, char aside[CHECKPOINT_PATH]) {
    char path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    return checkpoint_path(path, ignored, CHECKPOINT_FORMAT, dir, (long long)step) &&
           checkpoint_path(aside, ignored, CHECKPOINT_OLD_FORMAT, dir, (long long)step) && rename(path, aside) == 0;
}

static void retire_older(const char *dir, int64_t newest, int keep) {
    char aside[CHECKPOINT_PATH];
    int64_t *steps;
    size_t count, kept = 0;
    if (!checkpoint_list(dir, &steps, &count)) return;
    for (size_t i = 0; i < count; i++)
        if (steps[i] <= newest && ++kept > (size_t)(keep < 1 ? 1 : keep)) set_aside(dir, steps[i], aside);
    free(steps);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static bool write_text(const char *path, const char *text, char *error) {
    FILE *out = fopen(path, "wbx");
    if (!out) return train_fail(error, "%.300s: it cannot be created: %s", path, strerror(errno));
    bool ok = fputs(text, out) != EOF && fflush(out) == 0 && fsync(fileno(out)) == 0;
    int reason = errno;
    if (fclose(out) != 0 && ok) ok = false, reason = errno;
    return ok || train_fail(error, "%.300s: it cannot be written: %s", path, strerror(reason));
}

static bool write_files(const char *folder, const checkpoint_content *c, char *error) {
    char path[CHECKPOINT_PATH], step[32];
    snprintf(step, sizeof step, "%lld", (long long)c->step);
    /* transformers refuses weights whose metadata does not tell for which library they are. */
    const safetensors_pair metadata[] = {{"format", "pt"}, {"step", step}};
    const size_t pairs = sizeof metadata / sizeof metadata[0];
    return checkpoint_path(path, error, "%s/config.json", folder) && write_text(path, c->config, error) &&
           checkpoint_path(path, error, "%s/model.safetensors", folder) &&
           safetensors_write(path, c->model, c->model_count, metadata, pairs, error) &&
           (!c->optimizer || (checkpoint_path(path, error, "%s/optimizer.safetensors", folder) &&
                              safetensors_write(path, c->optimizer, c->optimizer_count, metadata, pairs, error))) &&
           (!c->trainer ||
            (checkpoint_path(path, error, "%s/trainer.json", folder) && write_text(path, c->trainer, error)));
}

/* ---- Names ------------------------------------------------------------------------------------------- */

/* Where a checkpoint has the name already, the two change places: in one step, if the system can do that. */
static bool replace(const char *dir, const char *folder, const char *path, int64_t step) {
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, folder, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return true;
#endif
    char aside[CHECKPOINT_PATH];
    if (!set_aside(dir, step, aside)) return false;
    if (rename(folder, path) == 0) return true;
    int reason = errno;
    (void)rename(aside, path);
    errno = reason;
    return false;
}

/* Gives the finished folder its name. */
static bool publish(const char *dir, const char *folder, int64_t step, char *error) {
    char path[CHECKPOINT_PATH];
    struct stat status;
    if (!checkpoint_path(path, error, CHECKPOINT_FORMAT, dir, (long long)step)) return false;
    bool taken = lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
    if (taken ? replace(dir, folder, path, step) : rename(folder, path) == 0) return true;
    return train_fail(error, "%.300s: it cannot take its name: %s", path, strerror(errno));
}

/* The new link, made under another name before the checkpoint takes its own: a full disk shows now or not at all. */
static bool make_link(const char *fresh, int64_t step, bool *made, char *error) {
    char target[64];
    snprintf(target, sizeof target, CHECKPOINT_NAME, (long long)step);
    *made = symlink(target, fresh) == 0;
    /* On a file system without links checkpoint_find() goes by the steps. */
    if (*made || errno == EPERM || errno == ENOTSUP || errno == ENOSYS) return true;
    return train_fail(error, "%.300s: the link cannot be made: %s", fresh, strerror(errno));
}

static bool move_link(const char *fresh, const char *latest, char *error) {
    if (rename(fresh, latest) == 0) return true;
    return train_fail(error, "%.300s: the link cannot be moved there: %s", latest, strerror(errno));
}

/* ---- All of it --------------------------------------------------------------------------------------- */

static bool save_locked(const char *dir, int keep, const checkpoint_content *c, char *error) {
    char folder[CHECKPOINT_PATH], fresh[CHECKPOINT_PATH], latest[CHECKPOINT_PATH];
    if (!checkpoint_path(folder, error, CHECKPOINT_TEMPORARY_FORMAT, dir, (long long)c->step) ||
        !checkpoint_path(fresh, error, "%s/%s", dir, CHECKPOINT_LINK_TEMPORARY) ||
        !checkpoint_path(latest, error, "%s/latest", dir))
        return false;
    remove_leftovers(dir);
    bool linked = false;
    bool ok =
        mkdir(folder, 0777) == 0 || train_fail(error, "%.300s: the folder cannot be made: %s", folder, strerror(errno));
    ok = ok && write_files(folder, c, error) && sync_folder(folder, error) && make_link(fresh, c->step, &linked, error);
    ok = ok && publish(dir, folder, c->step, error) && sync_folder(dir, error);
    ok = ok && (!linked || (move_link(fresh, latest, error) && sync_folder(dir, error)));
    if (ok) retire_older(dir, c->step, keep);
    remove_leftovers(dir);
    return ok;
}

bool checkpoint_save(const char *dir, int keep, const checkpoint_content *content, char error[TRAIN_ERROR]) {
    if (content->step < 0) return train_fail(error, "a checkpoint of step %lld", (long long)content->step);
    if (!make_folders(dir, error)) return false;
    int lock = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) return train_fail(error, "%.300s: it cannot be opened: %s", dir, strerror(errno));
    /* Where a file system has no locks, there is none to wait for. */
    bool busy = flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    bool ok = busy ? train_fail(error, "%.300s: another program is saving a checkpoint there", dir)
                   : save_locked(dir, keep, content, error);
    close(lock);
    return ok;
}
