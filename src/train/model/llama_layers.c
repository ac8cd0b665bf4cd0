/* SPDX-License-Identifier: MIT */
/* The rotations and the windows of attention of a model's layers, as its config.json has them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "train/model/llama_read.h"

static const int64_t MAX_TOKENS = INT32_MAX;

/* The defaults of transformers: a window's length, how many of Qwen's layers have none, which of Gemma's have none. */
static const int64_t DEFAULT_WINDOW = 4096, DEFAULT_FULL_LAYERS = 28, DEFAULT_PATTERN = 6;

/* ---- Reading rotations ------------------------------------------------------------------------------- */

/* The kind of a rotation, by "rope_type" or, in older files, "type". */
static bool read_rope_kind(const json_value *rope, const char *name, llama_config *c, char *error) {
    static const char *const keys[] = {"rope_type", "type"}, *const kinds[] = {"default", "linear", "llama3"};
    char key[64];
    for (size_t i = 0; i < COUNT(keys); i++) {
        if (!json_has(rope, keys[i])) continue;
        const json_value *kind = json_member(rope, keys[i]);
        size_t found = 0;
        while (found < COUNT(kinds) && !is_text(kind, kinds[found]))
            found++;
        snprintf(key, sizeof key, "%s.%s", name, keys[i]);
        if (found == COUNT(kinds)) return refuse(key, kind, "\"default\", \"linear\" or \"llama3\"", error);
        c->rope.kind = (int)found == 0 ? LLAMA_ROPE_DEFAULT : (int)found == 1 ? LLAMA_ROPE_LINEAR : LLAMA_ROPE_LLAMA3;
    }
    return true;
}

/* One rotation; `name` is where it is. */
static bool read_rope_object(const json_value *rope, const char *name, llama_config *c, char *error) {
    static const char *const known[] = {"rope_type",
                                        "type",
                                        "rope_theta",
                                        "factor",
                                        "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings",
                                        "partial_rotary_factor"};
    char key[64];
    if (!rope || rope->type == JSON_NULL) return true;
    if (rope->type != JSON_OBJECT) return refuse(name, rope, "an object", error);
    if (!read_rope_kind(rope, name, c, error)) return false;
    for (const json_value *v = rope->first; v; v = v->next) {
        snprintf(key, sizeof key, "%s.%.32s", name, v->key);
        if (v->type == JSON_OBJECT || v->type == JSON_ARRAY)
            return refuse(key, v, "one rotation for all layers", error);
        if (v->type != JSON_NULL && !is_one_of(v->key, known, COUNT(known))) return unknown(key, v, error);
    }
    const json_value *partial = json_member(rope, "partial_rotary_factor");
    snprintf(key, sizeof key, "%s.partial_rotary_factor", name);
    if (partial && partial->type != JSON_NULL && !(partial->type == JSON_NUMBER && partial->number == 1))
        return refuse(key, partial, "1", error);
    llama_rope_scaling *scaling = &c->rope;
    return read_real(rope, "rope_theta", &c->rope_theta, error) && read_real(rope, "factor", &scaling->factor, error) &&
           read_real(rope, "low_freq_factor", &scaling->low, error) &&
           read_real(rope, "high_freq_factor", &scaling->high, error) &&
           read_integer(rope, "original_max_position_embeddings", &scaling->original_positions, error);
}

/*
 * "rope_parameters" of transformers 5, "rope_scaling" of 4. Where layers with a window have a rotation of their own, 5
 * has an object for each kind of layer, and 4 has "rope_local_base_freq".
 */
static bool read_rotations(const json_value *root, llama_config *c, char *error) {
    const json_value *both = json_member(root, "rope_parameters");
    if (!read_real(root, "rope_theta", &c->rope_theta, error) ||
        !read_rope_object(json_member(root, "rope_scaling"), "rope_scaling", c, error))
        return false;
    if (!c->gemma) return read_rope_object(both, "rope_parameters", c, error);
    if (!read_real(root, "rope_local_base_freq", &c->local_theta, error)) return false;
    if (!both || both->type == JSON_NULL) return true;
    if (both->type != JSON_OBJECT) return refuse("rope_parameters", both, "an object", error);
    for (const json_value *v = both->first; v; v = v->next) {
        llama_config own = {.rope_theta = c->local_theta};
        char name[64];
        snprintf(name, sizeof name, "rope_parameters.%.32s", v->key);
        bool local = strcmp(v->key, "sliding_attention") == 0;
        if (!local && strcmp(v->key, "full_attention") != 0) return unknown(name, v, error);
        if (!read_rope_object(v, name, local ? &own : c, error)) return false;
        if (local && own.rope.kind != LLAMA_ROPE_DEFAULT)
            return refuse(name, v, "a rotation of kind \"default\" in the layers with a window", error);
        if (local) c->local_theta = own.rope_theta;
    }
    return true;
}

bool llama_read_rope(const json_value *root, llama_config *c, char error[TRAIN_ERROR]) {
    if (!read_rotations(root, c, error)) return false;
    if (c->rope.kind == LLAMA_ROPE_LLAMA3 && !c->rope.original_positions) c->rope.original_positions = c->max_positions;
    /* What the kind does not use is forgotten, so that the file written has only what counts. */
    if (c->rope.kind != LLAMA_ROPE_LLAMA3) c->rope.low = c->rope.high = 0, c->rope.original_positions = 0;
    if (c->rope.kind == LLAMA_ROPE_DEFAULT) c->rope.factor = 0;
    return true;
}

bool llama_check_rope(const llama_config *c, char error[TRAIN_ERROR]) {
    const llama_rope_scaling *r = &c->rope;
    if (r->kind != LLAMA_ROPE_DEFAULT && (!(r->factor >= 1) || !isfinite(r->factor)))
        return train_fail(error, "the \"factor\" of the rotation's scaling is %g; vjp takes 1 or more", r->factor);
    if (r->kind != LLAMA_ROPE_LLAMA3) return true;
    if (!(r->low > 0) || !(r->high > r->low) || !isfinite(r->high))
        return train_fail(error, "\"low_freq_factor\" is %g and \"high_freq_factor\" is %g; vjp takes 0 < low < high",
                          r->low, r->high);
    return (r->original_positions >= 1 && r->original_positions <= MAX_TOKENS) ||
           train_fail(error, "\"original_max_position_embeddings\" is %" PRId64 "; vjp takes 1 to %" PRId64,
                      r->original_positions, MAX_TOKENS);
}

/* ---- Rotations --------------------------------------------------------------------------------------- */

double llama_angle(const llama_config *c, bool local, int64_t i) {
    static const double TURN = 6.283185307179586;
    const llama_rope_scaling *r = &c->rope;
    bool own = local && c->local_theta > 0;
    double angle = pow(own ? c->local_theta : c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
    if (own || r->kind == LLAMA_ROPE_DEFAULT) return angle;
    if (r->kind == LLAMA_ROPE_LINEAR) return angle / r->factor;
    /* llama3: turns within the original context; few turns shrink by the factor, many stay, between them a mixture. */
    double turns = (double)r->original_positions * angle / TURN;
    double kept = fmin(1, fmax(0, (turns - r->low) / (r->high - r->low)));
    return (1 - kept) * angle / r->factor + kept * angle;
}

/* ---- Windows of attention ---------------------------------------------------------------------------- */

static void set_windowed(llama_config *c, int64_t layer, bool windowed) {
    uint8_t bit = (uint8_t)(1u << layer % 8), *byte = &c->windowed[layer / 8];
    *byte = (uint8_t)(windowed ? *byte | bit : *byte & ~bit);
}

static bool is_windowed(const llama_config *c, int64_t layer) {
    return c->windowed[layer / 8] >> layer % 8 & 1;
}

int64_t llama_window(const llama_config *config, int64_t layer) {
    return is_windowed(config, layer) ? config->window : 0;
}

/* "layer_types" names each layer; a family whose layers are all alike must have it so. */
static bool read_layer_types(const json_value *root, llama_config *c, char *error) {
    const json_value *types = json_member(root, "layer_types");
    if (!types || types->type == JSON_NULL) return true;
    if (types->type != JSON_ARRAY || types->count != (size_t)c->layers)
        return train_fail(error, "\"layer_types\" must be a list of %" PRId64 " names, one per layer", c->layers);
    int64_t layer = 0;
    for (const json_value *v = types->first; v; v = v->next, layer++) {
        bool windowed = is_text(v, "sliding_attention");
        if (!windowed && !is_text(v, "full_attention"))
            return refuse("layer_types", v, "\"full_attention\" and \"sliding_attention\"", error);
        if (windowed && !c->window)
            return train_fail(error, "\"layer_types\" has \"sliding_attention\", but no window is set");
        if (llama_families[c->family].windows == LLAMA_ALL_WINDOWED && windowed != is_windowed(c, layer))
            return refuse("layer_types", v, "layers that are all alike in this family", error);
        set_windowed(c, layer, windowed);
    }
    return true;
}

/* How often a layer has no window: 0: never. */
static bool read_pattern(const json_value *root, const llama_config *c, int64_t *pattern, char *error) {
    static const char *const keys[] = {"_sliding_window_pattern", "sliding_window_pattern"};
    *pattern = 0;
    if (llama_families[c->family].windows != LLAMA_PATTERN_WINDOWED) return true;
    *pattern = DEFAULT_PATTERN;
    for (size_t i = 0; i < COUNT(keys); i++)
        if (!read_integer(root, keys[i], pattern, error)) return false;
    return *pattern >= 1 ||
           train_fail(error, "\"sliding_window_pattern\" is %" PRId64 "; vjp takes 1 or more", *pattern);
}

/*
 * As transformers: the layers from max_window_layers have the window, or all but every sixth, unless layer_types says
 * otherwise.
 */
bool llama_read_windows(const json_value *root, llama_config *c, char error[TRAIN_ERROR]) {
    const llama_windows windows = llama_families[c->family].windows;
    bool used = windows == LLAMA_ALL_WINDOWED || windows == LLAMA_PATTERN_WINDOWED;
    int64_t full = windows == LLAMA_SOME_WINDOWED ? DEFAULT_FULL_LAYERS : 0, window = DEFAULT_WINDOW, pattern;
    if (!read_pattern(root, c, &pattern, error)) return false;
    if (windows == LLAMA_SOME_WINDOWED && (!read_boolean(root, "use_sliding_window", &used, error) ||
                                           !read_integer(root, "max_window_layers", &full, error)))
        return false;
    if (windows != LLAMA_NOT_WINDOWED && !read_integer(root, "sliding_window", &window, error)) return false;
    const json_value *given = json_member(root, "sliding_window");
    if (given && given->type == JSON_NULL) used = false;
    if (used && (window < 1 || window > MAX_TOKENS))
        return train_fail(error, "\"sliding_window\" is %" PRId64 "; vjp takes 1 to %" PRId64 ", or null", window,
                          MAX_TOKENS);
    if (used) c->window = window;
    for (int64_t layer = 0; layer < c->layers && used; layer++)
        set_windowed(c, layer, layer >= full && (!pattern || (layer + 1) % pattern));
    if (!read_layer_types(root, c, error)) return false;
    bool any = false;
    for (int64_t layer = 0; layer < c->layers; layer++)
        any = any || is_windowed(c, layer);
    if (!any) c->window = 0;
    return true;
}
