/*
 * What a Llama is: its sizes, to and from the config.json of Hugging Face, and the names and shapes of its weights.
 *
 * Reading knows the keys of transformers 4 and 5 and refuses, with the key and its value, what would be computed
 * otherwise than vjp does it; keys that do not change the numbers are passed over. Writing makes a file that both
 * read.
 */
#ifndef VJP_TRAIN_LLAMA_CONFIG_H
#define VJP_TRAIN_LLAMA_CONFIG_H

#include "files/json.h"
#include "train/fail.h"
#include "vjp.h"

enum { LLAMA_MOST_ENDS = 8 };

typedef struct llama_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers;
    int64_t heads, kv_heads; /* kv_heads divides heads */
    int64_t head_dim;        /* even */
    int64_t max_positions;
    double rope_theta, norm_eps;
    bool tied;                           /* the head is the embedding */
    vjp_dtype dtype;                     /* that the weights are stored in */
    int64_t begin_token;                 /* -1: none */
    int64_t end_tokens[LLAMA_MOST_ENDS]; /* any of them ends a text */
    int end_count;
} llama_config;

/* From the root of a config.json. False: `error` names the key, without the path. */
bool llama_config_read(const json_value *root, llama_config *config, char error[TRAIN_ERROR]);

/* Whether the sizes go together; reading has done this. */
bool llama_config_check(const llama_config *config, char error[TRAIN_ERROR]);

/* As a config.json, the caller's to free(). NULL: memory ran out. */
char *llama_config_write(const llama_config *config);

/* ---- Weights ----------------------------------------------------------------------------------------- */

enum { LLAMA_NAME = 96 };

typedef struct llama_weight {
    char name[LLAMA_NAME]; /* "model.layers.0.self_attn.q_proj.weight" */
    int ndim;
    int64_t shape[2]; /* [out, in], or [hidden_size] of a norm */
} llama_weight;

/* How many there are; weight 0, 1, ... come in the order of the computation. The config must have been checked. */
int64_t llama_weight_count(const llama_config *config);
llama_weight llama_weight_at(const llama_config *config, int64_t index);

/* The number of trained numbers in all of them. */
int64_t llama_size(const llama_config *config);

/* ---- Presets: models of bytes ------------------------------------------------------------------------ */

typedef struct llama_preset {
    const char *name;
    llama_config config;
} llama_preset;

extern const llama_preset llama_presets[];
extern const int llama_preset_count;

/* NULL, with a sentence that lists them, if there is none of that name. */
const llama_preset *llama_preset_find(const char *name, char error[TRAIN_ERROR]);

#endif
