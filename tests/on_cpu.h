/* SPDX-License-Identifier: MIT */
/* The CPU for a group of tests: cmocka opens it before the first of them and closes it after the last. */
#ifndef VJP_TESTS_ON_CPU_H
#define VJP_TESTS_ON_CPU_H

#include "vjp.h"

static vjp_device *device;

static int open_cpu(void **unused) {
    (void)unused;
    return vjp_open("cpu", NULL, &device) != VJP_OK;
}

static int close_cpu(void **unused) {
    (void)unused;
    vjp_close(device);
    return 0;
}

#endif
