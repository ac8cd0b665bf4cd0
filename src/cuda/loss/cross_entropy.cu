/* SPDX-License-Identifier: MIT */
/* cross_entropy on CUDA: loss_rows.cuh over all rows of the logits. */
#include "cuda/loss/loss_rows.cuh"

namespace vjp {
namespace {

/* The call of either pass with its workspace; `bytes`: of that. */
loss_call call_of(const vjp_work *work, size_t *bytes) {
    loss_call c = loss_call_of(vjp_cross_entropy_sizes_of(work));
    bool forward = work->pass == VJP_FORWARD;
    const int logits = forward ? (int)CROSS_ENTROPY_LOGITS : (int)CROSS_ENTROPY_B_LOGITS;
    const int target = forward ? (int)CROSS_ENTROPY_TARGET : (int)CROSS_ENTROPY_B_TARGET;
    c.logits = vjp_data(work, logits);
    c.target = vjp_data(work, target);
    c.target_type = vjp_type(work, target);
    if (!forward) c.dlogits = vjp_data(work, CROSS_ENTROPY_B_DLOGITS);
    plan_rows(work->storage, &c);
    workspace_layout layout(work->workspace);
    if (forward) {
        c.partials = layout.take<partial_loss>(c.chunks);
    } else if (c.mean) {
        c.count_blocks = count_blocks_of(c.rows);
        c.counts = layout.take<double>(c.count_blocks);
    }
    *bytes = layout.max;
    return c;
}

size_t workspace(const vjp_work *work) {
    size_t bytes;
    call_of(work, &bytes);
    return bytes;
}

vjp_status forward(const vjp_work *work) {
    size_t bytes;
    loss_call c = call_of(work, &bytes);
    c.loss = static_cast<float *>(vjp_data(work, CROSS_ENTROPY_LOSS));
    c.lse_out = static_cast<float *>(vjp_data(work, CROSS_ENTROPY_LSE));
    c.add_loss = vjp_accumulates(work, CROSS_ENTROPY_LOSS);
    if (!c.loss && !c.lse_out) return VJP_OK;
    c.found = findings_of(work);
    vjp_status status = enqueue_losses(work, c);
    return status == VJP_OK && c.loss ? enqueue_loss(work, c) : status;
}

vjp_status backward(const vjp_work *work) {
    size_t bytes;
    loss_call c = call_of(work, &bytes);
    c.dloss = static_cast<const float *>(vjp_data(work, CROSS_ENTROPY_B_DLOSS));
    c.lse = static_cast<const float *>(vjp_data(work, CROSS_ENTROPY_B_LSE));
    c.add = vjp_accumulates(work, CROSS_ENTROPY_B_DLOGITS);
    if (!c.dlogits || c.rows == 0) return VJP_OK;
    c.found = findings_of(work);
    vjp_status status = c.counts ? enqueue_count(work, c) : VJP_OK;
    return status == VJP_OK ? enqueue_gradients(work, c) : status;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_cross_entropy[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_cross_entropy[VJP_PASS_COUNT] = {
    {vjp::forward, vjp::workspace, VJP_STORAGE_16_32},
    {vjp::backward, vjp::workspace, VJP_STORAGE_16_32},
};
}
