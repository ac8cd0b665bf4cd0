/* SPDX-License-Identifier: MIT */
/*
 * Low-rank adapters (LoRA): a projection y = x W^T becomes y = x W^T + scale (x A^T) B^T, with W frozen, A [rank, in]
 * and B [out, rank]. B begins as 0, so that the model begins as it was.
 *
 * Files are those of the Python package PEFT: adapter_model.safetensors with A and B of each adapted projection, and
 * adapter_config.json with what is read here. A setting that vjp does not compute is refused by name. So is one that it
 * does not know, unless its value is null, false or empty, by which PEFT marks what is not used.
 */
#ifndef VJP_TRAIN_LORA_H
#define VJP_TRAIN_LORA_H

#include "files/json.h"
#include "train/fail.h"
#include "train/model/llama_config.h"

enum { LORA_MAX_RANK = 1 << 20, LORA_MAX_ALPHA = 1000000000, LORA_TARGETS_TEXT = 96 };

/* All zero: no adapters. */
typedef struct lora_config {
    int64_t rank;    /* 0: no adapters */
    double alpha;    /* above 0, at most LORA_MAX_ALPHA */
    bool root;       /* the scale is alpha / sqrt(rank), as PEFT's use_rslora; otherwise alpha / rank */
    uint32_t adapts; /* one bit for each of lora_targets */
} lora_config;

/* The projections that can have adapters: "q_proj", "k_proj", ...; then NULL. */
extern const char *const lora_targets[];

double lora_scale(const lora_config *lora);

/*
 * Whether the weight of that name has an adapter: "model.layers.0.self_attn.q_proj.weight". Then `a` and `b` get the
 * names of the adapter's tensors, in the model and in PEFT's file: "base_model.model....q_proj.lora_A.weight".
 */
bool lora_adapts(const lora_config *lora, const char *weight, char a[LLAMA_NAME], char b[LLAMA_NAME]);

/* Reads "q_proj,v_proj" or "all". False: `error` names the one that is unknown. */
bool lora_read_targets(const char *text, uint32_t *adapts, char error[TRAIN_ERROR]);

/* The other way, in the order of lora_targets. */
void lora_write_targets(uint32_t adapts, char text[LORA_TARGETS_TEXT]);

/* Whether a model can be computed with them: not where a projection that they adapt has an activation of its own. */
bool lora_suits(const lora_config *lora, const llama_config *config, char error[TRAIN_ERROR]);

/* From the root of an adapter_config.json, and back: a text that the caller frees, or NULL. `base` names the model. */
bool lora_config_read(const json_value *root, lora_config *lora, char error[TRAIN_ERROR]);
char *lora_config_write(const lora_config *lora, const char *base);

/*
 * The adapters of a checkpoint; none if it has none. False: their config cannot be read, a tensor is missing, is not
 * one of them, or does not have the shape that the model needs.
 */
struct checkpoint;
bool lora_of(const struct checkpoint *from, const llama_config *config, lora_config *lora, char error[TRAIN_ERROR]);

#endif
