/*
 * Checkpoints: DIR/checkpoint-00000100/ for step 100, each a Hugging Face folder with what training needs beside it,
 * and DIR/latest, a symbolic link to the newest.
 *
 *     config.json            the model, as its own code reads it
 *     model.safetensors      its weights
 *     optimizer.safetensors  what the optimiser remembers
 *     trainer.json           where training stands
 *
 * A checkpoint is saved as a whole: its files grow in a hidden folder, are forced to the disk, and take their name
 * together. A crash or a full disk at any byte leaves the checkpoints before it as they were, and `latest` on a whole
 * one. What a dead save left behind goes with the next.
 */
#ifndef VJP_TRAIN_CHECKPOINT_H
#define VJP_TRAIN_CHECKPOINT_H

#include "files/json.h"
#include "files/safetensors.h"
#include "train/fail.h"

enum { CHECKPOINT_PATH = 4096 };

/* ---- Saving ------------------------------------------------------------------------------------------ */

typedef struct checkpoint_content {
    int64_t step;        /* 0 or more; also kept inside both safetensors files */
    const char *config;  /* JSON */
    const char *trainer; /* JSON; NULL: no trainer.json */
    const safetensors_tensor *model;
    size_t model_count;
    const safetensors_tensor *optimizer; /* NULL: no optimizer.safetensors */
    size_t optimizer_count;
} checkpoint_content;

/*
 * Saves into `dir`, which is made where it is missing. A checkpoint of the same step is replaced. Afterwards the `keep`
 * (1 or more) checkpoints of the highest steps up to this one stay, those of lower steps are removed; those of higher
 * steps, which another run made, are left alone. While it runs, the disk holds one more. False: `error` names the file.
 */
bool checkpoint_save(const char *dir, int keep, const checkpoint_content *content, char error[TRAIN_ERROR]);

/* ---- Finding and opening ----------------------------------------------------------------------------- */

/*
 * The folder to open: `dir` itself if it has a config.json, else where its link `latest` leads, else its checkpoint of
 * the highest step that can be opened.
 */
bool checkpoint_find(const char *dir, char path[CHECKPOINT_PATH], char error[TRAIN_ERROR]);

/* A safetensors file that is open: its tensors are read when they are needed, by safetensors_fetch(). */
typedef struct checkpoint_file {
    safetensors_file tensors;
    const char *name; /* inside the folder */
} checkpoint_file;

/* All zero is a closed checkpoint, safe to close. */
typedef struct checkpoint {
    int64_t step; /* -1: its files tell none, as in a folder that vjp did not write */
    json_document config;
    json_document trainer;            /* root NULL: there is no trainer.json */
    const safetensors_tensor **model; /* the tensors of all files, sorted by name */
    size_t model_count;
    checkpoint_file optimizer; /* tensors.stream NULL: there is no optimizer.safetensors */
    checkpoint_file *files;    /* what `model` points into: model.safetensors, or several */
    size_t file_count;
    json_document index;   /* of several files: which tensor is in which */
    const char *tokenizer; /* the name of the file that makes tokens of text; NULL: there is none */
} checkpoint;

/*
 * Opens a folder with a config.json and weights in model.safetensors, or in several files listed by
 * model.safetensors.index.json; optimizer.safetensors and trainer.json are opened where they are there. Their steps
 * must agree. The tensors stay valid until checkpoint_close(); safetensors_fetch() reads their data.
 */
bool checkpoint_open(const char *path, checkpoint *c, char error[TRAIN_ERROR]);

void checkpoint_close(checkpoint *c);

/* The model's tensor of that name; NULL if there is none. */
const safetensors_tensor *checkpoint_tensor(const checkpoint *c, const char *name);

#endif
