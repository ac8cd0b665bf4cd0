/* SPDX-License-Identifier: MIT */
/*
 * Reading the safetensors format; safetensors_write.c writes it. json.c parses the header into a tree and refuses
 * invalid JSON and a name that is there twice; the tree becomes the list of tensors. Entries that the format does not
 * have are refused with the tensor's name. Of the tree only the strings are kept: names and metadata point into them.
 */
#include "files/safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/json.h"

/* The longest header that the format's own implementation takes. */
static const uint64_t MAX_HEADER = 100000000;

enum { LENGTH_BYTES = 8, DATA_ALIGNMENT = 64 };

/* Every type of the format, in bits; those that vjp computes with have a dtype. */
static const struct {
    const char *name;
    unsigned bits;
    int dtype;
} types[] = {
    {"F64", 64, VJP_F64}, {"F32", 32, VJP_F32}, {"F16", 16, VJP_F16}, {"BF16", 16, VJP_BF16}, {"I64", 64, VJP_I64},
    {"I32", 32, VJP_I32}, {"I16", 16, -1},      {"I8", 8, -1},        {"U64", 64, -1},        {"U32", 32, -1},
    {"U16", 16, -1},      {"U8", 8, -1},        {"BOOL", 8, -1},      {"C64", 64, -1},        {"F8_E5M2", 8, -1},
    {"F8_E4M3", 8, -1},   {"F8_E8M0", 8, -1},   {"F6_E2M3", 6, -1},   {"F6_E3M2", 6, -1},     {"F4", 4, -1},
};

enum { TYPE_COUNT = sizeof types / sizeof types[0] };

/* ---- The header -------------------------------------------------------------------------------------- */

/* The offsets of a tensor, until its data is read. */
typedef struct byte_range {
    int64_t begin, end;
    size_t tensor;
} byte_range;

typedef struct parser {
    safetensors_file *file;
    byte_range *ranges; /* one per tensor */
    char *error;
} parser;

static bool take_metadata(parser *p, const json_value *entry) {
    char shown[JSON_SHOWN];
    if (entry->type != JSON_OBJECT)
        return file_fail(p->error, "its __metadata__ is %s instead of an object", json_show(entry, shown));
    p->file->metadata = calloc(entry->count + 1, sizeof *p->file->metadata);
    if (!p->file->metadata) return file_fail(p->error, "there is no memory for its %zu metadata", entry->count);
    for (const json_value *v = entry->first; v; v = v->next) {
        if (v->type != JSON_STRING)
            return file_fail(p->error, "its __metadata__ has %s as \"%.64s\" instead of a text", json_show(v, shown),
                             v->key);
        p->file->metadata[p->file->pairs++] = (safetensors_pair){v->key, v->text};
    }
    return true;
}

static bool take_type(const json_value *entry, safetensors_tensor *tensor, unsigned *bits, char *error) {
    for (int i = 0; entry->type == JSON_STRING && i < TYPE_COUNT; i++)
        if (strcmp(types[i].name, entry->text) == 0) {
            tensor->type = types[i].name;
            tensor->dtype = types[i].dtype;
            *bits = types[i].bits;
            return true;
        }
    char shown[JSON_SHOWN];
    return file_fail(error, "tensor \"%.64s\" has dtype %s, which the format does not know", tensor->name,
                     json_show(entry, shown));
}

static bool check_list(const json_value *entry, const char *name, char *error) {
    char shown[JSON_SHOWN];
    return entry->type == JSON_ARRAY || file_fail(error, "tensor \"%.64s\" has %s as its %s instead of a list", name,
                                                  json_show(entry, shown), entry->key);
}

/* A size or an offset of the list `entry`. */
static bool take_size(const json_value *value, const json_value *entry, const char *name, int64_t *size, char *error) {
    char shown[JSON_SHOWN];
    if (value->type != JSON_NUMBER || !value->exact || value->integer < 0)
        return file_fail(error, "tensor \"%.64s\" has %s in its %s, which is not an integer from 0 to 2^63 - 1", name,
                         json_show(value, shown), entry->key);
    *size = value->integer;
    return true;
}

static bool take_shape(const json_value *entry, safetensors_tensor *tensor, uint64_t *elements, char *error) {
    if (!check_list(entry, tensor->name, error)) return false;
    bool empty = false, overflow = false;
    *elements = 1;
    for (const json_value *v = entry->first; v; v = v->next) {
        int64_t size = 0;
        if (!take_size(v, entry, tensor->name, &size, error)) return false;
        if (tensor->ndim < VJP_MAX_DIMS) tensor->shape[tensor->ndim] = size;
        tensor->ndim++;
        empty = empty || size == 0;
        /* Leaves room for the multiplication by an element's bits. */
        if (size && *elements > (uint64_t)INT64_MAX / 64 / (uint64_t)size) overflow = true;
        if (size && !overflow) *elements *= (uint64_t)size;
    }
    if (empty) *elements = 0, overflow = false;
    return !overflow ||
           file_fail(error, "tensor \"%.64s\" is too large: the product of its sizes overflows", tensor->name);
}

static bool take_offsets(const json_value *entry, const char *name, byte_range *range, char *error) {
    if (!check_list(entry, name, error)) return false;
    if (entry->count != 2)
        return file_fail(error, "tensor \"%.64s\" has %zu data_offsets instead of 2", name, entry->count);
    if (!take_size(entry->first, entry, name, &range->begin, error) ||
        !take_size(entry->first->next, entry, name, &range->end, error))
        return false;
    return range->begin <= range->end ||
           file_fail(error, "tensor \"%.64s\" has data_offsets [%lld, %lld], which end before they begin", name,
                     (long long)range->begin, (long long)range->end);
}

static bool take_tensor(parser *p, const json_value *entry) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    enum { DTYPE, SHAPE, OFFSETS, KEYS };
    const json_value *values[KEYS] = {0};
    const char *name = entry->key;
    char shown[JSON_SHOWN];
    if (entry->type != JSON_OBJECT)
        return file_fail(p->error, "tensor \"%.64s\" is %s instead of an object", name, json_show(entry, shown));
    for (const json_value *v = entry->first; v; v = v->next) {
        int key = 0;
        while (key < KEYS && strcmp(keys[key], v->key) != 0)
            key++;
        if (key == KEYS) return file_fail(p->error, "tensor \"%.64s\" has an unknown entry \"%.32s\"", name, v->key);
        values[key] = v;
    }
    for (int key = 0; key < KEYS; key++)
        if (!values[key]) return file_fail(p->error, "tensor \"%.64s\" has no %s", name, keys[key]);

    safetensors_tensor tensor = {.name = name};
    byte_range range = {.tensor = p->file->count};
    uint64_t elements = 0;
    unsigned bits = 0;
    if (!take_type(values[DTYPE], &tensor, &bits, p->error) ||
        !take_shape(values[SHAPE], &tensor, &elements, p->error) ||
        !take_offsets(values[OFFSETS], name, &range, p->error))
        return false;
    if (elements * bits % 8)
        return file_fail(p->error, "tensor \"%.64s\" has %llu elements of %u bits, which fill no whole bytes", name,
                         (unsigned long long)elements, bits);
    tensor.bytes = (size_t)(elements * bits / 8);
    if ((uint64_t)(range.end - range.begin) != tensor.bytes)
        return file_fail(p->error,
                         "tensor \"%.64s\" has %llu bytes by its shape and dtype, but %lld by its data_offsets", name,
                         (unsigned long long)tensor.bytes, (long long)(range.end - range.begin));
    p->ranges[p->file->count] = range;
    p->file->tensors[p->file->count++] = tensor;
    return true;
}

static bool take_entries(parser *p, const json_value *root) {
    p->file->tensors = calloc(root->count + 1, sizeof *p->file->tensors);
    p->ranges = calloc(root->count + 1, sizeof *p->ranges);
    if (!p->file->tensors || !p->ranges)
        return file_fail(p->error, "there is no memory for its %zu names", root->count);
    for (const json_value *v = root->first; v; v = v->next)
        if (!(strcmp(v->key, "__metadata__") == 0 ? take_metadata : take_tensor)(p, v)) return false;
    return true;
}

static int by_offset(const void *a, const void *b) {
    const byte_range *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Sorts the ranges and compares each with the one before: every byte of the data must belong to exactly one tensor. */
static bool check_ranges(parser *p, uint64_t *data_bytes) {
    if (p->file->count) qsort(p->ranges, p->file->count, sizeof *p->ranges, by_offset);
    int64_t end = 0;
    for (size_t i = 0; i < p->file->count; i++) {
        const char *name = p->file->tensors[p->ranges[i].tensor].name;
        if (p->ranges[i].begin < end)
            return file_fail(
                p->error, "tensor \"%.64s\" begins at byte %lld of the data, inside \"%.64s\", which ends at %lld",
                name, (long long)p->ranges[i].begin, p->file->tensors[p->ranges[i - 1].tensor].name, (long long)end);
        if (p->ranges[i].begin > end)
            return file_fail(p->error, "bytes %lld to %lld of the data belong to no tensor", (long long)end,
                             (long long)p->ranges[i].begin);
        end = p->ranges[i].end;
    }
    *data_bytes = (uint64_t)end;
    return true;
}

static uint64_t read_length(const unsigned char bytes[LENGTH_BYTES]) {
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    return length;
}

static bool check_length(uint64_t length, char *error) {
    if (length > MAX_HEADER)
        return file_fail(error, "it says that its header has %llu bytes; the most is %llu (is it a safetensors file?)",
                         (unsigned long long)length, (unsigned long long)MAX_HEADER);
    return true;
}

static bool check_size(uint64_t have, uint64_t want, char *error) {
    if (have < want)
        return file_fail(error, "it is cut off: its data has %llu of %llu bytes", (unsigned long long)have,
                         (unsigned long long)want);
    if (have > want)
        return file_fail(error, "it has more data than its tensors: %llu instead of %llu bytes",
                         (unsigned long long)have, (unsigned long long)want);
    return true;
}

static bool parse_header(parser *p, const char *text, size_t length, uint64_t *data_bytes) {
    if (!length || text[0] != '{') return file_fail(p->error, "its header does not begin with {");
    json_document document;
    char reason[FILE_ERROR] = "";
    if (!json_parse_up_to(MAX_HEADER, text, length, &document, reason))
        return file_fail(p->error, "its header cannot be read: %.300s", reason);
    bool ok = take_entries(p, document.root);
    p->file->header = json_take_texts(&document);
    return ok && check_ranges(p, data_bytes);
}

static void point_at_data(parser *p, const char *data) {
    for (size_t i = 0; i < p->file->count; i++)
        p->file->tensors[p->ranges[i].tensor].data = data + p->ranges[i].begin;
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool parse_bytes(parser *p, const unsigned char *bytes, size_t count) {
    char *error = p->error;
    if (count < LENGTH_BYTES) return file_fail(error, "it is cut off: %zu bytes are no safetensors file", count);
    uint64_t length = read_length(bytes), data_bytes;
    if (!check_length(length, error)) return false;
    if (length > count - LENGTH_BYTES)
        return file_fail(error, "it is cut off: its header has %zu of %llu bytes", count - LENGTH_BYTES,
                         (unsigned long long)length);
    if (!parse_header(p, (const char *)bytes + LENGTH_BYTES, (size_t)length, &data_bytes)) return false;
    if (!check_size(count - LENGTH_BYTES - length, data_bytes, error)) return false;
    point_at_data(p, (const char *)bytes + LENGTH_BYTES + length);
    return true;
}

bool safetensors_parse(const void *bytes, size_t count, safetensors_file *file, char error[SAFETENSORS_ERROR]) {
    *file = (safetensors_file){0};
    parser p = {.file = file, .error = error};
    bool ok = parse_bytes(&p, bytes, count);
    free(p.ranges);
    if (!ok) safetensors_free(file);
    return ok;
}

static bool read_header(parser *p, FILE *stream, size_t length, uint64_t *data_bytes) {
    char *text = malloc(length + 1);
    if (!text) return file_fail(p->error, "there is no memory for its header");
    size_t got = fread(text, 1, length, stream);
    bool ok = !ferror(stream) || file_fail(p->error, "it cannot be read: %s", strerror(errno));
    if (ok && got < length) ok = file_fail(p->error, "it is cut off: its header has %zu of %zu bytes", got, length);
    ok = ok && parse_header(p, text, length, data_bytes);
    free(text);
    return ok;
}

/* The header and, of a regular file, the size: no memory is taken for bytes that are not there. */
static bool read_head(parser *p, FILE *stream, uint64_t *begin, uint64_t *data_bytes) {
    char *error = p->error;
    unsigned char prefix[LENGTH_BYTES];
    size_t got = fread(prefix, 1, LENGTH_BYTES, stream);
    if (ferror(stream)) return file_fail(error, "it cannot be read: %s", strerror(errno));
    if (got < LENGTH_BYTES) return file_fail(error, "it is cut off: %zu bytes are no safetensors file", got);
    uint64_t length = read_length(prefix);
    if (!check_length(length, error)) return false;
    if (!read_header(p, stream, (size_t)length, data_bytes)) return false;
    *begin = LENGTH_BYTES + length;
    system_status status;
    if (!system_status_of_open(system_number_of(stream), &status) || status.kind != SYSTEM_FILE) return true;
    uint64_t size = (uint64_t)status.bytes;
    return check_size(size > *begin ? size - *begin : 0, *data_bytes, error);
}

static bool read_stream(parser *p, FILE *stream) {
    char *error = p->error;
    uint64_t begin, data_bytes;
    if (!read_head(p, stream, &begin, &data_bytes)) return false;
    size_t room = ((size_t)data_bytes / DATA_ALIGNMENT + 1) * DATA_ALIGNMENT;
    p->file->data = system_alloc(DATA_ALIGNMENT, room);
    if (!p->file->data)
        return file_fail(error, "there is no memory for its %llu bytes", (unsigned long long)data_bytes);
    size_t got = fread(p->file->data, 1, (size_t)data_bytes, stream);
    if (ferror(stream)) return file_fail(error, "it cannot be read: %s", strerror(errno));
    bool more = got == data_bytes && fgetc(stream) != EOF;
    if (!check_size(got + more, data_bytes, error)) return false;
    point_at_data(p, p->file->data);
    return true;
}

bool safetensors_read(const char *path, safetensors_file *file, char error[SAFETENSORS_ERROR]) {
    *file = (safetensors_file){0};
    FILE *stream = system_stream(path, "rb");
    if (!stream) return file_fail(error, "%s: it cannot be opened: %s", path, strerror(errno));
    char reason[SAFETENSORS_ERROR] = "";
    parser p = {.file = file, .error = reason};
    bool ok = read_stream(&p, stream);
    free(p.ranges);
    fclose(stream);
    if (ok) return true;
    safetensors_free(file);
    return file_fail(error, "%.200s: %.300s", path, reason);
}

static bool open_stream(parser *p, FILE *stream) {
    uint64_t begin, data_bytes;
    if (!read_head(p, stream, &begin, &data_bytes)) return false;
    for (size_t i = 0; i < p->file->count; i++) {
        safetensors_tensor *tensor = &p->file->tensors[p->ranges[i].tensor];
        tensor->file = stream;
        tensor->at = (int64_t)begin + p->ranges[i].begin;
    }
    return true;
}

bool safetensors_open(const char *path, safetensors_file *file, char error[SAFETENSORS_ERROR]) {
    *file = (safetensors_file){0};
    int opened = system_open_to_read(path);
    system_status status;
    if (opened >= 0 && system_status_of_open(opened, &status) && status.kind != SYSTEM_FILE) {
        system_close(opened);
        return file_fail(error, "%.200s: it is not a regular file", path);
    }
    file->stream = opened >= 0 ? system_stream_of(opened, "rb") : NULL;
    if (!file->stream) {
        file_fail(error, "%.200s: it cannot be opened: %s", path, strerror(errno));
        if (opened >= 0) system_close(opened);
        return false;
    }
    char reason[SAFETENSORS_ERROR] = "";
    parser p = {.file = file, .error = reason};
    bool ok = open_stream(&p, file->stream);
    free(p.ranges);
    if (ok) return true;
    safetensors_free(file);
    return file_fail(error, "%.200s: %.300s", path, reason);
}

bool safetensors_fetch(const safetensors_tensor *tensor, size_t at, size_t bytes, void *to,
                       char error[SAFETENSORS_ERROR]) {
    if (!tensor->file) {
        if (bytes) memcpy(to, (const char *)tensor->data + at, bytes);
        return true;
    }
    for (size_t done = 0; done < bytes;) {
        int64_t got = system_read_at(system_number_of(tensor->file), (char *)to + done, bytes - done,
                                     tensor->at + (int64_t)(at + done));
        if (got < 0) return file_fail(error, "tensor \"%.64s\" cannot be read: %s", tensor->name, strerror(errno));
        if (got == 0)
            return file_fail(error, "the file was cut off while tensor \"%.64s\" was read: %zu of %zu bytes",
                             tensor->name, at + done, tensor->bytes);
        done += (size_t)got;
    }
    return true;
}

void safetensors_free(safetensors_file *file) {
    if (file->stream) fclose(file->stream);
    free(file->tensors);
    free(file->metadata);
    free(file->header);
    system_free(file->data);
    *file = (safetensors_file){0};
}

const safetensors_tensor *safetensors_find(const safetensors_file *file, const char *name) {
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

const char *safetensors_metadata(const safetensors_file *file, const char *key) {
    for (size_t i = 0; i < file->pairs; i++)
        if (strcmp(file->metadata[i].key, key) == 0) return file->metadata[i].value;
    return NULL;
}
