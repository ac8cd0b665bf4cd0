/* SPDX-License-Identifier: MIT */
/* The entry of a backend whose files are linked into the test, for access to its internals. */
#ifndef VJP_TESTS_BACKEND_HERE_H
#define VJP_TESTS_BACKEND_HERE_H

#include "vjp_backend.h"

const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);

static inline const vjp_backend *backend_here(void) {
    vjp_backend_host host = {.struct_size = sizeof host, .interface_version = VJP_BACKEND_INTERFACE};
    host.version = vjp_version();
    return vjp_backend_entry(&host);
}

#endif
