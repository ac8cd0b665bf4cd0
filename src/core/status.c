/* SPDX-License-Identifier: MIT */
/* Statuses and their sentences. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/core.h"

const char *vjp_status_name(vjp_status status) {
    switch (status) {
    case VJP_OK: return "ok";
    case VJP_INVALID: return "invalid";
    case VJP_UNSUPPORTED: return "unsupported";
    case VJP_OUT_OF_MEMORY: return "out of memory";
    case VJP_WORKSPACE: return "workspace too small";
    case VJP_NO_DEVICE: return "no device";
    case VJP_DEVICE_FAILED: return "device failed";
    case VJP_INTERRUPTED: return "interrupted";
    case VJP_FILE: return "file";
    case VJP_GROUP_FAILED: return "group_failed";
    }
    return "unknown status";
}

const char *vjp_version(void) {
    return VJP_VERSION;
}

const char *vjp_pass_name(vjp_pass pass) {
    return pass == VJP_FORWARD ? "forward" : "backward";
}

const char *vjp_error(const vjp_device *device) {
    return device ? device->error : "out of memory: there is no device";
}

void vjp_string_free(char *text) {
    free(text);
}

vjp_status vjp_fail(vjp_device *device, vjp_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(device->error, sizeof device->error, format, list);
    va_end(list);
    return status;
}

void vjp_log_line(const vjp_device *device, const char *format, ...) {
    if (!device || !device->log) return;
    char line[VJP_ERROR_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    device->log(device->log_context, line);
}

vjp_status vjp_refuse(const vjp_work *work, vjp_status status, const char *format, ...) {
    char *error = work->device->error;
    int used = snprintf(error, VJP_ERROR_BYTES, "%s.%s: ", work->op->info.name, vjp_pass_name(work->pass));
    va_list list;
    va_start(list, format);
    vsnprintf(error + used, VJP_ERROR_BYTES - (size_t)used, format, list);
    va_end(list);
    return status;
}
