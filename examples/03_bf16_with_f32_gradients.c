/* SPDX-License-Identifier: MIT */
/*
 * Lesson 03: bf16 tensors, f32 gradients of parameters.
 *
 * bf16 halves the memory traffic and has the range of f32, but only 8 significant bits. That is enough for an
 * activation, but too little for a sum over thousands of rows that an optimiser adds up step after step. vjp sums in
 * f32 whatever the storage type. Parameters and their gradients (gamma, dgamma here) can each be bf16 like the tensors,
 * or f32: vjp uses the dtype in the vjp_tensor.
 *
 * The lesson computes dgamma of the same bf16 tensors twice, into bf16 and into f32, and compares both with the
 * reference device, which computes in double.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vjp.h>

enum { ROWS = 8192, DIM = 256 };

static uint16_t x[ROWS * DIM], dy[ROWS * DIM], dx[ROWS * DIM], dgamma_bf16[DIM];
static float gamma_values[DIM], dgamma_f32[DIM], dgamma_true[DIM];

/* bf16 is the upper half of an f32; round to nearest, ties to even. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static int failed(const vjp_device *device, vjp_status status) {
    if (status != VJP_OK) fprintf(stderr, "%s\n", vjp_error(device));
    return status != VJP_OK;
}

/* Size of the error relative to the size of the truth. */
static double relative_error(const float *value) {
    double error = 0, size = 0;
    for (int i = 0; i < DIM; i++) {
        error += pow((double)value[i] - (double)dgamma_true[i], 2);
        size += pow((double)dgamma_true[i], 2);
    }
    return sqrt(error / size);
}

int main(void) {
    const int64_t shape[] = {ROWS, DIM};
    for (int i = 0; i < ROWS * DIM; i++) {
        x[i] = to_bf16((float)(rand() % 2001 - 1000) / 500);
        dy[i] = to_bf16((float)(rand() % 2001 - 1000) / 1000);
    }
    for (int i = 0; i < DIM; i++)
        gamma_values[i] = 1 + (float)i / DIM;

    vjp_tensor tx = vjp_tensor_of(x, VJP_BF16, 2, shape), tdy = vjp_tensor_of(dy, VJP_BF16, 2, shape);
    vjp_tensor tdx = vjp_tensor_of(dx, VJP_BF16, 2, shape);
    vjp_tensor tgamma = vjp_tensor_of(gamma_values, VJP_F32, 1, &shape[1]); /* f32 with bf16 tensors */
    vjp_tensor as_bf16 = vjp_tensor_of(dgamma_bf16, VJP_BF16, 1, &shape[1]);
    vjp_tensor as_f32 = vjp_tensor_of(dgamma_f32, VJP_F32, 1, &shape[1]);
    vjp_tensor truth = vjp_tensor_of(dgamma_true, VJP_F32, 1, &shape[1]);

    vjp_device *cpu, *ref;
    vjp_status cpu_status = vjp_open("cpu", NULL, &cpu), ref_status = vjp_open("ref", NULL, &ref);
    if (failed(cpu, cpu_status) || failed(ref, ref_status)) return 1;
    if (failed(cpu, vjp_rms_norm_backward(cpu, &tdx, &as_bf16, NULL, NULL, &tdy, &tx, &tgamma, NULL, NULL, NULL)) ||
        failed(cpu, vjp_rms_norm_backward(cpu, NULL, &as_f32, NULL, NULL, &tdy, &tx, &tgamma, NULL, NULL, NULL)) ||
        failed(ref, vjp_rms_norm_backward(ref, NULL, &truth, NULL, NULL, &tdy, &tx, &tgamma, NULL, NULL, NULL)))
        return 1;
    vjp_close(cpu);
    vjp_close(ref);

    float widened[DIM];
    for (int i = 0; i < DIM; i++)
        widened[i] = from_bf16(dgamma_bf16[i]);
    double error_bf16 = relative_error(widened), error_f32 = relative_error(dgamma_f32);
    printf("relative error of dgamma over %d bf16 rows: stored as bf16 %.1e, as f32 %.1e\n", ROWS, error_bf16,
           error_f32);
    return !(error_f32 < 1e-5 && error_bf16 < 4e-3 && error_f32 < error_bf16);
}
