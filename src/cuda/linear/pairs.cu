/* SPDX-License-Identifier: MIT */
/*
 * The pair of calls that linear/gated.cu computes:
 *
 *     dy = linear.backward(dz, w)                     the gradient of swiglu's y, which nothing else reads, and
 *     dgate, dup, y = swiglu.backward(dy, gate, up)   swiglu's own
 */
#include "cuda/common/pairs.cuh"

#include "cuda/linear/gated.cuh"

extern "C" {
extern const vjp_kernel vjp_cuda_linear[VJP_PASS_COUNT];
extern const vjp_kernel vjp_cuda_swiglu[VJP_PASS_COUNT];
}

namespace vjp {
namespace {

/* Whether of the first `count` slots only those in `allowed` are present, and no output is added to. */
bool has_only(const vjp_work *work, int count, uint32_t allowed) {
    for (int i = 0; i < count; i++)
        if (work->tensor[i] && (!(allowed >> i & 1) || vjp_accumulates(work, i))) return false;
    return true;
}

bool describe(const vjp_work *first, const vjp_work *second, gated_product *p) {
    if (first->op->id != OP_ID(linear) || second->op->id != OP_ID(swiglu) || first->pass != VJP_BACKWARD ||
        second->pass != VJP_BACKWARD || first->storage != second->storage)
        return false;
    const auto *attributes = static_cast<const vjp_linear_attributes *>(first->attributes);
    vjp_linear_sizes s = vjp_linear_sizes_of(first);
    if (attributes->activation != VJP_ACTIVATION_NONE || !attributes->transpose_b || s.batch != 1 ||
        !first->tensor[LINEAR_B_DA] || !has_only(first, LINEAR_B_DY, 1u << LINEAR_B_DA) || first->tensor[LINEAR_B_GATE])
        return false;
    constexpr uint32_t outputs = 1u << SWIGLU_B_DGATE | 1u << SWIGLU_B_DUP | 1u << SWIGLU_B_Y;
    if (!second->tensor[SWIGLU_B_DGATE] || !second->tensor[SWIGLU_B_DUP] || !has_only(second, SWIGLU_B_DY, outputs) ||
        vjp_data(first, LINEAR_B_DA) != vjp_data(second, SWIGLU_B_DY))
        return false;
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
    gated_product p;
    return unread >> LINEAR_B_DA & 1 && describe(first, second, &p) && gated_product_pays(first->device, p);
}

vjp_status run_linear_pair(const vjp_work *first, const vjp_work *second) {
    gated_product p;
    bool done = false;
    if (describe(first, second, &p)) {
        vjp_status status = multiply_gated(first, p, &done);
        if (done || status != VJP_OK) return status;
    }
    vjp_status status = vjp_cuda_linear[first->pass].run(first);
    return status == VJP_OK ? vjp_cuda_swiglu[second->pass].run(second) : status;
}

} // namespace vjp
