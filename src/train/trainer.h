/* SPDX-License-Identifier: MIT */
/*
 * Training a model on one device, or on one device of each process of a group. A step is one program: loss, gradients,
 * their norm, clipping, and AdamW's step. Where a batch has several parts, there are three: one writes the gradients of
 * the first part, one adds those of the others, and the last measures, clips and takes the step. A batch's rows can be
 * split into shards (shards.h), which are parts, too, and which the processes of a group share.
 *
 * Steps are queued and their results are collected later, so that a GPU computes one step while the host prepares the
 * next. A loss or norm that is not finite suppresses its step on the device, and all later ones until the host has seen
 * it: weights and moments stay as they were.
 */
#ifndef VJP_TRAIN_TRAINER_H
#define VJP_TRAIN_TRAINER_H

#include "files/safetensors.h"
#include "train/model/model.h"

typedef struct trainer_options {
    int64_t steps;       /* of the whole run: where the schedule ends */
    int64_t warmup;      /* steps over which the rate rises */
    int64_t accumulate;  /* parts of a batch, over which gradients are summed */
    double rate;         /* the peak learning rate */
    double last_rate;    /* the rate at the end, as a share of the peak */
    double weight_decay; /* of matrices */
    double max_norm;     /* of all gradients together; 0: no limit */
    double beta1, beta2, eps;
    uint64_t seed;
    int64_t
        shards; /* into which the rows of a batch are split, a power of two; 0 is 1. The model has the rows of one */
    vjp_group *group; /* of processes that share the shards; NULL: one process */
} trainer_options;

/*
 * Where batches come from: `fill` writes the input and target of one part. They depend on `part`, counted from 0 over
 * the whole run, and nothing else, so that a run can be resumed. The shards of a batch are consecutive parts.
 */
typedef struct train_source {
    void *context;
    void (*fill)(void *context, bool validation, uint64_t part, void *input, int32_t *target);
    int64_t validation_parts; /* how many there are; 0: none */
} train_source;

typedef struct trainer trainer;

typedef struct trainer_step_result {
    double loss; /* mean over the parts */
    double norm; /* of the gradients, before clipping */
    double rate;
} trainer_step_result;

/* The rate of step 1, 2, ...: a linear rise, then half a cosine down to last_rate. */
double trainer_rate(const trainer_options *options, int64_t step);

/* The model and the device must outlive it. The parameters get their initial values. NULL: `error` says why. */
trainer *trainer_create(vjp_device *device, train_model *model, const trainer_options *options,
                        char error[TRAIN_ERROR]);
void trainer_destroy(trainer *t);

/* What a trainer needs of its device. */
typedef struct trainer_needs {
    size_t kept_bytes;  /* parameters, moments, gradients that are summed over parts, batches, constants */
    size_t arena_bytes; /* of all its programs, each of which has its own */
    size_t bytes;       /* both */
    vjp_cost cost;      /* of one run of each program of a step */
} trainer_needs;

/*
 * Plans the programs that trainer_create() would compile and, with `validates`, the one of trainer_evaluate(). The
 * device allocates nothing, so that a model that does not fit is found before it is made. Adds to the model's graph: a
 * trainer needs a newly built one.
 */
bool trainer_plan(vjp_device *device, train_model *model, const trainer_options *options, bool validates,
                  trainer_needs *needs, char error[TRAIN_ERROR]);

/*
 * Enqueues step `step` (from 1), and waits for the result of the oldest step that was queued. At most trainer_depth()
 * steps may be queued and not collected: 1 where the device computes while the host waits. False: `error` says why, and
 * for a NaN where it came from; the step that failed and those queued behind it have changed nothing and are dropped.
 */
int trainer_depth(const trainer *t);
bool trainer_queue(trainer *t, const train_source *source, int64_t step, char error[TRAIN_ERROR]);
bool trainer_collect(trainer *t, const train_source *source, trainer_step_result *result, char error[TRAIN_ERROR]);

/* Both, for one step, when no other is queued. */
bool trainer_step(trainer *t, const train_source *source, int64_t step, trainer_step_result *result,
                  char error[TRAIN_ERROR]);

/*
 * Whether the last failure is one that every process of the group has found at the same step: a loss or norm that is
 * not finite, or a failure of one that it could still tell the others. `error` is "" in those that know no more.
 */
bool trainer_failed_together(const trainer *t);

/* Seconds since the last call that were spent in the group's sums, and waiting for the other processes before them. */
typedef struct trainer_group_time {
    double sums, waits;
} trainer_group_time;
trainer_group_time trainer_take_group_time(trainer *t);

/* The mean loss over the first `parts` batches of the validation data. */
bool trainer_evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, char error[TRAIN_ERROR]);

/* Stops the step that is being queued, unless it already changes weights; for a signal handler. */
void trainer_interrupt(trainer *t);

/* The names of AdamW's moments in a checkpoint: that of the parameter, and one of these. */
#define TRAINER_FIRST_MOMENT  ".exp_avg"
#define TRAINER_SECOND_MOMENT ".exp_avg_sq"

/*
 * Everything that training changes, for a checkpoint: parameters and their moments, after all steps that were queued.
 * Lists and data belong to the trainer and are valid until the next step.
 */
bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]);

/* Loads one of them, f32, bf16 or f16. False: `error` says which name or shape the model does not have. */
bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]);

/* For reports: the programs of a step, in the order they run. Returns how many they are: 1 or TRAINER_PROGRAMS. */
enum { TRAINER_PROGRAMS = 3 };
int trainer_programs(trainer *t, vjp_program *programs[TRAINER_PROGRAMS]);

#endif
