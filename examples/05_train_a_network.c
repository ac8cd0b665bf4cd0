/* SPDX-License-Identifier: MIT */
/* Trains a small network to tell two spirals apart: a graph, one call for the training step, a program, a loop. */
#include <math.h>
#include <stdio.h>

#include <vjp.h>

enum { POINTS = 256, HIDDEN = 32, LAYERS = 3, STEPS = 400 };

int main(int argc, char **argv) {
    static const int64_t width[LAYERS + 1] = {2, HIDDEN, HIDDEN, 2}, points[] = {POINTS, 2};
    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, points), label = vjp_graph_input(g, "label", VJP_I32, 1, points);
    vjp_value h = x, weight[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        char name[2][16];
        snprintf(name[0], sizeof name[0], "weight%d", i), snprintf(name[1], sizeof name[1], "bias%d", i);
        vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
        linear.transpose_b = 1;
        if (i + 1 < LAYERS) linear.activation = VJP_ACTIVATION_TANH;
        weight[i] = vjp_graph_parameter(g, name[0], VJP_F32, 2, (const int64_t[]){width[i + 1], width[i]});
        h = vjp_graph_linear(g, h, weight[i], vjp_graph_parameter(g, name[1], VJP_F32, 1, &width[i + 1]), &linear);
    }
    vjp_value loss = vjp_graph_cross_entropy(g, h, label, NULL);
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    options.max_norm = 1;
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_graph_minimize(g, loss, &options, &made); /* vjp_compile() reports any mistake so far */

    float xs[POINTS][2], lr = 0.02f, value = 0;
    int32_t labels[POINTS];
    for (int i = 0; i < POINTS; i++) {
        float t = (float)(i / 2) / (POINTS / 2), angle = 9 * t + 3.14159265f * (float)(labels[i] = i % 2);
        xs[i][0] = t * cosf(angle), xs[i][1] = t * sinf(angle);
    }
    vjp_device *device;
    vjp_program *program = NULL;
    vjp_status status = vjp_open("cpu", NULL, &device);
    if (!status) status = vjp_compile(device, g, made.results, made.count, NULL, &program);
    for (int i = 0; i < LAYERS && !status; i++)
        status = vjp_program_init_kaiming(program, weight[i], 1);
    if (!status) status = vjp_program_write(program, x, xs, sizeof xs);
    if (!status) status = vjp_program_write(program, label, labels, sizeof labels);
    if (!status) status = vjp_program_write(program, made.lr, &lr, sizeof lr);
    for (int64_t step = 1; step <= STEPS && !status; step++) {
        status = vjp_program_write(program, made.step, &step, sizeof step);
        if (!status) status = vjp_program_run(program);
        if (!status) status = vjp_program_read(program, loss, &value, sizeof value);
        if (!status && (step == 1 || step % 100 == 0)) printf("step %3d  loss %.4f\n", (int)step, value);
    }
    if (!status && argc > 1) status = vjp_program_save(program, argv[1]);
    if (status) fprintf(stderr, "%s\n", vjp_error(device));
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
    return status != VJP_OK;
}
