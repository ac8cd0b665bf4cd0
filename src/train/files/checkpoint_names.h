/* SPDX-License-Identifier: MIT */
/* Names inside a folder of checkpoints, for checkpoint.c and checkpoint_save.c. */
#ifndef VJP_TRAIN_CHECKPOINT_NAMES_H
#define VJP_TRAIN_CHECKPOINT_NAMES_H

#include "train/files/checkpoint.h"

#define CHECKPOINT_NAME             "checkpoint-%08lld"
#define CHECKPOINT_FORMAT           "%s/" CHECKPOINT_NAME
#define CHECKPOINT_TEMPORARY_FORMAT "%s/." CHECKPOINT_NAME ".tmp"
#define CHECKPOINT_OLD_FORMAT       "%s/." CHECKPOINT_NAME ".old.tmp"
#define CHECKPOINT_LINK_FORMAT      "%s/.checkpoint-%s.tmp"     /* DIR, "latest" or "best" */
#define CHECKPOINT_LINK_OLD_FORMAT  "%s/.checkpoint-%s.old.tmp" /* the same */

/* Whether a name is one of the hidden ones above. */
bool checkpoint_is_temporary(const char *name);

/* Formats a path. False, with a sentence, if it is too long. */
bool checkpoint_path(char path[CHECKPOINT_PATH], char error[TRAIN_ERROR], const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The step of the checkpoint at `path`; -1: it has none; -2: it does not open. */
int64_t checkpoint_step(const char *path, char error[TRAIN_ERROR]);

/*
 * Whether the checkpoint at `path` is torn: a copy that was made while it was being removed may lack any of its files,
 * and may open all the same.
 */
bool checkpoint_lacks_files(const char *path);

/* The steps of all folders named checkpoint-..., highest first; the caller frees them. False: errno says why. */
bool checkpoint_list(const char *dir, int64_t **steps, size_t *count);

#endif
