/* SPDX-License-Identifier: MIT */
/*
 * A training run: settings, data, model, trainer, record, and checkpoints to resume from. What it prints is up to the
 * command line.
 *
 * In a group every process has the run and makes the same calls; rank 0 alone writes to the folder. A failure that one
 * process finds at the beginning, in a save or before a step's gradients are summed is every process's failure, with
 * the same sentence; `together` says so.
 */
#ifndef VJP_TRAIN_JOB_JOB_H
#define VJP_TRAIN_JOB_JOB_H

#include "train/data/images.h"
#include "train/data/jsonl.h"
#include "train/data/packed.h"
#include "train/data/text.h"
#include "train/data/tokens.h"
#include "train/files/checkpoint.h"
#include "train/files/metrics.h"
#include "train/job/fit.h"
#include "train/model/convnet.h"
#include "train/model/llama.h"
#include "train/trainer/trainer.h"

/*
 * What decides the bits of a result besides the settings. On the cpu every instruction set with FMA gives the same
 * bits; the set without FMA and each engine of matrix products give others.
 */
typedef struct job_arithmetic {
    char device[64];       /* "cpu", "cuda:0"; "": not recorded */
    char instructions[16]; /* of the cpu: "fma" or "plain" */
    char products[64];     /* of the cpu: "builtin", "amx", or the name of a BLAS; of others their choice; "": f32 */
} job_arithmetic;

enum { JOB_ARITHMETIC_TEXT = 256 }; /* "cpu with fma and products by amx" */

/* Whether two devices are of one kind, as "cuda:0" and "cuda:1" are. */
bool job_same_kind(const char *device, const char *other);

/* Of an open device and the dtype of a run's matrix products. */
job_arithmetic job_arithmetic_of(vjp_device *device, vjp_dtype dtype);

/* Sizes of a Llama in place of the preset's; 0: the preset's. Checkpoints have them in config.json. */
typedef struct job_sizes {
    int64_t hidden, intermediate, layers, heads, kv_heads;
} job_sizes;

/* Everything that decides what is computed. Saved in trainer.json, so that a run can be resumed without options. */
typedef struct job_settings {
    char data[CHECKPOINT_PATH];
    char model[16];  /* "llama" or "convnet" */
    char preset[16]; /* a size of the model */
    job_sizes sizes;
    char from[CHECKPOINT_PATH];      /* starts with this checkpoint's weights; "": with random ones */
    char tokenizer[CHECKPOINT_PATH]; /* the folder of one; "": that of `from`, or none: tokens are bytes */
    char cache[CHECKPOINT_PATH];     /* the folder for encoded .jsonl files; "": beside them */
    int64_t skip_bad;                /* 1: lines of .jsonl files that cannot be used are left out */
    int64_t pack;                    /* documents of .jsonl files share rows: 1, 0, or JOB_PACK_DOCUMENTS */
    int64_t batch, context;          /* 0: the preset's */
    int64_t validate_every, validate_parts, save_every, keep;
    vjp_dtype dtype;
    vjp_dtype residual;    /* of the llama's residual stream: dtype or f32 */
    int64_t recompute;     /* blocks of the llama, in the backward pass; LLAMA_ALL_BLOCKS: all */
    int64_t recompute_mlp; /* blocks of which at least the feed-forward part is */
    int64_t memory;        /* bytes that a step may use, for which `recompute` is chosen; 0: no limit */
    double label_smoothing;
    int64_t patience;  /* validations in a row without a new lowest loss that end the run; 0: they never do */
    int64_t save_best; /* 1: each new lowest validation loss is saved at once, and DIR/best names it */
    int64_t lora;      /* the rank of adapters, which alone are trained; 0: all weights of the model are */
    double lora_alpha;
    char lora_targets[LORA_TARGETS_TEXT]; /* "q_proj,v_proj" or "all" */
    trainer_options trainer;
    job_arithmetic arithmetic;
    /* Not saved: called while .jsonl files are encoded, as in jsonl_options; NULL: progress is not shown. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *progress_context;
} job_settings;

/* Documents share rows; other data have none. */
enum { JOB_PACK_DOCUMENTS = -1 };

job_settings job_defaults(void);

#define JOB_MAX_AVERAGE 0.999999 /* of trainer_options.average: with 1 no step would ever count */

/*
 * Of trainer_options.beta2 with moments in bf16. The second moment changes by (1 - beta2) of its distance to g^2 in a
 * step; a change of less than 2^-9 of it is always lost.
 */
#define JOB_MAX_NARROW_BETA2 0.99

#define JOB_MAX_LOSS_SCALE 0x1p100 /* of trainer_options.loss_scale: its inverse is a normal number, too */

/* The names of trainer_optimiser and trainer_schedule, in their order, then NULL; and the number of one, or -1. */
extern const char *const job_optimisers[], *const job_schedules[];
int job_choice(const char *const *names, const char *name);

/* As members of an open object, and back. False: `error` names the key. */
void job_settings_write(json_writer *w, job_settings *settings);
bool job_settings_read(const json_value *root, job_settings *settings, char error[TRAIN_ERROR]);

typedef struct job {
    vjp_device *device;
    job_settings settings;
    char out[CHECKPOINT_PATH];
    llama_config llama;
    lora_config lora;           /* rank 0: there are no adapters */
    char base[CHECKPOINT_PATH]; /* of adapters: the folder of their model */
    uint64_t base_hash;
    convnet_config convnet;
    text_data text;
    jsonl_result documents; /* of .jsonl files */
    packed_data packed;     /* and their rows; count 0: the data are something else */
    model_tokenizer tokenizer;
    image_data images;
    train_source source;
    train_model model;
    fit_result fit; /* needs.bytes 0: there is no limit but the host's memory */
    trainer *trainer;
    metrics *metrics;
    int64_t step;   /* taken so far */
    int64_t queued; /* the last step that the trainer was given: `step`, or one more */
    int64_t saved;  /* the step of the last checkpoint of this run; -1: none */
    int64_t saves;  /* by this process, and the seconds that they took together */
    double save_seconds;
    char later[TRAIN_ERROR]; /* why the step after the next could not be queued; "": it was, or was not tried */
    double seconds;
    int64_t best_step; /* of the lowest validation loss; 0: none was measured */
    double best_loss;
    int64_t worse; /* validations since then */
    uint64_t data_hash;
    uint64_t loss_hash; /* of the losses of all steps, as f32 in their order; 0: unknown */
    int lock;           /* on `out`, until the run is closed */
    bool together;      /* the last failure is that of all processes */
    /* The device and its products, before the run was resumed with other bits; "": it was not, or they are unknown. */
    char computed_on[JOB_ARITHMETIC_TEXT];
} job;

/*
 * Starts a new run in `out`. False: `error` says why; close it in any case. The device must outlive it, and so must the
 * group of settings->trainer, if any.
 */
bool job_begin(job *j, vjp_device *device, const job_settings *settings, const char *out, char error[TRAIN_ERROR]);

/* The settings of the newest checkpoint in `out`: which device to open for it. */
bool job_recorded(const char *out, job_settings *settings, char error[TRAIN_ERROR]);

/* How processes share a run: no part of its settings, so it may change when the run is resumed. */
typedef struct job_processes {
    vjp_group *group;   /* NULL: one process */
    bool zero, overlap; /* as in trainer_options */
} job_processes;

/* What a run that is resumed reads, where it is now; NULL: where it was. */
typedef struct job_places {
    const char *base; /* the model of a run of adapters */
    const char *data;
} job_places;

/*
 * Continues from the newest checkpoint in `out`, bit for bit. `arithmetic` is the device's; another one than recorded
 * is refused unless `allow_other_bits`.
 */
bool job_resume(job *j, vjp_device *device, const job_processes *processes, const job_arithmetic *arithmetic,
                bool allow_other_bits, const job_places *places, const char *out, char error[TRAIN_ERROR]);

void job_close(job *j);

/*
 * Takes the next step, validates if it is due, and writes a line of the record. On a device that computes beside the
 * host the step after it is queued, too, unless it is after `last` or the weights are needed first; job_is_ahead()
 * then, and only another job_step() brings the run to a step that can be saved.
 */
bool job_step(job *j, int64_t last, metrics_row *row, char error[TRAIN_ERROR]);
bool job_is_ahead(const job *j);

/* Whether any process wants to stop here: `wish` is this one's. */
bool job_stops(job *j, bool wish);

/* Rank 0, or the only process. */
bool job_is_first(const job *j);

/* Whether it trains a model of text, not of pictures. */
bool job_is_text(const job *j);

/* Whether all steps are taken, or the validation loss has not improved for settings.patience validations. */
bool job_is_over(const job *j);

/* Whether a checkpoint of the last step is due, by its number or because its validation loss is the lowest. */
bool job_save_is_due(const job *j);

/* Saves a checkpoint of the last step, and draws the curve. */
bool job_save(job *j, char error[TRAIN_ERROR]);

/* Writes the checkpoint that job_save() would write into another folder. A run of one process alone can do it. */
bool job_copy(job *j, const char *out, char error[TRAIN_ERROR]);

/* Tokens or pictures per step. */
int64_t job_items(const job *j);

#endif
