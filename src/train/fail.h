/* How functions of src/train fail: they return false, with one sentence in the caller's buffer. */
#ifndef VJP_TRAIN_FAIL_H
#define VJP_TRAIN_FAIL_H

#include <stdbool.h>

enum { TRAIN_ERROR = 512 };

/* Returns false. Control characters, which may come from a file, become '?', so that none reaches a terminal. */
bool train_fail(char error[TRAIN_ERROR], const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
