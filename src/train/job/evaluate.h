/* SPDX-License-Identifier: MIT */
/*
 * How well a model predicts a text. The text is split into windows of `context` tokens, each of which predicts the
 * token after each of its own; every token but the first is predicted once, from at most `context` tokens before it.
 * Of .jsonl files (data/jsonl.h) each document is such a text of its own, and only what the model is to answer counts.
 * The same bits for any number of threads.
 */
#ifndef VJP_TRAIN_JOB_EVALUATE_H
#define VJP_TRAIN_JOB_EVALUATE_H

#include "train/files/checkpoint.h"
#include "vjp.h"

typedef struct evaluate_options {
    int64_t batch, context; /* windows at once, and tokens per window; 0: 8, and the model's own, at most 1024 */
    vjp_dtype dtype;        /* of activations and of weights in products */
    const char *cache;      /* .jsonl files: as in jsonl_options */
    bool skip_bad;
    /* Called after each batch; NULL: progress is not reported. False ends the evaluation. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *progress_context;
} evaluate_options;

typedef struct evaluate_result {
    int64_t tokens;         /* predicted */
    int64_t bytes;          /* of text that they stand for */
    int64_t windows;        /* of `context` tokens */
    int64_t documents, bad; /* of .jsonl files: documents, and lines that were left out; 0: a text */
    int64_t context;
    double loss; /* nats per token */
} evaluate_result;

/* Evaluates a checkpoint on a file, or on all text files or all .jsonl files of a folder. False: `error` says why. */
bool evaluate(vjp_device *device, const checkpoint *from, const char *text, const evaluate_options *options,
              evaluate_result *result, char error[TRAIN_ERROR]);

double evaluate_perplexity(const evaluate_result *r);
double evaluate_bits_per_byte(const evaluate_result *r);

#endif
