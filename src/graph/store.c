/* SPDX-License-Identifier: MIT */
/* A program's parameters and states as a safetensors file. */
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "files/safetensors.h"
#include "graph/program.h"

static bool is_stored(const program_value *value) {
    return value->name && (value->role == GRAPH_PARAMETER || value->role == GRAPH_STATE);
}

static vjp_status file_failed(vjp_program *program, const char *sentence) {
    return vjp_fail(program->device, VJP_FILE, "%s", sentence);
}

static size_t count_stored(const vjp_program *program) {
    size_t count = 0;
    for (int32_t v = 1; v < program->values; v++)
        count += is_stored(&program->value[v]);
    return count;
}

/* ---- Saving ------------------------------------------------------------------------------------------ */

/* Whether a value to be stored is not in the host's memory as the file has it. */
static bool is_copied(const vjp_program *program, const program_value *value) {
    return is_stored(value) && (!program->device->backend->host_memory || value->halves);
}

/* Describes every value; *copy holds those that is_copied() names. */
static vjp_status list_tensors(vjp_program *program, safetensors_tensor *tensors, char **copy) {
    size_t bytes = 0, used = 0, count = 0;
    for (int32_t v = 1; v < program->values; v++)
        if (is_copied(program, &program->value[v]) &&
            !vjp_add_size(bytes, program_bytes(&program->value[v].tensor), &bytes))
            return vjp_fail(program->device, VJP_INVALID, "the sum of the bytes of all values does not fit size_t");
    if (bytes && !(*copy = malloc(bytes)))
        return vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to copy %zu bytes from the device", bytes);
    vjp_status status = vjp_synchronize(program->device);
    for (int32_t v = 1; v < program->values && status == VJP_OK; v++) {
        const program_value *value = &program->value[v];
        const vjp_tensor *t = &value->tensor;
        if (!is_stored(value)) continue;
        safetensors_tensor *to = &tensors[count++];
        *to = (safetensors_tensor){.name = value->name, .dtype = t->dtype, .ndim = t->ndim};
        memcpy(to->shape, t->shape, sizeof t->shape);
        size_t own = program_bytes(t);
        to->data = (const char *)t->data + t->offset;
        if (!is_copied(program, value) || !own) continue;
        to->data = *copy + used;
        status = program_download(program, value, 0, *copy + used, own / vjp_dtype_size((vjp_dtype)t->dtype));
        used += own;
    }
    return status;
}

vjp_status vjp_program_save(vjp_program *program, const char *path) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (!path) return vjp_fail(program->device, VJP_INVALID, "vjp_program_save: path is NULL");
    char error[SAFETENSORS_ERROR] = "", *copy = NULL;
    size_t count = count_stored(program);
    safetensors_tensor *tensors = calloc(count + 1, sizeof *tensors);
    if (!tensors) return vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to list %zu values", count);
    vjp_status status = list_tensors(program, tensors, &copy);
    if (status == VJP_OK && !safetensors_write(path, tensors, count, NULL, 0, error))
        status = file_failed(program, error);
    free(copy);
    free(tensors);
    return status;
}

/* ---- Loading ----------------------------------------------------------------------------------------- */

static bool same_shape(const vjp_tensor *own, const safetensors_tensor *other) {
    bool same = own->ndim == other->ndim;
    for (int i = 0; i < own->ndim && same; i++)
        same = own->shape[i] == other->shape[i];
    return same;
}

/* Finds the tensor of each value, and refuses a file that has fewer, more, or others. */
static vjp_status match(vjp_program *program, const char *path, const safetensors_file *file,
                        const safetensors_tensor **matched) {
    vjp_device *device = program->device;
    graph_names names = {0};
    bool ok = true;
    for (size_t i = 0; i < file->count && ok; i++) /* the header has room for less than 2^31 of them */
        ok = names_add(&names, file->tensors[i].name, (int32_t)i);
    vjp_status status = ok ? VJP_OK : vjp_fail(device, VJP_OUT_OF_MEMORY, "no memory to sort the names of %s", path);
    for (int32_t v = 1; v < program->values && status == VJP_OK; v++) {
        const program_value *value = &program->value[v];
        if (!is_stored(value)) continue;
        const int32_t *at = names_find(&names, value->name);
        matched[v] = at ? &file->tensors[*at] : NULL;
        char own[VJP_SHAPE_TEXT];
        vjp_shape shape = {.ndim = value->tensor.ndim};
        memcpy(shape.size, value->tensor.shape, sizeof value->tensor.shape);
        if (!at)
            status = vjp_fail(device, VJP_FILE, "%s: it has no tensor \"%s\"", path, value->name);
        else if (matched[v]->dtype != value->tensor.dtype || !same_shape(&value->tensor, matched[v]))
            status = vjp_fail(device, VJP_FILE, "%s: the dtype or shape of \"%s\" differs; in the program it is %s, %s",
                              path, value->name, vjp_dtype_name((vjp_dtype)value->tensor.dtype),
                              vjp_shape_text(&shape, own));
    }
    names_free(&names);
    if (status == VJP_OK && file->count != count_stored(program))
        status = vjp_fail(device, VJP_FILE, "%s: it has %zu tensors; the program has %zu parameters and states", path,
                          file->count, count_stored(program));
    return status;
}

vjp_status vjp_program_load(vjp_program *program, const char *path) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (!path) return vjp_fail(program->device, VJP_INVALID, "vjp_program_load: path is NULL");
    char error[SAFETENSORS_ERROR] = "";
    safetensors_file file;
    if (!safetensors_read(path, &file, error)) return file_failed(program, error);
    const safetensors_tensor **matched = calloc((size_t)program->values, sizeof *matched);
    vjp_status status = matched ? match(program, path, &file, matched)
                                : vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to load %s", path);
    for (int32_t v = 1; v < program->values && status == VJP_OK; v++) {
        const program_value *to = &program->value[v];
        if (matched[v] && matched[v]->bytes)
            status = program_upload(program, to, 0, matched[v]->data,
                                    matched[v]->bytes / vjp_dtype_size((vjp_dtype)to->tensor.dtype));
    }
    free(matched);
    safetensors_free(&file);
    return status;
}
