/* SPDX-License-Identifier: MIT */
/*
 * Training within a limit of memory. First values that one pass over memory computes are recomputed in the backward
 * pass, as far as the limit asks for. Then intermediates wait in the host's memory, where the device can copy beside
 * its calls and as far as that costs no time. What is still too much is recomputed: the feed-forward parts of blocks,
 * which give back the most memory for their FLOP, then whole blocks. Everything is planned with vjp_plan(), which
 * allocates nothing, so a model that does not fit is refused before any of it is made.
 */
#ifndef VJP_TRAIN_JOB_FIT_H
#define VJP_TRAIN_JOB_FIT_H

#include "train/model/convnet.h"
#include "train/model/llama.h"
#include "train/trainer/trainer.h"

/* The bytes that training may use. */
typedef struct fit_limit {
    size_t asked; /* by the user; 0: no limit */
    size_t free;  /* on the device; 0: it does not say */
} fit_limit;

typedef struct fit_result {
    int64_t layers;
    int64_t recompute;           /* blocks; as llama_options has them */
    int64_t recompute_mlp;       /* blocks, the others' feed-forward parts included */
    int64_t arena_limit;         /* as trainer_options have it; 0: the device does as it does without a limit */
    bool passes;                 /* for it, more values that take one pass over memory are recomputed than without */
    trainer_needs needs, before; /* with all this, and without any of it */
} fit_result;

/* The model, a Llama or a convnet: the other is NULL. */
typedef struct fit_model {
    const llama_config *llama;
    const llama_options *llama_options;
    const convnet_config *convnet;
    const convnet_options *convnet_options;
} fit_model;

/* What a run computes besides its model: the options of a trainer, and whether it validates. */
typedef struct fit_run {
    vjp_device *device;
    const trainer_options *trainer;
    bool validates;
} fit_run;

/* The free memory of the device, in bytes; 0: it does not say. The second is the host's, of a device that uses that. */
size_t fit_free(vjp_device *device);
size_t fit_available(vjp_device *device);

/* Whether so many bytes fit into that memory. False: `error` has what `what` ("sampling") needs, and what there is. */
bool fit_bytes(vjp_device *device, double needed, const char *what, char error[TRAIN_ERROR]);

/* The same for a program to which the graph and its results would be compiled. */
bool fit_program(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count, const char *what,
                 char error[TRAIN_ERROR]);

/*
 * What a step that must stay within the limit recomputes and leaves in the host's memory; of a Llama's feed-forward
 * parts and blocks the fewest. Where the user's limit leaves room, less is recomputed than without one. False: that is
 * not enough, and `error` has the bytes that are needed and allowed.
 */
bool fit_choose(const fit_run *run, const fit_model *model, const fit_limit *limit, fit_result *result,
                char error[TRAIN_ERROR]);

/* Plans with what the run's and the model's options have chosen, and checks the limit. */
bool fit_check(const fit_run *run, const fit_model *model, const fit_limit *limit, fit_result *result,
               char error[TRAIN_ERROR]);

/* Whether these needs are within the limit; `how` is added to the sentence: "with all 12 blocks recomputed". */
bool fit_allows(const fit_limit *limit, const trainer_needs *needs, const char *how, char error[TRAIN_ERROR]);

/*
 * What was done for the limit, and its price: "3 of 12 blocks are recomputed, which saves 2.1 GiB and adds 5.2 % of
 * FLOP". NULL: nothing.
 */
enum { FIT_TEXT = 320 };
const char *fit_text(const fit_result *result, char text[FIT_TEXT]);

/* The share of FLOP that recomputing adds to a step. */
double fit_price(const fit_result *result);

#endif
