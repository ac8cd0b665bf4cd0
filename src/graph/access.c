/* SPDX-License-Identifier: MIT */
/* Reading and writing a program's values between runs. */
#include <stdlib.h>

#include "core/half.h"
#include "graph/program.h"

vjp_status program_find(const vjp_program *program, vjp_value value, const program_value **found) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (value < 1 || value >= program->values || !program->value[value].name)
        return vjp_fail(program->device, VJP_INVALID,
                        "value %d is not an input, parameter, state or result that this program uses", value);
    *found = &program->value[value];
    return VJP_OK;
}

size_t program_bytes(const vjp_tensor *tensor) {
    size_t bytes = vjp_dtype_size((vjp_dtype)tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    return bytes;
}

vjp_status program_is_null(const vjp_program *program, const char *function, const char *what) {
    return vjp_fail(program->device, VJP_INVALID, "%s: %s is NULL", function, what);
}

/* ---- Halves ------------------------------------------------------------------------------------------- */

enum { PIECE = 1 << 18 }; /* elements of a parameter in halves that are copied at once */

/* Memory for the halves of a piece: upper ones, and lower ones PIECE elements behind. NULL: there is none. */
static uint16_t *new_piece(const vjp_program *program, const program_value *value) {
    uint16_t *half = malloc(2 * PIECE * sizeof *half);
    if (!half) vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to copy a piece of %s", value->name);
    return half;
}

static size_t pieces_end(size_t at, size_t end) {
    return end - at < PIECE ? end : at + PIECE;
}

/* Where the halves of element i are in the device's memory; the lower ones lie behind all upper ones. */
static uint64_t upper_at(const program_value *value, size_t i) {
    return value->tensor.offset + i * sizeof(uint16_t);
}

static uint64_t lower_at(const program_value *value, size_t i) {
    return upper_at(value, i) + program_bytes(&value->tensor) / 2;
}

static vjp_status upload_halves(const vjp_program *program, const program_value *to, size_t first, const float *host,
                                size_t count) {
    uint16_t *upper = new_piece(program, to), *lower = upper ? upper + PIECE : NULL;
    vjp_status status = upper ? VJP_OK : VJP_OUT_OF_MEMORY;
    for (size_t at = 0; at < count && status == VJP_OK; at = pieces_end(at, count)) {
        size_t some = pieces_end(at, count) - at;
        for (size_t i = 0; i < some; i++) {
            upper[i] = vjp_upper_half(host[at + i]);
            lower[i] = vjp_lower_half(host[at + i]);
        }
        status = vjp_upload(program->device, to->tensor.data, upper_at(to, first + at), upper, some * sizeof *upper);
        if (status == VJP_OK)
            status =
                vjp_upload(program->device, to->tensor.data, lower_at(to, first + at), lower, some * sizeof *lower);
    }
    free(upper);
    return status;
}

static vjp_status download_halves(const vjp_program *program, const program_value *from, size_t first, float *host,
                                  size_t count) {
    uint16_t *upper = new_piece(program, from), *lower = upper ? upper + PIECE : NULL;
    vjp_status status = upper ? VJP_OK : VJP_OUT_OF_MEMORY;
    for (size_t at = 0; at < count && status == VJP_OK; at = pieces_end(at, count)) {
        size_t some = pieces_end(at, count) - at;
        status =
            vjp_download(program->device, upper, from->tensor.data, upper_at(from, first + at), some * sizeof *upper);
        if (status == VJP_OK)
            status = vjp_download(program->device, lower, from->tensor.data, lower_at(from, first + at),
                                  some * sizeof *lower);
        for (size_t i = 0; i < some && status == VJP_OK; i++)
            host[at + i] = vjp_join_halves(upper[i], lower[i]);
    }
    free(upper);
    return status;
}

vjp_status program_upload(const vjp_program *program, const program_value *to, size_t first, const void *host,
                          size_t count) {
    if (to->halves) return upload_halves(program, to, first, host, count);
    size_t size = vjp_dtype_size((vjp_dtype)to->tensor.dtype);
    return vjp_upload(program->device, to->tensor.data, to->tensor.offset + first * size, host, count * size);
}

vjp_status program_download(const vjp_program *program, const program_value *from, size_t first, void *host,
                            size_t count) {
    if (from->halves) return download_halves(program, from, first, host, count);
    size_t size = vjp_dtype_size((vjp_dtype)from->tensor.dtype);
    return vjp_download(program->device, host, from->tensor.data, from->tensor.offset + first * size, count * size);
}

/* ---- Values ------------------------------------------------------------------------------------------- */

vjp_status vjp_program_tensor(const vjp_program *program, vjp_value value, vjp_tensor *tensor) {
    const program_value *found = NULL;
    vjp_status status = program_find(program, value, &found);
    if (status == VJP_OK && !tensor) return program_is_null(program, "vjp_program_tensor", "tensor");
    if (status == VJP_OK && found->halves)
        return vjp_fail(program->device, VJP_UNSUPPORTED,
                        "%s lies in halves, as options.halves allowed: use vjp_program_read() and vjp_program_write()",
                        found->name);
    if (status == VJP_OK) *tensor = found->tensor;
    return status;
}

static vjp_status find_sized(const vjp_program *program, vjp_value value, size_t bytes, const program_value **found) {
    vjp_status status = program_find(program, value, found);
    if (status == VJP_OK && program_bytes(&(*found)->tensor) != bytes)
        return vjp_fail(program->device, VJP_INVALID, "%s has %zu bytes; %zu were given", (*found)->name,
                        program_bytes(&(*found)->tensor), bytes);
    return status;
}

vjp_status vjp_program_write(vjp_program *program, vjp_value value, const void *host, size_t bytes) {
    const program_value *found = NULL;
    vjp_status status = find_sized(program, value, bytes, &found);
    if (status != VJP_OK) return status;
    if (bytes && !host) return program_is_null(program, "vjp_program_write", "host");
    return program_upload(program, found, 0, host, bytes / vjp_dtype_size((vjp_dtype)found->tensor.dtype));
}

vjp_status vjp_program_read(vjp_program *program, vjp_value value, void *host, size_t bytes) {
    const program_value *found = NULL;
    vjp_status status = find_sized(program, value, bytes, &found);
    if (status != VJP_OK) return status;
    if (bytes && !host) return program_is_null(program, "vjp_program_read", "host");
    return program_download(program, found, 0, host, bytes / vjp_dtype_size((vjp_dtype)found->tensor.dtype));
}
