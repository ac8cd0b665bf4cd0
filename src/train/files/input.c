/* SPDX-License-Identifier: MIT */
/* Opening regular files and folders; see input.h. */
#include "train/files/input.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"

static const char *name_of(system_kind kind) {
    switch (kind) {
    case SYSTEM_FOLDER: return "a folder";
    case SYSTEM_PIPE: return "a pipe";
    case SYSTEM_SOCKET: return "a socket";
    default: return "a device";
    }
}

/* False: errno is EINVAL, or the system's reason. */
static bool check(const char *path, int file, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    system_status status;
    if (!system_status_of_open(file, &status))
        return train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
    *bytes = status.bytes;
    bool regular = status.kind == SYSTEM_FILE;
    if (regular && *bytes <= max_bytes) return true;
    if (regular)
        train_fail(error, "%.300s: it has %lld bytes; at most %lld are read", path, (long long)*bytes,
                   (long long)max_bytes);
    else
        train_fail(error, "%.300s: it is %s; only regular files are read", path, name_of(status.kind));
    errno = EINVAL;
    return false;
}

int input_open(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    int file = system_open_to_read(path);
    if (file < 0) {
        int reason = errno;
        train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(reason));
        errno = reason;
        return -1;
    }
    if (check(path, file, max_bytes, bytes, error)) return file;
    int reason = errno;
    system_close(file);
    errno = reason;
    return -1;
}

FILE *input_stream(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    int file = input_open(path, max_bytes, bytes, error);
    FILE *stream = file >= 0 ? system_stream_of(file, "rb") : NULL;
    if (file >= 0 && !stream) {
        train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
        system_close(file);
    }
    return stream;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

char **input_names(const char *path, size_t *count, char error[TRAIN_ERROR]) {
    system_folder *folder = system_folder_open(path);
    char **names = NULL;
    size_t room = 0;
    *count = 0;
    if (!folder) {
        train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(errno));
        return NULL;
    }
    bool ok = true;
    for (const char *name; ok && (name = system_folder_next(folder));) {
        if (name[0] == '.') continue;
        if (*count + 1 >= room) {
            char **more = realloc(names, (room = 2 * room + 16) * sizeof *names);
            ok = more != NULL;
            if (more) names = more;
        }
        if (ok) ok = (names[*count] = strdup(name)) != NULL;
        if (ok) ++*count;
    }
    int reason = ok ? errno : ENOMEM;
    system_folder_close(folder);
    if (!reason && !names) reason = (names = calloc(1, sizeof *names)) ? 0 : ENOMEM;
    if (reason) {
        while (*count)
            free(names[--*count]);
        free(names);
        if (reason == ENOMEM)
            train_fail(error, "%.300s: there is no memory for the names in it", path);
        else
            train_fail(error, "%.300s: it cannot be read: %s", path, strerror(reason));
        return NULL;
    }
    qsort(names, *count, sizeof *names, by_name);
    return names;
}
