/*
 * A training run as a whole: settings, data, model, trainer, record, and checkpoints to go on from. What a person sees
 * of it is the command line's.
 */
#ifndef VJP_TRAIN_JOB_H
#define VJP_TRAIN_JOB_H

#include "train/data/images.h"
#include "train/data/text.h"
#include "train/files/checkpoint.h"
#include "train/files/metrics.h"
#include "train/model/convnet.h"
#include "train/model/llama.h"
#include "train/trainer.h"

/* Everything that decides what is computed. Kept in trainer.json, so that a run can go on by itself. */
typedef struct job_settings {
    char data[CHECKPOINT_PATH];
    char model[16];             /* "llama" or "convnet" */
    char preset[16];            /* a size of the model */
    char from[CHECKPOINT_PATH]; /* begins with this checkpoint's weights; "": with random ones */
    int64_t batch, context;     /* 0: the preset's */
    int64_t validate_every, validate_parts, save_every, keep;
    vjp_dtype dtype;
    bool recompute;
    double label_smoothing;
    trainer_options trainer;
} job_settings;

enum { JOB_USUAL_BATCH = 8 }; /* rows of text */

/* All zero but for what the defaults of a run are. */
job_settings job_defaults(void);

typedef struct job {
    vjp_device *device;
    job_settings settings;
    char out[CHECKPOINT_PATH];
    llama_config llama;
    convnet_config convnet;
    text_data text;
    image_data images;
    train_source source;
    train_model model;
    trainer *trainer;
    metrics *metrics;
    int64_t step;  /* taken so far */
    int64_t saved; /* the step of the last checkpoint of this run; -1: none */
    double seconds;
    uint64_t data_hash;
} job;

/* Begins anew in `out`. False: `error` says why; close it in any case. The device must outlive it. */
bool job_begin(job *j, vjp_device *device, const job_settings *settings, const char *out, char error[TRAIN_ERROR]);

/* Goes on from the newest checkpoint in `out`, bit for bit. */
bool job_resume(job *j, vjp_device *device, const char *out, char error[TRAIN_ERROR]);

void job_close(job *j);

/* Takes the next step, measures validation where it is due, and writes the record's line. */
bool job_step(job *j, metrics_row *row, char error[TRAIN_ERROR]);

/* Saves a checkpoint of the step that was taken last, and draws the curve. */
bool job_save(job *j, char error[TRAIN_ERROR]);

/* Tokens or pictures that a step trains on. */
int64_t job_items(const job *j);

#endif
