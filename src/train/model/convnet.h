/* SPDX-License-Identifier: MIT */
/* A network for small pictures: stages of convolution, group_norm, a linear layer and pooling. */
#ifndef VJP_TRAIN_CONVNET_H
#define VJP_TRAIN_CONVNET_H

#include "train/model/model.h"

typedef struct convnet_config {
    int64_t height, width, channels; /* of a picture, [height, width, channels] */
    int64_t classes;
    int64_t features; /* of the first stage; each later stage has twice as many */
    int64_t stages;   /* each halves the height and width */
} convnet_config;

typedef struct convnet_options {
    int64_t batch;
    vjp_dtype dtype; /* of activations and weights in products; parameters are f32 */
    double label_smoothing;
} convnet_options;

/* Builds the model. Errors are in vjp_graph_error(model->graph). */
void convnet_build(train_model *model, const convnet_config *config, const convnet_options *options);

#endif
