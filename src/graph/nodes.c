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

vjp_value vjp_graph_cross_entropy(vjp_graph *graph, vjp_value logits, vjp_value target, int64_t ignore_index,
                                  vjp_reduction reduction, double label_smoothing) {
    const vjp_cross_entropy_attributes values = {
        .ignore_index = ignore_index, .reduction = reduction, .label_smoothing = label_smoothing};
    return CALL(cross_entropy, &values, logits, target);
}

vjp_value vjp_graph_swiglu(vjp_graph *graph, vjp_value gate, vjp_value up) {
    return CALL(swiglu, NULL, gate, up);
}

vjp_value vjp_graph_attention(vjp_graph *graph, vjp_value q, vjp_value k, vjp_value v, int causal, double scale) {
    const vjp_attention_attributes values = {.causal = causal != 0, .scale = scale};
    return CALL(attention, &values, q, k, v);
}

vjp_value vjp_graph_conv2d(vjp_graph *graph, vjp_value x, vjp_value weight, vjp_value bias,
                           const vjp_conv2d_attributes *attributes) {
    return CALL(conv2d, attributes, x, weight, bias);
}

vjp_value vjp_graph_add(vjp_graph *graph, vjp_value a, vjp_value b) {
    return CALL(add, NULL, a, b);
}

vjp_value vjp_graph_mul(vjp_graph *graph, vjp_value a, vjp_value b) {
    return CALL(mul, NULL, a, b);
}

vjp_value vjp_graph_scale(vjp_graph *graph, vjp_value x, double factor) {
    const vjp_scale_attributes values = {.factor = factor};
    return CALL(scale, &values, x);
}

vjp_value vjp_graph_mean(vjp_graph *graph, vjp_value x, int64_t axis, int64_t axes) {
    const vjp_mean_attributes values = {.axis = axis, .axes = axes};
    return CALL(mean, &values, x);
}

vjp_value vjp_graph_dropout(vjp_graph *graph, vjp_value x, vjp_value counter, double p, int64_t stream) {
    const vjp_dropout_attributes values = {.p = p, .stream = stream};
    return CALL(dropout, &values, x, counter);
}

vjp_value vjp_graph_cast(vjp_graph *graph, vjp_value x, vjp_dtype dtype) {
    if (!graph_is(graph, x, "the value to cast")) return 0;
    if (dtype != VJP_F32 && dtype != VJP_BF16 && dtype != VJP_F16 && dtype != VJP_F64)
        return graph_fail(graph, VJP_INVALID, graph->value[x].name, "a cast to %s, which is no float type",
                          vjp_dtype_name(dtype));
    vjp_value y = CALL(cast, NULL, x);
    if (!y) return 0;
    /* The op's rules leave y's type open. */
    graph_value *value = &graph->value[y];
    value->bytes = value->bytes / vjp_dtype_size(value->dtype) * vjp_dtype_size(dtype);
    value->dtype = dtype;
    return y;
}

vjp_value vjp_graph_sum_squares(vjp_graph *graph, vjp_value x) {
    return CALL(sum_squares, NULL, x);
}

vjp_value vjp_graph_clip(vjp_graph *graph, vjp_value squares, double max_norm) {
    const vjp_clip_attributes values = {.max_norm = max_norm};
    return CALL(clip, &values, squares);
}

vjp_value vjp_graph_adamw(vjp_graph *graph, vjp_value w, vjp_value m, vjp_value v, vjp_value g, vjp_value lr,
                          vjp_value step, vjp_value scale, const vjp_adamw_attributes *attributes) {
    vjp_value moved = CALL(adamw, attributes, w, m, v, g, lr, step, scale);
    if (!moved) return 0;
    vjp_graph_assign(graph, m, vjp_graph_output(graph, moved, "m_out"));
    vjp_graph_assign(graph, v, vjp_graph_output(graph, moved, "v_out"));
    return vjp_graph_assign(graph, w, moved);
}

vjp_value vjp_graph_sgd(vjp_graph *graph, vjp_value w, vjp_value momentum, vjp_value g, vjp_value lr, vjp_value scale,
                        const vjp_sgd_attributes *attributes) {
    vjp_value moved = CALL(sgd, attributes, w, momentum, g, lr, scale);
    if (!moved) return 0;
    if (momentum) vjp_graph_assign(graph, momentum, vjp_graph_output(graph, moved, "momentum_out"));
    return vjp_graph_assign(graph, w, moved);
}
