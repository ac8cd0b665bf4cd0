/* SPDX-License-Identifier: MIT */
/*
 * A model, as the trainer sees it: a graph with a loss, and a list of parameters with their initial values and whether
 * they decay. llama.c and convnet.c each build one with the public graph API.
 */
#ifndef VJP_TRAIN_MODEL_H
#define VJP_TRAIN_MODEL_H

#include <stdbool.h>

#include "files/safetensors.h"
#include "train/fail.h"
#include "vjp.h"

enum { MODEL_NAME = 96 };

typedef struct model_parameter {
    char name[MODEL_NAME];
    vjp_value value;
    double spread; /* standard deviation of the initial values; of uniform ones, the largest distance from the mean */
    double centre; /* their mean */
    bool uniform;  /* not normal */
    bool decays;   /* matrices do, norms and biases do not */
    bool outer;    /* an embedding or a head, which Muon does not train */
    bool frozen;   /* not trained: it is loaded, and has no gradient */
} model_parameter;

/* All zero is an empty model, safe to free. */
typedef struct train_model {
    vjp_graph *graph;
    vjp_value input, target; /* i32 tokens or f32 pictures; i32 */
    vjp_value first;         /* i32, of the targets' shape: attention's first key of each token; 0: none */
    vjp_value loss;          /* rank 0, f32 */
    vjp_value logits;
    int64_t batch, context;   /* context: tokens per row; 1 for pictures */
    vjp_dtype parameter_type; /* of those that are trained: f32; f64 only for gradient checks */
    model_parameter *parameter;
    int parameters, room;
} train_model;

/* Lets the graph fail, so that compiling it says why: there is no memory for `what`. Returns 0. */
vjp_value model_out_of_memory(train_model *model, const char *what);

/* Adds a parameter to the graph and to the list. 0: the graph has failed. */
vjp_value model_add(train_model *model, const char *name, double centre, double spread, bool decays, int ndim,
                    const int64_t *shape);

/* The same for a matrix of uniform initial values between -bound and bound. */
vjp_value model_add_uniform(train_model *model, const char *name, double bound, int64_t out, int64_t in);

/* The same for a parameter that is not trained and has a dtype of its own. */
vjp_value model_add_frozen(train_model *model, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape);

/* y = act(x weight^T + bias), the weight stored [out, in]. */
vjp_value model_linear(vjp_graph *graph, vjp_value x, vjp_value weight, vjp_value bias, vjp_activation activation);

/* The mean cross-entropy. */
vjp_value model_loss(vjp_graph *graph, vjp_value logits, vjp_value target, double label_smoothing);

void model_free(train_model *model);

/* The number of numbers in all parameters, and in those that are trained. */
int64_t model_size(const train_model *model);
int64_t model_trained_size(const train_model *model);

/* Whether a parameter decays, for vjp_minimize_options; `model` is a train_model. */
int model_decays(void *model, const char *name, const vjp_tensor *parameter);

/* Marks the parameter of that name, if there is one, as an embedding or a head. */
void model_mark_outer(train_model *model, const char *name);

/* Whether a parameter is not one of these, for vjp_minimize_options; `model` is a train_model. */
int model_is_hidden(void *model, const char *name, const vjp_tensor *parameter);

/* Copies a tensor of a file, f32, bf16 or f16, to a parameter or a state of a program. False: another shape. */
bool model_load(const train_model *model, vjp_program *program, vjp_value value, const safetensors_tensor *tensor,
                char error[TRAIN_ERROR]);

/* Reads a tensor of a file to `to`, in the shape and dtype of `want`: f32, bf16 or f16. */
bool model_read(const safetensors_tensor *tensor, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]);

#endif
