/* SPDX-License-Identifier: MIT */
/*
 * Llama and its relatives, with the names and shapes of Hugging Face: every weight is [out, in]. Families differ in
 * what their config says (biases, norms of heads, a window, scaled rotations, Gemma's norms and gate), not in code of
 * their own.
 */
#include "train/model/llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/half.h"

/* Initial weights as in GPT-2 and Llama: projections into the residual stream are smaller in deeper models. */
static const double INITIAL_SPREAD = 0.02;

typedef struct building {
    train_model *model;
    const llama_config *config;
    const llama_options *options;
    vjp_value cosine[2], sine[2]; /* of layers that see all, and of those with a window */
    vjp_value one;                /* Gemma: what its norms add to their weights */
    double residual_spread;
} building;

static vjp_value in_type(building *b, vjp_value x, vjp_dtype dtype) {
    vjp_graph *graph = b->model->graph;
    return vjp_graph_describe(graph, x).dtype == (int)dtype ? x : vjp_graph_cast(graph, x, dtype);
}

/* A parameter; with adapters it is frozen, in `dtype`. */
static vjp_value parameter(building *b, const char *name, double centre, double spread, vjp_dtype dtype, int ndim,
                           const int64_t *shape) {
    if (b->options->lora.rank) return model_add_frozen(b->model, name, dtype, ndim, shape);
    return model_add(b->model, name, centre, spread, ndim > 1, ndim, shape);
}

/* A weight in the dtype of the products. Frozen, it needs no f32 copy, which only small steps would need. */
static vjp_value weight(building *b, const char *name, double spread, int64_t out, int64_t in) {
    vjp_dtype dtype = b->options->dtype;
    return in_type(b, parameter(b, name, 0, spread, dtype, 2, (const int64_t[]){out, in}), dtype);
}

/* What joins the residual stream, in its dtype. */
static vjp_value joining(building *b, vjp_value x) {
    return b->options->wide_residual ? in_type(b, x, b->model->parameter_type) : x;
}

/* A linear layer of a block: [..., in] to [..., out]. */
typedef struct projection {
    const char *name;
    int64_t out, in;
    bool bias;
    double spread;
} projection;

/*
 * What an adapter adds to a projection of x: scale (x A^T) B^T. The scale is applied to the product with A, which is
 * the smaller one.
 */
static vjp_value adapt(building *b, vjp_value x, const projection *p, const char *down_name, const char *up_name) {
    vjp_graph *graph = b->model->graph;
    const lora_config *lora = &b->options->lora;
    vjp_value down = model_add_uniform(b->model, down_name, 1 / sqrt((double)p->in), lora->rank, p->in);
    vjp_value up = model_add(b->model, up_name, 0, 0, true, 2, (const int64_t[]){p->out, lora->rank});
    vjp_scale_attributes scale = VJP_SCALE_DEFAULTS;
    scale.factor = lora_scale(lora);
    vjp_value low = model_linear(graph, x, in_type(b, down, b->options->dtype), 0, VJP_ACTIVATION_NONE);
    low = vjp_graph_scale(graph, low, &scale);
    return model_linear(graph, low, in_type(b, up, b->options->dtype), 0, VJP_ACTIVATION_NONE);
}

/* Adapters add to what is activated, which is inside of linear: only a projection without activation can have one. */
static vjp_value project_to(building *b, vjp_value x, const char *prefix, const projection *p,
                            vjp_activation activation) {
    char full[MODEL_NAME], down[LLAMA_NAME], up[LLAMA_NAME];
    snprintf(full, sizeof full, "%s.%s.weight", prefix, p->name);
    bool adapts = lora_adapts(&b->options->lora, full, down, up);
    vjp_value matrix = weight(b, full, p->spread, p->out, p->in);
    snprintf(full, sizeof full, "%s.%s.bias", prefix, p->name);
    vjp_value bias = p->bias ? parameter(b, full, 0, 0, b->model->parameter_type, 1, &p->out) : 0;
    vjp_value y = model_linear(b->model->graph, x, matrix, bias, activation);
    return adapts ? vjp_graph_add(b->model->graph, y, adapt(b, x, p, down, up), NULL) : y;
}

static vjp_value project(building *b, vjp_value x, const char *prefix, const projection *p) {
    return project_to(b, x, prefix, p, VJP_ACTIVATION_NONE);
}

static vjp_value norm(building *b, vjp_value x, const char *prefix, const char *name, int64_t size) {
    char full[MODEL_NAME];
    snprintf(full, sizeof full, "%s.%s.weight", prefix, name);
    vjp_value gamma = parameter(b, full, b->config->gemma ? 0 : 1, 0, b->model->parameter_type, 1, &size);
    if (b->config->gemma) gamma = vjp_graph_add(b->model->graph, gamma, b->one, NULL);
    vjp_rms_norm_attributes norm = VJP_RMS_NORM_DEFAULTS;
    norm.eps = b->config->norm_eps;
    return in_type(b, vjp_graph_rms_norm(b->model->graph, x, gamma, 0, &norm), b->options->dtype);
}

static vjp_value heads_of(building *b, vjp_value x, int64_t heads) {
    return vjp_graph_reshape(b->model->graph, x, 4,
                             (const int64_t[]){b->options->batch, b->options->context, heads, b->config->head_dim});
}

static vjp_value attend(building *b, vjp_value x, const char *prefix, int64_t layer) {
    vjp_graph *graph = b->model->graph;
    const llama_config *c = b->config;
    const int64_t hidden = c->hidden_size, width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    const projection to_q = {"self_attn.q_proj", width, hidden, c->qkv_bias, INITIAL_SPREAD};
    const projection to_k = {"self_attn.k_proj", kv_width, hidden, c->qkv_bias, INITIAL_SPREAD};
    const projection to_v = {"self_attn.v_proj", kv_width, hidden, c->qkv_bias, INITIAL_SPREAD};
    const projection out = {"self_attn.o_proj", hidden, width, c->output_bias, b->residual_spread};
    vjp_value q = heads_of(b, project(b, x, prefix, &to_q), c->heads);
    vjp_value k = heads_of(b, project(b, x, prefix, &to_k), c->kv_heads);
    vjp_value v = heads_of(b, project(b, x, prefix, &to_v), c->kv_heads);
    if (c->head_norms) {
        q = norm(b, q, prefix, "self_attn.q_norm", c->head_dim);
        k = norm(b, k, prefix, "self_attn.k_norm", c->head_dim);
    }
    int64_t window = llama_window(c, layer);
    vjp_value cosine = b->cosine[window > 0], sine = b->sine[window > 0];
    q = vjp_graph_rope(graph, q, cosine, sine, 0, NULL);
    k = vjp_graph_rope(graph, k, cosine, sine, 0, NULL);
    vjp_attention_attributes attention = VJP_ATTENTION_DEFAULTS;
    if (c->query_scalar > 0) attention.scale = 1 / sqrt((double)c->query_scalar);
    /* A window that is no shorter than the context hides nothing. */
    attention.window = window < b->options->context ? window : 0;
    vjp_value y = vjp_graph_attention(graph, q, k, v, b->model->first, &attention);
    y = vjp_graph_reshape(graph, y, 3, (const int64_t[]){b->options->batch, b->options->context, width});
    return project(b, y, prefix, &out);
}

static vjp_value feed_forward(building *b, vjp_value x, const char *prefix) {
    const llama_config *c = b->config;
    const int64_t hidden = c->hidden_size, inner = c->intermediate_size;
    const projection to_gate = {"mlp.gate_proj", inner, hidden, c->mlp_bias, INITIAL_SPREAD};
    const projection to_up = {"mlp.up_proj", inner, hidden, c->mlp_bias, INITIAL_SPREAD};
    const projection down = {"mlp.down_proj", hidden, inner, c->mlp_bias, b->residual_spread};
    vjp_value gate = project_to(b, x, prefix, &to_gate, c->gemma ? VJP_ACTIVATION_GELU_TANH : VJP_ACTIVATION_NONE);
    vjp_value up = project(b, x, prefix, &to_up);
    vjp_graph *graph = b->model->graph;
    vjp_value gated = c->gemma ? vjp_graph_mul(graph, gate, up, NULL) : vjp_graph_swiglu(graph, gate, up);
    return project(b, gated, prefix, &down);
}

static vjp_value block(building *b, vjp_value x, int64_t layer) {
    vjp_graph *graph = b->model->graph;
    char prefix[MODEL_NAME / 2];
    snprintf(prefix, sizeof prefix, "model.layers.%lld", (long long)layer);
    vjp_graph_push(graph, prefix);
    bool whole = layer < b->options->recompute, second = !whole && layer < b->options->recompute_mlp;
    if (whole) vjp_graph_recompute_begin(graph);
    const int64_t hidden = b->config->hidden_size;
    const bool gemma = b->config->gemma; /* its post_attention_layernorm is behind attention, not before what follows */
    vjp_value y = attend(b, norm(b, x, prefix, "input_layernorm", hidden), prefix, layer);
    if (gemma) y = norm(b, y, prefix, "post_attention_layernorm", hidden);
    x = vjp_graph_add(graph, x, joining(b, y), NULL);
    if (second) vjp_graph_recompute_begin(graph);
    const char *before = gemma ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    y = feed_forward(b, norm(b, x, prefix, before, hidden), prefix);
    if (gemma) y = norm(b, y, prefix, "post_feedforward_layernorm", hidden);
    x = vjp_graph_add(graph, x, joining(b, y), NULL);
    if (whole || second) vjp_graph_recompute_end(graph);
    vjp_graph_pop(graph);
    return x;
}

/* cos and sin of position * llama_angle(i). False: no memory. */
static bool add_rotation(building *b, bool local) {
    int64_t half = b->config->head_dim / 2, time = b->options->context;
    const int64_t shape[] = {time, half};
    float *cosine = malloc(sizeof(float) * (size_t)(time * half) + 1);
    float *sine = malloc(sizeof(float) * (size_t)(time * half) + 1);
    bool ok = cosine && sine;
    for (int64_t t = 0; t < time && ok; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)t * llama_angle(b->config, local, i);
            cosine[t * half + i] = (float)cos(angle);
            sine[t * half + i] = (float)sin(angle);
        }
    if (ok) {
        vjp_graph *graph = b->model->graph;
        b->cosine[local] =
            vjp_graph_constant(graph, local ? "rope.local.cosine" : "rope.cosine", VJP_F32, 2, shape, cosine);
        b->sine[local] = vjp_graph_constant(graph, local ? "rope.local.sine" : "rope.sine", VJP_F32, 2, shape, sine);
    }
    free(cosine);
    free(sine);
    if (!ok) model_out_of_memory(b->model, "the tables of rope");
    return ok;
}

/* The tables of rotations, and Gemma's 1. False: no memory. */
static bool add_constants(building *b) {
    static const double one = 1;
    static const float single = 1;
    vjp_dtype dtype = b->model->parameter_type;
    if (b->config->gemma)
        b->one = vjp_graph_constant(b->model->graph, "one", dtype, 0, NULL,
                                    dtype == VJP_F64 ? (const void *)&one : (const void *)&single);
    if (!add_rotation(b, false)) return false;
    if (b->config->local_theta > 0) return add_rotation(b, true);
    b->cosine[1] = b->cosine[0];
    b->sine[1] = b->sine[0];
    return true;
}

/* The rows of the table; Gemma's are multiplied by a number that is rounded to their dtype. */
static vjp_value embed(building *b, vjp_value table) {
    vjp_graph *graph = b->model->graph;
    vjp_value x = vjp_graph_gather(graph, table, b->model->input, NULL);
    if (!b->config->gemma) return x;
    vjp_scale_attributes scale = VJP_SCALE_DEFAULTS;
    float factor = (float)sqrt((double)b->config->hidden_size);
    scale.factor = b->options->dtype == VJP_BF16  ? (double)vjp_bf16_to_f32(vjp_f32_to_bf16(factor))
                   : b->options->dtype == VJP_F16 ? (double)vjp_f16_to_f32(vjp_f32_to_f16(factor))
                                                  : (double)factor;
    return vjp_graph_scale(graph, x, &scale);
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
    if (options->masks) model->first = vjp_graph_input(graph, "first", VJP_I32, 2, tokens);
    if (!add_constants(&b)) return;

    vjp_value table = weight(&b, "model.embed_tokens.weight", INITIAL_SPREAD, config->vocab_size, config->hidden_size);
    vjp_value x = joining(&b, embed(&b, table));
    for (int64_t layer = 0; layer < config->layers; layer++)
        x = block(&b, x, layer);
    x = norm(&b, x, "model", "norm", config->hidden_size);
    vjp_value head =
        config->tied ? table : weight(&b, "lm_head.weight", INITIAL_SPREAD, config->vocab_size, config->hidden_size);
    model->logits = model_linear(graph, x, head, 0, VJP_ACTIVATION_NONE);
    /* Not from the logits, which only sampling needs: they would be the largest tensor of all. */
    vjp_linear_cross_entropy_attributes loss = VJP_LINEAR_CROSS_ENTROPY_DEFAULTS;
    loss.label_smoothing = options->label_smoothing;
    model->loss = vjp_graph_linear_cross_entropy(graph, x, head, model->target, &loss);
    model_mark_outer(model, "model.embed_tokens.weight");
    model_mark_outer(model, "lm_head.weight");
}
