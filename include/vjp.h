/* SPDX-License-Identifier: MIT */
/*
 * vjp: training kernels. For every operation the forward pass and its closed-form backward pass (the
 * vector-Jacobian product), on several kinds of processor, behind this one header.
 *
 * Order of use: vjp_open() a device, describe memory you own as vjp_tensor values, call vjp_<op>_forward() and
 * vjp_<op>_backward() (vjp_ops.h, included at the end), vjp_close() the device. Every call returns a status; on
 * anything but VJP_OK, vjp_error() has a sentence that names the op, the tensor and the numbers, and none of your
 * memory was changed. No call prints or aborts. On the CPU and on CUDA no call allocates while it computes; WebGPU and
 * Metal compile a kernel when it is first used, unless vjp_warm() or vjp_compile() did so before.
 *
 * A device is used by one thread at a time; several threads use one device each. There is no other state.
 *
 * Structs that you fill begin with struct_size, so that later versions can add members: start from the struct's
 * _DEFAULTS, or set struct_size to the struct's size and the rest to zero.
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

#define VJP_VERSION_MAJOR 0
#define VJP_VERSION_MINOR 2
#define VJP_VERSION_PATCH 0
#define VJP_VERSION       "0.2.0"

/* The version of the library that is linked; VJP_VERSION is that of this header. */
const char *vjp_version(void);

typedef enum vjp_status {
    VJP_OK = 0,
    VJP_INVALID = 1,       /* the arguments contradict each other or the op's rules */
    VJP_UNSUPPORTED = 2,   /* the arguments make sense, but this device has no kernel for them */
    VJP_OUT_OF_MEMORY = 3, /* an allocation failed (opening, reserving, compiling) */
    VJP_WORKSPACE = 4,     /* the device's workspace is too small: vjp_reserve() what vjp_workspace_size() says */
    VJP_NO_DEVICE = 5,     /* there is no such device here; the sentence says why */
    VJP_DEVICE_FAILED = 6, /* the device or its driver reported an error of its own */
    VJP_INTERRUPTED = 7,   /* vjp_program_interrupt() stopped a run */
    VJP_FILE = 8,          /* a file could not be read or written; the sentence says why */
    VJP_GROUP_FAILED = 9   /* another process of a group did not answer, or what it sent does not fit */
} vjp_status;

/* The status as a word: "ok", "invalid", ... Never NULL. */
const char *vjp_status_name(vjp_status status);

/* ---- Tensors ----------------------------------------------------------------------------------------- */

typedef enum vjp_dtype { VJP_F32 = 0, VJP_BF16 = 1, VJP_F16 = 2, VJP_F64 = 3, VJP_I32 = 4, VJP_I64 = 5 } vjp_dtype;

enum { VJP_DTYPE_COUNT = 6 };

size_t vjp_dtype_size(vjp_dtype dtype);      /* bytes per element; 0 for an unknown dtype */
const char *vjp_dtype_name(vjp_dtype dtype); /* "f32", ...; "?" for an unknown dtype */
int vjp_dtype_find(const char *name);        /* the dtype of that name, or -1 */

enum { VJP_MAX_DIMS = 8 };

/* On an output: add to what is there (+=) instead of overwriting it (=). */
enum { VJP_ACCUMULATE = 1 };

/*
 * A view of memory that the caller owns. `data` is a host pointer, a device pointer or a buffer handle, depending on
 * the device; `offset` is in bytes. Strides are in elements and mean what they say: 0 repeats an element. Kernels take
 * packed row-major tensors, as vjp_tensor_of() describes them. A slot with VJP_SLOT_ROWS also takes a tensor whose rows
 * lie apart, such as the queries in a tensor that holds queries, keys and values of each time: a row, the last two
 * axes, is packed, and all rows follow at one distance. Anything else is VJP_UNSUPPORTED. The stride of an axis of size
 * 1 is not used, and no stride of an empty tensor is.
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

/* A packed tensor over `data`. A wrong ndim or a NULL shape makes a tensor that every call refuses. */
vjp_tensor vjp_tensor_of(void *data, vjp_dtype dtype, int ndim, const int64_t *shape);

/* ---- Devices ----------------------------------------------------------------------------------------- */

typedef struct vjp_device vjp_device;

/*
 * The caller's own thread pool: run task(argument, i) once for every i in [0, count), on any threads and in any order,
 * and return when all are done. Results do not depend on how it does that. A task may wait for another that has begun,
 * never for one that has not.
 */
typedef void (*vjp_task)(void *argument, size_t index);
typedef void (*vjp_parallel_for)(void *context, size_t count, vjp_task task, void *argument);

/* The caller's own memory: `alignment` is a power of two; NULL when memory ran out. `release` gets what `allocate`
 * gave.
 */
typedef void *(*vjp_allocate)(void *context, size_t bytes, size_t alignment);
typedef void (*vjp_release)(void *context, void *data);

/* Receives log lines, one at a time: what was opened, compiled or left out. */
typedef void (*vjp_log)(void *context, const char *line);

typedef struct vjp_options {
    uint64_t struct_size;          /* sizeof(vjp_options) */
    int32_t threads;               /* CPU: number of threads; 0: VJP_THREADS if set, else what the process may use */
    int32_t fixed_rows;            /* CPU: 1: the bits of a row of a matrix product do not depend on how many rows the
                                      product has, as generating text token by token needs; 0: faster splits of few rows */
    vjp_parallel_for parallel_for; /* CPU: the caller's pool instead of ours */
    void *parallel_context;        /* passed to parallel_for */
    const char *instruction_set;   /* CPU: "plain", "neon", "avx2", "avx512", "wasm"; NULL: VJP_ISA, else the best */
    const char *matrix_products;   /* CPU: "builtin", "amx", "blas"; NULL: VJP_GEMM if set, else amx for 16 bits where
                                      the processor has it, and builtin. CUDA: "f32", or "tf32", which shortens f32
                                      operands to TF32. Other devices refuse it, as they refuse instruction_set */
    size_t workspace_bytes;        /* reserved when opening; 0: 128 MiB */
    void *stream;                  /* CUDA: the cudaStream_t to enqueue on; NULL: one of the device's own */
    vjp_allocate allocate;         /* memory for vjp_alloc(), workspace and programs, as the device needs it (host
                                      memory, CUDA device memory); NULL: the device's own. WebGPU and Metal refuse it */
    vjp_release release;
    void *allocate_context; /* passed to allocate and release */
    vjp_log log;            /* NULL: nothing is logged */
    void *log_context;
} vjp_options;

#define VJP_OPTIONS_DEFAULTS                                                                                           \
    { sizeof(vjp_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/*
 * Opens "cpu", "ref", "cuda:0", "webgpu" or "metal", or a device of a third-party backend (vjp_backend.h).
 * *device is set even on failure, so that vjp_error() can say why; close it in any case. (It is NULL only when memory
 * ran out for the handle itself.)
 */
vjp_status vjp_open(const char *name, const vjp_options *options, vjp_device **device);
void vjp_close(vjp_device *device);

/* The kinds of devices that this version has, whether or not this machine has one: "ref", "cpu", ...; NULL past the
 * last. */
const char *vjp_device_kind(size_t index);

/* How many devices of a kind this machine has, and one line on each; 0 where its backend is not installed. */
size_t vjp_device_count(const char *kind);
vjp_status vjp_device_describe(const char *kind, size_t index, char *text, size_t bytes);

/* The sentence for the device's last failure, "" if none. Valid until the next call on the device. */
const char *vjp_error(const vjp_device *device);

/* The name it was opened by, and one line on what it is: instruction set, threads, matrix products. */
const char *vjp_device_name(const vjp_device *device);
const char *vjp_device_summary(const vjp_device *device);

/* 1 if the host reads and writes the device's memory directly ("cpu", "ref"); 0 otherwise. */
int vjp_device_is_host(const vjp_device *device);

/*
 * What the device uses, by name: on the CPU "instruction_set", "threads", "pool", "matrix_products", "blas"; on CUDA
 * "matrix_products" and the bytes "memory_free" and "memory_total"; on WebGPU and Metal what was counted since it was
 * opened: "dispatches", "submissions", "waits", "pipelines" and the "pipeline_seconds" that these took. VJP_UNSUPPORTED
 * where a device has no such thing.
 */
vjp_status vjp_device_property(vjp_device *device, const char *name, char *text, size_t bytes);

/* CUDA: enqueues on this cudaStream_t from now on; NULL: on the device's own. VJP_UNSUPPORTED where there are none. */
vjp_status vjp_set_stream(vjp_device *device, void *stream);

/* ---- Memory ------------------------------------------------------------------------------------------ */

/* Memory as the device needs it; on "cpu" and "ref" plain host memory. */
vjp_status vjp_alloc(vjp_device *device, size_t bytes, void **data);
void vjp_free(vjp_device *device, void *data);

/* Copies that are done when the call returns. */
vjp_status vjp_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
vjp_status vjp_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);

/*
 * Copies that are enqueued in order with the device's calls; host memory must stay as it is until a later event, or
 * vjp_synchronize(). A device that cannot do it copies at once. Copies within the device may not overlap.
 */
vjp_status vjp_upload_async(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
vjp_status vjp_download_async(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
vjp_status vjp_copy(vjp_device *device, void *to, uint64_t to_offset, const void *from, uint64_t from_offset,
                    size_t bytes);

/* A point in the device's queue: recorded now, waited for by the host, destroyed by the caller. */
typedef struct vjp_event vjp_event;
vjp_status vjp_event_record(vjp_device *device, vjp_event **event);
vjp_status vjp_event_wait(vjp_device *device, vjp_event *event);
void vjp_event_destroy(vjp_device *device, vjp_event *event);

/* Waits for everything enqueued and reports errors that the device found meanwhile. */
vjp_status vjp_synchronize(vjp_device *device);

/* Makes sure that the device's own workspace holds at least this much. */
vjp_status vjp_reserve(vjp_device *device, size_t bytes);

/* Uses the caller's memory (64-byte aligned) as workspace from now on; NULL, 0 returns to the device's own. */
vjp_status vjp_set_workspace(vjp_device *device, void *data, size_t bytes);

/* Frees a string that a vjp function returned as char *. */
void vjp_string_free(char *text);

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
    VJP_KIND_FLOAT = 5,     /* f32, bf16, f16 or f64, whatever T is */
    VJP_KIND_GRADIENT = 6,  /* T, f32 or bf16 */
    VJP_KIND_MOMENT = 7     /* f32 or bf16; f64 where T is f64 */
} vjp_kind;

enum {
    VJP_SLOT_OUTPUT = 1,      /* written; every output is optional: NULL means not computed */
    VJP_SLOT_OPTIONAL = 2,    /* an input that may be NULL */
    VJP_SLOT_ACCUMULATES = 4, /* an output that honours VJP_ACCUMULATE */
    VJP_SLOT_ROWS = 8         /* the rows, which are the last two axes, may lie apart: see vjp_tensor */
};

typedef struct vjp_slot {
    const char *name;
    const char *shape; /* for readers: "[..., dim]" */
    const char *about;
    vjp_kind kind;
    uint32_t flags;
    uint32_t aliases; /* for an output: bit i set means it may be the very same memory as input slot i */
    uint32_t reserved[3];
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
    uint64_t reserved[2];
} vjp_attribute;

typedef struct vjp_pass_info {
    const vjp_slot *slots; /* outputs first, then inputs: the order of vjp_call()'s tensors */
    size_t count;
    size_t outputs;
} vjp_pass_info;

/*
 * The description of an op. Names carry the gradient rule: the backward's output "dx" is the gradient of the forward's
 * input "x", its input "dy" that of the forward's output "y", and any other input is the forward's tensor of the same
 * name. An op that nothing is differentiated through (an optimiser's step) has a backward of no slots, and every call
 * of that is VJP_UNSUPPORTED.
 */
typedef struct vjp_op_info {
    const char *name;
    const char *family; /* "norm", "elementwise", ... */
    const char *about;
    const char *formula;
    vjp_pass_info pass[VJP_PASS_COUNT];
    const vjp_attribute *attributes;
    size_t attribute_count;
    size_t attribute_bytes; /* size of the attribute struct; 0: the op has none */
    uint64_t reserved[4];
} vjp_op_info;

typedef struct vjp_op vjp_op;

size_t vjp_op_count(void);
const vjp_op *vjp_op_at(size_t index);
const vjp_op *vjp_op_find(const char *name); /* NULL if there is none */
const vjp_op_info *vjp_op_describe(const vjp_op *op);

/* Fills an attribute struct with the op's defaults, struct_size too. */
void vjp_op_defaults(const vjp_op *op, void *attributes);

/*
 * VJP_OK if the device has a kernel for this pass at this storage type, else VJP_UNSUPPORTED and a sentence. Answers
 * for a device that failed to open, too, where its backend is installed: what it would do on a machine that has one.
 */
vjp_status vjp_supports(vjp_device *device, const vjp_op *op, vjp_pass pass, vjp_dtype storage);

/*
 * The entry behind all typed functions. `tensors` has one pointer per slot of the pass, in the table's order, NULL for
 * what is absent. `attributes` is the op's attribute struct, NULL for the defaults.
 */
vjp_status vjp_call(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors, size_t count,
                    const void *attributes);

/*
 * `calls` calls of one pass with the same attributes, and the results that they have one after the other. The tensors
 * of call i begin at tensors[i * count]. All calls are checked before the first one runs, but for values such as
 * indices. Where none of them uses what another one writes, a device that can runs several as one: CUDA merges rope (of
 * queries and of keys), adamw, sgd, sum_squares and cast.
 */
vjp_status vjp_call_many(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                         size_t count, size_t calls, const void *attributes);

/*
 * Compiles what that call needs on this device and runs nothing: WebGPU and Metal compile a kernel when a combination
 * of dtypes, options and placement first needs it. No call allocates or compiles after vjp_warm(). The other devices
 * have nothing to compile. vjp_compile() does this for every call of a program.
 */
vjp_status vjp_warm(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors, size_t count,
                    const void *attributes);

/* How much workspace that call needs. */
vjp_status vjp_workspace_size(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                              size_t count, const void *attributes, size_t *bytes);

/*
 * The shape and dtype of every slot, present or not, from the inputs that are present: `described` gets one packed
 * tensor per slot with data NULL. Data pointers of `tensors` are not read.
 */
vjp_status vjp_infer(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                     size_t count, const void *attributes, vjp_tensor *described);

/* The minimum that any implementation must do for that call: bytes moved and floating-point operations. */
typedef struct vjp_cost {
    double bytes;
    double flops;
    double reserved[2];
} vjp_cost;

vjp_status vjp_min_cost(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                        size_t count, const void *attributes, vjp_cost *cost);

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
 * Any op of the table, forward. `inputs` has one value per input slot, 0 for an absent one; `attributes` is the op's
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
 * Gradients of a value that is used several times are added in place. `into`, where given, names for each gradient a
 * state that it is written to, or, with `add`, added to (0: the arena). gradients[i] is 0 on failure.
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

/* The graph as text, one line per node, or as Graphviz's dot: vjp_string_free() it. NULL when memory ran out. */
char *vjp_graph_text(const vjp_graph *graph);
char *vjp_graph_dot(const vjp_graph *graph);

/* ---- Programs: a graph compiled for a device ----------------------------------------------------------- */

typedef struct vjp_program vjp_program;

typedef struct vjp_program_options {
    uint64_t struct_size;     /* sizeof(vjp_program_options) */
    const vjp_program *share; /* use the inputs, parameters and states of this program of the same graph */
    int32_t unplanned;        /* 1: every intermediate gets its own memory; for tests of the plan */
    int32_t halves;           /* 1: parameters may lie in halves, see below */
    int32_t share_arena;      /* 1: use the arena of `share`, too, if it is large enough, see below */
    size_t arena_bytes;       /* at least this much, for programs that will share it; 0: as planned */
    size_t arena_limit;       /* what the arena should fit into, see below; 0: no limit */
} vjp_program_options;

#define VJP_PROGRAM_OPTIONS_DEFAULTS                                                                                   \
    { sizeof(vjp_program_options), 0, 0, 0, 0, 0, 0 }

/*
 * Programs that run in turn need the memory of one. With options.share_arena a run of this program overwrites results
 * of `share` that lie in its arena, and of all others that share it: read them first, or let them be states. In turn is
 * meant of the device's queue as well: programs that share an arena must run on one stream. vjp_plan() says how large
 * an arena each needs; a program that needs more than there is allocates its own.
 */

/*
 * With options.arena_limit values that one pass over memory computes are freed and computed again, as few as it takes
 * for an arena that is no larger than that. Without a limit, a device with memory of its own does this wherever it
 * pays, and the CPU nowhere. Where that is not enough, intermediates that are not used for long are copied to the
 * host's memory and back, beside the calls, on CUDA. Only what calls need not wait for is copied, so the arena may stay
 * larger. The results have the same bits. vjp_program_report says how much host memory that takes, which the system
 * cannot page out.
 */

/*
 * With options.halves a device that has the kernels (CUDA) keeps each f32 parameter that only casts to bf16 and adamw
 * use as two halves: the weight in bf16, and the bits that it lacks. No cast is then needed, and no memory for its
 * result. vjp_program_read(), _write(), _save(), _load() and _init() give and take f32 as ever; vjp_program_tensor()
 * refuses such a parameter. A program that shares it must use it in the same way.
 */

/*
 * Orders the calls that `results` need, plans every intermediate in one arena, and resolves each call. Results can be
 * read after a run. *program is NULL on failure, and vjp_error(device) says why. The device and the shared program
 * must outlive it; the graph need not.
 */
vjp_status vjp_compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                       const vjp_program_options *options, vjp_program **program);
void vjp_program_destroy(vjp_program *program);

/* The memory of a value: any input, parameter, state or result, but no parameter in halves. On the CPU, memory to read
 * and write between runs. */
vjp_status vjp_program_tensor(const vjp_program *program, vjp_value value, vjp_tensor *tensor);

/* Copies host memory in or out; `bytes` must be the value's own. */
vjp_status vjp_program_write(vjp_program *program, vjp_value value, const void *host, size_t bytes);
vjp_status vjp_program_read(vjp_program *program, vjp_value value, void *host, size_t bytes);

/* Runs all calls. Nothing is allocated or looked up; the only checks are of values that can be wrong, such as indices.
 */
vjp_status vjp_program_run(vjp_program *program);

/*
 * Stops the current run before its next call, with VJP_INTERRUPTED. Between runs it does nothing, nor once the run has
 * begun to change parameters: a step is taken whole or not at all. May be called from a signal handler or another
 * thread.
 */
void vjp_program_interrupt(vjp_program *program);

/*
 * Runs the calls one by one until one produces a number that is not finite: `found` gets a sentence that names it, ""
 * when there is none.
 */
vjp_status vjp_program_trace(vjp_program *program, char *found, size_t bytes);

/* Set struct_size before it is filled. */
typedef struct vjp_program_report {
    uint64_t struct_size; /* sizeof(vjp_program_report) */
    size_t calls;
    size_t arena_bytes;        /* what was planned */
    size_t live_bytes;         /* the maximum that is alive at one moment: no plan can be smaller */
    size_t intermediate_bytes; /* the sum of all intermediates and scratch: the memory used without a plan */
    size_t persistent_bytes;   /* inputs, parameters, states, constants */
    size_t host_bytes;         /* host memory for intermediates that wait there, see options.arena_limit */
    vjp_cost cost;             /* the minimum that a run must do */
} vjp_program_report;

vjp_status vjp_program_describe(const vjp_program *program, vjp_program_report *report);

/*
 * The report of the program that vjp_compile() would make of these results. No memory of the device is allocated, so
 * models that do not fit can be planned, too.
 */
vjp_status vjp_plan(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                    const vjp_program_options *options, vjp_program_report *report);

/*
 * With `on`, runs time each call. vjp_program_time() then gives call i: its node, op, pass, seconds so far, runs, and
 * the tensors and attributes as vjp_call() takes them.
 */
typedef struct vjp_call_time {
    uint64_t struct_size; /* sizeof(vjp_call_time), set before it is filled */
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

#include "vjp_ops.h"

/* ---- Training: steps of an optimiser, first values, and files ------------------------------------------ */

/* The input, parameter, state or constant of that name; 0 when there is none. */
vjp_value vjp_graph_find(const vjp_graph *graph, const char *name);

/*
 * The scale that keeps the common norm of some gradients within max_norm (0: no limit; the scale is 1), for
 * vjp_graph_minimize() or an optimiser's op. *norm, where it is not NULL, gets the norm.
 */
vjp_value vjp_graph_clip_norm(vjp_graph *graph, const vjp_value *gradients, size_t count, double max_norm,
                              vjp_value *norm);

/* What the step of Muon is multiplied by. */
typedef enum vjp_muon_scale {
    VJP_MUON_SCALE_ADAMW = 0, /* 0.2 sqrt(max(rows, columns)): as large as a step of AdamW, for one common rate */
    VJP_MUON_SCALE_SHAPE = 1  /* sqrt(max(1, rows / columns)): Muon's first form, for rates of about 0.02 */
} vjp_muon_scale;

/*
 * Muon (docs/optimisers.md): the momentum of a matrix, made nearly orthogonal by Newton-Schulz iterations, is its step.
 */
typedef struct vjp_muon_options {
    uint64_t struct_size; /* sizeof(vjp_muon_options) */
    double momentum;      /* the share of it that is kept: 0 or more, less than 1 */
    double weight_decay;  /* the share of a weight that a rate of 1 would remove */
    int32_t nesterov;     /* 1: the gradient is mixed in once more */
    int32_t iterations;   /* of Newton-Schulz: 1 to 100 */
    int32_t scale;        /* a vjp_muon_scale */
    int32_t reserved;     /* zero */
} vjp_muon_options;

#define VJP_MUON_OPTIONS_DEFAULTS                                                                                      \
    { sizeof(vjp_muon_options), 0.95, 0.1, 1, 5, VJP_MUON_SCALE_ADAMW, 0 }

typedef struct vjp_minimize_options {
    uint64_t struct_size;              /* sizeof(vjp_minimize_options) */
    const vjp_value *parameters;       /* [count]: what to train; NULL: every parameter of the graph */
    const vjp_value *gradients;        /* [count]: given instead of those of the loss; needs `parameters` */
    size_t count;                      /* of the parameters; 0 when they are NULL */
    double max_norm;                   /* clips gradients whose common norm is larger; 0: no clipping */
    vjp_value scale;                   /* multiplies the gradients instead of the clipping; 0: absent */
    const vjp_adamw_attributes *adamw; /* NULL: the defaults */
    const vjp_sgd_attributes *sgd;     /* not NULL: SGD instead of AdamW */
    /* Whether a parameter decays by the optimiser's weight_decay. NULL: those with two axes or more do. */
    int (*decays)(void *context, const char *name, const vjp_tensor *parameter);
    void *context;                /* passed to decays and uses_muon */
    const vjp_muon_options *muon; /* not NULL: Muon for the matrices that uses_muon accepts; others as above */
    /* Whether Muon trains a matrix: hidden weights, not embeddings and heads. NULL: it trains every matrix. */
    int (*uses_muon)(void *context, const char *name, const vjp_tensor *parameter);
    int32_t moments; /* a vjp_dtype: VJP_F32 or VJP_BF16, what AdamW's moments of f32 or narrower parameters are */
    vjp_value step;  /* the number of the step, a scalar of f32, i32 or i64; 0: the input "step" */
} vjp_minimize_options;

#define VJP_MINIMIZE_OPTIONS_DEFAULTS                                                                                  \
    { sizeof(vjp_minimize_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, VJP_F32, 0 }

typedef struct vjp_minimize_result {
    uint64_t struct_size;     /* sizeof(vjp_minimize_result), set before it is filled */
    vjp_value loss;           /* as given; 0 without one */
    vjp_value lr;             /* the input "lr", f32: the learning rate of a run */
    vjp_value step;           /* the input "step", i64: 1 for the first run, then 2, ...; 0 where AdamW trains nothing,
                                 or where it was given */
    vjp_value norm;           /* of all gradients before the clipping; 0 without clipping */
    const vjp_value *results; /* [count]: for vjp_compile(): the loss, the norm (each if there is one), and the new
                                 parameters. Valid as long as the graph */
    size_t count;
} vjp_minimize_result;

/*
 * Adds all that a step of training needs: the gradients of the loss with respect to the parameters, their clipping, and
 * a step of AdamW, SGD or Muon for each. What the optimiser keeps are states, f32 (f64 for f64 parameters; AdamW's as
 * `moments` says), named "<parameter>.m" and "<parameter>.v", or "<parameter>.momentum". A run of the compiled
 * `results` is one step. `options` NULL: AdamW for every parameter.
 */
vjp_status vjp_graph_minimize(vjp_graph *graph, vjp_value loss, const vjp_minimize_options *options,
                              vjp_minimize_result *result);

/*
 * First values for a float input, parameter or state: random numbers that depend on the seed, the value's name and the
 * element's index alone, computed on the host, so the same for every device and every order of calls.
 * Kaiming: normal with a standard deviation of sqrt(2 / n), where n is the product of all sizes but the first, the
 * inputs of one output.
 */
vjp_status vjp_program_init_normal(vjp_program *program, vjp_value value, double mean, double deviation, uint64_t seed);
vjp_status vjp_program_init_uniform(vjp_program *program, vjp_value value, double low, double high, uint64_t seed);
vjp_status vjp_program_init_kaiming(vjp_program *program, vjp_value value, uint64_t seed);

/* Kaiming's first values for every parameter with two axes or more; the others stay as they are, zero at first. */
vjp_status vjp_program_init(vjp_program *program, uint64_t seed);

/*
 * One step of training: writes the learning rate and the number of the step (1, 2, ...), runs the program that was
 * compiled from training->results, and reads the loss (NULL: not read).
 */
vjp_status vjp_program_step(vjp_program *program, const vjp_minimize_result *training, double lr, int64_t step,
                            double *loss);

/*
 * All parameters and states of a program as a safetensors file. Saving writes a temporary file, forces it to the disk
 * and renames it, so a file of that name is always whole. Loading needs exactly the program's names, dtypes and shapes
 * and changes nothing otherwise.
 */
vjp_status vjp_program_save(vjp_program *program, const char *path);
vjp_status vjp_program_load(vjp_program *program, const char *path);

/* ---- Groups: processes that train together -------------------------------------------------------------- */

/*
 * A group is all processes that a launcher such as mpirun started, each with a rank from 0 on; their number is a power
 * of two. Every process makes the same calls in the same order. Sums have the same bits for any number of processes:
 * they are added as a binary tree over the rank, so that a process that stands for several neighbouring ones, and adds
 * their tensors in the same way first, changes nothing.
 *
 * A group belongs to a device, which must outlive it: it works on tensors of that device, and vjp_error(device) has
 * the sentence for a failure. After a failure of the communication (VJP_GROUP_FAILED) the tensors of that call are
 * undefined, and every later call fails with the same sentence: close the group or abort it.
 */
typedef struct vjp_group vjp_group;

typedef struct vjp_group_options {
    uint64_t struct_size; /* sizeof(vjp_group_options) */
    double timeout;       /* seconds to wait for another process before the call fails; 0: 600 */
} vjp_group_options;

#define VJP_GROUP_OPTIONS_DEFAULTS                                                                                     \
    { sizeof(vjp_group_options), 0 }

/*
 * Joins the group: "self" (this process alone), "mpi", or "auto": "mpi" where the environment of an MPI launcher is
 * found (OMPI_COMM_WORLD_SIZE, PMIX_RANK, PMI_RANK), otherwise "self". MPI is in separate libraries, libvjp-openmpi and
 * libvjp-mpich; "mpi" loads the one that fits the launcher, "openmpi" and "mpich" name one. *group is NULL on failure.
 * The last of all processes to close a group ends MPI, unless the caller began it; it cannot be opened again then.
 */
vjp_status vjp_group_open(vjp_device *device, const char *name, const vjp_group_options *options, vjp_group **group);
void vjp_group_close(vjp_group *group);

int32_t vjp_group_rank(const vjp_group *group);
int32_t vjp_group_size(const vjp_group *group);

/* The sum over all processes in the place of each one's packed f32 tensor. */
vjp_status vjp_group_sum(vjp_group *group, const vjp_tensor *tensor);

/*
 * The same in two halves, for work in between on a part of the tensor. Each process owns a range of its elements,
 * vjp_group_range(): after reduce_scatter this range holds the sum, and the rest is undefined; all_gather copies every
 * process's range to all others, for a tensor of any dtype.
 */
void vjp_group_range(const vjp_group *group, int64_t elements, int64_t *first, int64_t *count);
vjp_status vjp_group_reduce_scatter(vjp_group *group, const vjp_tensor *tensor);
vjp_status vjp_group_all_gather(vjp_group *group, const vjp_tensor *tensor);

/* Copies the tensor of the process `root` to all others. */
vjp_status vjp_group_broadcast(vjp_group *group, const vjp_tensor *tensor, int32_t root);

/* Returns when every process has called it. */
vjp_status vjp_group_barrier(vjp_group *group);

/* Host memory of `bytes` for each process: each fills its own part, at rank * bytes, and gets all others'. */
vjp_status vjp_group_share(vjp_group *group, void *host, size_t bytes);

/* Ends all processes of the group, this one with this exit status, through the launcher. It does not return. */
void vjp_group_abort(vjp_group *group, int32_t status);

#if defined(__GNUC__) || defined(__clang__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
