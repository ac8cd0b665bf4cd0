/* SPDX-License-Identifier: MIT */
/*
 * Training a model on one device, or on one device of each process of a group. A step is one program: loss, gradients,
 * their norm, clipping, the optimiser's step, and the average of the weights. Where a batch has several parts, there
 * are three: one writes the gradients of the first part, one adds those of the others, and the last measures, clips and
 * takes the step. A batch's rows can be split into shards (shards.h), which are parts, too, and which the processes of
 * a group share.
 *
 * Steps are queued and their results are collected later, so that a GPU computes one step while the host prepares the
 * next. A loss or norm that is not finite suppresses its step on the device, and all later ones until the host has seen
 * it: weights and moments stay as they were.
 */
#ifndef VJP_TRAIN_TRAINER_TRAINER_H
#define VJP_TRAIN_TRAINER_TRAINER_H

#include "files/safetensors.h"
#include "train/model/model.h"

/* Muon trains hidden matrices, AdamW then everything else. docs/optimisers.md compares them. */
typedef enum trainer_optimiser { TRAINER_ADAMW, TRAINER_MUON, TRAINER_SGD } trainer_optimiser;

/* How the rate falls after the warm-up: see trainer_rate(). */
typedef enum trainer_schedule { TRAINER_COSINE, TRAINER_LINEAR, TRAINER_WSD, TRAINER_CONSTANT } trainer_schedule;

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
    trainer_optimiser optimiser;
    trainer_schedule schedule;
    double decay_share; /* of TRAINER_WSD: the last steps, as a share of all, over which the rate falls */
    double momentum;    /* of Muon and SGD */
    double average;     /* the share of the averaged weights that a step keeps; 0: weights are not averaged */
    int64_t
        shards; /* into which the rows of a batch are split, a power of two; 0 is 1. The model has the rows of one */
    vjp_group *group; /* of processes that share the shards; NULL: one process */
    bool overlap;     /* gradients travel during the backward pass where the device and the group allow it; same bits */
    bool zero;        /* each process of the group keeps a part of what the optimiser keeps (split.h); same bits */
    vjp_dtype moments;        /* of AdamW: f32 or bf16 */
    vjp_dtype gradients;      /* of weights that are cast to this dtype for their products; f32: of all */
    double loss_scale;        /* multiplies the loss before it is differentiated (loss_scale.h); 0: no scaling */
    int64_t loss_scale_steps; /* without a skipped one, after which it is doubled; 0: it is fixed */
    int64_t arena_limit;      /* vjp_program_options.arena_limit of each program; 0: none. Same bits */
} trainer_options;

/*
 * Where batches come from: `fill` writes the input and target of one part. They depend on `part`, counted from 0 over
 * the whole run, and nothing else, so that a run can be resumed. The shards of a batch are consecutive parts. Where the
 * model has `first`, the targets are followed by it.
 */
typedef struct train_source {
    void *context;
    void (*fill)(void *context, bool validation, uint64_t part, void *input, int32_t *target);
    int64_t validation_parts; /* how many there are; 0: none */
} train_source;

typedef struct trainer trainer;

typedef struct trainer_step_result {
    double loss; /* mean over the parts */
    double norm; /* of the gradients, before clipping; 0 where the step was skipped */
    double rate;
    double loss_scale; /* after the step; 0: none */
    bool skipped;      /* the gradients were not finite: weights and moments are as before */
} trainer_step_result;

/* The rate of step 1, 2, ...: a linear rise, then the schedule's fall to last_rate. */
double trainer_rate(const trainer_options *options, int64_t step);

/*
 * The weight of step t in the average of all weights so far: (1 - d) / (1 - d^t), with d the share that is kept. The
 * first step's is 1, so that the average has no bias towards the initial weights.
 */
double trainer_average_share(const trainer_options *options, int64_t step);

/*
 * The model and the device must outlive it. Only parameters that are not frozen have gradients, moments and averages;
 * they get their initial values, and frozen ones must be loaded. NULL: `error` says why.
 */
trainer *trainer_create(vjp_device *device, train_model *model, const trainer_options *options,
                        char error[TRAIN_ERROR]);
void trainer_destroy(trainer *t);

/* What a trainer needs of its device. */
typedef struct trainer_needs {
    size_t kept_bytes;  /* parameters, moments, averages, gradients that are summed over parts, batches, constants */
    size_t arena_bytes; /* which the programs of a step share; validation adds its own only if it needs more */
    size_t bytes;       /* both */
    size_t host_bytes;  /* of the host's memory, for intermediates that wait there */
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

/*
 * Seconds since the last call that were spent in the group's sums and copies of weights, and waiting for the other
 * processes; and the time of sums that the backward pass has hidden.
 */
typedef struct trainer_group_time {
    double sums, waits, hidden;
} trainer_group_time;
trainer_group_time trainer_take_group_time(trainer *t);

/* Why gradients do not travel during the backward pass; NULL: they do, or were not asked to. */
const char *trainer_no_overlap(const trainer *t);

/* The mean loss over the first `parts` batches of the validation data, of the averaged weights where there are any. */
bool trainer_evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, char error[TRAIN_ERROR]);

/* Stops the step that is being queued, unless it already changes weights; for a signal handler. */
void trainer_interrupt(trainer *t);

/*
 * Everything that training changes, for a checkpoint, after all steps that were queued: the weights of the model that
 * are not frozen, and what the optimiser keeps. Where weights are averaged, the averages are the model's, and the
 * weights that are trained are kept with the optimiser. Lists and data belong to the trainer and are valid until the
 * next step. Each process of a group has the data of what it writes, a part of about the same size, and NULL in the
 * place of the others'.
 */
bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]);

/* What every process keeps, for a comparison: the weights that are trained, and all else that is not split. */
bool trainer_common_tensors(trainer *t, const safetensors_tensor **tensors, size_t *count, char error[TRAIN_ERROR]);

/*
 * The name of tensor `index` of the optimiser, as trainer_tensors() orders them: the parameter's, and ".exp_avg",
 * ".exp_avg_sq", ".momentum_buffer" or ".trained"; then loss_scale_names, where the loss is scaled. False: there are
 * not so many.
 */
enum { TRAINER_NAME = MODEL_NAME + 20 };
bool trainer_state_name(const trainer *t, size_t index, char name[TRAINER_NAME]);

/* The average begins with the current weights; for weights that were loaded. Does nothing where none is kept. */
bool trainer_begin_average(trainer *t, char error[TRAIN_ERROR]);

/* Loads one of the tensors of a checkpoint: weights from f32, bf16 or f16, what the optimiser keeps from its own dtype.
 * False: `error` says which name, shape or dtype the model does not have. */
bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]);

/* For reports: the programs of a step, in the order they run. Returns how many they are: 1 or TRAINER_PROGRAMS. */
enum { TRAINER_PROGRAMS = 3 };
int trainer_programs(trainer *t, vjp_program *programs[TRAINER_PROGRAMS]);

#endif
