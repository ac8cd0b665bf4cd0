/* SPDX-License-Identifier: MIT */
/*
 * Draws a token from a model's prediction. In this order: tokens of the text so far are made less likely (repetition),
 * logits are divided by the temperature, and only the likeliest tokens stay (top_k, then top_p, then min_p); from
 * these one is drawn in proportion to its probability. The same logits, options and number give the same token.
 */
#ifndef VJP_TRAIN_GENERATE_DRAW_H
#define VJP_TRAIN_GENERATE_DRAW_H

#include <stdint.h>

/* All zero: always the most likely token. */
typedef struct draw_options {
    double temperature; /* 0: the most likely token */
    int64_t top_k;      /* the k most likely tokens stay, with all that equal the last of them; 0: all */
    double top_p;       /* the most likely tokens stay that together have this probability; 0 or 1: all */
    double min_p;       /* tokens stay that have at least this share of the most likely one's probability; 0: all */
    double repetition;  /* above 1: less likely the tokens of the text so far; 0 or 1: no change */
    uint64_t seed;
} draw_options;

typedef struct draw_candidate {
    double weight; /* its probability over that of the most likely token */
    float logit;
    int32_t token;
} draw_candidate;

/* The logits of the listed tokens, each once: divided by the penalty where positive, multiplied where negative. */
void draw_penalize(float *logits, int count, const int32_t *tokens, int64_t tokens_count, double penalty,
                   draw_candidate *scratch);

/*
 * Draw number `number` of a text. `scratch` holds `count` candidates, here and above. Of equally likely tokens the
 * first counts as the more likely. -1: the logits have a NaN, or none is finite.
 */
int draw_token(const float *logits, int count, const draw_options *options, uint64_t number, draw_candidate *scratch);

#endif
