/* SPDX-License-Identifier: MIT */
/* attention on CUDA: which path a call takes (attention.cuh), and the backward without what the forward saved. */
#include "cuda/attention/attention.cuh"

namespace vjp {
namespace {

attention_call forward_call_of(const vjp_work *work) {
    attention_call a = attention_call_of(work);
    a.q = vjp_data(work, ATTENTION_Q);
    a.k = vjp_data(work, ATTENTION_K);
    a.v = vjp_data(work, ATTENTION_V);
    a.q_step = vjp_step(work, ATTENTION_Q);
    a.k_step = vjp_step(work, ATTENTION_K);
    a.v_step = vjp_step(work, ATTENTION_V);
    a.y = vjp_data(work, ATTENTION_Y);
    a.lse = static_cast<float *>(vjp_data(work, ATTENTION_LSE));
    a.add_y = vjp_accumulates(work, ATTENTION_Y);
    return a;
}

vjp_status forward_steps(const vjp_work *work, workspace_layout &layout) {
    attention_call a = forward_call_of(work);
    vjp_status status = find_visible(work, a, layout);
    if (status != VJP_OK) return status;
    if (fast_takes(work, a)) return fast_forward(work, a, layout);
    return layout.base ? exact_forward(work, a, {}) : VJP_OK;
}

vjp_status backward_steps(const vjp_work *work, workspace_layout &layout) {
    attention_call a = attention_call_of(work);
    a.q = vjp_data(work, ATTENTION_B_Q);
    a.k = vjp_data(work, ATTENTION_B_K);
    a.v = vjp_data(work, ATTENTION_B_V);
    a.dy = vjp_data(work, ATTENTION_B_DY);
    a.out = vjp_data(work, ATTENTION_B_Y);
    a.lse_in = static_cast<const float *>(vjp_data(work, ATTENTION_B_LSE));
    a.dq = vjp_data(work, ATTENTION_B_DQ);
    a.dk = vjp_data(work, ATTENTION_B_DK);
    a.dv = vjp_data(work, ATTENTION_B_DV);
    a.q_step = vjp_step(work, ATTENTION_B_Q);
    a.k_step = vjp_step(work, ATTENTION_B_K);
    a.v_step = vjp_step(work, ATTENTION_B_V);
    a.dq_step = vjp_step(work, ATTENTION_B_DQ);
    a.dk_step = vjp_step(work, ATTENTION_B_DK);
    a.dv_step = vjp_step(work, ATTENTION_B_DV);
    a.add_dq = vjp_accumulates(work, ATTENTION_B_DQ);
    a.add_dk = vjp_accumulates(work, ATTENTION_B_DK);
    a.add_dv = vjp_accumulates(work, ATTENTION_B_DV);
    /* What a forward in TF32 saved belongs to other scores than the exact path's, whose weights would not sum to 1. */
    bool fast = fast_takes(work, a), other_scores = !fast && work->storage == VJP_F32 && state_of(work->device)->tf32;
    bool recomputed = !a.out || !a.lse_in || other_scores;
    vjp_status status = find_visible(work, a, layout);
    if (status != VJP_OK) return status;
    if (recomputed) {
        int64_t rows = a.batch * a.heads * a.time;
        attention_call again = a;
        again.y = layout.take<float>(rows * a.dim);
        again.y_f32 = true;
        again.lse = layout.take<float>(rows);
        if (fast) {
            status = fast_forward(work, again, layout);
        } else {
            again.row_max = again.lse;
            again.row_log = layout.take<float>(rows);
            again.lse = nullptr;
            if (layout.base) status = exact_forward(work, again, {});
            a.row_max = again.row_max;
            a.row_log = again.row_log;
        }
        a.out = again.y;
        a.y_f32 = true;
        a.lse_in = again.lse;
    } else {
        a.row_max = const_cast<float *>(a.lse_in);
    }
    if (status != VJP_OK) return status;
    if (fast) return fast_backward(work, a, recomputed, layout);
    if (!layout.base) return VJP_OK;
    if (a.dq) status = exact_dq(work, a, {});
    if (status == VJP_OK && (a.dk || a.dv)) status = exact_dkv(work, a, {});
    return status;
}

template <vjp_status (*STEPS)(const vjp_work *, workspace_layout &)> vjp_status run(const vjp_work *work) {
    /* Without a workspace nothing is taken from it, and its address only has to be one. */
    static char nowhere[1];
    workspace_layout layout(work->workspace ? work->workspace : nowhere);
    return STEPS(work, layout);
}

template <vjp_status (*STEPS)(const vjp_work *, workspace_layout &)> size_t workspace(const vjp_work *work) {
    workspace_layout layout(nullptr);
    STEPS(work, layout);
    return layout.max;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_attention[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_attention[VJP_PASS_COUNT] = {
    {vjp::run<vjp::forward_steps>, vjp::workspace<vjp::forward_steps>, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
    {vjp::run<vjp::backward_steps>, vjp::workspace<vjp::backward_steps>, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
};
}
