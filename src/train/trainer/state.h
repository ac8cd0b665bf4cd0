/* SPDX-License-Identifier: MIT */
/*
 * The inside of a trainer, for the files that implement it:
 *
 *   trainer.c   creation, what it needs, destruction
 *   programs.c  the graph of a step and its programs
 *   batch.c     batches and numbers on their way between host and device
 *   step.c      steps: queued, collected, and explained where a number is not finite
 *   group.c     what the processes of a group tell each other
 *   evaluate.c  validation and averaged weights
 *   tensors.c   the tensors of a checkpoint
 */
#ifndef VJP_TRAIN_TRAINER_STATE_H
#define VJP_TRAIN_TRAINER_STATE_H

#include "comm/group.h"
#include "core/core.h"
#include "train/trainer/loss_scale.h"
#include "train/trainer/overlap.h"
#include "train/trainer/shards.h"
#include "train/trainer/split.h"
#include "train/trainer/trainer.h"

/* What trainer_plan() has planned so far. */
typedef struct planning {
    trainer_needs needs;
    vjp_value *results; /* [count]: of all programs */
    size_t count;
} planning;

/* What optimisers keep of a parameter: the ends of the names in the graph and in a checkpoint. */
typedef struct kept_kind {
    const char *graph, *file;
} kept_kind;

enum { KINDS = 3, MAX_TENSORS = 4 /* of a parameter: weight, average, two moments */ };

extern const kept_kind trainer_kinds[KINDS];

/* The gradient, the optimiser's states and the average of one parameter. */
typedef struct tracked {
    vjp_value gradient;     /* a state; 0 where a batch is one part */
    vjp_value state[KINDS]; /* 0: its optimiser keeps none of this kind */
    vjp_value average;      /* 0: weights are not averaged */
    int64_t count;
} tracked;

/* A step in the queue. What the device reads and writes late is in the host's memory, pinned where that helps. */
typedef struct flight {
    int64_t step;
    int64_t *number; /* the step, as the program's input */
    float *rate, *share, *norm;
    float *scale; /* of the loss, after the step */
    float *loss;  /* [parts] */
    vjp_event *done;
} flight;

/* A batch on its way to the device: the host's copy, and where the device can copy beside its calls, its own. */
typedef struct batch {
    char *host; /* input, then target, then the model's `first` */
    void *device;
    vjp_event *used; /* the program has read it; NULL: it is free */
} batch;

enum { DEPTH = 2, BATCHES = 2 };

/* What each process of a group tells the others of a step before the gradients are summed. */
typedef struct rank_report {
    int32_t failed;
    float norm;   /* of the step before, which must have the same bits everywhere */
    float loss[]; /* [parts] */
} rank_report;

struct trainer {
    vjp_device *device;
    train_model *model;
    trainer_options options;
    size_t count;                    /* of the parameters that are trained */
    const model_parameter **trained; /* [count] */
    tracked *track;                  /* [count] */
    vjp_value *values;               /* [2 * count]: the parameters that are trained, then their gradients */
    vjp_value rate, step, norm, guard;
    loss_scale scaling;   /* of options.loss_scale */
    vjp_value share;      /* of a step in the average; 0: weights are not averaged */
    vjp_value squares;    /* of all gradients, where processes sum them together; 0: the program does it */
    vjp_program *first;   /* all of a step; or, where a batch has several parts, loss and gradients of the first */
    vjp_program *more;    /* loss and gradients of another part, added to what is there; NULL: there is one part */
    vjp_program *update;  /* norm and the optimiser's step; NULL: there is one part */
    vjp_program *forward; /* the loss alone */
    flight flight[DEPTH];
    int oldest, queued; /* in flight[] */
    bool dirty;         /* a step failed while it was queued: the guard may be set */
    bool swapped;       /* weights and averages have changed places */
    char *flight_memory;
    batch batch[BATCHES];
    int next_batch;
    size_t input_bytes, target_bytes, target_offset;
    size_t first_bytes; /* behind the target; 0: the model has none */
    shards shards;
    overlap overlap;
    parameter_split split;   /* of what the optimiser keeps */
    parameter_split writers; /* of the tensors of a checkpoint; the same where `split` is not empty */
    int64_t parts;           /* of a step, computed by this process: own shards, each with its parts of the batch */
    rank_report *shared;     /* [size of the group]; NULL: one process */
    bool together;           /* the last failure was found by all processes */
    float last_norm;
    double waited; /* seconds for the reports of others */
    /* The results of trainer_tensors(). */
    safetensors_tensor *tensor; /* [MAX_TENSORS * count + LOSS_SCALE_STATES]: weights, then states */
    char (*name)[TRAINER_NAME];
    float *copy;        /* all of them where they must be copied, else twice as large as the largest parameter */
    planning *planning; /* NULL: programs are compiled */
};

static inline bool device_failed(const trainer *t, char error[TRAIN_ERROR]) {
    return train_fail(error, "%s", vjp_error(t->device));
}

static inline int64_t count_of(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* The program that takes the optimiser's step. */
static inline vjp_program *updating(const trainer *t) {
    return t->update ? t->update : t->first;
}

static inline bool copies_beside(const trainer *t) {
    return t->device->backend->upload_beside != NULL;
}

static inline size_t report_bytes(const trainer *t) {
    return sizeof(rank_report) + (size_t)t->parts * sizeof(float);
}

static inline rank_report *report_of(const trainer *t, int32_t rank) {
    return (rank_report *)(void *)((char *)t->shared + (size_t)rank * report_bytes(t));
}

static inline void free_event(trainer *t, vjp_event **event) {
    vjp_event_destroy(t->device, *event);
    *event = NULL;
}

/* Builds the graph of a step and compiles its programs; or plans them, where the trainer has `planning`. */
bool trainer_compile_all(trainer *t);

/* Whether weights may lie in halves: nothing but casts and adamw uses them, and no process sends them. */
bool trainer_takes_halves(const trainer *t);

/* Compiles a program that shares what the first one keeps; or only plans it. */
bool trainer_compile(trainer *t, const vjp_value *results, size_t count, vjp_program **program);

/* Memory of the host that the device copies. */
bool trainer_make_flights(trainer *t);
bool trainer_make_batches(trainer *t);
void trainer_free_host(vjp_device *device, void *data);

/* Fills a program's input and target. While the device still reads one batch, the other is filled. */
bool trainer_feed(trainer *t, vjp_program *program, const train_source *source, bool validation, uint64_t part);

/* What the processes of a group share: before the programs are compiled, and after. */
bool trainer_choose_split(trainer *t, char error[TRAIN_ERROR]);
bool trainer_make_reports(trainer *t);
bool trainer_make_shards(trainer *t);

/* Tells the other processes how the own parts went. False: one has failed, and all of them know. */
bool trainer_agree(trainer *t, flight *f, bool ok);

/* Ends the exchange of gradients during the last part, also of a process in which a part has failed. */
bool trainer_end_overlap(trainer *t, bool begun, bool ok);

/* The own gradients of all processes, and the squares of all gradients for the program that takes the step. */
bool trainer_sum_split(trainer *t);

#endif
