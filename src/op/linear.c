/* SPDX-License-Identifier: MIT */
/*
 * linear: y = act(a b + bias) + residual, or y = silu(gate) (a b + bias). Maths: docs/ops/linear.md. Where a backend
 * has no kernel for the gate, vjp_linear_gated() runs its kernels of linear and swiglu one after the other.
 */
#include <string.h>

#include "op/op.h"

/* The backward without a: only da and dbias, and of an activation only with a saved pre. */
static vjp_status check_needed(const vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    if (work->pass == VJP_FORWARD || work->tensor[LINEAR_B_A]) return VJP_OK;
    if (work->tensor[LINEAR_B_DB]) return vjp_refuse(work, VJP_INVALID, "a is missing: db needs it");
    if (attributes->activation != VJP_ACTIVATION_NONE && !work->tensor[LINEAR_B_PRE])
        return vjp_refuse(work, VJP_INVALID, "a and pre are both missing: the activation's derivative needs one");
    if (work->tensor[LINEAR_B_DGATE] && !work->tensor[LINEAR_B_PRE])
        return vjp_refuse(work, VJP_INVALID, "a and pre are both missing: dgate needs one");
    return VJP_OK;
}

static vjp_status check_gate(const vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    bool forward = work->pass == VJP_FORWARD;
    const vjp_tensor *gate = work->tensor[forward ? LINEAR_GATE : LINEAR_B_GATE];
    const vjp_tensor *pre = work->tensor[forward ? LINEAR_PRE : LINEAR_B_PRE];
    if (!gate && !forward && work->tensor[LINEAR_B_DGATE])
        return vjp_refuse(work, VJP_INVALID, "gate is missing: dgate needs it");
    if (!gate) return VJP_OK;
    if (attributes->activation != VJP_ACTIVATION_NONE)
        return vjp_refuse(work, VJP_INVALID, "gate and activation are both given; a gated product has no activation");
    if (work->tensor[forward ? LINEAR_RESIDUAL : LINEAR_B_DRESIDUAL])
        return vjp_refuse(work, VJP_INVALID, "gate and %s are both given; a gated product has no residual",
                          forward ? "residual" : "dresidual");
    if (pre && pre->dtype != gate->dtype)
        return vjp_refuse(work, VJP_INVALID, "pre is %s and gate is %s; with a gate pre has its dtype",
                          vjp_dtype_name((vjp_dtype)pre->dtype), vjp_dtype_name((vjp_dtype)gate->dtype));
    return VJP_OK;
}

static vjp_status infer(vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    int slot_a = work->pass == VJP_FORWARD ? LINEAR_A : LINEAR_B_A;
    int slot_b = work->pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B;
    vjp_status status = check_needed(work);
    if (status == VJP_OK) status = check_gate(work);
    if (status != VJP_OK) return status;
    bool has_a = work->tensor[slot_a];
    int rows = has_a ? slot_a : LINEAR_B_DY; /* a's shape, or one that differs in its last size */
    vjp_shape_own(work, rows);
    vjp_shape_own(work, slot_b);
    vjp_shape a = work->shape[rows];
    const vjp_shape b = work->shape[slot_b];
    char a_text[VJP_SHAPE_TEXT], b_text[VJP_SHAPE_TEXT];
    if (a.ndim < 2)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it must be 2 or more: [..., M, %s]", has_a ? "a" : "dy",
                          a.ndim, has_a ? "K" : "N");
    if (b.ndim != 2 && b.ndim != a.ndim)
        return vjp_refuse(work, VJP_INVALID, "b has rank %d; it must be 2 (shared) or %d (batched, as a is)", b.ndim,
                          a.ndim);
    if (!has_a) a.size[a.ndim - 1] = b.size[b.ndim - (attributes->transpose_b ? 1 : 2)];
    for (int i = 0; i < b.ndim - 2; i++)
        if (b.size[i] != a.size[i])
            return vjp_refuse(work, VJP_INVALID, "a is %s and b is %s: their batches differ on axis %d",
                              vjp_shape_text(&a, a_text), vjp_shape_text(&b, b_text), i);
    int64_t k = a.size[a.ndim - 1];
    int64_t b_k = b.size[b.ndim - (attributes->transpose_b ? 1 : 2)];
    int64_t n = b.size[b.ndim - (attributes->transpose_b ? 2 : 1)];
    if (k != b_k)
        return vjp_refuse(work, VJP_INVALID, "a is %s and b is %s%s: K is %lld in one and %lld in the other",
                          vjp_shape_text(&a, a_text), vjp_shape_text(&b, b_text),
                          attributes->transpose_b ? " (transposed)" : "", (long long)k, (long long)b_k);
    int64_t y[VJP_MAX_DIMS];
    for (int i = 0; i < a.ndim; i++)
        y[i] = i < a.ndim - 1 ? a.size[i] : n;
    /* The caller will allocate an absent y: its size must fit too. */
    if (!vjp_sizes_fit(a.ndim, y))
        return vjp_refuse(work, VJP_INVALID, "y is too large: the product of its sizes overflows");
    if (!vjp_sizes_fit(a.ndim, a.size))
        return vjp_refuse(work, VJP_INVALID, "a is too large: the product of its sizes overflows");
    vjp_shape_set(work, "[..., M, K]", a.ndim, a.size);
    vjp_shape_set(work, "[K, N] or [..., K, N]", b.ndim, b.size);
    vjp_shape_set(work, "[..., M, N]", a.ndim, y);
    vjp_shape_set(work, "[N]", 1, &n);
    return VJP_OK;
}

vjp_linear_sizes vjp_linear_sizes_of(const vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    const vjp_shape *a = &work->shape[work->pass == VJP_FORWARD ? LINEAR_A : LINEAR_B_A];
    const vjp_shape *b = &work->shape[work->pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B];
    vjp_linear_sizes s = {.batch = vjp_shape_product(a, 0, a->ndim - 2),
                          .m = a->size[a->ndim - 2],
                          .k = a->size[a->ndim - 1],
                          .n = b->size[b->ndim - (attributes->transpose_b ? 2 : 1)],
                          .activation = (vjp_activation)attributes->activation,
                          .transpose_b = attributes->transpose_b,
                          .zero_nan = attributes->zero_nan};
    if (b->ndim == 2) {
        s.m *= s.batch;
        s.batch = 1;
    }
    return s;
}

/* Each product is 2mnk flops. A backward that needs pre and has none saved needs a third product. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    double product = 2.0 * (double)s.batch * (double)s.m * (double)s.n * (double)s.k;
    if (work->pass == VJP_FORWARD) {
        cost->flops = product;
        return;
    }
    bool again = (s.activation != VJP_ACTIVATION_NONE || work->tensor[LINEAR_B_DGATE]) && !work->tensor[LINEAR_B_PRE];
    cost->flops =
        product * ((work->tensor[LINEAR_B_DA] ? 1 : 0) + (work->tensor[LINEAR_B_DB] ? 1 : 0) + (again ? 1 : 0));
}

/* The derivatives of an activation and of a gate need pre; bias would only be needed to compute pre again. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    const vjp_linear_attributes *a = attributes;
    uint32_t for_db = wanted >> LINEAR_B_DB & 1 ? 1u << LINEAR_B_A : 0;
    bool pre = a->activation != VJP_ACTIVATION_NONE || wanted >> LINEAR_B_DGATE & 1;
    return for_db | 1u << LINEAR_B_GATE | (pre ? 1u << LINEAR_B_PRE : 0);
}

/* ---- A gated product as a product and a swiglu --------------------------------------------------------- */

enum { ALIGN = 256 }; /* every device can bind a range that begins at a multiple of it */

/* What lies in the workspace, in this order: pre and dpre in the storage type, then that of the product's kernel. */
typedef struct gated {
    bool makes_pre, makes_dpre;
    vjp_tensor pre, dpre; /* pre: the call's own, or that in the workspace */
    size_t bytes;
} gated;

static vjp_tensor take(const vjp_work *work, gated *g, const vjp_shape *shape) {
    void *at = work->workspace ? (char *)work->workspace + g->bytes : NULL;
    size_t bytes = (size_t)vjp_shape_product(shape, 0, shape->ndim) * vjp_dtype_size(work->storage);
    g->bytes += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return vjp_tensor_of(at, work->storage, shape->ndim, shape->size);
}

static gated gated_of(const vjp_work *work) {
    bool forward = work->pass == VJP_FORWARD;
    const vjp_tensor *pre = work->tensor[forward ? LINEAR_PRE : LINEAR_B_PRE];
    const vjp_shape *shape = &work->shape[forward ? LINEAR_Y : LINEAR_B_DY];
    gated g = {0};
    g.makes_pre = forward ? work->tensor[LINEAR_Y] || pre : work->tensor[LINEAR_B_DGATE] && !pre;
    g.makes_dpre = !forward && (work->tensor[LINEAR_B_DA] || work->tensor[LINEAR_B_DB] || work->tensor[LINEAR_B_DBIAS]);
    if (pre)
        g.pre = *pre;
    else if (g.makes_pre)
        g.pre = take(work, &g, shape);
    if (g.makes_dpre) g.dpre = take(work, &g, shape);
    return g;
}

/* The same call of a product alone, in what is left of the workspace. */
static vjp_work product_alone(const vjp_work *work, const gated *g, vjp_pass pass) {
    vjp_work w = *work;
    w.pass = pass;
    memset(w.tensor, 0, sizeof w.tensor);
    if (w.workspace) w.workspace = (char *)w.workspace + g->bytes;
    w.workspace_bytes -= work->workspace ? g->bytes : 0;
    return w;
}

/* pre = a b + bias, for either pass. */
static vjp_work pre_work(const vjp_work *work, const gated *g) {
    vjp_work w = product_alone(work, g, VJP_FORWARD);
    bool forward = work->pass == VJP_FORWARD;
    const vjp_shape y = work->shape[forward ? LINEAR_Y : LINEAR_B_DY];
    const int from[][2] = {{LINEAR_A, LINEAR_B_A}, {LINEAR_B, LINEAR_B_B}, {LINEAR_BIAS, LINEAR_B_BIAS}};
    for (size_t i = 0; i < sizeof from / sizeof from[0]; i++) {
        int slot = from[i][0], own = from[i][!forward];
        w.tensor[slot] = work->tensor[own];
        w.shape[slot] = work->shape[own];
    }
    w.tensor[LINEAR_PRE] = &g->pre;
    w.shape[LINEAR_Y] = w.shape[LINEAR_PRE] = w.shape[LINEAR_RESIDUAL] = w.shape[LINEAR_GATE] = y;
    return w;
}

/* The gradients of the product from dpre. */
static vjp_work gradients_work(const vjp_work *work, const gated *g) {
    static const int same[] = {LINEAR_B_DA, LINEAR_B_DB, LINEAR_B_DBIAS, LINEAR_B_A, LINEAR_B_B};
    vjp_work w = product_alone(work, g, VJP_BACKWARD);
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        w.tensor[same[i]] = work->tensor[same[i]];
    w.tensor[LINEAR_B_DY] = &g->dpre;
    return w;
}

/* swiglu in the same pass: pre is its up. Where dgate is not wanted, any tensor of the shape will do for that. */
static vjp_work swiglu_work(const vjp_work *work, const gated *g) {
    vjp_work w = product_alone(work, g, work->pass);
    w.op = &vjp_op_swiglu;
    w.attributes = NULL;
    const vjp_shape y = work->shape[work->pass == VJP_FORWARD ? LINEAR_Y : LINEAR_B_DY];
    for (size_t i = 0; i < w.op->info.pass[w.pass].count; i++)
        w.shape[i] = y;
    if (w.pass == VJP_FORWARD) {
        w.tensor[SWIGLU_Y] = work->tensor[LINEAR_Y];
        w.tensor[SWIGLU_GATE] = work->tensor[LINEAR_GATE];
        w.tensor[SWIGLU_UP] = &g->pre;
        return w;
    }
    w.tensor[SWIGLU_B_DGATE] = work->tensor[LINEAR_B_DGATE];
    w.tensor[SWIGLU_B_DUP] = g->makes_dpre ? &g->dpre : NULL;
    w.tensor[SWIGLU_B_DY] = work->tensor[LINEAR_B_DY];
    w.tensor[SWIGLU_B_GATE] = work->tensor[LINEAR_B_GATE];
    w.tensor[SWIGLU_B_UP] = work->tensor[LINEAR_B_DGATE] ? &g->pre : work->tensor[LINEAR_B_GATE];
    return w;
}

vjp_status vjp_linear_gated(const vjp_work *work, const vjp_kernel *linear, const vjp_kernel *swiglu) {
    bool forward = work->pass == VJP_FORWARD;
    gated g = gated_of(work);
    vjp_work pre = pre_work(work, &g), gate = swiglu_work(work, &g);
    vjp_status status = g.makes_pre ? linear[VJP_FORWARD].run(&pre) : VJP_OK;
    bool gates = forward ? work->tensor[LINEAR_Y] != NULL : work->tensor[LINEAR_B_DGATE] || g.makes_dpre;
    if (status == VJP_OK && gates) status = swiglu[work->pass].run(&gate);
    if (status != VJP_OK || !g.makes_dpre) return status;
    vjp_work gradients = gradients_work(work, &g);
    return linear[VJP_BACKWARD].run(&gradients);
}

size_t vjp_linear_gated_workspace(const vjp_work *work, const vjp_kernel *linear) {
    gated g = gated_of(work);
    size_t bytes[VJP_PASS_COUNT] = {0};
    vjp_work pre = pre_work(work, &g), gradients = product_alone(work, &g, VJP_BACKWARD);
    if (g.makes_dpre) gradients = gradients_work(work, &g);
    if (g.makes_pre && linear[VJP_FORWARD].workspace) bytes[0] = linear[VJP_FORWARD].workspace(&pre);
    if (g.makes_dpre && linear[VJP_BACKWARD].workspace) bytes[1] = linear[VJP_BACKWARD].workspace(&gradients);
    return g.bytes + (bytes[0] > bytes[1] ? bytes[0] : bytes[1]);
}

const vjp_op_rules vjp_linear_rules = {
    .infer = infer, .keeps = keeps, .cost = cost, .passes_gradient = 1u << LINEAR_B_DRESIDUAL};
