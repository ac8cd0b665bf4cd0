/* SPDX-License-Identifier: MIT */
/*
 * The pairs of calls that one kernel computes:
 *
 *     gate = linear(x, gate_weight)                   swiglu's factors and swiglu, as the rewrite `swiglu` writes
 *     y, up = linear(x, up_weight, gate)              it (gated_forward.cu)
 *
 *     dy = linear.backward(dz, w)                     the gradient of swiglu's y, which nothing else reads, and
 *     dgate, dup, y = swiglu.backward(dy, gate, up)   swiglu's own (gated.cu)
 */
#include "cuda/common/pairs.cuh"

#include "cuda/linear/gated.cuh"

extern "C" {
extern const vjp_kernel vjp_cuda_linear[VJP_PASS_COUNT];
extern const vjp_kernel vjp_cuda_swiglu[VJP_PASS_COUNT];
}

namespace vjp {
namespace {

constexpr uint32_t bit(int slot) {
    return 1u << slot;
}

/* Whether the call has the tensors in `required`, besides them at most those in `allowed`, and adds to no output. */
bool has(const vjp_work *work, uint32_t required, uint32_t allowed = 0) {
    const vjp_pass_info &pass = work->op->info.pass[work->pass];
    for (size_t i = 0; i < pass.count; i++) {
        if (!work->tensor[i] ? required >> i & 1 : !((required | allowed) >> i & 1)) return false;
        if (i < pass.outputs && vjp_accumulates(work, (int)i)) return false;
    }
    return true;
}

/* Whether the calls are passes of these ops, of one storage type. */
bool are(const vjp_work *first, int op, const vjp_work *second, int other, vjp_pass pass) {
    return first->op->id == op && second->op->id == other && first->pass == pass && second->pass == pass &&
           first->storage == second->storage;
}

/* Whether a product has no activation, a weight [n, k] and one item. */
bool is_plain(const vjp_work *work) {
    const auto *attributes = static_cast<const vjp_linear_attributes *>(work->attributes);
    return attributes->activation == VJP_ACTIVATION_NONE && attributes->transpose_b &&
           vjp_linear_sizes_of(work).batch == 1;
}

bool describe(const vjp_work *first, const vjp_work *second, gated_forward *p) {
    constexpr uint32_t product = bit(LINEAR_Y) | bit(LINEAR_A) | bit(LINEAR_B);
    if (!are(first, OP_ID(linear), second, OP_ID(linear), VJP_FORWARD) || !is_plain(first) || !is_plain(second) ||
        !has(first, product) || !has(second, product | bit(LINEAR_GATE), bit(LINEAR_PRE)) ||
        vjp_data(first, LINEAR_Y) != vjp_data(second, LINEAR_GATE) ||
        vjp_data(first, LINEAR_A) != vjp_data(second, LINEAR_A) ||
        (second->tensor[LINEAR_PRE] && vjp_type(second, LINEAR_PRE) != second->storage))
        return false;
    vjp_linear_sizes s = vjp_linear_sizes_of(first);
    *p = {first->storage,
          s.m,
          s.n,
          s.k,
          vjp_data(first, LINEAR_A),
          vjp_data(first, LINEAR_B),
          vjp_data(second, LINEAR_B),
          vjp_data(first, LINEAR_Y),
          vjp_data(second, LINEAR_PRE),
          vjp_data(second, LINEAR_Y)};
    if (p->gate == p->y) p->gate = nullptr; /* nothing else reads it */
    return true;
}

bool describe(const vjp_work *first, const vjp_work *second, gated_product *p) {
    constexpr uint32_t gradients = bit(SWIGLU_B_DGATE) | bit(SWIGLU_B_DUP);
    if (!are(first, OP_ID(linear), second, OP_ID(swiglu), VJP_BACKWARD) || !is_plain(first) ||
        !has(first, bit(LINEAR_B_DA) | bit(LINEAR_B_DY) | bit(LINEAR_B_B), bit(LINEAR_B_A)) ||
        !has(second, gradients | bit(SWIGLU_B_DY) | bit(SWIGLU_B_GATE) | bit(SWIGLU_B_UP), bit(SWIGLU_B_Y)) ||
        vjp_data(first, LINEAR_B_DA) != vjp_data(second, SWIGLU_B_DY))
        return false;
    vjp_linear_sizes s = vjp_linear_sizes_of(first);
    *p = {first->storage,
          s.m,
          s.k,
          s.n,
          vjp_data(first, LINEAR_B_DY),
          vjp_data(first, LINEAR_B_B),
          vjp_data(second, SWIGLU_B_GATE),
          vjp_data(second, SWIGLU_B_UP),
          vjp_data(second, SWIGLU_B_DGATE),
          vjp_data(second, SWIGLU_B_DUP),
          vjp_data(second, SWIGLU_B_Y)};
    return true;
}

} // namespace

int linear_pairs(const vjp_work *first, const vjp_work *second, uint32_t unread) {
    gated_forward forward;
    gated_product backward;
    if (describe(first, second, &forward)) return gated_forward_pays(first->device, forward);
    return unread & bit(LINEAR_B_DA) && describe(first, second, &backward) &&
           gated_product_pays(first->device, backward);
}

vjp_status run_linear_pair(const vjp_work *first, const vjp_work *second) {
    gated_forward forward;
    gated_product backward;
    bool done = false;
    vjp_status status = VJP_OK;
    if (describe(first, second, &forward))
        status = multiply_gated_forward(first, forward, &done);
    else if (describe(first, second, &backward))
        status = multiply_gated(first, backward, &done);
    if (done || status != VJP_OK) return status;
    status = vjp_cuda_linear[first->pass].run(first);
    const vjp_kernel *kernels = second->op->id == OP_ID(linear) ? vjp_cuda_linear : vjp_cuda_swiglu;
    return status == VJP_OK ? kernels[second->pass].run(second) : status;
}

} // namespace vjp
