/* SPDX-License-Identifier: MIT */
/* Trains a small network to tell two spirals apart. */
#include <math.h>
#include <stdio.h>

#include <vjp.h>

enum { POINTS = 256, HIDDEN = 32, STEPS = 400 };

static vjp_value layer(vjp_graph *g, const char *name, vjp_value x, int64_t in, int64_t out,
                       vjp_activation activation) {
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.activation = activation;
    vjp_graph_push(g, name);
    vjp_value weight = vjp_graph_parameter(g, name, VJP_F32, 2, (const int64_t[]){in, out});
    x = vjp_graph_linear(g, x, weight, 0, 0, 0, &linear);
    vjp_graph_pop(g);
    return x;
}

int main(void) {
    float xs[POINTS][3];
    int32_t labels[POINTS];
    for (int i = 0; i < POINTS; i++) {
        float t = (float)(i / 2) / (POINTS / 2), angle = 9 * t + 3.14159265f * (float)(labels[i] = i % 2);
        xs[i][0] = t * cosf(angle), xs[i][1] = t * sinf(angle), xs[i][2] = 1;
    }

    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, (const int64_t[]){POINTS, 3}), h;
    vjp_value label = vjp_graph_input(g, "label", VJP_I32, 1, (const int64_t[]){POINTS});
    h = layer(g, "first", x, 3, HIDDEN, VJP_ACTIVATION_TANH);
    h = layer(g, "second", h, HIDDEN, HIDDEN, VJP_ACTIVATION_TANH);
    h = layer(g, "last", h, HIDDEN, 2, VJP_ACTIVATION_NONE);
    vjp_minimize_result training = {.struct_size = sizeof training};
    vjp_graph_minimize(g, vjp_graph_cross_entropy(g, h, label, NULL), NULL, &training);

    vjp_device *device;
    vjp_program *program = NULL;
    double loss;
    vjp_status status = vjp_open("cpu", NULL, &device);
    if (!status) status = vjp_compile(device, g, training.results, training.count, NULL, &program);
    if (!status) status = vjp_program_init(program, 1);
    if (!status) status = vjp_program_write(program, x, xs, sizeof xs);
    if (!status) status = vjp_program_write(program, label, labels, sizeof labels);
    for (int64_t step = 1; step <= STEPS && !status; step++) {
        status = vjp_program_step(program, &training, 0.02, step, &loss);
        if (!status && (step == 1 || step % 100 == 0)) printf("step %3d  loss %.4f\n", (int)step, loss);
    }
    if (status) fprintf(stderr, "%s\n", vjp_error(device));
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
    return status != VJP_OK;
}
