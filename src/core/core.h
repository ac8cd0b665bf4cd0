/* SPDX-License-Identifier: MIT */
/*
 * What all parts of the library share: ops and their rules, devices, and calls in progress (vjp_work). What a backend
 * provides is in vjp_backend.h. core includes no op and no backend; they include core.
 *
 * Call path: vjp_call() collects the tensors in a vjp_work, checks them against the op's table (call.c), calls the op's
 * infer() for the shape of every slot, compares, looks up the backend's kernel and runs it.
 */
#ifndef VJP_CORE_H
#define VJP_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp_backend.h"

/* An op: its description (op/<op>.def, through the generated op/table.c) and its rules (op/<op>.c). */
typedef struct vjp_op_rules {
    /*
     * Checks attributes and the shapes of the inputs that shapes come from, and sets work->shape[] of every slot of the
     * pass. Reads an output's shape only where nothing else determines it. Must not read data.
     */
    vjp_status (*infer)(vjp_work *work);

    /*
     * Checks values, for ops whose input data can be refused (indices, positions), before anything is written. NULL
     * for most ops. Called by backends whose memory the host can read; the others check on the device.
     */
    vjp_status (*check_values)(const vjp_work *work);

    /* Whether a call has weights in halves (half.h), which few kernels take. NULL: never. */
    bool (*in_halves)(const vjp_work *work);

    /* Corrects the default cost (every present tensor moved once, += moved twice). NULL: the default holds. */
    void (*cost)(const vjp_work *work, vjp_cost *cost);

    /*
     * For graphs: which optional inputs of the backward (one bit per slot) to keep when the outputs `wanted` (one bit
     * per slot) are needed. NULL: all of them.
     */
    uint32_t (*keeps)(const void *attributes, uint32_t wanted);

    /*
     * For graphs: the outputs of the backward (one bit per slot) that are dy itself where they have its shape, as in a
     * sum: no call is needed.
     */
    uint32_t passes_gradient;
} vjp_op_rules;

struct vjp_op {
    vjp_op_info info;
    int id; /* its row in the tables of all ops: OP_ID(name) of op/op.h */
    const vjp_op_rules *rules;
};

/* The checks that need neither data nor memory; fills all of `work` but its workspace. */
vjp_status vjp_describe_work(vjp_work *work, vjp_device *device, const vjp_op *op, vjp_pass pass,
                             const vjp_tensor *const *tensors, size_t count, const void *attributes);

/*
 * vjp_call() in two parts, for callers that repeat the same call. vjp_resolve() makes all checks except those of
 * values, with the caller's workspace; vjp_run() checks values and computes. `attributes` (not NULL) and the tensors
 * must stay where they are in between.
 */
vjp_status vjp_resolve(vjp_work *work, const vjp_kernel **kernel, vjp_device *device, const vjp_op *op, vjp_pass pass,
                       const vjp_tensor *const *tensors, size_t count, const void *attributes, void *workspace,
                       size_t workspace_bytes);
vjp_status vjp_run(const vjp_work *work, const vjp_kernel *kernel);

/* vjp_warm() for a call that is resolved. */
vjp_status vjp_warm_work(const vjp_work *work);

enum { VJP_MAX_ATTRIBUTE_BYTES = 256 };

/* ---- Devices ----------------------------------------------------------------------------------------- */

enum { VJP_ERROR_BYTES = 512, VJP_NAME_BYTES = 64, VJP_SUMMARY_BYTES = 256 };

struct vjp_device {
    const vjp_backend *backend; /* NULL: opening failed, and `error` says why */
    const vjp_backend *found;   /* the backend of that name, even if it has no device on this machine */
    void *state;                /* the backend's own */
    void *library;              /* of a backend that was loaded */
    void *workspace;
    size_t workspace_bytes;
    void *own_workspace; /* what vjp_reserve() allocated; `workspace` may be the caller's instead */
    size_t own_workspace_bytes;
    vjp_allocate allocate; /* the caller's memory; NULL: the backend's */
    vjp_release release;
    void *allocate_context;
    vjp_log log; /* NULL: nothing is logged */
    void *log_context;
    char name[VJP_NAME_BYTES];
    char summary[VJP_SUMMARY_BYTES];
    char error[VJP_ERROR_BYTES];
};

/* Host memory for backends that live on the host (64-byte aligned). */
vjp_status vjp_host_alloc(vjp_device *device, size_t bytes, void **data);
void vjp_host_free(vjp_device *device, void *data);
vjp_status vjp_host_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
vjp_status vjp_host_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
vjp_status vjp_host_synchronize(vjp_device *device);

/* Runs task(argument, i) for i in [0, count) on the device's host threads. */
void vjp_parallel(const vjp_device *device, size_t count, vjp_task task, void *argument);

/* Opens a device of a given backend; open.c finds the backend. */
vjp_status vjp_device_create(const char *name, vjp_device **device);
vjp_status vjp_device_start(vjp_device *device, const vjp_backend *backend, const vjp_options *options);

/* ---- Separate libraries ------------------------------------------------------------------------------ */

enum { VJP_KIND_BYTES = 32, VJP_LIBRARY_FILE = 64 };

/* "cuda:0" is of the kind "cuda". False for a name that cannot be part of a file's name. */
bool vjp_library_kind(const char *name, char kind[VJP_KIND_BYTES]);

/* Loads libvjp-<kind>; `file` gets its file name. NULL: system_library_error() says why. */
void *vjp_library_open(const char *kind, char file[VJP_LIBRARY_FILE]);

/* ---- Failing ----------------------------------------------------------------------------------------- */

/* Records the sentence on the device and returns the status. */
vjp_status vjp_fail(vjp_device *device, vjp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* One line for the caller's log. */
void vjp_log_line(const vjp_device *device, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* vjp_fail() for a call: the sentence begins with "op.pass: ". */
vjp_status vjp_refuse(const vjp_work *work, vjp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- For infer() and kernels ------------------------------------------------------------------------- */

const char *vjp_pass_name(vjp_pass pass);

/* How many passes an op has: both, or only the forward where nothing is differentiated (an optimiser's step). */
static inline int vjp_passes(const vjp_op_info *info) {
    return info->pass[VJP_BACKWARD].count ? VJP_PASS_COUNT : 1;
}

/* Refuses a struct of another size, a boolean that is neither 0 nor 1 and an unknown choice. */
vjp_status vjp_check_attributes(const vjp_work *work);

static inline const vjp_slot *vjp_slot_at(const vjp_work *work, int slot) {
    return &work->op->info.pass[work->pass].slots[slot];
}

/* The host address of a slot's first element; NULL where absent. */
static inline void *vjp_data(const vjp_work *work, int slot) {
    const vjp_tensor *tensor = work->tensor[slot];
    return tensor && tensor->data ? (char *)tensor->data + tensor->offset : NULL;
}

static inline bool vjp_accumulates(const vjp_work *work, int slot) {
    return work->tensor[slot] && (work->tensor[slot]->flags & VJP_ACCUMULATE);
}

/* The dtype of a slot; T where absent, so that a switch on it has a value. */
static inline vjp_dtype vjp_type(const vjp_work *work, int slot) {
    return work->tensor[slot] ? (vjp_dtype)work->tensor[slot]->dtype : work->storage;
}

/*
 * Elements from one row of a tensor to the next, a row being the last two axes: their product, or more where the rows
 * lie apart.
 */
int64_t vjp_row_step(const vjp_tensor *tensor);

/* That of a slot; 0 where absent. */
static inline int64_t vjp_step(const vjp_work *work, int slot) {
    return work->tensor[slot] ? vjp_row_step(work->tensor[slot]) : 0;
}

/* Bytes from the first element to the end of the last, of a tensor whose strides were checked. */
int64_t vjp_extent(const vjp_tensor *tensor);

/* Takes a present tensor's own shape as the slot's (the inputs that shapes come from). */
void vjp_shape_own(vjp_work *work, int slot);

/*
 * Sets the shape of every slot of the pass whose shape in the table is `text`: the shapes shown to readers are also the
 * rule, for both passes.
 */
void vjp_shape_set(vjp_work *work, const char *text, int ndim, const int64_t *size);

/* Product of sizes [from, to) of a slot's shape. */
int64_t vjp_shape_product(const vjp_shape *shape, int from, int to);

/* Whether the byte count of a tensor of these sizes, of any dtype, does not overflow. */
bool vjp_sizes_fit(int ndim, const int64_t *size);

/* "[2, 3]", or "a scalar", in a buffer. */
enum { VJP_SHAPE_TEXT = 160 };
const char *vjp_shape_text(const vjp_shape *shape, char text[VJP_SHAPE_TEXT]);

/*
 * Reads element k of an index tensor (i32, i64, f32). False if it is not an integer or beyond what f32 holds exactly;
 * *value is then its value for the sentence.
 */
bool vjp_index_at(const void *data, vjp_dtype dtype, int64_t k, int64_t *index, double *value);

/* Refuses the first index of a slot that is not in [0, limit), on all threads. `axis` says what is indexed. */
vjp_status vjp_check_indices(const vjp_work *work, int slot, int64_t limit, const char *axis);

/* The same where one more value, `except`, is allowed; `name` is what the sentence calls it. */
vjp_status vjp_check_indices_except(const vjp_work *work, int slot, int64_t limit, const char *axis, int64_t except,
                                    const char *name);

#endif
