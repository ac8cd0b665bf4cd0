/* SPDX-License-Identifier: MIT */
/*
 * The parts of DLPack 1.3 that this module uses, declared from its specification (https://dmlc.github.io/dlpack): how
 * Python libraries hand each other tensors. A tensor comes in a capsule that `__dlpack__` returns, or, at a tenth of
 * the cost, through a table of C functions that the tensor's type carries as `__dlpack_c_exchange_api__`.
 */
#ifndef VJP_PYTHON_DLPACK_H
#define VJP_PYTHON_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA_HOST = 3 };                 /* device types whose memory the host reads */
enum { DL_CUDA = 2, DL_CUDA_MANAGED = 13 };            /* and those of a GPU */
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4 };      /* type codes */
enum { DL_MAJOR = 1, DL_MINOR = 0, DL_READ_ONLY = 1 }; /* the version that we write; a flag */

typedef struct dl_device {
    int32_t type, id;
} dl_device;

typedef struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: packed row-major */
    uint64_t byte_offset;
} dl_tensor;

/* The content of a capsule "dltensor". */
typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_version {
    uint32_t major, minor;
} dl_version;

/* The content of a capsule "dltensor_versioned". */
typedef struct dl_managed_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

typedef struct dl_exchange_header {
    dl_version version;
    struct dl_exchange_header *previous; /* the table for an older major version */
} dl_exchange_header;

/* Functions that return an int return 0, or -1 with a Python exception set. Only `borrow` may be NULL. */
typedef struct dl_exchange {
    dl_exchange_header header;
    int (*allocate)(dl_tensor *prototype, dl_managed_versioned **made, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*from_object)(void *object, dl_managed_versioned **made);
    int (*to_object)(dl_managed_versioned *tensor, void **object); /* takes the tensor */
    int (*borrow)(void *object, dl_tensor *view);                  /* valid while the object is not changed */
    int (*current_stream)(int32_t type, int32_t id, void **stream);
} dl_exchange;

#endif
