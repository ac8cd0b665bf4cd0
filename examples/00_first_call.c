/* SPDX-License-Identifier: MIT */
/*
 * Lesson 00: a first call.
 *
 * A layer norm over two rows of three numbers, forward and backward. Memory is yours: a vjp_tensor only describes it.
 * Outputs come first, then inputs, then attributes; NULL stands for what you do not have or do not want. Here there
 * is no gamma and no beta, and the mean and rstd of each row are not saved, so the backward computes them again.
 *
 * dy is the gradient of some loss with respect to y; the result dx is the gradient with respect to x. A layer norm
 * removes each row's mean and scale, so adding a constant to a row changes nothing, and each row of dx adds up to 0.
 */
#include <math.h>
#include <stdio.h>
#include <vjp.h>

int main(void) {
    float x[6] = {1, 2, 4, 8, 5, 7}, y[6], dy[6] = {1, 0, 0, 0, 0, 1}, dx[6];
    const int64_t shape[] = {2, 3};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 2, shape), ty = vjp_tensor_of(y, VJP_F32, 2, shape);
    vjp_tensor tdx = vjp_tensor_of(dx, VJP_F32, 2, shape), tdy = vjp_tensor_of(dy, VJP_F32, 2, shape);

    vjp_device *cpu;
    vjp_status status = vjp_open("cpu", NULL, &cpu);
    if (status == VJP_OK) status = vjp_layer_norm_forward(cpu, &ty, NULL, NULL, &tx, NULL, NULL, NULL);
    if (status == VJP_OK) status = vjp_layer_norm_backward(cpu, &tdx, NULL, NULL, &tdy, &tx, NULL, NULL, NULL, NULL);
    if (status != VJP_OK) fprintf(stderr, "%s\n", vjp_error(cpu));
    for (int row = 0; row < 2 && status == VJP_OK; row++) {
        float *yr = y + 3 * row, *dr = dx + 3 * row;
        printf("y = %7.4f %7.4f %7.4f   dx = %7.4f %7.4f %7.4f\n", yr[0], yr[1], yr[2], dr[0], dr[1], dr[2]);
        if (fabsf(dr[0] + dr[1] + dr[2]) > 1e-6f) status = VJP_DEVICE_FAILED; /* it never does */
    }
    vjp_close(cpu);
    return status != VJP_OK;
}
