/* SPDX-License-Identifier: MIT */
/* What reading and writing a config.json share: the names of the families and of the dtypes. */
#ifndef VJP_TRAIN_LLAMA_FAMILIES_H
#define VJP_TRAIN_LLAMA_FAMILIES_H

#include "train/model/llama_config.h"

typedef enum llama_windows {
    LLAMA_NOT_WINDOWED,
    LLAMA_ALL_WINDOWED,
    LLAMA_SOME_WINDOWED,   /* where use_sliding_window says so, from max_window_layers on */
    LLAMA_PATTERN_WINDOWED /* all but every sliding_window_pattern-th */
} llama_windows;

typedef struct llama_family_info {
    const char *model_type, *architecture;
    int64_t positions, kv_heads, head_dim; /* defaults; 0: kv_heads as heads, head_dim as hidden_size / heads */
    llama_windows windows;                 /* which layers may have a window of attention */
    bool attention_bias, mlp_bias;         /* whether these settings exist */
    bool always_qkv_bias, head_norms;
    bool gemma; /* what is special to Gemma; such models are tied unless they say otherwise */
} llama_family_info;

extern const llama_family_info llama_families[LLAMA_FAMILIES];

typedef struct llama_dtype_name {
    const char *name;
    vjp_dtype dtype;
} llama_dtype_name;

enum { LLAMA_DTYPES = 4 };
extern const llama_dtype_name llama_dtype_names[LLAMA_DTYPES];

#endif
