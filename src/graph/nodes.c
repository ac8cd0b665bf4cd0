/* The typed nodes: vjp_graph_call() with the inputs in the order of the op's table. */
#include "graph/graph.h"
#include "op/op.h"

#define CALL(op, attributes, ...)                                                                                      \
    vjp_graph_call(graph, &vjp_op_##op, (const vjp_value[]){__VA_ARGS__},                                              \
                   sizeof((const vjp_value[]){__VA_ARGS__}) / sizeof(vjp_value), attributes)

vjp_value vjp_graph_layer_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t axes,
                               double eps) {
    const vjp_layer_norm_attributes values = {.axes = axes, .eps = eps};
    return CALL(layer_norm, &values, x, gamma, beta);
}

vjp_value vjp_graph_rms_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t axes, double eps) {
    const vjp_rms_norm_attributes values = {.axes = axes, .eps = eps};
    return CALL(rms_norm, &values, x, gamma, beta);
}

vjp_value vjp_graph_group_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t groups,
                               vjp_layout layout, double eps) {
    const vjp_group_norm_attributes values = {.groups = groups, .layout = layout, .eps = eps};
    return CALL(group_norm, &values, x, gamma, beta);
}

vjp_value vjp_graph_rope(vjp_graph *graph, vjp_value x, vjp_value cosine, vjp_value sine, vjp_value positions,
                         int64_t n_rot, vjp_pairing pairing) {
    const vjp_rope_attributes values = {.n_rot = n_rot, .pairing = pairing};
    return CALL(rope, &values, x, cosine, sine, positions);
}

vjp_value vjp_graph_cumsum(vjp_graph *graph, vjp_value x, int64_t axis, int exclusive, int reverse) {
    const vjp_cumsum_attributes values = {.axis = axis, .exclusive = exclusive != 0, .reverse = reverse != 0};
    return CALL(cumsum, &values, x);
}

vjp_value vjp_graph_gather(vjp_graph *graph, vjp_value table, vjp_value index, int64_t axis) {
    const vjp_gather_attributes values = {.axis = axis};
    return CALL(gather, &values, table, index);
}

vjp_value vjp_graph_maxpool2d(vjp_graph *graph, vjp_value x, const vjp_maxpool2d_attributes *attributes) {
    return CALL(maxpool2d, attributes, x);
}

vjp_value vjp_graph_linear(vjp_graph *graph, vjp_value a, vjp_value b, vjp_value bias, vjp_activation activation,
                           int transpose_b) {
    const vjp_linear_attributes values = {.activation = activation, .transpose_b = transpose_b != 0};
    return CALL(linear, &values, a, b, bias);
}
