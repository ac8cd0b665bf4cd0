/* SPDX-License-Identifier: MIT */
/*
 * The interface for backends outside this repository. vjp_open("name:0") loads libvjp-name.so (or .dylib) from the
 * usual places and calls
 *
 *     const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
 *
 * which returns the backend's table, or NULL where host->interface_version is not one that it was made for. The library
 * needs these headers and nothing else: it calls vjp's functions through `host`. tests/outside_backend.c is a complete
 * example.
 *
 * A kernel need not check its arguments: vjp has checked the call against the op's table, so present tensors are packed
 * (VJP_TAKES_ROWS says where not), aligned, of the right dtype and shape, and overlap only where the table allows.
 */
#ifndef VJP_BACKEND_H
#define VJP_BACKEND_H

#include "vjp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented when a change of this file requires backends to be recompiled. */
enum { VJP_BACKEND_INTERFACE = 5 };

typedef struct vjp_shape {
    int32_t ndim;
    int64_t size[VJP_MAX_DIMS];
} vjp_shape;

/* One call in progress. */
typedef struct vjp_work {
    vjp_device *device;
    const vjp_op *op;
    vjp_pass pass;
    const vjp_tensor *tensor[VJP_MAX_SLOTS]; /* NULL where absent */
    vjp_shape shape[VJP_MAX_SLOTS];          /* of every slot, absent ones too */
    const void *attributes;                  /* the op's attribute struct; NULL where it has none */
    vjp_dtype storage;                       /* T */
    void *workspace;                         /* 64-byte aligned, as many bytes as the kernel requested */
    size_t workspace_bytes;
} vjp_work;

typedef struct vjp_kernel {
    vjp_status (*run)(const vjp_work *work);   /* NULL: no kernel */
    size_t (*workspace)(const vjp_work *work); /* NULL: none needed; SIZE_MAX: overflow */
    uint32_t storage;                          /* bit d set: storage type d is supported; VJP_TAKES_... */
} vjp_kernel;

enum {
    VJP_BIT_F32 = 1 << VJP_F32,
    VJP_BIT_BF16 = 1 << VJP_BF16,
    VJP_BIT_F16 = 1 << VJP_F16,
    VJP_BIT_F64 = 1 << VJP_F64,
    VJP_STORAGE_16_32 = VJP_BIT_F32 | VJP_BIT_BF16 | VJP_BIT_F16,
    VJP_TAKES_ROWS = 1 << 16,  /* slots with VJP_SLOT_ROWS may have rows that lie apart; without it they are refused */
    VJP_TAKES_HALVES = 1 << 17 /* adamw: weights may lie in halves */
};

/* A NULL member: the device cannot do it, or core falls back to what the comment says. */
typedef struct vjp_backend {
    uint32_t struct_size;       /* sizeof(vjp_backend) */
    uint32_t interface_version; /* VJP_BACKEND_INTERFACE */
    const char *name;           /* the kind: "cuda" of "cuda:0" */
    const char *version;        /* must equal the library's (backends of this repository); NULL: any */
    int host_memory; /* the host reads and writes the device's memory: values are checked before the kernel */
    vjp_status (*open)(vjp_device *device, const vjp_options *options); /* sets the state; fails with a sentence */
    void (*close)(vjp_device *device);
    const vjp_kernel *(*kernel)(const vjp_device *device, const vjp_op *op, vjp_pass pass); /* NULL: no kernel */
    vjp_status (*alloc)(vjp_device *device, size_t bytes, void **data);
    void (*free)(vjp_device *device, void *data);
    vjp_status (*upload)(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
    vjp_status (*download)(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
    vjp_status (*synchronize)(vjp_device *device);
    /* Runs task(argument, i) for i in [0, count) on the device's host threads. NULL: on the caller's alone. */
    void (*parallel)(const vjp_device *device, size_t count, vjp_task task, void *argument);
    /* Enqueues a copy within the device's memory. NULL: through the host. */
    vjp_status (*copy)(vjp_device *device, void *to, const void *from, size_t bytes);
    /*
     * The time of what enqueue(argument) puts on the device, by the device's clock: recorded once, replayed. NULL: the
     * host's clock is used.
     */
    vjp_status (*measure)(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, int replays,
                          double *seconds);
    /* The size of the largest cache, so that timings can avoid it. NULL: the host's. */
    size_t (*cache_bytes)(const vjp_device *device);
    /* Records what enqueue(argument) puts on the device, to be replayed any number of times. NULL: it cannot. */
    vjp_status (*record)(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, void **recording);
    vjp_status (*replay)(vjp_device *device, void *recording);
    void (*forget)(vjp_device *device, void *recording);
    /* What `vjp ops` says about how the backend was tested. NULL: nothing. */
    const char *note;
    /* Compiles what the call needs and runs nothing. NULL: nothing is compiled in a call. */
    vjp_status (*warm)(const vjp_work *work);
    vjp_status (*set_stream)(vjp_device *device, void *stream); /* NULL: the device has no streams */
    /* Copies in order with the device's calls. NULL: upload and download. */
    vjp_status (*upload_async)(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
    vjp_status (*download_async)(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
    /* An event recorded now in the device's queue, and the host's wait for it. NULL: vjp_synchronize(). */
    vjp_status (*event_create)(vjp_device *device, void **event);
    vjp_status (*event_wait)(vjp_device *device, void *event);
    void (*event_destroy)(vjp_device *device, void *event);
    /* How many devices of this kind the machine has, and a line on each. NULL: one. */
    int (*count)(void);
    vjp_status (*describe)(int index, char *text, size_t bytes);
    /*
     * What the device uses, by name, as vjp_device_property() gives it; NULL for an unknown name. A backend that reads
     * options.matrix_products or options.instruction_set knows that name: others are not opened with such a choice.
     */
    const char *(*property)(const vjp_device *device, const char *name, char *text, size_t bytes);
    /* Whether vjp_options.allocate can give this device's memory. */
    int takes_allocator;
    /*
     * Refuses a call for reasons that the op's table does not cover, such as the sizes of buffers, before anything
     * runs. NULL: nothing to refuse.
     */
    vjp_status (*check)(const vjp_work *work);
    /*
     * Whether run_many() gains something for this op and pass. run_many() runs such calls, all on one device, with the
     * results that they have one after the other. No call reads what another one writes; where several add to one
     * output, they do it in the order given. Each has its own workspace. NULL: calls run one by one.
     */
    int (*merges)(const vjp_device *device, const vjp_op *op, vjp_pass pass);
    vjp_status (*run_many)(const vjp_work *const *works, size_t count);
    vjp_status (*warm_many)(const vjp_work *const *works, size_t count); /* as warm() for one call; NULL: nothing */
    /* Host memory that the device copies from and to without a detour (pinned). NULL: malloc() and free(). */
    vjp_status (*alloc_host)(vjp_device *device, size_t bytes, void **data);
    void (*free_host)(vjp_device *device, void *data);
    /*
     * Copies from the host beside the calls that are in the queue; calls that are enqueued later wait for it. The
     * caller knows that no call in the queue uses `data`. NULL: upload_async.
     */
    vjp_status (*upload_beside)(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
    /*
     * Whether linear multiplies by silu(gate) in the kernel that computes the product, alone or in a pair (below) with
     * the product that computes gate: graphs then put swiglu there.
     */
    int gates_products;
    /*
     * Enqueues y[M, N] = a[M, K] b[K, N], packed and of one dtype, by the fastest plain product of this device: vjp
     * bench measures linear against it. VJP_UNSUPPORTED: not of these sizes. NULL: it is measured against linear.
     */
    vjp_status (*raw_product)(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b);
    /*
     * Whether run_pair() gains something for two calls of a program, the second of which reads what the first writes.
     * Bit i of `unread`: nothing else reads the first call's output i. This is called before memory is planned: equal
     * addresses mean the same memory, and nothing more. NULL: calls run one by one.
     */
    int (*pairs)(const vjp_work *first, const vjp_work *second, uint32_t unread);
    /*
     * Runs both, with the results that they have one after the other; unread outputs need not be written. Outputs of
     * the second call may be in the place of its own inputs, as its op allows, but never of the first call's.
     */
    vjp_status (*run_pair)(const vjp_work *first, const vjp_work *second);
    /*
     * Copies between the device's memory and alloc_host()'s, beside the calls: the copy begins when the calls that are
     * in the queue have ended, and calls that are enqueued after copy_wait() wait for it. Copies in one direction keep
     * their order. A ticket is a small number that names the copy until it has been waited for. Both may be called
     * while a run is recorded. NULL: graphs keep everything in the device's memory.
     *
     * Graphs copy what no call has to wait for. While one byte is copied, calls move about copy_cost bytes of the
     * device's memory; moving one takes as long as flops_per_byte operations of a large product.
     */
    vjp_status (*copy_begin)(vjp_device *device, void *to, const void *from, size_t bytes, int to_host, int ticket);
    vjp_status (*copy_wait)(vjp_device *device, int ticket);
    double copy_cost, flops_per_byte;
} vjp_backend;

/* What vjp offers a backend. */
typedef struct vjp_backend_host {
    uint32_t struct_size;       /* sizeof(vjp_backend_host) */
    uint32_t interface_version; /* VJP_BACKEND_INTERFACE */
    const char *version;        /* the library's */
    /* Records the sentence on the device and returns the status; refuse() begins it with "op.pass: ". */
    vjp_status (*fail)(vjp_device *device, vjp_status status, const char *format, ...);
    vjp_status (*refuse)(const vjp_work *work, vjp_status status, const char *format, ...);
    const vjp_op_info *(*describe)(const vjp_op *op);
    const char *(*name)(const vjp_device *device); /* as it was opened: "cuda:0" */
    void *(*state)(const vjp_device *device);      /* the backend's own, NULL at first */
    void (*set_state)(vjp_device *device, void *state);
    void (*set_summary)(vjp_device *device, const char *text);
    void (*log)(const vjp_device *device, const char *format, ...);
} vjp_backend_host;

#ifdef __cplusplus
}
#endif

#endif
