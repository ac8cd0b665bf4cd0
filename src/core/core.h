/*
 * What everything inside the library shares: how an op is described, what a backend provides, and one call under
 * way (vjp_work). core knows no op and no backend; they know core.
 *
 * The way of a call: vjp_call() gathers the tensors into a vjp_work, checks them against the op's table
 * (call.c), asks the op's infer() for the shape of every slot, compares, looks the backend's kernel up and runs it.
 * A kernel therefore starts from facts: present tensors are packed, aligned, of the right dtype and shape, and
 * overlap only where the table allows.
 */
#ifndef VJP_CORE_H
#define VJP_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

typedef struct vjp_work vjp_work;

typedef struct vjp_shape {
    int32_t ndim;
    int64_t size[VJP_MAX_DIMS];
} vjp_shape;

struct vjp_op {
    vjp_op_info info; /* what the public header shows; first, so that a pointer to one is a pointer to the other */
    int id;           /* its row in the tables of all ops: OP_ID(name) of op/op.h */

    /*
     * Checks attributes and the shapes of the inputs that shapes come from, and sets work->shape[] of every slot of
     * the pass. Reads an output's shape only where nothing else can tell it. Must not look at data.
     */
    vjp_status (*infer)(vjp_work *work);

    /*
     * Checks values, for ops whose input data can be refused (indices, positions), before anything is written. NULL
     * for most ops. Called by backends whose memory the host can read; the others check on the device.
     */
    vjp_status (*check_values)(const vjp_work *work);

    /* Corrects the default cost (every present tensor moved once, += moved twice). NULL: the default is right. */
    void (*cost)(const vjp_work *work, vjp_cost *cost);

    /*
     * For graphs: which optional inputs of the backward (bit a slot) are worth keeping, when the outputs `wanted` (bit
     * a slot) are asked for. NULL: all of them.
     */
    uint32_t (*keeps)(const void *attributes, uint32_t wanted);

    /* For graphs: dy itself is the gradient of inputs of dy's shape, as in a sum: no call is needed. */
    bool passes_gradient;
};

/* One call under way. */
struct vjp_work {
    vjp_device *device;
    const vjp_op *op;
    vjp_pass pass;
    const vjp_tensor *tensor[VJP_MAX_SLOTS]; /* NULL where absent */
    vjp_shape shape[VJP_MAX_SLOTS];          /* of every slot, absent ones too */
    const void *attributes;                  /* never NULL here */
    vjp_dtype storage;                       /* T */
    void *workspace;                         /* 64-byte aligned, as many bytes as the kernel asked for */
    size_t workspace_bytes;
};

/*
 * vjp_call() in two halves, for who makes the same call many times. All checks but those of values, against a workspace
 * of the caller's; then the run, which checks values and computes. `attributes` (not NULL) and the tensors must stay
 * where they are between the two.
 */
typedef struct vjp_kernel vjp_kernel;
vjp_status vjp_resolve(vjp_work *work, const vjp_kernel **kernel, vjp_device *device, const vjp_op *op, vjp_pass pass,
                       const vjp_tensor *const *tensors, size_t count, const void *attributes, void *workspace,
                       size_t workspace_bytes);
vjp_status vjp_run(const vjp_work *work, const vjp_kernel *kernel);

enum { VJP_MAX_ATTRIBUTE_BYTES = 256 };

/* ---- Backends ---------------------------------------------------------------------------------------- */

struct vjp_kernel {
    vjp_status (*run)(const vjp_work *work);   /* NULL: no kernel */
    size_t (*workspace)(const vjp_work *work); /* NULL: none needed; SIZE_MAX: overflow */
    uint32_t storage;                          /* bit d set: storage type d is supported */
};

enum {
    VJP_BIT_F32 = 1 << VJP_F32,
    VJP_BIT_BF16 = 1 << VJP_BF16,
    VJP_BIT_F16 = 1 << VJP_F16,
    VJP_BIT_F64 = 1 << VJP_F64,
    VJP_BITS_CPU = VJP_BIT_F32 | VJP_BIT_BF16 | VJP_BIT_F16
};

typedef struct vjp_backend {
    const char *name;
    bool host_memory; /* the host reads and writes the device's memory: values are checked before the kernel */
    vjp_status (*open)(vjp_device *device, const vjp_options *options); /* sets device->state; vjp_fail() on failure */
    void (*close)(vjp_device *device);
    const vjp_kernel *(*kernel)(const vjp_device *device, const vjp_op *op, vjp_pass pass); /* NULL: no kernel */
    vjp_status (*alloc)(vjp_device *device, size_t bytes, void **data);
    void (*free)(vjp_device *device, void *data);
    vjp_status (*upload)(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
    vjp_status (*download)(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
    vjp_status (*synchronize)(vjp_device *device);
    /* Runs task(argument, i) for i in [0, count) on the device's host threads. NULL: it has none but the caller's. */
    void (*parallel)(const vjp_device *device, size_t count, vjp_task task, void *argument);
    /* Enqueues a copy within the device's memory. NULL: the host copies. */
    vjp_status (*copy)(vjp_device *device, void *to, const void *from, size_t bytes);
    /*
     * The time of what enqueue(argument) puts on the device, by its own clock: recorded once, replayed. NULL: the
     * host's clock tells.
     */
    vjp_status (*measure)(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, int replays,
                          double *seconds);
    /* The largest cache, which a timing must not be served from. NULL: the host's. */
    size_t (*cache_bytes)(const vjp_device *device);
    /* Records what enqueue(argument) puts on the device, to be replayed any number of times. NULL: it cannot. */
    vjp_status (*record)(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, void **recording);
    vjp_status (*replay)(vjp_device *device, void *recording);
    void (*forget)(vjp_device *device, void *recording);
    /* What people must know of how far it was proved: `vjp ops` says it. NULL: nothing. */
    const char *note;
} vjp_backend;

enum { VJP_ERROR_BYTES = 512, VJP_NAME_BYTES = 64, VJP_SUMMARY_BYTES = 256 };

struct vjp_device {
    const vjp_backend *backend; /* NULL: opening failed, and `error` says why */
    const vjp_backend *found;   /* the backend of that name, whether or not it has a device here */
    void *state;                /* the backend's own */
    void *library;              /* of a backend that was loaded, and how to let go of it */
    void (*unload)(void *library);
    void *workspace;
    size_t workspace_bytes;
    void *own_workspace; /* what vjp_reserve() allocated; `workspace` may be the caller's instead */
    size_t own_workspace_bytes;
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

/* Opens a device of a backend that is already known; open.c finds the backend. */
vjp_status vjp_device_create(const char *name, vjp_device **device);
vjp_status vjp_device_start(vjp_device *device, const vjp_backend *backend, const vjp_options *options);

/* ---- Failing ----------------------------------------------------------------------------------------- */

/* Records the sentence on the device and returns the status. */
vjp_status vjp_fail(vjp_device *device, vjp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same for a call: the sentence begins with "op.pass: ". */
vjp_status vjp_refuse(const vjp_work *work, vjp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- For infer() and kernels ------------------------------------------------------------------------- */

const char *vjp_pass_name(vjp_pass pass);

/* How many passes an op has: both, or the forward alone where nothing is differentiated (an optimiser's step). */
static inline int vjp_passes(const vjp_op_info *info) {
    return info->pass[VJP_BACKWARD].count ? VJP_PASS_COUNT : 1;
}

/* Refuses a boolean that is neither 0 nor 1 and a choice that is none. */
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

/* Takes a present tensor's own shape as the slot's (the inputs that shapes come from). */
void vjp_shape_own(vjp_work *work, int slot);

/*
 * Sets the shape of every slot of the pass whose table row says `text`. The shapes that people read in the table
 * are thus the rule itself, for both passes at once.
 */
void vjp_shape_set(vjp_work *work, const char *text, int ndim, const int64_t *size);

/* Product of sizes [from, to) of a slot's shape. */
int64_t vjp_shape_product(const vjp_shape *shape, int from, int to);

/* Whether a tensor of these sizes, of any dtype, has a byte count that nothing overflows on. */
bool vjp_sizes_fit(int ndim, const int64_t *size);

/* "[2, 3]" in a buffer. */
enum { VJP_SHAPE_TEXT = 160 };
const char *vjp_shape_text(const vjp_shape *shape, char text[VJP_SHAPE_TEXT]);

/*
 * Reads element k of an index tensor (i32, i64, f32). False if it is no integer or past what f32 holds exactly;
 * *value is then its value for the sentence.
 */
bool vjp_index_at(const void *data, vjp_dtype dtype, int64_t k, int64_t *index, double *value);

/* Refuses the first index of a slot that is not in [0, limit), on all threads. `axis` says what is indexed. */
vjp_status vjp_check_indices(const vjp_work *work, int slot, int64_t limit, const char *axis);

/* The same where one value, `except`, is allowed besides; `name` is what the sentence calls it. */
vjp_status vjp_check_indices_except(const vjp_work *work, int slot, int64_t limit, const char *axis, int64_t except,
                                    const char *name);

#endif
