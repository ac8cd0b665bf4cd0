/* SPDX-License-Identifier: MIT */
/*
 * The network for pictures, channels last throughout, so that a linear layer mixes the features of each pixel. A stage
 * is convolution 3x3, group_norm, linear with gelu, pooling 2x2; after the last one come the mean over all pixels and a
 * linear layer with one output per class.
 */
#include "train/model/convnet.h"

#include <math.h>
#include <stdio.h>

enum { GROUP = 8 }; /* features normalised together */

typedef struct building {
    train_model *model;
    const convnet_options *options;
} building;

static vjp_value narrow(building *b, vjp_value x) {
    vjp_graph *graph = b->model->graph;
    return vjp_graph_describe(graph, x).dtype == (int)b->options->dtype ? x
                                                                        : vjp_graph_cast(graph, x, b->options->dtype);
}

/* A weight whose spread, sqrt(2 / inputs), keeps the scale of the activations. */
static vjp_value weight(building *b, const char *stage, const char *name, int64_t inputs, int ndim,
                        const int64_t *shape) {
    char full[MODEL_NAME];
    snprintf(full, sizeof full, "%s.%s.weight", stage, name);
    return narrow(b, model_add(b->model, full, 0, sqrt(2 / (double)inputs), true, ndim, shape));
}

static vjp_value vector(building *b, const char *stage, const char *name, double centre, int64_t size) {
    char full[MODEL_NAME];
    snprintf(full, sizeof full, "%s.%s", stage, name);
    return model_add(b->model, full, centre, 0, false, 1, &size);
}

static vjp_value stage(building *b, vjp_value x, int64_t number, int64_t in, int64_t out) {
    vjp_graph *graph = b->model->graph;
    char name[MODEL_NAME / 2];
    snprintf(name, sizeof name, "stages.%lld", (long long)number);
    vjp_graph_push(graph, name);
    vjp_conv2d_attributes conv = VJP_CONV2D_DEFAULTS;
    conv.padding_h = conv.padding_w = 1;
    conv.layout = VJP_LAYOUT_CHANNELS_LAST;
    vjp_group_norm_attributes norm = VJP_GROUP_NORM_DEFAULTS;
    norm.groups = out % GROUP ? 1 : out / GROUP;
    norm.layout = VJP_LAYOUT_CHANNELS_LAST;
    vjp_maxpool2d_attributes pool = VJP_MAXPOOL2D_DEFAULTS;
    pool.layout = VJP_LAYOUT_CHANNELS_LAST;
    /* One after the other: C leaves open in which order arguments are evaluated, and the order of parameters decides
     * the bits of their gradients' norm. */
    vjp_value kernel = weight(b, name, "conv", 9 * in, 4, (const int64_t[]){out, 3, 3, in});
    vjp_value kernel_bias = vector(b, name, "conv.bias", 0, out);
    x = vjp_graph_conv2d(graph, x, kernel, kernel_bias, &conv);
    vjp_value gamma = vector(b, name, "norm.weight", 1, out);
    vjp_value beta = vector(b, name, "norm.bias", 0, out);
    x = vjp_graph_group_norm(graph, x, gamma, beta, &norm);
    vjp_value mix = weight(b, name, "mix", out, 2, (const int64_t[]){out, out});
    vjp_value mix_bias = vector(b, name, "mix.bias", 0, out);
    x = model_linear(graph, x, mix, mix_bias, VJP_ACTIVATION_GELU_TANH);
    x = vjp_graph_maxpool2d(graph, x, &pool);
    vjp_graph_pop(graph);
    return x;
}

void convnet_build(train_model *model, const convnet_config *config, const convnet_options *options) {
    *model = (train_model){.graph = vjp_graph_create(),
                           .batch = options->batch,
                           .context = 1,
                           .parameter_type = options->dtype == VJP_F64 ? VJP_F64 : VJP_F32};
    vjp_graph *graph = model->graph;
    building b = {.model = model, .options = options};
    model->input = vjp_graph_input(graph, "pictures", VJP_F32, 4,
                                   (const int64_t[]){options->batch, config->height, config->width, config->channels});
    model->target = vjp_graph_input(graph, "classes", VJP_I32, 1, &options->batch);
    vjp_value x = narrow(&b, model->input);
    int64_t in = config->channels, out = config->features;
    for (int64_t i = 0; i < config->stages; i++) {
        x = stage(&b, x, i, in, out);
        in = out;
        out *= 2;
    }
    vjp_mean_attributes plane = VJP_MEAN_DEFAULTS;
    plane.axis = 1;
    plane.axes = 2;
    x = vjp_graph_mean(graph, x, &plane);
    vjp_value head = weight(&b, "head", "linear", in, 2, (const int64_t[]){config->classes, in});
    vjp_value head_bias = vector(&b, "head", "linear.bias", 0, config->classes);
    model->logits = model_linear(graph, x, head, head_bias, VJP_ACTIVATION_NONE);
    model->loss = model_loss(graph, model->logits, model->target, options->label_smoothing);
    model_mark_outer(model, "head.linear.weight");
}
