/* SPDX-License-Identifier: MIT */
/*
 * What XLA's interface for foreign functions (version 0.x of its C API) passes to a handler: the part of its binary
 * layout that jax.c reads. Every struct begins with its size, so later versions may be longer.
 */
#ifndef VJP_PYTHON_XLA_H
#define VJP_PYTHON_XLA_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_MINOR = 1 };
enum { XLA_EXTENSION_METADATA = 1, XLA_STAGE_EXECUTE = 3, XLA_BUFFER = 1, XLA_ARRAY = 1 };
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_UNIMPLEMENTED = 12, XLA_INTERNAL = 13 };
enum { XLA_S32 = 4, XLA_S64 = 5, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16 };

typedef struct xla_extension {
    size_t struct_size;
    int32_t type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
    size_t struct_size;
    xla_extension *extensions;
    int32_t major, minor;
} xla_version;

typedef struct xla_metadata {
    size_t struct_size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error xla_error;

typedef struct xla_error_arguments {
    size_t struct_size;
    xla_extension *extensions;
    const char *message;
    int32_t code;
} xla_error_arguments;

typedef struct xla_api {
    size_t struct_size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    xla_error *(*create_error)(xla_error_arguments *arguments);
} xla_api;

typedef struct xla_buffer {
    size_t struct_size;
    xla_extension *extensions;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *shape;
} xla_buffer;

/* Arguments and results. */
typedef struct xla_values {
    size_t struct_size;
    xla_extension *extensions;
    int64_t count;
    int32_t *types;
    void **values;
} xla_values;

typedef struct xla_text {
    const char *bytes;
    size_t length;
} xla_text;

typedef struct xla_array {
    int32_t dtype;
    size_t count;
    void *data;
} xla_array;

typedef struct xla_attributes {
    size_t struct_size;
    xla_extension *extensions;
    int64_t count;
    int32_t *types;
    xla_text **names;
    void **values;
} xla_attributes;

typedef struct xla_frame {
    size_t struct_size;
    xla_extension *extensions;
    const xla_api *api;
    void *context;
    int32_t stage;
    xla_values arguments, results;
    xla_attributes attributes;
} xla_frame;

#endif
