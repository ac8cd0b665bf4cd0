/* SPDX-License-Identifier: MIT */
/*
 * conv2d and its gradients.
 *
 *     result        path      file
 *     y, dx         general   conv2d_general.cuh: a thread per element
 *     dweight       general   a block per element
 *     dbias         chunks    sums over chunks of pixels, added in order
 */
#include "cuda/conv/conv2d_general.cuh"

namespace vjp {
namespace {

conv_call call_of(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_call q{};
    q.batch = s.batch;
    q.channels = s.channels / s.groups;
    q.outs = s.out_channels / s.groups;
    q.x = picture_of(s.channels_last, s.channels, s.height, s.width);
    q.y = picture_of(s.channels_last, s.out_channels, s.out_height, s.out_width);
    q.window = picture_of(s.channels_last, q.channels, s.kernel_h, s.kernel_w);
    q.stride_h = s.stride_h;
    q.stride_w = s.stride_w;
    q.padding_h = s.padding_h;
    q.padding_w = s.padding_w;
    q.dilation_h = s.dilation_h;
    q.dilation_w = s.dilation_w;
    q.channels_last = s.channels_last;
    bool back = work->pass == VJP_BACKWARD;
    int result = back ? (int)CONV2D_B_DX : (int)CONV2D_Y;
    q.x_data = vjp_data(work, back ? (int)CONV2D_B_X : (int)CONV2D_X);
    q.weight = vjp_data(work, back ? (int)CONV2D_B_WEIGHT : (int)CONV2D_WEIGHT);
    q.result = vjp_data(work, result);
    q.add = vjp_accumulates(work, result);
    if (back) {
        q.y_data = vjp_data(work, CONV2D_B_DY);
        q.dweight = parameter_output_of(work, CONV2D_B_DWEIGHT);
        q.dbias = parameter_output_of(work, CONV2D_B_DBIAS);
    } else {
        q.bias = parameter_of(work, CONV2D_BIAS);
    }
    return q;
}

int64_t blocks_of(int64_t threads) {
    return vjp_min(vjp_divide_up(threads, THREADS), MAX_BLOCKS);
}

template <class T> vjp_status run_dbias(const vjp_work *work, const conv_call &q, double *partial) {
    bias_split s = bias_split_of(q);
    s.partial = partial;
    vjp_status status = launch(work, true, dbias_chunks<T>, vjp_min(s.chunks * s.tiles, MAX_BLOCKS), THREADS, 0, q, s);
    if (status != VJP_OK) return status;
    return launch(work, true, dbias_sum<T>, blocks_of(q.y.channels), THREADS, 0, q, s);
}

vjp_status forward(const vjp_work *work) {
    conv_call q = call_of(work);
    if (!q.result) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        return launch(work, true, forward_general<decltype(zero)>, blocks_of(q.batch * q.y.image), THREADS, 0, q);
    });
}

vjp_status backward(const vjp_work *work) {
    conv_call q = call_of(work);
    workspace_layout layout(work->workspace);
    bias_split s = bias_split_of(q);
    double *partial = work->tensor[CONV2D_B_DBIAS] ? layout.take<double>(s.chunks * q.y.channels) : nullptr;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        vjp_status status = VJP_OK;
        if (q.dbias.data) status = run_dbias<T>(work, q, partial);
        if (status == VJP_OK && q.result)
            status = launch(work, true, dx_general<T>, blocks_of(q.batch * q.x.image), THREADS, 0, q);
        if (status == VJP_OK && q.dweight.data)
            status = launch(work, true, dweight_general<T>, vjp_min(q.y.channels * q.window.image, MAX_BLOCKS), THREADS,
                            0, q);
        return status;
    });
}

size_t backward_workspace(const vjp_work *work) {
    if (!work->tensor[CONV2D_B_DBIAS]) return 0;
    conv_call q = call_of(work);
    workspace_layout layout(nullptr);
    layout.take<double>(bias_split_of(q).chunks * q.y.channels);
    return layout.max;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_conv2d[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_conv2d[VJP_PASS_COUNT] = {
    {vjp::forward, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, vjp::backward_workspace, VJP_STORAGE_16_32},
};
}
