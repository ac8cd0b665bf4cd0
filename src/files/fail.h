/* SPDX-License-Identifier: MIT */
/* How src/files reports a failure: it returns false and writes one sentence to the caller's buffer. */
#ifndef VJP_FILES_FAIL_H
#define VJP_FILES_FAIL_H

#include <stdbool.h>

enum { FILE_ERROR = 512 };

/* Always false. Control characters, which may come from a file, become '?': none reaches a terminal. */
bool file_fail(char error[FILE_ERROR], const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
