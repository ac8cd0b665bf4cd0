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
    VJP_DEVICE_FAILED = 6, /* the device or its driver reported an error of its own */
    VJP_INTERRUPTED = 7    /* vjp_program_interrupt() stopped a run */
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
 * any order, and return when all are done. Results do not depend on how it does that. A task that was begun runs to its
 * end by itself: it may wait for another that was begun, never for one that was not.
 */
typedef void (*vjp_task)(void *argument, size_t index);
typedef void (*vjp_parallel_for)(void *context, size_t count, vjp_task task, void *argument);

/* All zero is a good default. */
typedef struct vjp_options {
    int32_t threads;               /* CPU: how many threads; 0: VJP_THREADS if set, else one a core */
    vjp_parallel_for parallel_for; /* CPU: the caller's pool instead of ours */
    void *parallel_context;        /* passed to parallel_for */
    const char *instruction_set;   /* CPU: "plain", "neon", "avx2", "avx512"; NULL: VJP_ISA if set, else the best */
    const char *matrix_products;   /* CPU: "builtin", "amx", "blas"; NULL: VJP_GEMM if set, else amx for 16 bits where
                                      the processor has it, and builtin. CUDA: "f32", "tf32" */
    size_t workspace_bytes;        /* reserved when opening; 0: 128 MiB */
    void *stream;                  /* CUDA: the cudaStream_t to enqueue on; NULL: one of the device's own */
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
    VJP_KIND_ARGMAX = 4,    /* i32 or i64 */
    VJP_KIND_FLOAT = 5      /* f32, bf16, f16 or f64, whatever T is */
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
 * the same name. An op that nothing is differentiated through (an optimiser's step) has a backward of no slots, and
 * every call of that is VJP_UNSUPPORTED.
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

/* y = a + b; b has a's shape or its last axes (none too) and is used again for each of the rest. */
typedef struct vjp_add_attributes {
    int64_t b_axes; /* -1: read off b or db, else all of a's */
} vjp_add_attributes;

vjp_status vjp_add_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b);
vjp_status vjp_add_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dy);

/* y = a * b, with b as for add. */
typedef struct vjp_mul_attributes {
    int64_t b_axes; /* -1: read off b or db, else all of a's */
} vjp_mul_attributes;

vjp_status vjp_mul_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b);
vjp_status vjp_mul_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dy,
                            const vjp_tensor *a, const vjp_tensor *b);

/* y = factor * x. */
typedef struct vjp_scale_attributes {
    double factor; /* 1 */
} vjp_scale_attributes;

vjp_status vjp_scale_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, double factor);
vjp_status vjp_scale_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, double factor);

/* The mean over `axes` axes from `axis` on, which y no longer has. */
typedef struct vjp_mean_attributes {
    int64_t axis; /* 0; negative: from the end */
    int64_t axes; /* 1; 0: all from `axis` on */
} vjp_mean_attributes;

vjp_status vjp_mean_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, int64_t axis, int64_t axes);
vjp_status vjp_mean_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, const vjp_tensor *x,
                             int64_t axis, int64_t axes);

/* y = x / (1 - p), or 0 where the element is dropped; which are is a function of seed, step, stream and place alone. */
typedef struct vjp_dropout_attributes {
    double p;       /* 0.1; 0 or more, less than 1 */
    int64_t stream; /* 0; tells the dropouts of one step apart */
} vjp_dropout_attributes;

vjp_status vjp_dropout_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, const vjp_tensor *counter,
                               double p, int64_t stream);
vjp_status vjp_dropout_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy,
                                const vjp_tensor *counter, double p, int64_t stream);

/* y is x in another storage type, rounded to nearest even. It has no attributes. */
vjp_status vjp_cast_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x);
vjp_status vjp_cast_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy);
/* y = the sum of x^2 over all of x. += over many tensors gives the square of their common norm. */
vjp_status vjp_sum_squares_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x);

/* norm = sqrt(squares), scale = min(1, max_norm / norm): what gradients are multiplied by to be no longer than that. */
typedef struct vjp_clip_attributes {
    double max_norm; /* 1; 0: no limit, scale is 1 */
} vjp_clip_attributes;

vjp_status vjp_clip_forward(vjp_device *device, const vjp_tensor *scale, const vjp_tensor *norm,
                            const vjp_tensor *squares, double max_norm);

/* A step of AdamW: the averages m of g and v of g^2, corrected for their start at 0, move w; weights decay by lr. */
typedef struct vjp_adamw_attributes {
    double beta1;        /* 0.9 */
    double beta2;        /* 0.999 */
    double eps;          /* 1e-8 */
    double weight_decay; /* 0.01 */
} vjp_adamw_attributes;

vjp_status vjp_adamw_forward(vjp_device *device, const vjp_tensor *w_out, const vjp_tensor *m_out,
                             const vjp_tensor *v_out, const vjp_tensor *w, const vjp_tensor *m, const vjp_tensor *v,
                             const vjp_tensor *g, const vjp_tensor *lr, const vjp_tensor *step, const vjp_tensor *scale,
                             double beta1, double beta2, double eps, double weight_decay);

/* A step of gradient descent with momentum: momentum = beta momentum + g + weight_decay w, w = w - lr momentum. */
typedef struct vjp_sgd_attributes {
    double beta;         /* 0.9 */
    double weight_decay; /* 0 */
    int64_t nesterov;    /* 0; 1: a look ahead, w = w - lr (g + weight_decay w + beta momentum) */
} vjp_sgd_attributes;

vjp_status vjp_sgd_forward(vjp_device *device, const vjp_tensor *w_out, const vjp_tensor *momentum_out,
                           const vjp_tensor *w, const vjp_tensor *momentum, const vjp_tensor *g, const vjp_tensor *lr,
                           const vjp_tensor *scale, double beta, double weight_decay, int nesterov);
typedef enum vjp_reduction { VJP_REDUCE_MEAN = 0, VJP_REDUCE_SUM = 1 } vjp_reduction;

/* Softmax cross-entropy: the mean or sum over rows of log(sum(exp(logits))) - logits[target]. */
typedef struct vjp_cross_entropy_attributes {
    int64_t ignore_index;   /* -100: a row with this target takes no part */
    int64_t reduction;      /* VJP_REDUCE_MEAN: over the rows that take part; VJP_REDUCE_SUM */
    double label_smoothing; /* 0, up to 1: this share of a target is spread over all classes evenly */
} vjp_cross_entropy_attributes;

vjp_status vjp_cross_entropy_forward(vjp_device *device, const vjp_tensor *loss, const vjp_tensor *lse,
                                     const vjp_tensor *logits, const vjp_tensor *target, int64_t ignore_index,
                                     vjp_reduction reduction, double label_smoothing);
vjp_status vjp_cross_entropy_backward(vjp_device *device, const vjp_tensor *dlogits, const vjp_tensor *dloss,
                                      const vjp_tensor *logits, const vjp_tensor *target, const vjp_tensor *lse,
                                      int64_t ignore_index, vjp_reduction reduction, double label_smoothing);

/* y = silu(gate) * up, silu(x) = x / (1 + exp(-x)). No attributes. */
vjp_status vjp_swiglu_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *gate, const vjp_tensor *up);
vjp_status vjp_swiglu_backward(vjp_device *device, const vjp_tensor *dgate, const vjp_tensor *dup, const vjp_tensor *dy,
                               const vjp_tensor *gate, const vjp_tensor *up);
/* y = softmax(scale q k^T) v for each head; heads / kv_heads heads of q share one of k and v. */
typedef struct vjp_attention_attributes {
    int64_t causal; /* 1: time t sees the keys [0, t + keys - time]; 0: all */
    double scale;   /* 0: 1/sqrt(dim) */
} vjp_attention_attributes;

vjp_status vjp_attention_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *lse, const vjp_tensor *q,
                                 const vjp_tensor *k, const vjp_tensor *v, int causal, double scale);
vjp_status vjp_attention_backward(vjp_device *device, const vjp_tensor *dq, const vjp_tensor *dk, const vjp_tensor *dv,
                                  const vjp_tensor *dy, const vjp_tensor *q, const vjp_tensor *k, const vjp_tensor *v,
                                  const vjp_tensor *y, const vjp_tensor *lse, int causal, double scale);
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

/* ---- Graphs: ops on named values, differentiated ------------------------------------------------------ */

/*
 * A graph is built once, by calls that read like the mathematics, and then compiled (vjp_compile) for a device. A
 * value is a number; 0 stands for an absent one. Building never needs a check in between: the first mistake is kept,
 * with a sentence that names the node, every later call returns 0 quietly, and vjp_compile() reports it.
 *
 * Nodes run in the order in which they were built. What a program does not need is left out.
 */
typedef struct vjp_graph vjp_graph;
typedef int32_t vjp_value;

/* NULL when memory ran out. */
vjp_graph *vjp_graph_create(void);
void vjp_graph_destroy(vjp_graph *graph);

/* The first mistake, and its sentence ("" if none). */
vjp_status vjp_graph_status(const vjp_graph *graph);
const char *vjp_graph_error(const vjp_graph *graph);

/* Nodes built from here on are named "<scope>.<op>"; scopes nest. */
void vjp_graph_push(vjp_graph *graph, const char *name);
void vjp_graph_pop(vjp_graph *graph);

/* What changes from run to run and is written by the caller. */
vjp_value vjp_graph_input(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape);

/* What is kept from run to run: a parameter to train; a state, such as a moment of an optimiser. Zero at first. */
vjp_value vjp_graph_parameter(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape);
vjp_value vjp_graph_state(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape);

/* What never changes; the data is copied. */
vjp_value vjp_graph_constant(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape,
                             const void *data);

/* The same elements under another shape. No work is done for it. One size may be -1: what is left. */
vjp_value vjp_graph_reshape(vjp_graph *graph, vjp_value value, int ndim, const int64_t *shape);

/*
 * Any op of the table, forward. `inputs` has one value an input slot, 0 for what is absent; `attributes` is the op's
 * struct, NULL for the defaults. Returns the first output; vjp_graph_output() gives the others by the slot's name.
 */
vjp_value vjp_graph_call(vjp_graph *graph, const vjp_op *op, const vjp_value *inputs, size_t count,
                         const void *attributes);
vjp_value vjp_graph_output(vjp_graph *graph, vjp_value value, const char *slot);

/*
 * The node that made `output` writes it where `state` is: the new value of a parameter or of a moment. The op must
 * be able to compute it in place. What reads `state` and was built before reads the old value, later nodes the new one.
 * Returns `output`.
 */
vjp_value vjp_graph_assign(vjp_graph *graph, vjp_value state, vjp_value output);

/*
 * The node that made `output` adds it to `total`, an older output of the same shape, instead of writing it: sums over
 * many tensors without an addition. Returns `total`.
 */
vjp_value vjp_graph_accumulate(vjp_graph *graph, vjp_value total, vjp_value output);

/*
 * The gradients of a scalar with respect to parameters (or any other values), by the ops' own backward passes.
 * Gradients of a value that is used several times are added where they lie. `into`, where given, names for each
 * gradient a state that it is written to, or, with `add`, added to (0: the arena). gradients[i] is 0 on failure.
 */
vjp_status vjp_graph_grad(vjp_graph *graph, vjp_value scalar, const vjp_value *wrt, size_t count, const vjp_value *into,
                          int add, vjp_value *gradients);

/*
 * Nodes built between begin and end are a block that the backward computes again instead of keeping what they made:
 * less memory for more time, and the same bits.
 */
void vjp_graph_recompute_begin(vjp_graph *graph);
void vjp_graph_recompute_end(vjp_graph *graph);

/* What a value is: name, dtype and shape (data NULL). */
const char *vjp_graph_name(const vjp_graph *graph, vjp_value value);
vjp_tensor vjp_graph_describe(const vjp_graph *graph, vjp_value value);

/* The graph as text, one line a node, or as Graphviz's dot. malloc()ed: free() it. NULL when memory ran out. */
char *vjp_graph_text(const vjp_graph *graph);
char *vjp_graph_dot(const vjp_graph *graph);

/* ---- Programs: a graph compiled for a device ----------------------------------------------------------- */

typedef struct vjp_program vjp_program;

/* All zero is a good default. */
typedef struct vjp_program_options {
    const vjp_program *share; /* inputs, parameters and states lie where this program of the same graph has them */
    int32_t unplanned;        /* 1: every intermediate has memory of its own; to test the plan against */
    int32_t reserved;         /* zero */
} vjp_program_options;

/*
 * Orders the calls that `results` need, plans every intermediate in one arena, and resolves each call. Results can be
 * read after a run. *program is NULL on failure, and vjp_error(device) says why. The device and the shared program
 * must outlive it; the graph need not.
 */
vjp_status vjp_compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                       const vjp_program_options *options, vjp_program **program);
void vjp_program_destroy(vjp_program *program);

/* Where a value lies: any input, parameter, state or result. On the CPU, memory to read and write between runs. */
vjp_status vjp_program_tensor(const vjp_program *program, vjp_value value, vjp_tensor *tensor);

/* Copies host memory in or out; `bytes` must be the value's own. */
vjp_status vjp_program_write(vjp_program *program, vjp_value value, const void *host, size_t bytes);
vjp_status vjp_program_read(vjp_program *program, vjp_value value, void *host, size_t bytes);

/* Runs all calls. Nothing is allocated, looked up or checked but values that can be wrong, such as indices. */
vjp_status vjp_program_run(vjp_program *program);

/* Makes a run that is under way stop before its next call, with VJP_INTERRUPTED. May be called from a signal handler.
 */
void vjp_program_interrupt(vjp_program *program);

/*
 * Runs the calls one by one until one makes a number that is not finite, and tells which: `found` gets its sentence,
 * "" when there is none.
 */
vjp_status vjp_program_trace(vjp_program *program, char *found, size_t bytes);

typedef struct vjp_program_report {
    size_t calls;
    size_t arena_bytes;        /* what was planned */
    size_t live_bytes;         /* the most that is alive at one moment: no plan can be smaller */
    size_t intermediate_bytes; /* the sum of all intermediates and scratch: what it would be without a plan */
    size_t persistent_bytes;   /* inputs, parameters, states, constants */
    vjp_cost cost;             /* the least a run must do */
} vjp_program_report;

void vjp_program_describe(const vjp_program *program, vjp_program_report *report);

/*
 * With `on`, runs time each call. vjp_program_time() then gives call i: its node, op, pass, seconds so far, runs, and
 * what it is called with, as vjp_call() takes it.
 */
typedef struct vjp_call_time {
    const char *node;
    const vjp_op *op;
    vjp_pass pass;
    double seconds;
    int64_t runs;
    vjp_cost cost;
    const vjp_tensor *const *tensors; /* NULL where one is absent */
    const void *attributes;
} vjp_call_time;

void vjp_program_profile(vjp_program *program, int on);
vjp_status vjp_program_time(const vjp_program *program, size_t call, vjp_call_time *time);

/* ---- Nodes, typed: inputs, then attributes; 0 for an optional input that is absent --------------------- */

vjp_value vjp_graph_layer_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t axes,
                               double eps);
vjp_value vjp_graph_rms_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t axes, double eps);
vjp_value vjp_graph_group_norm(vjp_graph *graph, vjp_value x, vjp_value gamma, vjp_value beta, int64_t groups,
                               vjp_layout layout, double eps);
vjp_value vjp_graph_rope(vjp_graph *graph, vjp_value x, vjp_value cosine, vjp_value sine, vjp_value positions,
                         int64_t n_rot, vjp_pairing pairing);
vjp_value vjp_graph_cumsum(vjp_graph *graph, vjp_value x, int64_t axis, int exclusive, int reverse);
vjp_value vjp_graph_gather(vjp_graph *graph, vjp_value table, vjp_value index, int64_t axis);
vjp_value vjp_graph_maxpool2d(vjp_graph *graph, vjp_value x, const vjp_maxpool2d_attributes *attributes);
vjp_value vjp_graph_linear(vjp_graph *graph, vjp_value a, vjp_value b, vjp_value bias, vjp_activation activation,
                           int transpose_b);
vjp_value vjp_graph_cross_entropy(vjp_graph *graph, vjp_value logits, vjp_value target, int64_t ignore_index,
                                  vjp_reduction reduction, double label_smoothing);
vjp_value vjp_graph_swiglu(vjp_graph *graph, vjp_value gate, vjp_value up);
vjp_value vjp_graph_attention(vjp_graph *graph, vjp_value q, vjp_value k, vjp_value v, int causal, double scale);
vjp_value vjp_graph_conv2d(vjp_graph *graph, vjp_value x, vjp_value weight, vjp_value bias,
                           const vjp_conv2d_attributes *attributes);
vjp_value vjp_graph_add(vjp_graph *graph, vjp_value a, vjp_value b);
vjp_value vjp_graph_mul(vjp_graph *graph, vjp_value a, vjp_value b);
vjp_value vjp_graph_scale(vjp_graph *graph, vjp_value x, double factor);
vjp_value vjp_graph_mean(vjp_graph *graph, vjp_value x, int64_t axis, int64_t axes);
vjp_value vjp_graph_dropout(vjp_graph *graph, vjp_value x, vjp_value counter, double p, int64_t stream);
vjp_value vjp_graph_cast(vjp_graph *graph, vjp_value x, vjp_dtype dtype);
vjp_value vjp_graph_sum_squares(vjp_graph *graph, vjp_value x);

/* The scale; vjp_graph_output(graph, scale, "norm") is the norm. */
vjp_value vjp_graph_clip(vjp_graph *graph, vjp_value squares, double max_norm);

/* A step of an optimiser. What it changes (w, and m and v, or momentum) is assigned; returns the new w. */
vjp_value vjp_graph_adamw(vjp_graph *graph, vjp_value w, vjp_value m, vjp_value v, vjp_value g, vjp_value lr,
                          vjp_value step, vjp_value scale, const vjp_adamw_attributes *attributes);
vjp_value vjp_graph_sgd(vjp_graph *graph, vjp_value w, vjp_value momentum, vjp_value g, vjp_value lr, vjp_value scale,
                        const vjp_sgd_attributes *attributes);

#if defined(__GNUC__) || defined(__clang__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
