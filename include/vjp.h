/*
 * vjp: training kernels. For every operation the forward pass and its closed-form backward pass (the
 * vector-Jacobian product), on several kinds of processor, behind this one header.
 *
 * The order of use: vjp_open() a device, describe memory you own as vjp_tensor values, call
 * vjp_<op>_forward() and vjp_<op>_backward(), vjp_close() the device. Every call returns a status; on
 * anything but VJP_OK, vjp_error() has a sentence that names the op, the tensor and the numbers, and none
 * of your memory was changed. No call prints, aborts, or allocates while it computes.
 *
 * A device is used by one thread at a time; several threads use one device each. There is no other state.
 */
#ifndef VJP_H
#define VJP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) || defined(__clang__)
#pragma GCC visibility push(default)
#endif

/* ---- Status and version ------------------------------------------------------------------------------ */

typedef enum vjp_status {
    VJP_OK = 0,
    VJP_INVALID = 1,       /* the arguments contradict each other or the op's rules */
    VJP_UNSUPPORTED = 2,   /* the arguments make sense, but this device has no kernel for them */
    VJP_OUT_OF_MEMORY = 3, /* an allocation failed (opening, reserving; never inside a call) */
    VJP_WORKSPACE = 4,     /* the device's workspace is too small: vjp_reserve() what vjp_workspace_size() says */
    VJP_NO_DEVICE = 5,     /* there is no such device here; the sentence says why */
    VJP_DEVICE_FAILED = 6  /* the device or its driver reported an error of its own */
} vjp_status;

/* The status as a word: "ok", "invalid", ... Never NULL. */
const char *vjp_status_name(vjp_status status);

/* The library's version, "major.minor.patch". */
const char *vjp_version(void);

/* ---- Tensors ----------------------------------------------------------------------------------------- */

typedef enum vjp_dtype { VJP_F32 = 0, VJP_BF16 = 1, VJP_F16 = 2, VJP_F64 = 3, VJP_I32 = 4, VJP_I64 = 5 } vjp_dtype;

enum { VJP_DTYPE_COUNT = 6 };

size_t vjp_dtype_size(vjp_dtype dtype);      /* bytes an element; 0 for a value that is no dtype */
const char *vjp_dtype_name(vjp_dtype dtype); /* "f32", ...; "?" for a value that is no dtype */
int vjp_dtype_find(const char *name);        /* the dtype of that name, or -1 */

enum { VJP_MAX_DIMS = 8 };

/* On an output: add to what is there (+=) instead of overwriting it (=). */
enum { VJP_ACCUMULATE = 1 };

/*
 * A view of memory that the caller owns. `data` is a host pointer, a device pointer or a buffer handle, as
 * the device wants it; `offset` is in bytes. Strides are in elements; all zero means packed row-major, and
 * packed is what every kernel takes today (anything else is VJP_UNSUPPORTED).
 */
typedef struct vjp_tensor {
    void *data;
    uint64_t offset;
    int32_t dtype; /* a vjp_dtype */
    int32_t ndim;
    int64_t shape[VJP_MAX_DIMS];
    int64_t stride[VJP_MAX_DIMS];
    uint32_t flags;
    uint32_t reserved; /* zero */
} vjp_tensor;

/* A packed tensor over `data`. More than VJP_MAX_DIMS dimensions make a tensor that every call refuses. */
vjp_tensor vjp_tensor_of(void *data, vjp_dtype dtype, int ndim, const int64_t *shape);

/* ---- Devices ----------------------------------------------------------------------------------------- */

typedef struct vjp_device vjp_device;

/*
 * The caller's own thread pool: run task(argument, i) once for every i in [0, count), on any threads and in
 * any order, and return when all are done. Results do not depend on how it does that.
 */
typedef void (*vjp_task)(void *argument, size_t index);
typedef void (*vjp_parallel_for)(void *context, size_t count, vjp_task task, void *argument);

/* All zero is a good default. */
typedef struct vjp_options {
    int32_t threads;               /* CPU: how many threads; 0: VJP_THREADS if set, else one a core */
    vjp_parallel_for parallel_for; /* CPU: the caller's pool instead of ours */
    void *parallel_context;        /* passed to parallel_for */
    const char *instruction_set;   /* CPU: "plain", "neon", "avx2", "avx512"; NULL: VJP_ISA if set, else the best */
    const char *matrix_products; /* CPU: "builtin", "blas"; NULL: VJP_GEMM if set, else builtin. CUDA: "f32", "tf32" */
    size_t workspace_bytes;      /* reserved when opening; 0: 128 MiB */
    void *stream;                /* CUDA: the cudaStream_t to enqueue on; NULL: one of the device's own */
} vjp_options;

/*
 * Opens "cpu", "ref", "cuda:0", "webgpu" or "metal". *device is set even on failure, so that vjp_error() can
 * say why; close it in any case. (It is NULL only when memory ran out for the handle itself.)
 */
vjp_status vjp_open(const char *name, const vjp_options *options, vjp_device **device);
void vjp_close(vjp_device *device);

/* The sentence for the device's last failure, "" if none. Valid until the next call on the device. */
const char *vjp_error(const vjp_device *device);

/* The name it was opened by, and one line on what it is: instruction set, threads, matrix products. */
const char *vjp_device_name(const vjp_device *device);
const char *vjp_device_summary(const vjp_device *device);

/* Memory as the device wants it; on "cpu" and "ref" plain host memory. */
vjp_status vjp_alloc(vjp_device *device, size_t bytes, void **data);
void vjp_free(vjp_device *device, void *data);
vjp_status vjp_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
vjp_status vjp_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);

/* Waits for everything enqueued and reports what the device found on the way. */
vjp_status vjp_synchronize(vjp_device *device);

/* ---- Workspace --------------------------------------------------------------------------------------- */

/* Makes sure that the device's own workspace holds at least this much. */
vjp_status vjp_reserve(vjp_device *device, size_t bytes);

/* Uses the caller's memory (64-byte aligned) as workspace from now on; NULL, 0 returns to the device's own. */
vjp_status vjp_set_workspace(vjp_device *device, void *data, size_t bytes);

/* ---- Ops, as a table --------------------------------------------------------------------------------- */

typedef enum vjp_pass { VJP_FORWARD = 0, VJP_BACKWARD = 1 } vjp_pass;

enum { VJP_PASS_COUNT = 2 };
enum { VJP_MAX_SLOTS = 12 };

/* What a slot may hold. T is the op's storage type: that of its first VJP_KIND_STORAGE tensor. */
typedef enum vjp_kind {
    VJP_KIND_STORAGE = 0,   /* T */
    VJP_KIND_PARAMETER = 1, /* T or f32 */
    VJP_KIND_STATISTIC = 2, /* f32; f64 where T is f64 */
    VJP_KIND_INDEX = 3,     /* i32, i64, or f32 holding exact integers */
    VJP_KIND_ARGMAX = 4     /* i32 or i64 */
} vjp_kind;

enum {
    VJP_SLOT_OUTPUT = 1,     /* written; every output is optional: NULL means not computed */
    VJP_SLOT_OPTIONAL = 2,   /* an input that may be NULL */
    VJP_SLOT_ACCUMULATES = 4 /* an output that honours VJP_ACCUMULATE */
};

typedef struct vjp_slot {
    const char *name;
    const char *shape; /* for people: "[..., dim]" */
    const char *about;
    vjp_kind kind;
    uint32_t flags;
    uint32_t aliases; /* for an output: bit i set means it may be the very same memory as input slot i */
} vjp_slot;

typedef enum vjp_attribute_type { VJP_INTEGER = 0, VJP_REAL = 1, VJP_BOOLEAN = 2, VJP_CHOICE = 3 } vjp_attribute_type;

/* One member of an op's attribute struct. Integers, booleans and choices are int64_t there, reals are double. */
typedef struct vjp_attribute {
    const char *name;
    const char *about;
    vjp_attribute_type type;
    size_t offset;
    int64_t integer;            /* default of an integer, boolean or choice */
    double real;                /* default of a real */
    const char *const *choices; /* a choice's names, NULL-terminated, in the order of its values */
} vjp_attribute;

typedef struct vjp_pass_info {
    const vjp_slot *slots; /* outputs first, then inputs: the order of vjp_call()'s tensors */
    size_t count;
    size_t outputs;
} vjp_pass_info;

/*
 * An op told once. Names carry the gradient rule: the backward's output "dx" is the gradient of the forward's
 * input "x", its input "dy" that of the forward's output "y", and any other input is the forward's tensor of
 * the same name.
 */
typedef struct vjp_op_info {
    const char *name;
    const char *about;
    vjp_pass_info pass[VJP_PASS_COUNT];
    const vjp_attribute *attributes;
    size_t attribute_count;
    size_t attribute_bytes; /* size of the attribute struct */
} vjp_op_info;

typedef struct vjp_op vjp_op;

size_t vjp_op_count(void);
const vjp_op *vjp_op_at(size_t index);
const vjp_op *vjp_op_find(const char *name); /* NULL if there is none */
const vjp_op_info *vjp_op_describe(const vjp_op *op);

/* Fills an attribute struct with the op's defaults. */
void vjp_op_defaults(const vjp_op *op, void *attributes);

/*
 * VJP_OK if the device has a kernel for this pass at this storage type, else VJP_UNSUPPORTED and a sentence. Answers
 * for a device that failed to open, too, where its backend is installed: what it would do on a machine that has one.
 */
vjp_status vjp_supports(vjp_device *device, const vjp_op *op, vjp_pass pass, vjp_dtype storage);

/*
 * The one entry behind all typed functions. `tensors` has one pointer a slot of the pass, in the table's order,
 * NULL for what is absent. `attributes` is the op's attribute struct, NULL for the defaults.
 */
vjp_status vjp_call(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors, size_t count,
                    const void *attributes);

/* How much workspace that call needs. */
vjp_status vjp_workspace_size(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                              size_t count, const void *attributes, size_t *bytes);

/*
 * The shape and dtype of every slot, present or not, from the inputs that are present: `described` gets one
 * packed tensor a slot with data NULL. Data pointers of `tensors` are not looked at.
 */
vjp_status vjp_infer(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                     size_t count, const void *attributes, vjp_tensor *described);

/* The least that any implementation must do for that call: bytes moved and floating-point operations. */
typedef struct vjp_cost {
    double bytes;
    double flops;
} vjp_cost;

vjp_status vjp_least_cost(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                          size_t count, const void *attributes, vjp_cost *cost);

/* ---- Ops, typed: outputs, inputs, attributes; NULL for what is optional and absent ------------------- */

/* y = (x - mean) * rstd * gamma + beta over the last `axes` axes, rstd = 1/sqrt(var + eps). */
typedef struct vjp_layer_norm_attributes {
    int64_t axes; /* 1 */
    double eps;   /* 1e-5 */
} vjp_layer_norm_attributes;

vjp_status vjp_layer_norm_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *mean,
                                  const vjp_tensor *rstd, const vjp_tensor *x, const vjp_tensor *gamma,
                                  const vjp_tensor *beta, int64_t axes, double eps);
vjp_status vjp_layer_norm_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dgamma,
                                   const vjp_tensor *dbeta, const vjp_tensor *dy, const vjp_tensor *x,
                                   const vjp_tensor *gamma, const vjp_tensor *mean, const vjp_tensor *rstd,
                                   int64_t axes, double eps);

/* y = x * rstd * gamma + beta over the last `axes` axes, rstd = 1/sqrt(mean(x^2) + eps). */
typedef struct vjp_rms_norm_attributes {
    int64_t axes; /* 1 */
    double eps;   /* 1e-6 */
} vjp_rms_norm_attributes;

vjp_status vjp_rms_norm_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *rstd, const vjp_tensor *x,
                                const vjp_tensor *gamma, const vjp_tensor *beta, int64_t axes, double eps);
vjp_status vjp_rms_norm_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dgamma,
                                 const vjp_tensor *dbeta, const vjp_tensor *dy, const vjp_tensor *x,
                                 const vjp_tensor *gamma, const vjp_tensor *rstd, int64_t axes, double eps);

typedef enum vjp_layout { VJP_CHANNELS_FIRST = 0, VJP_CHANNELS_LAST = 1 } vjp_layout;

/* layer_norm's formula over (channels / groups) x spatial, gamma and beta a channel. */
typedef struct vjp_group_norm_attributes {
    int64_t groups; /* 1 */
    int64_t layout; /* VJP_CHANNELS_FIRST */
    double eps;     /* 1e-5 */
} vjp_group_norm_attributes;

vjp_status vjp_group_norm_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *mean,
                                  const vjp_tensor *rstd, const vjp_tensor *x, const vjp_tensor *gamma,
                                  const vjp_tensor *beta, int64_t groups, vjp_layout layout, double eps);
vjp_status vjp_group_norm_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dgamma,
                                   const vjp_tensor *dbeta, const vjp_tensor *dy, const vjp_tensor *x,
                                   const vjp_tensor *gamma, const vjp_tensor *mean, const vjp_tensor *rstd,
                                   int64_t groups, vjp_layout layout, double eps);

typedef enum vjp_pairing { VJP_PAIRS_HALF = 0, VJP_PAIRS_INTERLEAVED = 1 } vjp_pairing;

/* Rotates pairs of the first n_rot elements of each head by the angle whose cosine and sine the tables hold. */
typedef struct vjp_rope_attributes {
    int64_t n_rot;   /* 0: the whole head */
    int64_t pairing; /* VJP_PAIRS_HALF (i with i + n_rot/2) or VJP_PAIRS_INTERLEAVED (2i with 2i + 1) */
} vjp_rope_attributes;

vjp_status vjp_rope_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, const vjp_tensor *cosine,
                            const vjp_tensor *sine, const vjp_tensor *positions, int64_t n_rot, vjp_pairing pairing);
vjp_status vjp_rope_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, const vjp_tensor *cosine,
                             const vjp_tensor *sine, const vjp_tensor *positions, int64_t n_rot, vjp_pairing pairing);

/* Running sums along an axis (negative: from the end). */
typedef struct vjp_cumsum_attributes {
    int64_t axis;      /* -1 */
    int64_t exclusive; /* 0; 1: an element's own value is left out */
    int64_t reverse;   /* 0; 1: from the last element to the first */
} vjp_cumsum_attributes;

vjp_status vjp_cumsum_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, int64_t axis, int exclusive,
                              int reverse);
vjp_status vjp_cumsum_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, int64_t axis,
                               int exclusive, int reverse);

/* y[outer, k, inner] = table[outer, index[k], inner]: `axis` of the table is indexed. */
typedef struct vjp_gather_attributes {
    int64_t axis; /* 0 */
    int64_t rows; /* backward: length of dtable's axis; 0: read off dtable */
} vjp_gather_attributes;

vjp_status vjp_gather_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *table, const vjp_tensor *index,
                              int64_t axis);
vjp_status vjp_gather_backward(vjp_device *device, const vjp_tensor *dtable, const vjp_tensor *dy,
                               const vjp_tensor *index, int64_t axis);

/* The largest element of each window; argmax is its place in the plane, row * width + column. */
typedef struct vjp_maxpool2d_attributes {
    int64_t kernel_h, kernel_w;     /* 2, 2 */
    int64_t stride_h, stride_w;     /* 0: the kernel's */
    int64_t padding_h, padding_w;   /* 0 */
    int64_t dilation_h, dilation_w; /* 1 */
    int64_t ceil_mode;              /* 0; 1: a last window may hang over the edge */
    int64_t layout;                 /* VJP_CHANNELS_FIRST */
    int64_t height, width;          /* backward: x's plane; 0: read off x or dx */
} vjp_maxpool2d_attributes;

vjp_status vjp_maxpool2d_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *argmax, const vjp_tensor *x,
                                 const vjp_maxpool2d_attributes *attributes);
vjp_status vjp_maxpool2d_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, const vjp_tensor *x,
                                  const vjp_tensor *argmax, const vjp_maxpool2d_attributes *attributes);

typedef enum vjp_activation {
    VJP_ACT_NONE = 0,
    VJP_ACT_RELU = 1,
    VJP_ACT_GELU_TANH = 2,
    VJP_ACT_GELU_ERF = 3,
    VJP_ACT_SILU = 4,
    VJP_ACT_SIGMOID = 5,
    VJP_ACT_TANH = 6
} vjp_activation;

/* y = act(a b + bias). */
typedef struct vjp_linear_attributes {
    int64_t activation;  /* VJP_ACT_NONE */
    int64_t transpose_b; /* 0: b is [.., K, N]; 1: b is [.., N, K], as most frameworks store a weight */
    int64_t zero_nan;    /* backward: 1: a NaN pre-activation gives a zero derivative instead of NaN */
} vjp_linear_attributes;

vjp_status vjp_linear_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *pre, const vjp_tensor *a,
                              const vjp_tensor *b, const vjp_tensor *bias, vjp_activation activation, int transpose_b);
vjp_status vjp_linear_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dbias,
                               const vjp_tensor *dy, const vjp_tensor *a, const vjp_tensor *b, const vjp_tensor *bias,
                               const vjp_tensor *pre, vjp_activation activation, int transpose_b, int zero_nan);

/*
 * y[o, i, j] = bias[o] + sum of weight[o, c, u, v] * x[c, i*stride - padding + u*dilation, the same with j and v]; past
 * x's edge is 0. With VJP_CHANNELS_LAST weight is [out_channels, kernel_h, kernel_w, channels / groups].
 */
typedef struct vjp_conv2d_attributes {
    int64_t stride_h, stride_w;     /* 1 */
    int64_t padding_h, padding_w;   /* 0 */
    int64_t dilation_h, dilation_w; /* 1 */
    int64_t groups;                 /* 1 */
    int64_t layout;                 /* VJP_CHANNELS_FIRST */
    int64_t height, width;          /* backward: x's plane; 0: read off x or dx */
} vjp_conv2d_attributes;

vjp_status vjp_conv2d_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, const vjp_tensor *weight,
                              const vjp_tensor *bias, const vjp_conv2d_attributes *attributes);
vjp_status vjp_conv2d_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dweight,
                               const vjp_tensor *dbias, const vjp_tensor *dy, const vjp_tensor *x,
                               const vjp_tensor *weight, const vjp_conv2d_attributes *attributes);

#if defined(__GNUC__) || defined(__clang__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
