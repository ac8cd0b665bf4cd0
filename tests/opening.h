/* SPDX-License-Identifier: MIT */
/* Opens a device, or fails the test with the device's error. Include it after cmocka.h. */
#ifndef VJP_TESTS_OPENING_H
#define VJP_TESTS_OPENING_H

#include "vjp.h"

static inline vjp_device *open_with(const char *name, const vjp_options *options) {
    vjp_device *device;
    if (vjp_open(name, options, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

static inline vjp_device *open_device(const char *name) {
    return open_with(name, NULL);
}

#endif
