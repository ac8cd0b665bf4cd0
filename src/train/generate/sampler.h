/* SPDX-License-Identifier: MIT */
/*
 * Generates text with a trained model, token by token, for one prompt or for several at once.
 *
 * Order of calls: sampler_open(), sampler_begin() with the prompts, sampler_next() until no text is running (or for as
 * long as wanted), sampler_close(). After each call sampler_answer_of() gives what has been written.
 *
 * A text depends on the model, its own prompt and the options alone: not on the other prompts, nor on the threads. When
 * the context is full, its older half is forgotten and the newer half becomes the beginning of the context.
 */
#ifndef VJP_TRAIN_GENERATE_SAMPLER_H
#define VJP_TRAIN_GENERATE_SAMPLER_H

#include "text/tokenizer.h"
#include "train/files/checkpoint.h"
#include "train/generate/decoder.h"
#include "train/generate/draw.h"

enum { SAMPLER_MAX_STOPS = 16, SAMPLER_MAX_TEXTS = DECODER_MAX_TEXTS };

typedef struct sampler_options {
    draw_options draw;
    int64_t max_tokens, max_bytes; /* of a text's answer; 0: no limit */
    const char *stop[SAMPLER_MAX_STOPS];
    int stops; /* a text ends before the first of these strings */
    bool chat; /* the token that ends a message ends a text, and prompts are complete: nothing is put around them */
} sampler_options;

typedef struct sampler_settings {
    int64_t texts;   /* prompts at once; 0: one */
    int64_t context; /* tokens that the model sees at once; 0: those it was trained with, at most 4096 */
    int dtype;       /* that it computes with; -1: that of its weights, or f32 if the device does not have it */
} sampler_settings;

typedef struct sampler sampler;

/* Loads a model and its tokenizer; without one its tokens are bytes. The device must outlive it. NULL: `error` says
 * why. */
sampler *sampler_open(vjp_device *device, const checkpoint *from, const sampler_settings *settings,
                      char error[TRAIN_ERROR]);
void sampler_close(sampler *s);

/* The model's tokenizer; NULL: its tokens are bytes. */
const tokenizer *sampler_tokenizer(const sampler *s);

typedef struct sampler_prompt {
    const char *text;
    size_t bytes;
} sampler_prompt;

/* Starts new texts, at most as many as the sampler was opened for. A prompt may be empty. */
bool sampler_begin(sampler *s, const sampler_options *options, const sampler_prompt *prompts, int count,
                   char error[TRAIN_ERROR]);

/* Appends a prompt to a text that has ended, and starts a new answer: the next turn of a conversation. */
bool sampler_continue(sampler *s, int text, const char *prompt, size_t bytes, char error[TRAIN_ERROR]);

/* Draws the next token of every text that is running. */
bool sampler_next(sampler *s, char error[TRAIN_ERROR]);

typedef enum sampler_state {
    SAMPLER_RUNNING,
    SAMPLER_END,  /* the model ended the text */
    SAMPLER_STOP, /* a stop string followed */
    SAMPLER_LIMIT /* of tokens or bytes */
} sampler_state;

/* The answer so far. Valid until the next call. */
typedef struct sampler_answer {
    sampler_state state;
    const char *bytes;
    size_t count;
    size_t ready;   /* of them: whole characters that can no longer turn out to begin a stop string */
    int64_t tokens; /* drawn */
} sampler_answer;

sampler_answer sampler_answer_of(const sampler *s, int text);

#endif
