/* SPDX-License-Identifier: MIT */
/* The files of src/train report a failure as src/files does: false, and one sentence in the caller's buffer. */
#ifndef VJP_TRAIN_FAIL_H
#define VJP_TRAIN_FAIL_H

#include "files/fail.h"

enum { TRAIN_ERROR = FILE_ERROR };

#define train_fail file_fail

#endif
