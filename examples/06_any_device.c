/* SPDX-License-Identifier: MIT */
/*
 * Lesson 06: the same norm on every device of this machine.
 *
 * A device is opened by its name; if it is absent, the error says why, and the lesson skips it. Memory comes from
 * vjp_alloc(), so that the same code works on the CPU and on a GPU, whose memory the host cannot access:
 * vjp_upload() and vjp_download() copy, vjp_synchronize() waits and reports errors. All tensors of the lesson are in
 * one block of that memory, at byte offsets, as in a whole model.
 *
 * The gradients of each device are compared with `ref`, which computes in double.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <vjp.h>

enum { ROWS = 300, DIM = 257, SIZE = ROWS * DIM, WHOLE = 3 * SIZE + 2 * DIM };

static float host[WHOLE], truth[WHOLE]; /* x, dy, dx, gamma, dgamma, one after another */

enum { X = 0, DY = SIZE, DX = 2 * SIZE, GAMMA = 3 * SIZE, DGAMMA = 3 * SIZE + DIM };

static vjp_tensor tensor_at(void *memory, int first, int ndim, const int64_t *shape) {
    vjp_tensor tensor = vjp_tensor_of(memory, VJP_F32, ndim, shape);
    tensor.offset = (uint64_t)first * sizeof(float);
    return tensor;
}

/* The backward pass on one device: dx and dgamma come back in `result`. */
static vjp_status run(vjp_device *device, float *result) {
    const int64_t shape[] = {ROWS, DIM};
    void *memory;
    vjp_status status = vjp_alloc(device, sizeof host, &memory);
    if (status != VJP_OK) return status;
    vjp_tensor x = tensor_at(memory, X, 2, shape), dy = tensor_at(memory, DY, 2, shape);
    vjp_tensor dx = tensor_at(memory, DX, 2, shape), gamma_values = tensor_at(memory, GAMMA, 1, &shape[1]);
    vjp_tensor dgamma = tensor_at(memory, DGAMMA, 1, &shape[1]);
    status = vjp_upload(device, memory, 0, host, sizeof host);
    if (status == VJP_OK)
        status = vjp_layer_norm_backward(device, &dx, &dgamma, NULL, &dy, &x, &gamma_values, NULL, NULL, NULL);
    if (status == VJP_OK) status = vjp_synchronize(device);
    if (status == VJP_OK) status = vjp_download(device, result, memory, 0, sizeof host);
    vjp_free(device, memory);
    return status;
}

static double relative_error(const float *result, int first, int count) {
    double error = 0, size = 0;
    for (int i = first; i < first + count; i++) {
        error += pow((double)result[i] - (double)truth[i], 2);
        size += pow((double)truth[i], 2);
    }
    return sqrt(error / size);
}

int main(void) {
    static const char *const names[] = {"ref", "cpu", "cuda", "webgpu", "metal"};
    static float result[WHOLE];
    int agree = 1;
    for (int i = 0; i < WHOLE; i++)
        host[i] = (float)(rand() % 2001 - 1000) / 500;
    for (int i = 0; i < 5; i++) {
        vjp_device *device;
        vjp_status status = vjp_open(names[i], NULL, &device);
        if (status == VJP_OK) status = run(device, i ? result : truth);
        if (status == VJP_NO_DEVICE) {
            printf("%-6s  not here: %s\n", names[i], vjp_error(device));
        } else if (status != VJP_OK) {
            printf("%-6s  failed: %s\n", names[i], vjp_error(device));
            agree = 0;
        } else if (i) {
            double dx = relative_error(result, DX, SIZE), dgamma = relative_error(result, DGAMMA, DIM);
            int good = dx < 2e-6 && dgamma < 2e-6;
            printf("%-6s  %s: dx differs by %.0e, dgamma by %.0e (%s)\n", names[i], good ? "agrees" : "DISAGREES", dx,
                   dgamma, vjp_device_summary(device));
            agree = agree && good;
        }
        vjp_close(device);
    }
    return !agree;
}
