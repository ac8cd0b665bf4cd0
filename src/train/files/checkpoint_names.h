/* Names inside a folder of checkpoints, for checkpoint.c and checkpoint_save.c. */
#ifndef VJP_TRAIN_CHECKPOINT_NAMES_H
#define VJP_TRAIN_CHECKPOINT_NAMES_H

#include "train/files/checkpoint.h"

#define CHECKPOINT_NAME             "checkpoint-%08lld"
#define CHECKPOINT_FORMAT           "%s/" CHECKPOINT_NAME
#define CHECKPOINT_TEMPORARY_FORMAT "%s/." CHECKPOINT_NAME ".tmp"
#define CHECKPOINT_OLD_FORMAT       "%s/." CHECKPOINT_NAME ".old.tmp"
#define CHECKPOINT_LINK_TEMPORARY   ".checkpoint-latest.tmp"

/* Whether it is one of the hidden names above. */
bool checkpoint_is_temporary(const char *name);

/* Formats a path. False, with a sentence, if it is too long. */
bool checkpoint_path(char path[CHECKPOINT_PATH], char error[TRAIN_ERROR], const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The steps of all folders called checkpoint-..., the highest first; the caller's to free. False: errno says why. */
bool checkpoint_list(const char *dir, int64_t **steps, size_t *count);

#endif
