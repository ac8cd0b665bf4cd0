/*
 * Training a model: two programs on one device. The first computes the loss and puts every gradient into a state of
 * its own, once for each part of a batch; the second measures their norm, clips, and takes AdamW's step. Between the
 * two stands the question whether the loss is a number, so that a step gone wrong changes nothing.
 */
#ifndef VJP_TRAIN_TRAINER_H
#define VJP_TRAIN_TRAINER_H

#include "files/safetensors.h"
#include "train/model/model.h"

typedef struct trainer_options {
    int64_t steps;       /* of the whole run: where the schedule ends */
    int64_t warmup;      /* steps in which the rate rises */
    int64_t accumulate;  /* parts of a batch: gradients are added up over so many */
    double rate;         /* the highest */
    double last_rate;    /* share of it at the end of the cosine */
    double weight_decay; /* of matrices */
    double max_norm;     /* of all gradients together; 0: no limit */
    double beta1, beta2, eps;
    uint64_t seed;
} trainer_options;

/*
 * Where batches come from: fills one part's input and target. Which, is a function of `part`, counted from 0 over the
 * whole run, alone: so training can go on where it stopped.
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

/* The rate of step 1, 2, ...: a rise, then half a cosine down to last_rate. */
double trainer_rate(const trainer_options *options, int64_t step);

/* The model and the device must outlive it. The parameters hold their first values. NULL: `error` says why. */
trainer *trainer_create(vjp_device *device, train_model *model, const trainer_options *options,
                        char error[TRAIN_ERROR]);
void trainer_destroy(trainer *t);

/* Takes step `step` (from 1). False: nothing was changed, and `error` says why; of a NaN, where it came from. */
bool trainer_step(trainer *t, const train_source *source, int64_t step, trainer_step_result *result,
                  char error[TRAIN_ERROR]);

/* The mean loss over the first `parts` parts of the validation data. */
bool trainer_evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, char error[TRAIN_ERROR]);

/* Makes a step that is under way stop; for a signal handler. */
void trainer_interrupt(trainer *t);

/*
 * Everything that training changes, for a checkpoint: parameters by their names; AdamW's moments as "<name>.exp_avg"
 * and "<name>.exp_avg_sq". Lists and data belong to the trainer: read them before the next step, which may change them
 * in place.
 */
bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]);

/*
 * Reads one of them back, f32, bf16 or f16; `what` is a name as above. False, with a sentence, where the name or the
 * shape is none of the model's.
 */
bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]);

/* For reports: the programs of a step, in the order in which they run. */
vjp_program *trainer_gradients(trainer *t);
vjp_program *trainer_measure(trainer *t);
vjp_program *trainer_update(trainer *t);

#endif
