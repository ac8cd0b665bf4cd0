/* SPDX-License-Identifier: MIT */
/*
 * Writing the safetensors format. The new file is written under a temporary name in the same folder, synced to the
 * disk, and then renamed: a full disk, a crash or a second writer never leaves half a file under the final name.
 * Several processes can write one file together, each its own tensors at their places.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/json.h"
#include "files/safetensors.h"
#include "files/sync.h"

enum { LENGTH_BYTES = 8, HEADER_ALIGNMENT = 8 };

static const char *const type_names[VJP_DTYPE_COUNT] = {
    [VJP_F32] = "F32", [VJP_BF16] = "BF16", [VJP_F16] = "F16", [VJP_F64] = "F64", [VJP_I32] = "I32", [VJP_I64] = "I64",
};

/* ---- The header -------------------------------------------------------------------------------------- */

static bool tensor_bytes(const safetensors_tensor *tensor, uint64_t *bytes, char *error) {
    if (!tensor->name || strcmp(tensor->name, "__metadata__") == 0)
        return file_fail(error, "a tensor cannot be called \"%s\"", tensor->name ? tensor->name : "(null)");
    if (tensor->dtype < 0 || tensor->dtype >= VJP_DTYPE_COUNT)
        return file_fail(error, "tensor \"%.64s\" has dtype %d, which is none", tensor->name, tensor->dtype);
    if (tensor->ndim < 0 || tensor->ndim > VJP_MAX_DIMS)
        return file_fail(error, "tensor \"%.64s\" has rank %d; ranks go from 0 to %d", tensor->name, tensor->ndim,
                         VJP_MAX_DIMS);
    *bytes = vjp_dtype_size((vjp_dtype)tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(*bytes, (uint64_t)tensor->shape[i], bytes) ||
            *bytes > INT64_MAX)
            return file_fail(error, "tensor \"%.64s\" has sizes that no file can hold", tensor->name);
    return true;
}

static void put_tensor(json_writer *w, const safetensors_tensor *tensor, uint64_t begin, uint64_t bytes) {
    json_put_object(w, tensor->name);
    json_put_text(w, "dtype", type_names[tensor->dtype]);
    json_put_array(w, "shape");
    for (int i = 0; i < tensor->ndim; i++)
        json_put_integer(w, NULL, tensor->shape[i]);
    json_put_array_end(w);
    json_put_array(w, "data_offsets");
    json_put_integer(w, NULL, (int64_t)begin);
    json_put_integer(w, NULL, (int64_t)(begin + bytes));
    json_put_array_end(w);
    json_put_object_end(w);
}

/* NULL: out of memory. */
static char *make_header(const safetensors_tensor *tensors, size_t count, const uint64_t *begin, const uint64_t *bytes,
                         const safetensors_pair *metadata, size_t pairs) {
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    if (pairs) {
        json_put_object(&w, "__metadata__");
        for (size_t i = 0; i < pairs; i++)
            json_put_text(&w, metadata[i].key, metadata[i].value);
        json_put_object_end(&w);
    }
    for (size_t i = 0; i < count; i++)
        put_tensor(&w, &tensors[i], begin[i], bytes[i]);
    json_put_object_end(&w);
    return json_take(&w);
}

/* Sets where the data of each begins: widest elements first, and within a width as given. False: the sum of all sizes
 * does not fit. */
static bool lay_out(const safetensors_tensor *tensors, size_t count, const uint64_t *bytes, size_t *order,
                    uint64_t *begin) {
    size_t placed = 0;
    uint64_t at = 0;
    for (size_t width = 8; width >= 1; width /= 2)
        for (size_t i = 0; i < count; i++)
            if (vjp_dtype_size((vjp_dtype)tensors[i].dtype) == width) {
                order[placed++] = i;
                begin[i] = at;
                if (__builtin_add_overflow(at, bytes[i], &at) || at > INT64_MAX) return false;
            }
    return true;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const safetensors_tensor *const *)a)->name, (*(const safetensors_tensor *const *)b)->name);
}

static bool check_names(const char *path, const safetensors_tensor *tensors, size_t count, char *error) {
    const safetensors_tensor **sorted = calloc(count + 1, sizeof *sorted);
    if (!sorted) return file_fail(error, "%s: there is no memory for its header", path);
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, by_name);
    bool ok = true;
    for (size_t i = 1; i < count && ok; i++)
        if (by_name(&sorted[i - 1], &sorted[i]) == 0)
            ok = file_fail(error, "%s: there are two tensors \"%.64s\"", path, sorted[i]->name);
    free(sorted);
    return ok;
}

/* A file to write: its tensors in the order of their data, and the header that says so. */
typedef struct content {
    char *header;
    const safetensors_tensor *tensors;
    size_t count;
    size_t *order;
    uint64_t *begin, *bytes; /* [count]: of each tensor's data, after the header */
} content;

static void free_content(content *c) {
    free(c->header);
    free(c->order);
    free(c->begin);
    free(c->bytes);
}

/* Free it in any case. */
static bool make_content(content *c, const char *path, const safetensors_tensor *tensors, size_t count,
                         const safetensors_pair *metadata, size_t pairs, char *error) {
    *c = (content){.tensors = tensors,
                   .count = count,
                   .order = calloc(count + 1, sizeof *c->order),
                   .begin = calloc(count + 1, sizeof *c->begin),
                   .bytes = calloc(count + 1, sizeof *c->bytes)};
    if (!c->order || !c->begin || !c->bytes) return file_fail(error, "%s: there is no memory for its header", path);
    for (size_t i = 0; i < count; i++)
        if (!tensor_bytes(&tensors[i], &c->bytes[i], error)) return false;
    if (!check_names(path, tensors, count, error)) return false;
    if (!lay_out(tensors, count, c->bytes, c->order, c->begin))
        return file_fail(error, "%s: all tensors together are larger than a file can be", path);
    c->header = make_header(tensors, count, c->begin, c->bytes, metadata, pairs);
    return c->header || file_fail(error, "%s: there is no memory for its header", path);
}

/* ---- The file ---------------------------------------------------------------------------------------- */

static bool write_all(int file, const void *data, size_t bytes) {
    const char *from = data;
    while (bytes) {
        int64_t wrote = system_write(file, from, bytes);
        if (wrote < 0) return false;
        from += wrote;
        bytes -= (size_t)wrote;
    }
    return true;
}

static size_t padding_of(const content *c) {
    return (HEADER_ALIGNMENT - strlen(c->header) % HEADER_ALIGNMENT) % HEADER_ALIGNMENT;
}

/* Where the data begins. */
static uint64_t header_end(const content *c) {
    return LENGTH_BYTES + strlen(c->header) + padding_of(c);
}

static bool write_header(int file, const content *c) {
    static const char blanks[HEADER_ALIGNMENT] = "       ";
    unsigned char prefix[LENGTH_BYTES];
    for (int i = 0; i < LENGTH_BYTES; i++)
        prefix[i] = (unsigned char)((header_end(c) - LENGTH_BYTES) >> (8 * i));
    return write_all(file, prefix, sizeof prefix) && write_all(file, c->header, strlen(c->header)) &&
           write_all(file, blanks, padding_of(c));
}

static bool write_content(int file, const content *c) {
    bool ok = write_header(file, c);
    for (size_t i = 0; ok && i < c->count; i++)
        ok = write_all(file, c->tensors[c->order[i]].data, (size_t)c->bytes[c->order[i]]);
    return ok;
}

/* For a pipe or a device, which a rename would replace by a file. */
static bool write_in_place(const char *path, const content *c, char *error) {
    int file = system_open_to_write(path);
    if (file < 0) return file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    bool ok = write_content(file, c);
    int reason = errno;
    if (!system_close(file) && ok) ok = false, reason = errno;
    return ok || file_fail(error, "%s: it cannot be written: %s", path, strerror(reason));
}

/* Opens a file beside `path` that did not exist. NULL: errno says why not. */
static char *open_temporary(const char *path, int *file) {
    enum { ATTEMPTS = 100 };
    size_t room = strlen(path) + 48;
    char *name = malloc(room);
    if (!name) return NULL;
    for (int i = 0; i < ATTEMPTS; i++) {
        snprintf(name, room, "%s.%lld.%d.tmp", path, (long long)system_process(), i);
        *file = system_create(name);
        if (*file >= 0) return name;
        if (errno != EEXIST) break;
    }
    int reason = errno;
    free(name);
    errno = reason;
    return NULL;
}

static bool write_and_rename(const char *path, const content *c, char *error) {
    int file;
    char *temporary = open_temporary(path, &file);
    if (!temporary) return file_fail(error, "%s: it cannot be created: %s", path, strerror(errno));
    bool ok = write_content(file, c) && system_sync(file);
    int reason = errno;
    if (!system_close(file) && ok) ok = false, reason = errno;
    if (ok && !system_rename(temporary, path)) ok = false, reason = errno;
    if (!ok) system_remove_file(temporary);
    free(temporary);
    if (!ok) return file_fail(error, "%s: it cannot be written: %s", path, strerror(reason));
    return file_sync_parent(path, error);
}

static bool write_file(const char *path, const content *c, char *error) {
    system_status status;
    bool exists = system_status_of(path, &status);
    if (!exists && errno != ENOENT) return file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    if (exists && status.kind == SYSTEM_FOLDER) return file_fail(error, "%s: it is a folder", path);
    if (exists && status.kind != SYSTEM_FILE) return write_in_place(path, c, error);
    /* The file that a symbolic link points to is replaced, not the link. */
    char *target = exists ? system_absolute_path(path) : NULL;
    if (exists && !target) return file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    bool ok = write_and_rename(target ? target : path, c, error);
    free(target);
    return ok;
}

bool safetensors_write(const char *path, const safetensors_tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]) {
    content c;
    bool ok = make_content(&c, path, tensors, count, metadata, pairs, error) && write_file(path, &c, error);
    free_content(&c);
    return ok;
}

/* ---- A file that several processes write ------------------------------------------------------------------ */

bool safetensors_begin(const char *path, const safetensors_tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]) {
    content c;
    bool ok = make_content(&c, path, tensors, count, metadata, pairs, error);
    int file = ok ? system_create(path) : -1;
    if (ok && file < 0) ok = file_fail(error, "%s: it cannot be created: %s", path, strerror(errno));
    if (ok && (!write_header(file, &c) || !system_sync(file)))
        ok = file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    if (file >= 0 && !system_close(file) && ok)
        ok = file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    free_content(&c);
    return ok;
}

static bool write_all_at(int file, const void *data, uint64_t bytes, uint64_t offset) {
    const char *from = data;
    for (uint64_t at = 0; at < bytes;) {
        int64_t wrote = system_write_at(file, from + at, (size_t)(bytes - at), (int64_t)(offset + at));
        if (wrote < 0) return false;
        at += (uint64_t)wrote;
    }
    return true;
}

bool safetensors_write_own(int file, const char *path, const safetensors_tensor *tensors, size_t count,
                           const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]) {
    content c;
    bool ok = make_content(&c, path, tensors, count, metadata, pairs, error), wrote = true;
    for (size_t i = 0; i < count && ok && wrote; i++)
        if (tensors[i].data) wrote = write_all_at(file, tensors[i].data, c.bytes[i], header_end(&c) + c.begin[i]);
    if (ok && !(wrote && system_sync(file)))
        ok = file_fail(error, "%s: it cannot be written: %s", path, strerror(errno));
    free_content(&c);
    return ok;
}
