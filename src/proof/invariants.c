/* SPDX-License-Identifier: MIT */
/*
 * Algebraic properties of the results, independent of any oracle: a norm's dx is orthogonal to the directions that the
 * norm removes; the backward of a linear map is its adjoint; that of a rotation its inverse; scattering conserves the
 * sum. A new invariant of an op is a new row of the table.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op/op.h"
#include "proof/error.h"
#include "proof/values.h"

/* A case run forward and backward on a device, its tensors as doubles by name. */
typedef struct solved {
    const proof_problem *p;
    void *stored[VJP_PASS_COUNT][VJP_MAX_SLOTS];
    double *values[VJP_PASS_COUNT][VJP_MAX_SLOTS];
} solved;

typedef struct named {
    const double *values;
    int64_t count;
} named;

/* A tensor of either pass; an output as the device computed it. */
static named find(const solved *s, const char *name) {
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
        for (size_t i = 0; i < s->p->info->pass[pass].count; i++) {
            const proof_values *v = &s->p->slot[pass][i];
            if (strcmp(v->slot->name, name) != 0) continue;
            bool output = v->slot->flags & VJP_SLOT_OUTPUT;
            return (named){output ? s->values[pass][i] : v->exact, v->count};
        }
    return (named){NULL, 0};
}

static double dot(named a, named b) {
    double sum = 0;
    for (int64_t i = 0; i < a.count; i++)
        sum += a.values[i] * b.values[i];
    return sum;
}

static double norm(named a) {
    return sqrt(dot(a, a));
}

static double sum_of(named a) {
    double sum = 0;
    for (int64_t i = 0; i < a.count; i++)
        sum += a.values[i];
    return sum;
}

/* ---- Norms: dx is orthogonal to what the norm removes ------------------------------------------------- */

/* Which of the groups that are normalised together element i of x belongs to. */
static int64_t group_of(const solved *s, int64_t i) {
    const vjp_tensor *x = &s->p->slot[VJP_FORWARD][s->p->info->pass[VJP_FORWARD].outputs].tensor;
    if (strcmp(s->p->info->name, "group_norm") != 0) return i / x->shape[x->ndim - 1];
    const vjp_group_norm_attributes *a = (const void *)s->p->setup.attributes.bytes;
    int64_t plane = 1;
    bool last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    for (int k = last ? 1 : 2; k < x->ndim - (last ? 1 : 0); k++)
        plane *= x->shape[k];
    int64_t channels = x->shape[last ? x->ndim - 1 : 1];
    int64_t channel = last ? i % channels : i / plane % channels;
    return i / (plane * channels) * a->groups + channel / (channels / a->groups);
}

/* The component of dx along `direction` in each group, relative to dx. */
static double along(const solved *s, named dx, const double *direction) {
    int64_t groups = dx.count ? group_of(s, dx.count - 1) + 1 : 0;
    double *product = proof_memory((size_t)groups * sizeof(double));
    double *square = proof_memory((size_t)groups * sizeof(double)), part = 0;
    for (int64_t i = 0; i < dx.count; i++) {
        int64_t g = group_of(s, i);
        product[g] += dx.values[i] * direction[i];
        square[g] += direction[i] * direction[i];
    }
    for (int64_t g = 0; g < groups; g++)
        part += product[g] * product[g] / square[g];
    free(product);
    free(square);
    return sqrt(part) / norm(dx);
}

static double constant_in(const solved *s, const char *gradient) {
    named dx = find(s, gradient);
    double *ones = proof_memory((size_t)dx.count * sizeof(double));
    for (int64_t i = 0; i < dx.count; i++)
        ones[i] = 1;
    double share = along(s, dx, ones);
    free(ones);
    return share;
}

static double no_constant(const solved *s) {
    return constant_in(s, "dx");
}

/* A number added to all logits of a row changes no probability. */
static double no_constant_dlogits(const solved *s) {
    return constant_in(s, "dlogits");
}

/* So the gradients of all classes' weights add up to 0. */
static double no_common_weight(const solved *s) {
    named dweight = find(s, "dweight");
    const vjp_tensor *tensor = &s->p->slot[VJP_FORWARD][LINEAR_CROSS_ENTROPY_WEIGHT].tensor;
    double wrong = 0;
    for (int64_t k = 0; k < tensor->shape[1]; k++) {
        double sum = 0;
        for (int64_t i = 0; i < tensor->shape[0]; i++)
            sum += dweight.values[i * tensor->shape[1] + k];
        wrong += sum * sum;
    }
    return sqrt(wrong) / norm(dweight);
}

static double no_x(const solved *s) {
    return along(s, find(s, "dx"), find(s, "x").values);
}

static double no_normalised_x(const solved *s) {
    named dx = find(s, "dx"), x = find(s, "x");
    int64_t groups = group_of(s, dx.count - 1) + 1;
    double *mean = proof_memory((size_t)groups * sizeof(double)), *centred = proof_memory((size_t)x.count * 8);
    for (int64_t i = 0; i < x.count; i++)
        mean[group_of(s, i)] += x.values[i] / ((double)x.count / (double)groups);
    for (int64_t i = 0; i < x.count; i++)
        centred[i] = x.values[i] - mean[group_of(s, i)];
    double share = along(s, dx, centred);
    free(mean);
    free(centred);
    return share;
}

/* ---- Linear maps -------------------------------------------------------------------------------------- */

/* <y, dy> = <input, dinput>, as a share of what the product could be. */
static double adjoint(const solved *s, const char *input, const char *gradient) {
    named y = find(s, "y"), dy = find(s, "dy");
    return fabs(dot(y, dy) - dot(find(s, input), find(s, gradient))) / (norm(y) * norm(dy));
}

static double adjoint_x(const solved *s) {
    return adjoint(s, "x", "dx");
}

static double adjoint_table(const solved *s) {
    return adjoint(s, "table", "dtable");
}

static double adjoint_a(const solved *s) {
    return adjoint(s, "a", "da");
}

static double adjoint_b(const solved *s) {
    return adjoint(s, "b", "db");
}

/* Of a map that is linear in a and b together. */
static double adjoint_both(const solved *s) {
    named y = find(s, "y"), dy = find(s, "dy");
    double inputs = dot(find(s, "a"), find(s, "da")) + dot(find(s, "b"), find(s, "db"));
    return fabs(dot(y, dy) - inputs) / (norm(y) * norm(dy));
}

static double adjoint_up(const solved *s) {
    return adjoint(s, "up", "dup");
}

static double adjoint_weight(const solved *s) {
    return adjoint(s, "weight", "dweight");
}

/* A rotation keeps lengths, forward and backward. */
static double length_kept(const solved *s) {
    double forward = fabs(norm(find(s, "y")) / norm(find(s, "x")) - 1);
    double backward = fabs(norm(find(s, "dx")) / norm(find(s, "dy")) - 1);
    return fmax(forward, backward);
}

static double sum_kept(const solved *s, const char *gradient) {
    named dy = find(s, "dy");
    return fabs(sum_of(find(s, gradient)) - sum_of(dy)) / (norm(dy) * sqrt((double)dy.count));
}

static double sum_kept_dtable(const solved *s) {
    return sum_kept(s, "dtable");
}

static double sum_kept_dx(const solved *s) {
    return sum_kept(s, "dx");
}

static double sum_kept_db(const solved *s) {
    return sum_kept(s, "db");
}

static double sum_kept_dbias(const solved *s) {
    return sum_kept(s, "dbias");
}

/* ---- attention ---------------------------------------------------------------------------------------- */

static double adjoint_v(const solved *s) {
    return adjoint(s, "v", "dv");
}

/* Scores are products of q and k, so scaling one is the same as scaling the other: <q, dq> = <k, dk>. */
static double same_factor(const solved *s) {
    named q = find(s, "q"), dq = find(s, "dq"), k = find(s, "k"), dk = find(s, "dk");
    return fabs(dot(q, dq) - dot(k, dk)) / (norm(q) * norm(dq));
}

/* A vector added to all keys adds the same number to all scores of a query, which changes no weight: dk sums to 0. */
static double no_common_key(const solved *s) {
    named dk = find(s, "dk");
    const int64_t *shape = s->p->slot[VJP_BACKWARD][1].tensor.shape; /* dk's: [batch, keys, kv_heads, dim] */
    int64_t keys = shape[1], row = shape[2] * shape[3];
    double part = 0;
    for (int64_t i = 0; i < shape[0] * row; i++) {
        double sum = 0;
        for (int64_t j = 0; j < keys; j++)
            sum += dk.values[(i / row * keys + j) * row + i % row];
        part += sum * sum;
    }
    return sqrt(part) / norm(dk);
}

/* 2^25 ones reach 33554432, exactly. */
static double last_is_count(const solved *s) {
    named y = find(s, "y"), dx = find(s, "dx");
    double error = fmax(fabs(y.values[y.count - 1] - (double)y.count), fabs(dx.values[0] - (double)dx.count));
    return error == 0 ? 0 : INFINITY;
}

/* ---- Steps of training -------------------------------------------------------------------------------- */

/* Adam's first step is lr long in every direction, whatever the gradient's size: w - lr weight_decay w - lr sign(g). */
static double first_step(const solved *s) {
    const vjp_adamw_attributes *a = (const void *)s->p->setup.attributes.bytes;
    named w = find(s, "w"), g = find(s, "g"), out = find(s, "w_out");
    double lr = find(s, "lr").values[0], wrong = 0;
    for (int64_t i = 0; i < w.count; i++)
        wrong += pow(out.values[i] - (1 - lr * a->weight_decay) * w.values[i] + copysign(lr, g.values[i]), 2);
    return sqrt(wrong) / norm(out);
}

/* Without weight decay and Nesterov w moves along the momentum. */
static double along_momentum(const solved *s) {
    named w = find(s, "w"), out = find(s, "w_out"), momentum = find(s, "momentum_out");
    double lr = find(s, "lr").values[0], wrong = 0;
    for (int64_t i = 0; i < w.count; i++)
        wrong += pow(out.values[i] - w.values[i] + lr * momentum.values[i], 2);
    return sqrt(wrong) / norm(out);
}

static double squares_are_count(const solved *s) {
    return find(s, "y").values[0] == (double)find(s, "x").count ? 0 : INFINITY;
}

/* Clipped gradients have the norm max_norm. */
static double clipped(const solved *s) {
    const vjp_clip_attributes *a = (const void *)s->p->setup.attributes.bytes;
    double norm_of = find(s, "norm").values[0];
    return fabs(find(s, "scale").values[0] * norm_of / fmin(norm_of, a->max_norm) - 1);
}

/* ---- The table ---------------------------------------------------------------------------------------- */

static const struct {
    const char *op, *text, *pass, *output, *says;
    double (*error)(const solved *s);
    bool slow;
} table[] = {
    {"layer_norm", "x=[37,129] eps=0", "backward", "dx", "<dx, 1> = 0", no_constant, false},
    {"layer_norm", "x=[37,129] eps=0", "backward", "dx", "<dx, xh> = 0", no_normalised_x, false},
    {"layer_norm", "x=[500,1025] eps=0", "backward", "dx", "<dx, xh> = 0", no_normalised_x, true},
    {"rms_norm", "x=[37,129] eps=0", "backward", "dx", "<dx, x> = 0", no_x, false},
    {"rms_norm", "x=[500,1025] eps=0", "backward", "dx", "<dx, x> = 0", no_x, true},
    {"group_norm", "x=[3,12,65] groups=4 eps=0", "backward", "dx", "<dx, 1> = 0", no_constant, false},
    {"group_norm", "x=[3,12,65] groups=4 eps=0", "backward", "dx", "<dx, xh> = 0", no_normalised_x, false},
    {"group_norm", "x=[3,65,12] groups=4 eps=0 layout=channels_last", "backward", "dx", "<dx, 1> = 0", no_constant,
     false},
    {"group_norm", "x=[3,65,12] groups=4 eps=0 layout=channels_last", "backward", "dx", "<dx, xh> = 0", no_normalised_x,
     false},
    {"rope", "x=[2,65,3,64] cosine=[65,32] param=f32", "backward", "dx", "adjoint", adjoint_x, false},
    {"rope", "x=[2,65,3,64] cosine=[65,32] param=f32", "backward", "dx", "keeps lengths", length_kept, false},
    {"rope", "x=[2,65,3,80] cosine=[65,32] n_rot=64 pairing=interleaved param=f32", "backward", "dx", "adjoint",
     adjoint_x, false},
    {"rope", "x=[2,65,3,80] cosine=[65,32] n_rot=64 pairing=interleaved param=f32", "backward", "dx", "keeps lengths",
     length_kept, false},
    {"cumsum", "x=[7,1025]", "backward", "dx", "adjoint", adjoint_x, false},
    {"cumsum", "x=[7,1025] exclusive=1", "backward", "dx", "adjoint", adjoint_x, false},
    {"cumsum", "x=[7,1025] reverse=1", "backward", "dx", "adjoint", adjoint_x, false},
    {"cumsum", "x=[3,127,65] axis=1 exclusive=1 reverse=1", "backward", "dx", "adjoint", adjoint_x, false},
    {"cumsum", "x=[33554432] data=ones only=f32", "forward", "y", "2^25 ones are 33554432", last_is_count, true},
    {"gather", "table=[127,65] index=[1000] dtable=f32", "backward", "dtable", "adjoint", adjoint_table, false},
    {"gather", "table=[127,65] index=[1000] dtable=f32", "backward", "dtable", "keeps the sum", sum_kept_dtable, false},
    {"gather", "table=[3,9,65] index=[1000] axis=1 data=runs dtable=f32", "backward", "dtable", "keeps the sum",
     sum_kept_dtable, false},
    {"maxpool2d", "x=[2,5,33,65]", "backward", "dx", "keeps the sum", sum_kept_dx, false},
    {"maxpool2d",
     "x=[2,33,65,5] kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1 layout=channels_last data=ties",
     "backward", "dx", "keeps the sum", sum_kept_dx, false},
    {"linear", "a=[65,33] b=[33,17] -bias", "backward", "da", "adjoint", adjoint_a, false},
    {"linear", "a=[65,33] b=[33,17] -bias", "backward", "db", "adjoint", adjoint_b, false},
    {"linear", "a=[65,33] b=[33,17] -bias param=f32", "backward", "dbias", "keeps the sum", sum_kept_dbias, false},
    {"linear", "a=[3,65,33] b=[17,33] transpose_b=1 -bias", "backward", "db", "adjoint", adjoint_b, false},
    {"linear", "a=[3,65,33] b=[3,33,17] -bias", "backward", "da", "adjoint", adjoint_a, false},
    {"linear", "a=[3,65,33] b=[3,33,17] -bias", "backward", "db", "adjoint", adjoint_b, false},
    {"add", "a=[65,33] b=[33] param=f32", "backward", "db", "adjoint", adjoint_both, false},
    {"add", "a=[65,33] b=[33] param=f32", "backward", "db", "keeps the sum", sum_kept_db, false},
    {"add", "a=[65,257] b=[] param=f32", "backward", "db", "keeps the sum", sum_kept_db, false},
    {"mul", "a=[65,33] b=[33] param=f32", "backward", "da", "adjoint", adjoint_a, false},
    {"mul", "a=[65,33] b=[33] param=f32", "backward", "db", "adjoint", adjoint_b, false},
    {"mul", "a=[65,257] b=[65,257] param=f32", "backward", "db", "adjoint", adjoint_b, false},
    {"scale", "x=[65,33] factor=0.3", "backward", "dx", "adjoint", adjoint_x, false},
    {"mean", "x=[3,65,33] axis=1", "backward", "dx", "adjoint", adjoint_x, false},
    {"mean", "x=[3,65,33] axis=1", "backward", "dx", "keeps the sum", sum_kept_dx, false},
    {"mean", "x=[65,333] axis=1", "backward", "dx", "keeps the sum", sum_kept_dx, false},
    {"dropout", "x=[65,33] counter=[2] p=0.5", "backward", "dx", "adjoint", adjoint_x, false},
    {"cast", "x=[65,33] y=f32 dx=f32", "backward", "dx", "adjoint", adjoint_x, false},
    {"sum_squares", "x=[257,129] data=ones", "forward", "y", "ones are counted", squares_are_count, false},
    {"clip", "max_norm=1", "forward", "scale", "clipped to max_norm", clipped, false},
    {"clip", "max_norm=1000", "forward", "scale", "within max_norm: unchanged", clipped, false},
    {"adamw", "w=[1025] eps=0 data=first", "forward", "w_out", "the first step is lr long", first_step, false},
    {"adamw", "w=[1025] eps=0 weight_decay=0.5 beta1=0.5 beta2=0.9999 data=first g=f32", "forward", "w_out",
     "the first step is lr long", first_step, false},
    {"sgd", "w=[1025] param=f32", "forward", "w_out", "along the momentum", along_momentum, false},
    {"cross_entropy", "logits=[37,129] target=[37]", "backward", "dlogits", "<dlogits, 1> = 0", no_constant_dlogits,
     false},
    {"cross_entropy", "logits=[37,1025] target=[37] label_smoothing=0.3 reduction=sum", "backward", "dlogits",
     "<dlogits, 1> = 0", no_constant_dlogits, false},
    {"linear_cross_entropy", "x=[37,17] weight=[129,17] target=[37] dweight=f32", "backward", "dweight",
     "sums to 0 over classes", no_common_weight, false},
    {"swiglu", "gate=[37,129]", "backward", "dup", "adjoint", adjoint_up, false},
    {"conv2d", "x=[2,6,13,17] weight=[8,3,3,3] groups=2 stride_h=2 padding_w=1 -bias", "backward", "dx", "adjoint",
     adjoint_x, false},
    {"conv2d", "x=[2,6,13,17] weight=[8,3,3,3] groups=2 stride_h=2 padding_w=1 -bias", "backward", "dweight", "adjoint",
     adjoint_weight, false},
    {"conv2d", "x=[2,13,17,6] weight=[8,3,3,3] groups=2 dilation_h=2 padding_w=1 -bias layout=channels_last",
     "backward", "dx", "adjoint", adjoint_x, false},
    {"conv2d", "x=[2,13,17,6] weight=[8,3,3,3] groups=2 dilation_h=2 padding_w=1 -bias layout=channels_last",
     "backward", "dweight", "adjoint", adjoint_weight, false},
    {"conv2d", "x=[2,6,13,17] weight=[8,3,3,3] groups=2 -bias param=f32", "backward", "dbias", "keeps the sum",
     sum_kept_dbias, false},
    {"attention", "q=[2,33,4,17] k=[2,33,2,17]", "backward", "dv", "adjoint", adjoint_v, false},
    {"attention", "q=[2,33,4,17] k=[2,33,2,17] -lse", "backward", "dk", "<q, dq> = <k, dk>", same_factor, false},
    {"attention", "q=[2,33,4,17] k=[2,33,2,17] -lse", "backward", "dk", "sums to 0", no_common_key, false},
    {"attention", "q=[2,9,4,17] k=[2,40,2,17] causal=0 -lse", "backward", "dk", "sums to 0", no_common_key, false},
};

static bool solve(solved *s, const proof_problem *p, vjp_device *device, char fault[PROOF_FAULT]) {
    *s = (solved){.p = p};
    for (int pass = 0; pass < vjp_passes(p->info); pass++) {
        proof_call call = {.pass = (vjp_pass)pass, .present = proof_present(p, (vjp_pass)pass)};
        if (proof_run(p, device, &call, s->stored[pass], fault) != VJP_OK || fault[0]) return false;
        for (size_t i = 0; i < p->info->pass[pass].outputs; i++) {
            const proof_values *v = &p->slot[pass][i];
            if (!s->stored[pass][i]) continue;
            s->values[pass][i] = proof_to_double(s->stored[pass][i], (vjp_dtype)v->tensor.dtype, v->count);
        }
    }
    return true;
}

static void solved_free(solved *s) {
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
        for (int i = 0; i < VJP_MAX_SLOTS; i++) {
            free(s->stored[pass][i]);
            free(s->values[pass][i]);
        }
}

/* The bound is that of the storage type: with f64 that of its f32 parameters, if it has any. */
static double bound_of(const proof_setup *setup, vjp_dtype storage) {
    bool f32 = storage == VJP_F32;
    for (int i = 0; i < setup->choices; i++)
        f32 = f32 || (storage == VJP_F64 && setup->choice[i].dtype == VJP_F32);
    return f32 ? 2e-6 : storage == VJP_F64 ? 1e-12 : storage == VJP_BF16 ? 4e-3 : 5e-4;
}

static void check_row(const proof_plan *plan, vjp_device *device, vjp_device *ref, size_t row, const vjp_op *op,
                      vjp_dtype storage) {
    proof_setup setup;
    proof_problem p;
    solved s = {0};
    char why[TEXT_ERROR] = "", text[320];
    double error = INFINITY;
    if (!proof_setup_read(&setup, op, table[row].text, why)) return;
    if (!(setup.only >> storage & 1)) return;
    bool made = proof_problem_make(&p, ref, &setup, storage, plan->seed, why);
    if (made && solve(&s, &p, device, why)) error = table[row].error(&s);
    snprintf(text, sizeof text, "%s; %s", table[row].text, table[row].says);
    double bound = bound_of(&setup, storage);
    plan->row(plan->context, &(proof_row){table[row].op, table[row].pass, table[row].output, vjp_dtype_name(storage),
                                          vjp_device_name(device), text, error, bound, error <= bound && !why[0], why});
    solved_free(&s);
    if (made) proof_problem_free(&p);
}

void proof_invariants(const proof_plan *plan, vjp_device *device) {
    vjp_device *ref = proof_open_ref();
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const vjp_op *op = vjp_op_find(table[i].op);
        if ((plan->op && plan->op != op) || (plan->quick && table[i].slow)) continue;
        for (int dtype = 0; dtype < VJP_DTYPE_COUNT; dtype++) {
            bool wanted = plan->dtype < 0 || plan->dtype == dtype;
            if (wanted && proof_supports(device, op, (vjp_dtype)dtype))
                check_row(plan, device, ref, i, op, (vjp_dtype)dtype);
        }
    }
    vjp_close(ref);
}
