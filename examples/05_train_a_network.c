/* Trains a small network to tell two spirals apart: a graph, its gradients, a program, a loop. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vjp.h>

enum { POINTS = 256, HIDDEN = 32, LAYERS = 3, STEPS = 400 };

int main(void) {
    static const int64_t width[LAYERS + 1] = {2, HIDDEN, HIDDEN, 2}, points[] = {POINTS, 2};
    vjp_value w[2 * LAYERS], gradient[2 * LAYERS], result[2 * LAYERS + 1];

    /* The model: x goes through three linear layers; the loss compares with the label. */
    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, points), label = vjp_graph_input(g, "label", VJP_I32, 1, points);
    vjp_value rate = vjp_graph_input(g, "rate", VJP_F32, 0, NULL), step = vjp_graph_input(g, "step", VJP_I64, 0, NULL);
    vjp_value h = x;
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer%d.weight", i);
        w[2 * i] = vjp_graph_parameter(g, name, VJP_F32, 2, (const int64_t[]){width[i + 1], width[i]});
        snprintf(name, sizeof name, "layer%d.bias", i);
        w[2 * i + 1] = vjp_graph_parameter(g, name, VJP_F32, 1, &width[i + 1]);
        h = vjp_graph_linear(
            g, h, w[2 * i], w[2 * i + 1],
            &(vjp_linear_attributes){.struct_size = sizeof(vjp_linear_attributes),
                                     .activation = i + 1 < LAYERS ? VJP_ACTIVATION_TANH : VJP_ACTIVATION_NONE,
                                     .transpose_b = 1});
    }
    vjp_value loss = result[2 * LAYERS] = vjp_graph_cross_entropy(g, h, label, NULL);

    /* Its gradients, and a step of AdamW for each parameter, all in one program. */
    vjp_graph_grad(g, loss, w, 2 * LAYERS, NULL, 0, gradient);
    for (int i = 0; i < 2 * LAYERS; i++) {
        char m[32], v[32];
        snprintf(m, sizeof m, "m%d", i), snprintf(v, sizeof v, "v%d", i);
        vjp_tensor like = vjp_graph_describe(g, w[i]);
        result[i] =
            vjp_graph_adamw(g, w[i], vjp_graph_state(g, m, VJP_F32, like.ndim, like.shape),
                            vjp_graph_state(g, v, VJP_F32, like.ndim, like.shape), gradient[i], rate, step, 0, NULL);
    }
    vjp_device *device;
    vjp_program *program = NULL;
    vjp_status status = vjp_open("cpu", NULL, &device);
    if (status == VJP_OK) status = vjp_compile(device, g, result, 2 * LAYERS + 1, NULL, &program);

    /* Data, first weights, and the loop. */
    static float xs[POINTS][2], first[HIDDEN * HIDDEN];
    static int32_t labels[POINTS];
    for (int i = 0; i < POINTS; i++) {
        float t = (float)(i / 2) / (POINTS / 2), angle = 9 * t + 3.14159265f * (float)(labels[i] = i % 2);
        xs[i][0] = t * cosf(angle), xs[i][1] = t * sinf(angle);
    }
    for (int i = 0; i < LAYERS && status == VJP_OK; i++) {
        for (int k = 0; k < width[i] * width[i + 1]; k++)
            first[k] = ((float)rand() / (float)RAND_MAX - 0.5f) * 3 / sqrtf((float)width[i]);
        status = vjp_program_write(program, w[2 * i], first, sizeof(float) * (size_t)(width[i] * width[i + 1]));
    }
    if (status == VJP_OK) status = vjp_program_write(program, x, xs, sizeof xs);
    if (status == VJP_OK) status = vjp_program_write(program, label, labels, sizeof labels);
    for (int64_t t = 1; t <= STEPS && status == VJP_OK; t++) {
        float lr = 0.02f, value;
        status = vjp_program_write(program, rate, &lr, sizeof lr);
        if (status == VJP_OK) status = vjp_program_write(program, step, &t, sizeof t);
        if (status == VJP_OK) status = vjp_program_run(program);
        if (status == VJP_OK) status = vjp_program_read(program, loss, &value, sizeof value);
        if (status == VJP_OK && (t == 1 || t % 100 == 0)) printf("step %3d  loss %.4f\n", (int)t, value);
    }
    if (status != VJP_OK) fprintf(stderr, "%s\n", vjp_error(device));
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
    return status != VJP_OK;
}
