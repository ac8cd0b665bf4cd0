/* SPDX-License-Identifier: MIT */
/* cross_entropy: the rows of loss.h are those of the logits. */
#include "gpu/ops/loss.h"

typedef struct plan {
    gpu_loss loss;
    gpu_loss_rows rows;
    size_t bytes; /* of workspace */
} plan;

static gpu_matrix given(const vjp_work *work, int slot) {
    return work->tensor[slot] ? gpu_matrix_of(slot) : (gpu_matrix){.place = GPU_NOWHERE};
}

static plan forward_plan(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    plan p = {.loss = {.work = work, .s = s, .target = CROSS_ENTROPY_TARGET},
              .rows = {.rows = s.rows, .width = s.classes, .logits = gpu_matrix_of(CROSS_ENTROPY_LOGITS)}};
    p.rows.lse = given(work, CROSS_ENTROPY_LSE);
    p.loss.loss = given(work, CROSS_ENTROPY_LOSS);
    if (!p.loss.loss.place) return p;
    p.loss.partials = gpu_loss_partials(work, s.rows, s.classes);
    p.bytes = p.loss.partials > 1 ? gpu_loss_partials_bytes(p.loss.partials) : 0;
    return p;
}

static plan backward_plan(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    plan p = {.loss = {.work = work, .s = s, .target = CROSS_ENTROPY_B_TARGET},
              .rows = {.rows = s.rows, .width = s.classes, .logits = gpu_matrix_of(CROSS_ENTROPY_B_LOGITS)}};
    p.rows.dlogits = given(work, CROSS_ENTROPY_B_DLOGITS);
    p.rows.lse_in = given(work, CROSS_ENTROPY_B_LSE);
    p.loss.dloss = gpu_matrix_of(CROSS_ENTROPY_B_DLOSS);
    p.bytes = gpu_loss_plan_counts(&p.loss);
    return p;
}

static vjp_status forward(const vjp_work *work) {
    plan p = forward_plan(work);
    if (!p.loss.loss.place && !p.rows.lse.place) return VJP_OK;
    vjp_status status = gpu_loss_run(&p.loss, &p.rows);
    return status == VJP_OK ? gpu_loss_finish(&p.loss) : status;
}

static vjp_status backward(const vjp_work *work) {
    plan p = backward_plan(work);
    if (!p.rows.dlogits.place) return VJP_OK;
    vjp_status status = gpu_loss_count(&p.loss);
    if (status == VJP_OK) status = gpu_loss_run(&p.loss, &p.rows);
    return status == VJP_OK ? gpu_loss_finish(&p.loss) : status;
}

static size_t forward_workspace(const vjp_work *work) {
    return forward_plan(work).bytes;
}

static size_t backward_workspace(const vjp_work *work) {
    return backward_plan(work).bytes;
}

const vjp_kernel gpu_cross_entropy[VJP_PASS_COUNT] = {{forward, forward_workspace, VJP_STORAGE_16_32},
                                                      {backward, backward_workspace, VJP_STORAGE_16_32}};
