/* SPDX-License-Identifier: MIT */
/* The Metal backend that is linked into the test, on the stand-in for macOS. Include it after cmocka.h. */
#ifndef VJP_TESTS_ON_STAND_IN_H
#define VJP_TESTS_ON_STAND_IN_H

#include "attributes.h"
#include "gpu/metal/device.h"
#include "metal/emulate.h"
#include "metal/stand_in.h"

/* After them: it names a variable `device`. */
#include "backend_here.h"
#include "on_device.h"

static inline vjp_status open_here(vjp_device **opened) {
    objc_use(&stand_in_system);
    assert_int_equal(vjp_device_create("metal", opened), VJP_OK);
    return vjp_device_start(*opened, backend_here(), NULL);
}

static inline void start(void) {
    stand_in_reset();
    emulate_with = (emulate_settings){EMULATE_IN_TURN, 32};
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
}

/* Everything was released, and nothing done that would be a fault on a real system. */
static inline void all_is_gone(void) {
    assert_string_equal(stand_in.misuse, "");
    assert_int_equal(stand_in.objects, 0);
    assert_int_equal(stand_in.pools, 0);
}

static inline void stop(void) {
    vjp_close(device);
    device = NULL;
    all_is_gone();
}

static inline vjp_status norm(vjp_tensor *y, const vjp_tensor *x) {
    return vjp_rms_norm_forward(device, y, NULL, x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5));
}

#endif
