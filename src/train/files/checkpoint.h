/* SPDX-License-Identifier: MIT */
/*
 * Checkpoints: DIR/checkpoint-00000100/ for step 100, each a Hugging Face folder plus what training needs, and
 * DIR/latest, a symbolic link to the newest. DIR/best links to the one of the lowest validation loss, if the run keeps
 * it; on a file system without links it is a file with that name in it.
 *
 *     config.json            sizes of the model
 *     model.safetensors      its weights
 *     optimizer.safetensors  what the optimiser keeps of each weight
 *     trainer.json           the step and the settings of the run
 *     tokenizer.json, tokenizer_config.json  of a model whose tokens are not bytes
 *
 * A run that trains adapters has, in place of the first two, adapter_config.json and adapter_model.safetensors in the
 * form of PEFT. Such a folder is complete together with the folder of its base model, which the config names.
 *
 * A checkpoint appears whole or not at all: its files are written to a hidden folder, synced to the disk, and the
 * folder is then renamed. A crash or a full disk at any byte leaves the older checkpoints as they were, and `latest` on
 * a whole one. The next save removes what an interrupted one left behind. The processes of a group write their parts
 * of the same files in that folder, with the bytes that one process would write; it is renamed once all have synced.
 */
#ifndef VJP_TRAIN_CHECKPOINT_H
#define VJP_TRAIN_CHECKPOINT_H

#include "files/json.h"
#include "files/safetensors.h"
#include "train/fail.h"

enum { CHECKPOINT_PATH = 4096 };

/* ---- Saving ------------------------------------------------------------------------------------------ */

/*
 * The processes that write a checkpoint together. All of them save the same content, except that each has the data of
 * the tensors that it writes, and NULL in the place of the others'; every tensor has one writer. Rank 0 does
 * everything else. agree() is called by all, each with its own result: true if all are, else `error` says why.
 */
typedef struct checkpoint_group {
    int32_t rank;
    void *context;
    bool (*agree)(void *context, bool ok, char error[TRAIN_ERROR]);
} checkpoint_group;

typedef struct checkpoint_content {
    int64_t step;        /* 0 or more; also kept inside both safetensors files */
    int64_t best;        /* the step that `best` is to name, this one or an earlier one; 0: none */
    const char *config;  /* JSON */
    bool is_adapter;     /* `config` is that of adapters, and `model` has their tensors */
    const char *trainer; /* JSON; NULL: no trainer.json */
    const safetensors_tensor *model;
    size_t model_count;
    const safetensors_tensor *optimizer; /* NULL: no optimizer.safetensors */
    size_t optimizer_count;
    const char *tokenizer_json, *tokenizer_config; /* NULL: no such file */
    const checkpoint_group *group;                 /* NULL: one process, which has all data */
} checkpoint_content;

/* Creates `dir` and the folders above it, where they are missing. */
bool checkpoint_make_folders(const char *dir, char error[TRAIN_ERROR]);

/* Creates a file, which must not be there, and syncs it to the disk. */
bool checkpoint_write_text(const char *path, const char *text, char error[TRAIN_ERROR]);

/*
 * Locks `dir`, which is created if it is missing, until the returned descriptor is closed or the process ends: one run
 * at a time may save there. -1: `error` names the process that holds the lock, or the system's reason.
 */
int checkpoint_lock(const char *dir, char error[TRAIN_ERROR]);

/*
 * Saves into `dir`, which is created if it is missing. The caller holds the lock. A checkpoint of the same step is
 * replaced. Afterwards the `keep` (1 or more) checkpoints of the highest steps up to this one stay, and the best one;
 * others of lower steps are removed, and those of higher steps, which another run made, are left alone. A torn copy
 * does not count, and is removed once `keep` newer ones are there. During the save the disk holds one more. Where
 * `latest` or `best` is a folder, as in a copy made by `cp -rL`, a link replaces it.
 * False: `error` names the file. In a group, `dir` is the same folder for all processes, and rank 0 holds the lock; for
 * the others true means that their part is written, and rank 0 can still fail.
 */
bool checkpoint_save(const char *dir, int keep, const checkpoint_content *content, char error[TRAIN_ERROR]);

/* ---- Finding and opening ----------------------------------------------------------------------------- */

/* Whether `dir` is a checkpoint itself: it has a config.json or an adapter_config.json. */
bool checkpoint_is_one(const char *dir);

/*
 * The folder to open: `dir` itself if it is a checkpoint, else the target of its link `latest`, else its checkpoint of
 * the highest step that opens. Where that target lacks files, as in a copy that was made while a run saved, it is the
 * whole checkpoint of the highest step, if there is one. `dir` may also be a file that names a checkpoint beside it, as
 * `best` can be.
 */
bool checkpoint_find(const char *dir, char path[CHECKPOINT_PATH], char error[TRAIN_ERROR]);

/* A safetensors file that is open: its tensors are read when they are needed, by safetensors_fetch(). */
typedef struct checkpoint_file {
    safetensors_file tensors;
    const char *name; /* inside the folder */
} checkpoint_file;

/* All zero is a closed checkpoint, safe to close. */
typedef struct checkpoint {
    int64_t step; /* -1: its files have none, as in a folder that vjp did not write */
    json_document config;
    json_document trainer;            /* root NULL: there is no trainer.json */
    const safetensors_tensor **model; /* the tensors of all files, sorted by name */
    size_t model_count;
    checkpoint_file optimizer; /* tensors.stream NULL: there is no optimizer.safetensors */
    checkpoint_file *files;    /* what `model` points into: model.safetensors, or several */
    size_t file_count;
    json_document index;                     /* of several files: which tensor is in which */
    const char *tokenizer;                   /* the name of its tokenizer's file; NULL: there is none */
    char *tokenizer_json, *tokenizer_config; /* the texts of these files; NULL: there is none */
    /* Of adapters; `config` and `model` are then those of their base, once it is opened. */
    json_document adapter_config; /* root NULL: it has no adapters */
    checkpoint_file adapter;      /* their tensors */
    char base[CHECKPOINT_PATH];   /* the folder of the base; "": it is not open */
} checkpoint;

/*
 * Opens a folder with a config.json and weights in model.safetensors, or in several files listed by
 * model.safetensors.index.json; optimizer.safetensors and trainer.json are opened where they are there. Their steps
 * must agree. The tensors stay valid until checkpoint_close(); safetensors_fetch() reads their data.
 *
 * Of a folder with an adapter_config.json only the adapters are opened: checkpoint_open_base() adds their model.
 */
bool checkpoint_open(const char *path, checkpoint *c, char error[TRAIN_ERROR]);

/*
 * Opens the model that adapters were made for: `base`, or, if that is NULL, the folder that their config names. Does
 * nothing for a checkpoint without adapters, but `base` must then be NULL.
 */
bool checkpoint_open_base(checkpoint *c, const char *base, char error[TRAIN_ERROR]);

/*
 * checkpoint_find() and checkpoint_open(), while a run may be saving in `dir`: if the checkpoint was replaced by a
 * newer one before all its files were open, that one is opened.
 */
bool checkpoint_open_newest(const char *dir, char path[CHECKPOINT_PATH], checkpoint *c, char error[TRAIN_ERROR]);

void checkpoint_close(checkpoint *c);

/* The texts of tokenizer.json and tokenizer_config.json, which the caller must free(); NULL: there is no such file. */
bool checkpoint_read_tokenizer(const char *folder, char **json, char **config, char error[TRAIN_ERROR]);

/* The tensor of that name, of the model or of its adapters; NULL if there is none. */
const safetensors_tensor *checkpoint_tensor(const checkpoint *c, const char *name);

#endif
