/* SPDX-License-Identifier: MIT */
/*
 * Runs a causal language model a few tokens at a time, for generation: the keys and values of earlier tokens are kept,
 * so that a new token costs one row of work instead of the whole text.
 *
 * The model is the graph that computes the logits of one text (batch 1). Of its ops only attention looks at other
 * tokens and only rope at the position; all others compute each row by itself. So the same nodes run on any number of
 * rows: rows of one text (its prompt), or one row each of several texts. No second form of the model is needed, and a
 * new family of models works as soon as its graph does.
 *
 * On a CPU that was opened with `fixed_rows`, the logits have the same bits as those of the whole graph, however the
 * tokens are grouped into calls.
 */
#ifndef VJP_TRAIN_GENERATE_DECODER_H
#define VJP_TRAIN_GENERATE_DECODER_H

#include "train/model/model.h"

enum { DECODER_MAX_TEXTS = 64 };

typedef struct decoder decoder;

typedef struct decoder_options {
    int64_t texts;   /* held at once */
    int64_t rows;    /* that one call computes; longer prompts take several calls */
    bool all_logits; /* decoder_append() gives the logits of every token; else only those of the last */
} decoder_options;

/* Writes the numbers of a parameter to `to`, as `want` describes them: its shape, and a dtype of f32, bf16 or f16. */
typedef bool (*decoder_load)(void *context, const char *name, const vjp_tensor *want, void *to,
                             char error[TRAIN_ERROR]);

/* The device and the model must outlive it. NULL: `error` says why. */
decoder *decoder_open(vjp_device *device, const train_model *model, const decoder_options *options, decoder_load load,
                      void *context, char error[TRAIN_ERROR]);
void decoder_close(decoder *d);

/* The tokens that a text has now, and how many it can have. */
int64_t decoder_length(const decoder *d, int64_t text);
int64_t decoder_room(const decoder *d);

/* Bytes of the weights that a token reads, and of the keys and values of all texts. */
size_t decoder_weight_bytes(const decoder *d);
size_t decoder_cache_bytes(const decoder *d);

/* Forgets a text. */
void decoder_clear(decoder *d, int64_t text);

/*
 * Appends tokens to a text. `logits` gets one row: the prediction of what follows the last token; with all_logits one
 * row per token. On failure the text is as it was.
 */
bool decoder_append(decoder *d, int64_t text, const int32_t *tokens, int64_t count, float *logits,
                    char error[TRAIN_ERROR]);

/* Appends one token to each of `count` different texts. `logits` gets a row for each. */
bool decoder_step(decoder *d, const int64_t *texts, const int32_t *tokens, int64_t count, float *logits,
                  char error[TRAIN_ERROR]);

#endif
