/* SPDX-License-Identifier: MIT */
/* Syncing folders; see sync.h. */
#include "files/sync.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"

static bool cannot_sync(const char *folder, int reason, char *error) {
    return file_fail(error, "%.300s: it cannot be synced to the disk: %s", folder, strerror(reason));
}

bool file_sync_folder(const char *folder, char error[FILE_ERROR]) {
    return system_sync_folder(folder) || cannot_sync(folder, errno, error);
}

bool file_sync_parent(const char *path, char error[FILE_ERROR]) {
    char *folder = strdup(path);
    if (!folder) return cannot_sync(path, ENOMEM, error);
    char *last = NULL;
    for (char *c = folder; *c; c++)
        if (system_is_separator(*c)) last = c;
    if (last) last[last == folder] = 0;
    bool ok = file_sync_folder(last ? folder : ".", error);
    free(folder);
    return ok;
}
