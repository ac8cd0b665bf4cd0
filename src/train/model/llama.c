/* SPDX-License-Identifier: MIT */
/* Llama, with the names and shapes of Hugging Face: every weight is [out, in]. */
#include "train/model/llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Initial weights as in GPT-2 and Llama: projections into the residual stream are smaller in deeper models. */
static const double INITIAL_SPREAD = 0.02;

typedef struct building {
    train_model *model;
    const llama_config *config;
    const llama_options *options;
    vjp_value cosine, sine;
    double residual_spread;
} building;

static vjp_value in_type(building *b, vjp_value x, vjp_dtype dtype) {
    vjp_graph *graph = b->model->graph;
    return vjp_graph_describe(graph, x).dtype == (int)dtype ? x : vjp_graph_cast(graph, x, dtype);
}

/* A weight in the dtype of the products. */
static vjp_value weight(building *b, const char *name, double spread, int64_t out, int64_t in) {
    return in_type(b, model_add(b->model, name, 0, spread, true, 2, (const int64_t[]){out, in}), b->options->dtype);
}

/* What joins the residual stream, in its dtype. */
static vjp_value joining(building *b, vjp_value x) {
    return b->options->wide_residual ? in_type(b, x, b->model->parameter_type) : x;
}

static vjp_value project(building *b, vjp_value x, const char *prefix, const char *name, double spread, int64_t out,
                         int64_t in) {
    char full[MODEL_NAME];
    snprintf(full, sizeof full, "%s.%s.weight", prefix, name);
    return model_linear(b->model->graph, x, weight(b, full, spread, out, in), 0, VJP_ACTIVATION_NONE);
}

static vjp_value norm(building *b, vjp_value x, const char *prefix, const char *name) {
    char full[MODEL_NAME];
    snprintf(full, sizeof full, "%s.%s.weight", prefix, name);
    vjp_value gamma = model_add(b->model, full, 1, 0, false, 1, &b->config->hidden_size);
    vjp_rms_norm_attributes norm = VJP_RMS_NORM_DEFAULTS;
    norm.eps = b->config->norm_eps;
    return in_type(b, vjp_graph_rms_norm(b->model->graph, x, gamma, 0, &norm), b->options->dtype);
}

static vjp_value heads_of(building *b, vjp_value x, int64_t heads) {
    return vjp_graph_reshape(b->model->graph, x, 4,
                             (const int64_t[]){b->options->batch, b->options->context, heads, b->config->head_dim});
}

static vjp_value attend(building *b, vjp_value x, const char *prefix) {
    vjp_graph *graph = b->model->graph;
    const llama_config *c = b->config;
    int64_t width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    vjp_value q =
        heads_of(b, project(b, x, prefix, "self_attn.q_proj", INITIAL_SPREAD, width, c->hidden_size), c->heads);
    vjp_value k =
        heads_of(b, project(b, x, prefix, "self_attn.k_proj", INITIAL_SPREAD, kv_width, c->hidden_size), c->kv_heads);
    vjp_value v =
        heads_of(b, project(b, x, prefix, "self_attn.v_proj", INITIAL_SPREAD, kv_width, c->hidden_size), c->kv_heads);
    q = vjp_graph_rope(graph, q, b->cosine, b->sine, 0, NULL);
    k = vjp_graph_rope(graph, k, b->cosine, b->sine, 0, NULL);
    vjp_value y = vjp_graph_attention(graph, q, k, v, NULL);
    y = vjp_graph_reshape(graph, y, 3, (const int64_t[]){b->options->batch, b->options->context, width});
    return project(b, y, prefix, "self_attn.o_proj", b->residual_spread, c->hidden_size, width);
}

static vjp_value feed_forward(building *b, vjp_value x, const char *prefix) {
    const llama_config *c = b->config;
    vjp_value gate = project(b, x, prefix, "mlp.gate_proj", INITIAL_SPREAD, c->intermediate_size, c->hidden_size);
    vjp_value up = project(b, x, prefix, "mlp.up_proj", INITIAL_SPREAD, c->intermediate_size, c->hidden_size);
    vjp_value y = vjp_graph_swiglu(b->model->graph, gate, up);
    return project(b, y, prefix, "mlp.down_proj", b->residual_spread, c->hidden_size, c->intermediate_size);
}

static vjp_value block(building *b, vjp_value x, int64_t layer) {
    vjp_graph *graph = b->model->graph;
    char prefix[MODEL_NAME / 2];
    snprintf(prefix, sizeof prefix, "model.layers.%lld", (long long)layer);
    vjp_graph_push(graph, prefix);
    bool recompute = layer < b->options->recompute;
    if (recompute) vjp_graph_recompute_begin(graph);
    vjp_value y = attend(b, norm(b, x, prefix, "input_layernorm"), prefix);
    x = vjp_graph_add(graph, x, joining(b, y), NULL);
    y = feed_forward(b, norm(b, x, prefix, "post_attention_layernorm"), prefix);
    x = vjp_graph_add(graph, x, joining(b, y), NULL);
    if (recompute) vjp_graph_recompute_end(graph);
    vjp_graph_pop(graph);
    return x;
}

/* cos and sin of position * theta^(-2i/dim). False: no memory. */
static bool add_rotations(building *b) {
    int64_t half = b->config->head_dim / 2, time = b->options->context;
    const int64_t shape[] = {time, half};
    float *cosine = malloc(sizeof(float) * (size_t)(time * half) + 1);
    float *sine = malloc(sizeof(float) * (size_t)(time * half) + 1);
    bool ok = cosine && sine;
    for (int64_t t = 0; t < time && ok; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)t * pow(b->config->rope_theta, -2.0 * (double)i / (double)b->config->head_dim);
            cosine[t * half + i] = (float)cos(angle);
            sine[t * half + i] = (float)sin(angle);
        }
    if (ok) {
        b->cosine = vjp_graph_constant(b->model->graph, "rope.cosine", VJP_F32, 2, shape, cosine);
        b->sine = vjp_graph_constant(b->model->graph, "rope.sine", VJP_F32, 2, shape, sine);
    }
    free(cosine);
    free(sine);
    return ok;
}

void llama_build(train_model *model, const llama_config *config, const llama_options *options) {
    *model = (train_model){.graph = vjp_graph_create(),
                           .batch = options->batch,
                           .context = options->context,
                           .parameter_type = options->dtype == VJP_F64 ? VJP_F64 : VJP_F32};
    vjp_graph *graph = model->graph;
    building b = {.model = model,
                  .config = config,
                  .options = options,
                  .residual_spread = INITIAL_SPREAD / sqrt(2.0 * (double)config->layers)};
    const int64_t tokens[] = {options->batch, options->context};
    model->input = vjp_graph_input(graph, "tokens", VJP_I32, 2, tokens);
    model->target = vjp_graph_input(graph, "targets", VJP_I32, 2, tokens);
    if (!add_rotations(&b)) return;

    vjp_value table = weight(&b, "model.embed_tokens.weight", INITIAL_SPREAD, config->vocab_size, config->hidden_size);
    vjp_value x = joining(&b, vjp_graph_gather(graph, table, model->input, NULL));
    for (int64_t layer = 0; layer < config->layers; layer++)
        x = block(&b, x, layer);
    x = norm(&b, x, "model", "norm");
    vjp_value head =
        config->tied ? table : weight(&b, "lm_head.weight", INITIAL_SPREAD, config->vocab_size, config->hidden_size);
    model->logits = model_linear(graph, x, head, 0, VJP_ACTIVATION_NONE);
    /* Not from the logits, which only sampling needs: they would be the largest tensor of all. */
    vjp_linear_cross_entropy_attributes loss = VJP_LINEAR_CROSS_ENTROPY_DEFAULTS;
    loss.label_smoothing = options->label_smoothing;
    model->loss = vjp_graph_linear_cross_entropy(graph, x, head, model->target, &loss);
}
