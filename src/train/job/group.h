/* SPDX-License-Identifier: MIT */
/* What the processes of a run tell each other besides gradients: failures, and whether they compute the same. */
#ifndef VJP_TRAIN_JOB_GROUP_H
#define VJP_TRAIN_JOB_GROUP_H

#include "train/job/job.h"

/* FNV-1a; the second continues a hash with more bytes. */
uint64_t job_hash(const void *bytes, size_t count);
uint64_t job_hash_more(uint64_t hash, const void *bytes, size_t count);

/* A hash of a model's tensors: names, shapes, and the first bytes of each, so that other weights are seen quickly. */
bool job_hash_model(const checkpoint *model, uint64_t *hash, char error[TRAIN_ERROR]);

/*
 * Every process calls it with its own result. True: all are. False: `error` is in every process the sentence of the
 * lowest rank that has one, and names the rank unless all say the same.
 */
bool job_agree(job *j, bool ok, char error[TRAIN_ERROR]);

/*
 * A process that others wait for in job_agree() calls it every few seconds, so that they do not take it for dead.
 * False: another one has failed.
 */
bool job_is_busy(job *j);

/* job_agree() at the beginning of a run, which also refuses processes of another library, settings, data or weights. */
bool job_meet(job *j, bool ok, char error[TRAIN_ERROR]);

/* Whether all processes have the same weights and moments, to the last bit; before each save. */
bool job_has_same_weights(job *j, char error[TRAIN_ERROR]);

#endif
