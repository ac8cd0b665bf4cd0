/* SPDX-License-Identifier: MIT */
/*
 * Trains the network of lesson 05 on several processes, with the same losses to the last bit for any number of them:
 *
 *     ./07_several_processes                  alone
 *     mpirun -n 4 ./07_several_processes      each process computes a quarter of the points
 *
 * The points are split into shards. The gradients of the shards are added as a binary tree over the shard numbers:
 * each process adds its own block of shards, and vjp_group_sum() adds the blocks by the same tree.
 */
#include <math.h>
#include <stdio.h>

#include <vjp.h>

enum { POINTS = 256, SHARDS = 4, ROWS = POINTS / SHARDS, HIDDEN = 32, STEPS = 400, LAYERS = 3 };
enum { NUMBERS = 3 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 2 }; /* of all gradients together */

static const int64_t shape[LAYERS][2] = {{3, HIDDEN}, {HIDDEN, HIDDEN}, {HIDDEN, 2}};
static const char *const name[LAYERS] = {"first", "second", "last"};
static const char *const gradient_name[LAYERS] = {"first.grad", "second.grad", "last.grad"};

static float points[POINTS][3];
static int32_t labels[POINTS];
static vjp_value x, label, loss, weight[LAYERS], gradient[LAYERS], computed[LAYERS];
static vjp_program *program; /* the loss and gradients of one shard */

static size_t bytes_of(int layer) {
    return (size_t)(shape[layer][0] * shape[layer][1]) * sizeof(float);
}

/* The sum over shards [first, first + count), in `sum`; adds their losses, too. */
static vjp_status add_shards(int first, int count, float *sum, double *total) {
    vjp_status status = VJP_OK;
    if (count > 1) {
        float right[NUMBERS];
        status = add_shards(first, count / 2, sum, total);
        if (!status) status = add_shards(first + count / 2, count / 2, right, total);
        for (int i = 0; i < NUMBERS && !status; i++)
            sum[i] += right[i];
        return status;
    }
    float own;
    status = vjp_program_write(program, x, points[first * ROWS], ROWS * sizeof points[0]);
    if (!status) status = vjp_program_write(program, label, labels + first * ROWS, ROWS * sizeof labels[0]);
    if (!status) status = vjp_program_run(program);
    for (int i = 0; i < LAYERS && !status; sum += bytes_of(i++) / sizeof *sum)
        status = vjp_program_read(program, gradient[i], sum, bytes_of(i));
    if (!status) status = vjp_program_read(program, loss, &own, sizeof own);
    *total += own;
    return status;
}

int main(void) {
    for (int i = 0; i < POINTS; i++) {
        float t = (float)(i / 2) / (POINTS / 2), angle = 9 * t + 3.14159265f * (float)(labels[i] = i % 2);
        points[i][0] = t * cosf(angle), points[i][1] = t * sinf(angle), points[i][2] = 1;
    }

    vjp_graph *g = vjp_graph_create();
    x = vjp_graph_input(g, "x", VJP_F32, 2, (const int64_t[]){ROWS, 3});
    label = vjp_graph_input(g, "label", VJP_I32, 1, (const int64_t[]){ROWS});
    vjp_value h = x;
    for (int i = 0; i < LAYERS; i++) {
        vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
        linear.activation = i < LAYERS - 1 ? VJP_ACTIVATION_TANH : VJP_ACTIVATION_NONE;
        weight[i] = vjp_graph_parameter(g, name[i], VJP_F32, 2, shape[i]);
        gradient[i] = vjp_graph_state(g, gradient_name[i], VJP_F32, 2, shape[i]);
        h = vjp_graph_linear(g, h, weight[i], 0, 0, 0, &linear);
    }
    /* The mean over all points is the sum of the shards' means, each divided by their number. */
    vjp_scale_attributes share = VJP_SCALE_DEFAULTS;
    share.factor = 1.0 / SHARDS;
    loss = vjp_graph_scale(g, vjp_graph_cross_entropy(g, h, label, NULL), &share);
    vjp_graph_grad(g, loss, weight, LAYERS, gradient, 0, computed);
    vjp_minimize_options with = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    with.parameters = weight, with.gradients = gradient, with.count = LAYERS;
    vjp_minimize_result training = {.struct_size = sizeof training};
    vjp_graph_minimize(g, 0, &with, &training);

    vjp_device *device;
    vjp_group *group = NULL;
    vjp_program *update = NULL;
    const vjp_value results[] = {computed[0], computed[1], computed[2], loss};
    vjp_status status = vjp_open("cpu", NULL, &device);
    if (!status) status = vjp_group_open(device, "auto", NULL, &group);
    if (!status && SHARDS % vjp_group_size(group)) {
        fprintf(stderr, "%d processes cannot share %d shards\n", (int)vjp_group_size(group), SHARDS);
        status = VJP_INVALID;
    }
    if (!status) status = vjp_compile(device, g, results, 4, NULL, &program);
    vjp_program_options shared = VJP_PROGRAM_OPTIONS_DEFAULTS;
    shared.share = program;
    if (!status) status = vjp_compile(device, g, training.results, training.count, &shared, &update);
    if (!status) status = vjp_program_init(program, 1);
    for (int64_t step = 1; step <= STEPS && !status; step++) {
        float sum[NUMBERS], *at = sum;
        double losses[SHARDS] = {0}; /* of each process */
        int own = SHARDS / vjp_group_size(group), rank = vjp_group_rank(group);
        const int64_t numbers = NUMBERS;
        vjp_tensor all = vjp_tensor_of(sum, VJP_F32, 1, &numbers);
        status = add_shards(rank * own, own, sum, &losses[rank]);
        if (!status) status = vjp_group_sum(group, &all);
        if (!status) status = vjp_group_share(group, losses, sizeof losses[0]);
        for (int i = 0; i < LAYERS && !status; at += bytes_of(i++) / sizeof *at)
            status = vjp_program_write(update, gradient[i], at, bytes_of(i));
        if (!status) status = vjp_program_step(update, &training, 0.02, step, NULL);
        if (!status && rank == 0 && (step == 1 || step % 100 == 0))
            printf("step %3d  loss %.4f\n", (int)step, losses[0] + losses[1] + losses[2] + losses[3]);
    }
    if (status) fprintf(stderr, "%s\n", vjp_error(device));
    vjp_program_destroy(update);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_group_close(group);
    vjp_close(device);
    return status != VJP_OK;
}
