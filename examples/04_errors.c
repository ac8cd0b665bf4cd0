/* SPDX-License-Identifier: MIT */
/*
 * Lesson 04: what happens when a call is wrong.
 *
 * The library never aborts and never prints. The call returns a status, and vjp_error() returns a message that names
 * the op, the tensor and the numbers. None of your memory was changed, because every check comes before the first
 * write. So an error can be handled where it happens, and the next call works as if nothing had happened.
 *
 * The lesson makes seven mistakes, prints the message for each, and checks after each that the output is unchanged.
 */
#include <stdio.h>
#include <string.h>
#include <vjp.h>

static float x[64], out[64], parameter[8];
static const float untouched = -123.5f;
static int wrong;

static void expect_refusal(const vjp_device *device, const char *mistake, vjp_status status) {
    int clean = 1;
    for (int i = 0; i < 64; i++)
        clean = clean && out[i] == untouched;
    printf("%s\n  %s: %s%s\n", mistake, vjp_status_name(status), vjp_error(device), clean ? "" : "  WROTE SOMETHING");
    wrong += status == VJP_OK || !clean || !vjp_error(device)[0];
}

static vjp_tensor of(void *data, vjp_dtype dtype, int64_t rows, int64_t columns) {
    return vjp_tensor_of(data, dtype, 2, (int64_t[]){rows, columns});
}

int main(void) {
    for (int i = 0; i < 64; i++)
        out[i] = untouched;
    vjp_device *device;

    vjp_status status = vjp_open("abacus", NULL, &device);
    expect_refusal(device, "a device that does not exist", status);
    vjp_close(device); /* a device that failed to open is closed like any other */

    if (vjp_open("cpu", NULL, &device) != VJP_OK) return fprintf(stderr, "%s\n", vjp_error(device)), 1;

    vjp_tensor tx = of(x, VJP_F32, 8, 8), ty = of(out, VJP_F32, 8, 8);
    vjp_tensor seven = vjp_tensor_of(parameter, VJP_F32, 1, (int64_t[]){7});
    status = vjp_layer_norm_forward(device, &ty, NULL, NULL, &tx, &seven, NULL, NULL);
    expect_refusal(device, "gamma is one element short", status);

    status = vjp_layer_norm_forward(device, &ty, NULL, NULL, NULL, NULL, NULL, NULL);
    expect_refusal(device, "the input was forgotten", status);

    status = vjp_group_norm_forward(device, &ty, NULL, NULL, &tx, NULL, NULL,
                                    &(vjp_group_norm_attributes){.struct_size = sizeof(vjp_group_norm_attributes),
                                                                 .groups = 3,
                                                                 .layout = VJP_LAYOUT_CHANNELS_FIRST,
                                                                 .eps = 1e-5});
    expect_refusal(device, "8 channels in 3 groups", status);

    const int32_t indices[] = {0, 7, 8, 1};
    vjp_tensor tindex = vjp_tensor_of((void *)indices, VJP_I32, 1, (int64_t[]){4});
    vjp_tensor four = of(out, VJP_F32, 4, 8);
    status = vjp_gather_forward(device, &four, &tx, &tindex, NULL);
    expect_refusal(device, "row 8 of a table of 8", status);

    vjp_tensor shifted = of(out, VJP_F32, 7, 8), source = of(out + 8, VJP_F32, 7, 8);
    status = vjp_cumsum_forward(device, &shifted, &source, NULL);
    expect_refusal(device, "input and output overlap by halves", status);

    vjp_tensor half = of(out, VJP_F16, 8, 8);
    status = vjp_cumsum_forward(device, &half, &tx, NULL);
    expect_refusal(device, "f32 in, f16 out", status);

    /* And the device still works. */
    status = vjp_layer_norm_forward(device, &ty, NULL, NULL, &tx, NULL, NULL, NULL);
    printf("then a valid call: %s\n", vjp_status_name(status));
    wrong += status != VJP_OK || out[0] == untouched;
    vjp_close(device);
    return wrong != 0;
}
