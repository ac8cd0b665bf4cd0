/* SPDX-License-Identifier: MIT */
/*
 * The usual Llama: embedding, blocks of grouped causal attention and swiglu, each after an rms_norm, tied or untied
 * head. With adapters (lora.h) only they are trained, and all other weights are frozen.
 */
#ifndef VJP_TRAIN_LLAMA_H
#define VJP_TRAIN_LLAMA_H

#include "train/model/llama_config.h"
#include "train/model/lora.h"
#include "train/model/model.h"

enum { LLAMA_ALL_BLOCKS = 1 << 30 }; /* more than any model has */

typedef struct llama_options {
    int64_t batch, context;
    vjp_dtype dtype; /* of activations and of weights in products; parameters that are trained are f32 */
    /*
     * How many blocks are recomputed in the backward pass, to save memory: the first ones. Recomputing a block holds
     * its intermediates once more while its backward runs; of the last block that is when most of the others' are kept,
     * of the first when none are.
     */
    int64_t recompute;
    int64_t recompute_mlp; /* how many, from the first on, at least their feed-forward part: less memory for its FLOP */
    bool wide_residual;    /* the residual stream is f32 beside 16-bit activations */
    double label_smoothing;
    bool masks;       /* has `first`: a row holds several documents, and attention does not cross from one to another */
    lora_config lora; /* rank 0: there are no adapters, and all weights are trained */
} llama_options;

/* Builds the model. Errors are in vjp_graph_error(model->graph). */
void llama_build(train_model *model, const llama_config *config, const llama_options *options);

#endif
