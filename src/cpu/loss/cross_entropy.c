/* SPDX-License-Identifier: MIT */
/* cross_entropy on the CPU: loss_rows.h over all rows of the logits. */
#include "cpu/loss/loss_rows.h"

extern const vjp_kernel CPU_NAME(cross_entropy)[VJP_PASS_COUNT];

static vjp_status forward(const vjp_work *work) {
    loss_rows call = {
        .s = vjp_cross_entropy_sizes_of(work),
        .dtype = work->storage,
        .target_type = vjp_type(work, CROSS_ENTROPY_TARGET),
        .logits = vjp_data(work, CROSS_ENTROPY_LOGITS),
        .target = vjp_data(work, CROSS_ENTROPY_TARGET),
        .lse = vjp_data(work, CROSS_ENTROPY_LSE),
        .wants_loss = work->tensor[CROSS_ENTROPY_LOSS],
        .partials = work->workspace,
    };
    if (!call.wants_loss && !call.lse) return VJP_OK;
    CPU_NAME(loss_rows)(work, &call);
    if (call.wants_loss) CPU_NAME(loss_store)
    (&call.s, call.partials, call.split.count, vjp_data(work, CROSS_ENTROPY_LOSS),
     vjp_accumulates(work, CROSS_ENTROPY_LOSS));
    return VJP_OK;
}

static size_t forward_workspace(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    return (size_t)CPU_NAME(loss_split)(s.rows, s.classes).count * sizeof(loss_partial);
}

static vjp_status backward(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    gradient_rows call = {
        .s = s,
        .width = s.classes,
        .dtype = work->storage,
        .target_type = vjp_type(work, CROSS_ENTROPY_B_TARGET),
        .dlogits = vjp_data(work, CROSS_ENTROPY_B_DLOGITS),
        .logits = vjp_data(work, CROSS_ENTROPY_B_LOGITS),
        .target = vjp_data(work, CROSS_ENTROPY_B_TARGET),
        .lse = vjp_data(work, CROSS_ENTROPY_B_LSE),
    };
    if (!call.dlogits || s.rows == 0) return VJP_OK;
    call.scale = CPU_NAME(loss_scale)(work, &s, CROSS_ENTROPY_B_TARGET, CROSS_ENTROPY_B_DLOSS, work->workspace);
    int64_t bytes = s.rows * s.classes * (int64_t)dtype_bytes(work->storage);
    call.mode = write_mode_of(work, CROSS_ENTROPY_B_DLOGITS, bytes, true, call.dlogits == call.logits);
    CPU_NAME(gradient_rows)(work, &call);
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    return CPU_NAME(loss_scale_workspace)(&s);
}

const vjp_kernel CPU_NAME(cross_entropy)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_STORAGE_16_32},
    {backward, backward_workspace, VJP_STORAGE_16_32},
};
