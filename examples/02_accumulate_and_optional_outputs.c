/* SPDX-License-Identifier: MIT */
/*
 * Lesson 02: adding to a gradient, and leaving one out.
 *
 * A model's gradients add up: a tensor that feeds two branches gets the sum of both, a weight gets the sum over all
 * micro-batches. With VJP_ACCUMULATE on an output, a call adds to it (+=) instead of overwriting it (=), so neither
 * sum needs its own buffer. And every output is optional: an output that you pass as NULL is not computed and costs
 * nothing.
 *
 * The lesson shows all three on y = x + rms_norm(x) * gamma, the form of a residual block: micro-batches add up to
 * the whole batch, dx is added in place to the gradient of the skip connection, and a frozen gamma costs nothing.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vjp.h>

enum { ROWS = 512, HALF = ROWS / 2, DIM = 384 };

static float x[ROWS * DIM], dy[ROWS * DIM], dx[ROWS * DIM], norm_only[ROWS * DIM];
static float gamma_values[DIM], whole[DIM], summed[DIM];

static vjp_tensor rows_of(float *data, int64_t rows) {
    return vjp_tensor_of(data, VJP_F32, 2, (int64_t[]){rows, DIM});
}

static vjp_tensor vector_of(float *data) {
    return vjp_tensor_of(data, VJP_F32, 1, (int64_t[]){DIM});
}

/* Ends the lesson with the library's error message if a call was refused. */
static void check(vjp_device *device, vjp_status status) {
    if (status == VJP_OK) return;
    fprintf(stderr, "%s\n", vjp_error(device));
    exit(1);
}

/* The backward of the norm over `rows` rows, starting at `first`. NULL outputs are left out. */
static void backward(vjp_device *device, int64_t first, int64_t rows, const vjp_tensor *dx_out,
                     const vjp_tensor *dgamma) {
    vjp_tensor tx = rows_of(x + first * DIM, rows), tdy = rows_of(dy + first * DIM, rows);
    vjp_tensor tgamma = vector_of(gamma_values);
    check(device, vjp_rms_norm_backward(device, dx_out, dgamma, NULL, NULL, &tdy, &tx, &tgamma, NULL, NULL, NULL));
}

int main(void) {
    for (int i = 0; i < ROWS * DIM; i++) {
        x[i] = (float)(rand() % 2001 - 1000) / 500;
        dy[i] = (float)(rand() % 2001 - 1000) / 1000;
    }
    for (int i = 0; i < DIM; i++)
        gamma_values[i] = 1 + (float)i / DIM;
    vjp_device *device;
    vjp_status status = vjp_open("cpu", NULL, &device);
    check(device, status);

    /* Two micro-batches: the first overwrites, the second adds. dx is NULL, so it is not computed. */
    vjp_tensor tsummed = vector_of(summed), twhole = vector_of(whole);
    backward(device, 0, HALF, NULL, &tsummed);
    tsummed.flags = VJP_ACCUMULATE;
    backward(device, HALF, HALF, NULL, &tsummed);
    backward(device, 0, ROWS, NULL, &twhole);
    float difference = 0, largest = 0;
    for (int i = 0; i < DIM; i++) {
        difference = fmaxf(difference, fabsf(summed[i] - whole[i]));
        largest = fmaxf(largest, fabsf(whole[i]));
    }
    printf("dgamma of two halves compared with the whole batch: largest difference %.1e of %.1f\n", difference,
           largest);

    /* The residual: dx starts as the skip's gradient, which is dy, and the norm adds its own. gamma is frozen: NULL. */
    vjp_tensor tdx = rows_of(dx, ROWS), tnorm = rows_of(norm_only, ROWS);
    backward(device, 0, ROWS, &tnorm, NULL);
    memcpy(dx, dy, sizeof dx);
    tdx.flags = VJP_ACCUMULATE;
    backward(device, 0, ROWS, &tdx, NULL);
    float residual = 0; /* the device rounds the sum once, this line twice: the last bit may differ */
    for (int i = 0; i < ROWS * DIM; i++)
        residual = fmaxf(residual, fabsf(dx[i] - (dy[i] + norm_only[i])));
    printf("dx of the residual block compared with dy + the norm's dx: largest difference %.1e\n", residual);
    vjp_close(device);
    return !(difference <= 1e-5f * largest && residual <= 1e-6f);
}
