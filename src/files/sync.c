/* SPDX-License-Identifier: MIT */
/* Syncing folders; see sync.h. */
#include "files/sync.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool cannot_sync(const char *folder, int reason, char *error) {
    return file_fail(error, "%.300s: it cannot be synced to the disk: %s", folder, strerror(reason));
}

bool file_sync_folder(const char *folder, char error[FILE_ERROR]) {
    int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return errno == EACCES || cannot_sync(folder, errno, error);
    /* Some file systems cannot sync a folder, and say so with EINVAL. */
    bool ok = fsync(file) == 0 || errno == EINVAL;
    int reason = errno;
    close(file);
    return ok || cannot_sync(folder, reason, error);
}

bool file_sync_parent(const char *path, char error[FILE_ERROR]) {
    char *folder = strdup(path);
    if (!folder) return cannot_sync(path, ENOMEM, error);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    bool ok = file_sync_folder(slash ? folder : ".", error);
    free(folder);
    return ok;
}
