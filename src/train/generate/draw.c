/* SPDX-License-Identifier: MIT */
/* See draw.h. Probabilities are sums in double over the tokens that stay, in the order of the tokens. */
#include "train/generate/draw.h"

#include <math.h>
#include <stdlib.h>

#include "core/philox.h"

void draw_penalize(float *logits, int count, const int32_t *tokens, int64_t tokens_count, double penalty,
                   draw_candidate *scratch) {
    if (penalty <= 0 || penalty == 1) return;
    enum { WAITS, DONE };
    for (int64_t i = 0; i < tokens_count; i++)
        if (tokens[i] >= 0 && tokens[i] < count) scratch[tokens[i]].token = WAITS;
    for (int64_t i = 0; i < tokens_count; i++) {
        if (tokens[i] < 0 || tokens[i] >= count || scratch[tokens[i]].token == DONE) continue;
        float *logit = &logits[tokens[i]];
        *logit = (float)(*logit > 0 ? *logit / penalty : *logit * penalty);
        scratch[tokens[i]].token = DONE;
    }
}

/* Moves the smallest of a heap's first elements down to its place: the parent of i is (i - 1) / 2. */
static void sift_down(draw_candidate *heap, int64_t count, int64_t i) {
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && heap[child + 1].logit < heap[child].logit) child++;
        if (heap[i].logit <= heap[child].logit) return;
        draw_candidate kept = heap[i];
        heap[i] = heap[child];
        heap[child] = kept;
    }
}

/* The k-th largest logit, by a heap of the k largest so far. */
static float kth_largest(const float *logits, int count, int64_t k, draw_candidate *heap) {
    for (int64_t i = 0; i < k; i++)
        heap[i].logit = logits[i];
    for (int64_t i = k / 2 - 1; i >= 0; i--)
        sift_down(heap, k, i);
    for (int64_t i = k; i < count; i++)
        if (logits[i] > heap[0].logit) {
            heap[0].logit = logits[i];
            sift_down(heap, k, 0);
        }
    return heap[0].logit;
}

static int likelier_first(const void *a, const void *b) {
    const draw_candidate *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

static int token_first(const void *a, const void *b) {
    const draw_candidate *x = a, *y = b;
    return (x->token > y->token) - (x->token < y->token);
}

static double total_of(const draw_candidate *c, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++)
        total += c[i].weight;
    return total;
}

/* Keeps the likeliest candidates that together reach top_p of all; returns how many, in the order of the tokens. */
static int64_t keep_top_p(draw_candidate *c, int64_t count, double top_p) {
    double total = total_of(c, count), sum = 0;
    /* All tokens below this together have less than 1 - top_p: the larger ones reach top_p without them. */
    double below = (1 - top_p) * total / (double)count;
    int64_t kept = 0, last = 0;
    for (int64_t i = 0; i < count; i++)
        if (c[i].weight >= below) c[kept++] = c[i];
    qsort(c, (size_t)kept, sizeof *c, likelier_first);
    while (last < kept && sum < top_p * total)
        sum += c[last++].weight;
    qsort(c, (size_t)last, sizeof *c, token_first);
    return last;
}

int draw_token(const float *logits, int count, const draw_options *o, uint64_t number, draw_candidate *scratch) {
    int best = 0;
    for (int i = 0; i < count; i++) {
        if (isnan(logits[i])) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    if (!isfinite(logits[best])) return -1;
    if (o->temperature <= 0) return best;
    float threshold = -INFINITY;
    if (o->top_k > 0 && o->top_k < count) threshold = kth_largest(logits, count, o->top_k, scratch);
    int64_t kept = 0;
    for (int i = 0; i < count; i++)
        if (logits[i] >= threshold)
            scratch[kept++] = (draw_candidate){
                .weight = exp((logits[i] - logits[best]) / o->temperature), .logit = logits[i], .token = i};
    if (o->top_p > 0 && o->top_p < 1) kept = keep_top_p(scratch, kept, o->top_p);
    int64_t likely = 0;
    for (int64_t i = 0; i < kept; i++)
        if (scratch[i].weight >= o->min_p) scratch[likely++] = scratch[i];
    vjp_philox words = {{(uint32_t)number, (uint32_t)(number >> 32), 0, 0x64726177u /* "draw" */}};
    words = vjp_philox4x32_10(words, (uint32_t)o->seed, (uint32_t)(o->seed >> 32));
    double uniform = ((double)words.word[0] + (double)words.word[1] * 0x1p-32) * 0x1p-32;
    double wanted = total_of(scratch, likely) * uniform, sum = 0;
    for (int64_t i = 0; i < likely; i++) {
        sum += scratch[i].weight;
        if (wanted < sum) return scratch[i].token;
    }
    return best;
}
