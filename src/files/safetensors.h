/* SPDX-License-Identifier: MIT */
/*
 * Files in the safetensors format: eight bytes of header length (little-endian), a JSON header that names each tensor
 * with its dtype, shape and byte range, then the bytes of all tensors without gaps.
 *
 * Reading checks everything: a file that breaks the format anywhere is refused with a sentence, and no memory is kept.
 * Writing is atomic: the path names either the old file or the whole new one.
 */
#ifndef VJP_FILES_SAFETENSORS_H
#define VJP_FILES_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "files/fail.h"
#include "vjp.h"

enum { SAFETENSORS_ERROR = FILE_ERROR };

typedef struct safetensors_tensor {
    const char *name;
    const char *type; /* as the file has it: "F32", "U8", ... */
    int dtype;        /* a vjp_dtype, or -1: a type of the format that vjp does not compute with */
    int ndim;         /* can be larger than VJP_MAX_DIMS; `shape` then holds the first ones */
    int64_t shape[VJP_MAX_DIMS];
    const void *data; /* not aligned: copy it where alignment matters; NULL: in `file`, for safetensors_fetch() */
    size_t bytes;
    FILE *file; /* of a file that safetensors_open() opened */
    int64_t at; /* where the data begins in it */
} safetensors_tensor;

typedef struct safetensors_pair {
    const char *key, *value;
} safetensors_pair;

/* All zero is an empty file, safe to free. */
typedef struct safetensors_file {
    safetensors_tensor *tensors; /* in the order of the header */
    size_t count;
    safetensors_pair *metadata;
    size_t pairs;
    char *header; /* the strings above point into it */
    void *data;   /* NULL when the caller's memory was parsed, or the file was only opened */
    FILE *stream; /* of a file that was opened */
} safetensors_file;

/* Reads a whole file into memory, its data aligned to 64 bytes. False: `error` has a sentence that begins with the
 * path. */
bool safetensors_read(const char *path, safetensors_file *file, char error[SAFETENSORS_ERROR]);

/*
 * The same, but reads the header alone and keeps the file open: for files that are larger than memory allows to hold
 * twice. Only a regular file can be opened. (A mapped file would be as easy to use and ends the process with SIGBUS
 * when another process cuts it off.)
 */
bool safetensors_open(const char *path, safetensors_file *file, char error[SAFETENSORS_ERROR]);

/* Copies bytes [at, at + bytes) of a tensor, from memory or from its open file. False: the file cannot be read, or was
 * cut off.
 */
bool safetensors_fetch(const safetensors_tensor *tensor, size_t at, size_t bytes, void *to,
                       char error[SAFETENSORS_ERROR]);

/* The same as safetensors_read() from memory, which must outlive `file`: the tensors point into it. */
bool safetensors_parse(const void *bytes, size_t count, safetensors_file *file, char error[SAFETENSORS_ERROR]);

void safetensors_free(safetensors_file *file);

/* NULL if there is none of that name. */
const safetensors_tensor *safetensors_find(const safetensors_file *file, const char *name);
const char *safetensors_metadata(const safetensors_file *file, const char *key);

/*
 * Writes tensors (name, dtype, ndim, shape and data are read; type and bytes are not) and metadata. The header keeps
 * their order; the data is laid out with the widest elements first, so that every tensor is aligned to its element
 * although the format allows no gaps. A path that is no regular file (a pipe, a device) is written to directly.
 */
bool safetensors_write(const char *path, const safetensors_tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]);

/*
 * The same bytes, written by several processes together, all of which have the same list. One creates the file, which
 * must not exist, and its header. Then each writes into the file, which it has opened to write, the tensors whose data
 * is not NULL in its own list, and syncs them. Nothing here is atomic: the caller renames the folder around it.
 */
bool safetensors_begin(const char *path, const safetensors_tensor *tensors, size_t count,
                       const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]);
bool safetensors_write_own(int file, const char *path, const safetensors_tensor *tensors, size_t count,
                           const safetensors_pair *metadata, size_t pairs, char error[SAFETENSORS_ERROR]);

#endif
