/* SPDX-License-Identifier: MIT */
/*
 * What a program does that embeds the library, for tests/stress/faults: opens a device, builds a graph, compiles it,
 * trains for a few steps, saves, loads into a second program and trains on. Prints the two losses; on failure a
 * sentence, and exits with 1.
 *
 *     faults_program FILE.safetensors
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vjp.h>

enum { ROWS = 8, INPUTS = 6, HIDDEN = 10, CLASSES = 3, STEPS = 3, BROKEN = 1, MISUSE = 2 };

static float rows[ROWS][INPUTS];
static int32_t labels[ROWS];

typedef struct network {
    vjp_value x, label;
    vjp_minimize_result training;
} network;

static int fail(const char *what, const char *why) {
    fprintf(stderr, "faults_program: %s: %s\n", what, why);
    return BROKEN;
}

static vjp_status build(vjp_graph *graph, network *net) {
    vjp_linear_attributes hidden = VJP_LINEAR_DEFAULTS;
    hidden.activation = VJP_ACTIVATION_TANH;
    net->x = vjp_graph_input(graph, "x", VJP_F32, 2, (const int64_t[]){ROWS, INPUTS});
    net->label = vjp_graph_input(graph, "label", VJP_I32, 1, (const int64_t[]){ROWS});
    vjp_value first = vjp_graph_parameter(graph, "first", VJP_F32, 2, (const int64_t[]){INPUTS, HIDDEN});
    vjp_value last = vjp_graph_parameter(graph, "last", VJP_F32, 2, (const int64_t[]){HIDDEN, CLASSES});
    vjp_value h = vjp_graph_linear(graph, net->x, first, 0, 0, 0, &hidden);
    vjp_value loss = vjp_graph_cross_entropy(graph, vjp_graph_linear(graph, h, last, 0, 0, 0, NULL), net->label, NULL);
    net->training.struct_size = sizeof net->training;
    return vjp_graph_minimize(graph, loss, NULL, &net->training);
}

static vjp_status train(vjp_program *program, const network *net, int64_t from, double *loss) {
    vjp_status status = vjp_program_write(program, net->x, rows, sizeof rows);
    if (!status) status = vjp_program_write(program, net->label, labels, sizeof labels);
    for (int64_t step = from; step < from + STEPS && !status; step++)
        status = vjp_program_step(program, &net->training, 0.02, step, loss);
    return status;
}

static int run(vjp_device *device, vjp_graph *graph, const char *path) {
    network net;
    if (build(graph, &net)) return fail("building the graph", vjp_graph_error(graph));
    vjp_program *one = NULL, *two = NULL;
    double trained = 0, resumed = 0, expected = 0;
    const char *doing = "compiling";
    vjp_status status = vjp_compile(device, graph, net.training.results, net.training.count, NULL, &one);
    if (!status) doing = "training", status = vjp_program_init(one, 7);
    if (!status) status = train(one, &net, 1, &trained);
    if (!status) doing = "saving", status = vjp_program_save(one, path);
    if (!status) doing = "training on", status = train(one, &net, STEPS + 1, &expected);
    if (!status) doing = "compiling again";
    if (!status) status = vjp_compile(device, graph, net.training.results, net.training.count, NULL, &two);
    if (!status) doing = "loading", status = vjp_program_load(two, path);
    if (!status) doing = "training what was loaded", status = train(two, &net, STEPS + 1, &resumed);
    int result = status ? fail(doing, vjp_error(device)) : 0;
    if (!status && resumed != expected) result = fail("loading", "training continues with another loss");
    vjp_program_destroy(one);
    vjp_program_destroy(two);
    if (!result && (printf("%.9g %.9g\n", trained, resumed) < 0 || fflush(stdout) != 0))
        result = fail("printing", "standard output cannot be written");
    return result;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: faults_program FILE.safetensors\n");
        return MISUSE;
    }
    for (int i = 0; i < ROWS; i++) {
        labels[i] = i % CLASSES;
        for (int k = 0; k < INPUTS; k++)
            rows[i][k] = (float)((i * 7 + k * 5) % 11 - 5) / 8;
    }
    vjp_device *device = NULL;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = 2;
    vjp_status status = vjp_open("cpu", &options, &device);
    vjp_graph *graph = status ? NULL : vjp_graph_create();
    int result;
    if (status)
        result = fail("opening the cpu", device ? vjp_error(device) : vjp_status_name(status));
    else if (!graph)
        result = fail("creating a graph", vjp_status_name(VJP_OUT_OF_MEMORY));
    else
        result = run(device, graph, argv[1]);
    vjp_graph_destroy(graph);
    vjp_close(device);
    return result;
}
