/* SPDX-License-Identifier: MIT */
/*
 * The sizes of a Llama or a model of a related family, from and to the config.json of Hugging Face, and the names and
 * shapes of its weights.
 *
 * The keys of transformers 4 and 5 are read. A value that vjp does not compute, and a key that it does not know, are
 * refused by name; a list in llama_config.c has the keys that change no result and are ignored. The file written is
 * read by both versions.
 */
#ifndef VJP_TRAIN_LLAMA_CONFIG_H
#define VJP_TRAIN_LLAMA_CONFIG_H

#include "files/json.h"
#include "train/fail.h"
#include "vjp.h"

enum { LLAMA_MAX_ENDS = 8, LLAMA_MAX_LAYERS = 4096 };

/* What a family's files are called and which settings they have: llama_families in llama_config.c. */
typedef enum llama_family {
    LLAMA_LLAMA,
    LLAMA_MISTRAL,
    LLAMA_QWEN2,
    LLAMA_QWEN3,
    LLAMA_GEMMA3,
    LLAMA_FAMILIES
} llama_family;

/* How the angles of the rotation are changed for texts that are longer than those of the first training. */
typedef struct llama_rope_scaling {
    enum { LLAMA_ROPE_DEFAULT, LLAMA_ROPE_LINEAR, LLAMA_ROPE_LLAMA3 } kind;
    double factor;    /* by which angles shrink: all of them, or (llama3) those of long wavelengths */
    double low, high; /* llama3: original_positions / wavelength where the change ends and begins */
    int64_t original_positions;
} llama_rope_scaling;

/* All zero after the sizes is a plain Llama. */
typedef struct llama_config {
    llama_family family;
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers;
    int64_t heads, kv_heads; /* kv_heads divides heads */
    int64_t head_dim;        /* even */
    int64_t max_positions;
    double rope_theta, norm_eps;
    llama_rope_scaling rope;
    double local_theta;   /* of the rotation in layers with a window, without scaling; 0: that of the others */
    int64_t query_scalar; /* products of queries and keys are divided by its root; 0: by that of head_dim */
    /*
     * Gemma's differences: norms multiply by 1 + their weight, what joins the residual stream has a norm, too, the
     * embedding is multiplied by sqrt(hidden_size), and the gate has gelu instead of silu.
     */
    bool gemma;
    bool qkv_bias, output_bias, mlp_bias;   /* whether these projections of a block have one */
    bool head_norms;                        /* an rms_norm of each head of q and k, before the rotation */
    int64_t window;                         /* of attention, in the layers that have one; 0: none has */
    uint8_t windowed[LLAMA_MAX_LAYERS / 8]; /* one bit per layer */
    bool tied;                              /* the head is the embedding */
    vjp_dtype dtype;                        /* of the stored weights */
    int64_t begin_token;                    /* -1: none */
    int64_t end_tokens[LLAMA_MAX_ENDS];     /* any of them ends a text */
    int end_count;
} llama_config;

/* From the root of a config.json. False: `error` names the key, without the path. */
bool llama_config_read(const json_value *root, llama_config *config, char error[TRAIN_ERROR]);

/* The window of attention in a layer; 0: it sees all. */
int64_t llama_window(const llama_config *config, int64_t layer);

/*
 * The angle by which pair `i` of a head's elements is rotated at position 1; `local`: in layers with a window, where
 * the model has a rotation of its own for them.
 */
double llama_angle(const llama_config *config, bool local, int64_t i);

/* Whether the sizes are consistent; llama_config_read() has checked this. */
bool llama_config_check(const llama_config *config, char error[TRAIN_ERROR]);

/* As a config.json, which the caller frees. NULL: there is no memory. */
char *llama_config_write(const llama_config *config);

/* ---- Weights ----------------------------------------------------------------------------------------- */

enum { LLAMA_NAME = 96 };

typedef struct llama_weight {
    char name[LLAMA_NAME]; /* "model.layers.0.self_attn.q_proj.weight" */
    int ndim;
    int64_t shape[2]; /* [out, in]; one size of a norm or a bias */
} llama_weight;

/* Weights are numbered from 0 in the order of the computation. The config must have been checked. */
int64_t llama_weight_count(const llama_config *config);
llama_weight llama_weight_at(const llama_config *config, int64_t index);

/* The number of trained numbers in all of them. */
int64_t llama_size(const llama_config *config);

/*
 * Whether a checkpoint has all of them in these shapes, and no others: a look before the model is built, which takes
 * long for thousands of layers.
 */
struct checkpoint;
bool llama_require_weights(const llama_config *config, const struct checkpoint *from, char error[TRAIN_ERROR]);

/* ---- Presets ----------------------------------------------------------------------------------------- */

/* Rows of text, and the most tokens of a row where a model may have more: 131072 positions fill any memory. */
enum { LLAMA_USUAL_BATCH = 8, LLAMA_USUAL_CONTEXT = 1024 };

typedef struct llama_preset {
    const char *name;
    int64_t batch; /* rows, by default */
    llama_config config;
} llama_preset;

#define LLAMA_PRESETS "tiny, small, medium, large, 124M, 350M, 1.1B or 7B" /* for help texts */

extern const llama_preset llama_presets[];
extern const int llama_preset_count;

/* NULL if the name is unknown; `error` lists the presets. */
const llama_preset *llama_preset_find(const char *name, char error[TRAIN_ERROR]);

#endif
