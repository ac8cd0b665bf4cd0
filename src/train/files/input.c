/* SPDX-License-Identifier: MIT */
/* Opening regular files; see input.h. */
#include "train/files/input.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *kind_of(mode_t mode) {
    return S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

/* False: errno is EINVAL, or the system's reason. */
static bool check(const char *path, int file, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    struct stat status;
    if (fstat(file, &status) != 0) return train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
    *bytes = status.st_size;
    bool regular = S_ISREG(status.st_mode);
    if (regular && *bytes <= max_bytes) return true;
    if (regular)
        train_fail(error, "%.300s: it has %lld bytes; at most %lld are read", path, (long long)*bytes,
                   (long long)max_bytes);
    else
        train_fail(error, "%.300s: it is %s; only regular files are read", path, kind_of(status.st_mode));
    errno = EINVAL;
    return false;
}

int input_open(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a pipe must not make us wait */
    if (file < 0) {
        int reason = errno;
        train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(reason));
        errno = reason;
        return -1;
    }
    if (check(path, file, max_bytes, bytes, error)) return file;
    int reason = errno;
    close(file);
    errno = reason;
    return -1;
}

FILE *input_stream(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]) {
    int file = input_open(path, max_bytes, bytes, error);
    FILE *stream = file >= 0 ? fdopen(file, "rb") : NULL;
    if (file >= 0 && !stream) {
        train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
        close(file);
    }
    return stream;
}
