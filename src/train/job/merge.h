/* SPDX-License-Identifier: MIT */
/*
 * Adapters and their model made one: every adapted weight becomes W + scale B A, computed in f32 and rounded once to
 * the dtype that W has. The folder that is written has the files of the base, with the same names and tensors, and its
 * config and tokenizer; a tokenizer beside the adapters comes first. It appears whole or not at all.
 */
#ifndef VJP_TRAIN_JOB_MERGE_H
#define VJP_TRAIN_JOB_MERGE_H

#include "train/files/checkpoint.h"
#include "vjp.h"

/*
 * Merges the adapters of `from`, whose base is open and which are in the folder `path`, into a new folder `out`. Memory
 * is needed for one file of the base and three f32 copies of its largest adapted weight. Returns how many weights were
 * merged; -1: `error` says why.
 */
int64_t merge_adapters(vjp_device *device, const checkpoint *from, const char *path, const char *out,
                       char error[TRAIN_ERROR]);

#endif
