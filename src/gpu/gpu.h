/* SPDX-License-Identifier: MIT */
/*
 * How an op becomes launches of kernels on a GPU that is driven from plain C. Shared by every backend whose shaders
 * take their operands by name (WebGPU's .wgsl, Metal's .metal). A file ops/<op>.c splits the problem, says which
 * tensors a kernel sees under which names, and hands the launch to gpu_enqueue(), which each backend provides.
 *
 *     gpu_launch l = gpu_begin(work, "columns");            a function of the op's shader
 *     gpu_tensor(&l, "dx", LAYER_NORM_B_DX, dim);           the shader then has dx_set_two() and the like
 *     gpu_scratch(&l, "partials", VJP_F32, 0, count, true); a range of the workspace
 *     gpu_u32(&l, rows);                                    members of the shader's Params, in their order
 *     gpu_constant(&l, "PAIRS", 4);                         a constant that the shader is compiled with
 *     return gpu_enqueue(&l, groups);                       workgroups of 256 threads
 *
 * A shader reads and writes an operand by functions that the backend makes for its dtype; docs/webgpu.md lists them.
 * An operand that a shader names and a launch does not give is absent there: name_is is false.
 *
 * Two 16-bit elements share a word, and only words can be written. Where runs of elements start on whole words (`run`
 * even, the tensor on a word, rows that lie apart at an even distance), a thread stores two at once; elsewhere single
 * halves are stored by integer atomics, which is equally accurate, but slower. A kernel therefore goes through a run
 * two elements at a time: two(i), set_two(i, v) for even i within the run, at() and set() for an odd last one. A kernel
 * that stores single elements gives run 1.
 *
 * Results depend on the problem alone: launches are split by its size, sums follow fixed trees, floats are never added
 * by atomics. A launch of more groups than a grid dimension holds is spread over two dimensions by the backend.
 *
 * An op's code runs in one of three modes. Before a call GPU_CHECK checks every launch, so that a call that is refused
 * has written nothing; vjp_warm() makes the pipelines in GPU_WARM; GPU_RUN encodes.
 */
#ifndef VJP_GPU_H
#define VJP_GPU_H

#include "core/arithmetic.h"
#include "core/core.h"
#include "op/op.h"

enum {
    GPU_THREADS = 256, /* of a workgroup: what every WebGPU device has */
    GPU_MAX_OPERANDS = 16,
    GPU_MAX_WINDOWS = 8, /* distinct ranges of memory that a launch may see, with that of bad indices */
    GPU_MAX_PARAMS = 36,
    GPU_MAX_CONSTANTS = 12,
    GPU_CHUNK = 1 << 24, /* elements of a tensor that every device can bind at once: 64 of 128 MiB in f32 */
    GPU_CHAIN = 256      /* the longest run of terms added in one f32 chain: 2^8 equal terms stay right to 4e-6 */
};

typedef enum gpu_mode {
    GPU_RUN,   /* encode launches */
    GPU_CHECK, /* refuse what cannot be encoded; encode nothing */
    GPU_WARM,  /* make the pipelines; encode nothing */
    GPU_GATHER /* keep the launches in a list, for a backend that merges those of several calls */
} gpu_mode;

/*
 * How a launch may be merged with those of other calls that differ in places and numbers alone. Its kernel may have no
 * barrier in a branch or loop that depends on its parameters: they come from the row of a table.
 */
typedef enum gpu_merge {
    GPU_ALONE,
    GPU_BESIDE,  /* each workgroup does the work of one call */
    GPU_IN_ORDER /* one workgroup does one call after another; must be the last launch of its call */
} gpu_merge;

/* What a device has done since it was opened. */
typedef struct gpu_counts {
    uint64_t dispatches, submissions, waits, pipelines;
    double pipeline_seconds;
} gpu_counts;

/* A count by its name, as text; NULL: there is none of that name. */
const char *gpu_count(const gpu_counts *counts, const char *name, char *text, size_t bytes);

typedef enum gpu_form {
    GPU_FLOAT,    /* f32, bf16, f16: at, two, four; set, set_two */
    GPU_INDEX,    /* i32, i64, f32 holding integers: in(i, limit), raw(i); put(i, v) where it is an output */
    GPU_WORD,     /* u32: word(i), put(i, v) */
    GPU_BAD_INDEX /* where bad values are reported */
} gpu_form;

typedef struct gpu_operand {
    const char *name;
    gpu_form form;
    vjp_dtype dtype;
    bool present, output, adds;
    bool paired; /* 16-bit: every two of a run that starts at an even element are one word */
    bool fours;  /* four elements from a multiple of four on are one aligned load */
    const char *address;
    uint64_t bytes;    /* to the end of the last element: with what lies between rows that lie apart */
    const char *label; /* what a refusal calls it: the tensor's name, or "its workspace" */
} gpu_operand;

typedef struct gpu_constant_value {
    const char *name;
    uint32_t value;
} gpu_constant_value;

typedef struct gpu_launch {
    const vjp_work *work;
    const char *shader; /* the op's name */
    const char *kernel;
    gpu_operand operand[GPU_MAX_OPERANDS];
    int operands;
    gpu_constant_value constant[GPU_MAX_CONSTANTS];
    int constants;
    uint32_t param[GPU_MAX_PARAMS];
    int params;
    int threads; /* of a workgroup */
    gpu_merge merge;
    int64_t iterations;  /* of the loops of a thread, at most, where they may be very many; else 0 */
    int64_t first;       /* the smallest valid index, for the sentence */
    int64_t limit;       /* what an index must stay below; -1: the sentence is that of an earlier launch */
    const char *too_big; /* the operand or size that 32-bit indices cannot hold; NULL: all fit */
} gpu_launch;

gpu_launch gpu_begin(const vjp_work *work, const char *kernel);

/*
 * A tensor of the call, under a name; absent where the call does not have it. `run`: the length of the runs that the
 * kernel goes through two elements at a time, each starting at a multiple of it. 1: elements are stored one by one.
 */
void gpu_tensor(gpu_launch *l, const char *name, int slot, int64_t run);

/* The same for an input that the kernel reads by name_four(i), i a multiple of four: one load where runs allow it. */
void gpu_fours(gpu_launch *l, const char *name, int slot, int64_t run);

/*
 * Of the tensor given last the kernel sees only elements [first, first + count), as 0, 1, 2, ...: a device may bind no
 * more than 128 MiB at once. `first` is a multiple of 4, or of the run.
 */
void gpu_part(gpu_launch *l, int64_t first, int64_t count);

/*
 * Of the tensor given last, which is that of `slot`, the kernel sees only rows [first, first + count), a row being the
 * last two axes: element i of row r is r * vjp_step(work, slot) + i.
 */
void gpu_rows(gpu_launch *l, int slot, int64_t first, int64_t count);

/* `count` elements of the workspace from byte `offset`, a multiple of 16: f32 (GPU_FLOAT) or, as i32, words. */
void gpu_scratch(gpu_launch *l, const char *name, vjp_dtype dtype, size_t offset, int64_t count, bool output);

/* A packed tensor that belongs to no op, for a launch of raw_product.wgsl or raw_product.metal. */
void gpu_floats(gpu_launch *l, const char *name, const vjp_tensor *t, bool output);

/* Words of the device's memory, for a launch of tools.wgsl or tools.metal, which belongs to no op. */
void gpu_words(gpu_launch *l, const char *name, const void *address, uint64_t bytes, bool output);

/*
 * Lets the kernel report a bad index by bad_index_report(position). The next vjp_synchronize() returns the first one of
 * the pass, with a sentence that has the valid range [0, limit). The last launch of such a call is gpu_explain().
 */
void gpu_report_bad_index(gpu_launch *l, int64_t limit);

/*
 * The same for integers of [first, INT64_MAX), which one thread reads and reports with their value, by
 * bad_index_explain(position, raw): such a call needs no gpu_explain().
 */
void gpu_report_bad_integer(gpu_launch *l, int64_t first);

/* Enqueues the kernel that records the value of the first bad index of slot `slot`, for the sentence. */
vjp_status gpu_explain(const vjp_work *work, int slot);

void gpu_u32(gpu_launch *l, int64_t value);
void gpu_f32(gpu_launch *l, double value);
void gpu_constant(gpu_launch *l, const char *name, int64_t value);

/* Refuses a launch: "<name> <what>". */
vjp_status gpu_refuse(vjp_device *device, const gpu_launch *l, vjp_status status, const char *what, const char *name);

/* Refuses a launch for an operand that does not lie in memory of the device. */
vjp_status gpu_refuse_memory(vjp_device *device, const gpu_launch *l, const gpu_operand *o);

/* Refuses a launch that a shader cannot count in 32 bits. */
vjp_status gpu_launch_counts(vjp_device *device, const gpu_launch *l, int64_t groups);

/* Provided by the backend: enqueues `groups` workgroups. With none there is no work. */
vjp_status gpu_enqueue(const gpu_launch *l, int64_t groups);

/*
 * Provided by the backend: how many threads a workgroup of this device has, GPU_THREADS or fewer, any number. An op
 * that splits its work by it sets the launch's `threads`; the others have GPU_THREADS, and a device that gives fewer
 * refuses them.
 */
int gpu_threads(const vjp_device *device);

/*
 * Provided by the backend: whether simdgroups of 32 threads multiply matrices of 8 x 8 of f32 (matrices.metal), in
 * workgroups of GPU_THREADS.
 */
bool gpu_has_matrices(const vjp_device *device);

/* Provided by the backend: whether it merges launches of several calls. */
bool gpu_merges(const vjp_device *device);

/* The smallest power of two that is not below `n`, or the first that is not below `max`. */
static inline int64_t gpu_power_of_two(int64_t n, int64_t max) {
    int64_t power = 1;
    while (power < n && power < max)
        power *= 2;
    return power;
}

/* Bytes that `count` elements take in the workspace: a multiple of 256, so that each range can be bound separately. */
static inline size_t gpu_scratch_bytes(int64_t count, size_t size) {
    return ((size_t)count * size + 255) / 256 * 256;
}

/*
 * For vjp_backend.raw_product: the launch of y = a b, which the backend enqueues. VJP_UNSUPPORTED: these sizes are no
 * multiples of its tiles.
 */
vjp_status gpu_raw_product(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b,
                           gpu_launch *l, int64_t *groups);

/*
 * For vjp_backend.measure, by the host's clock. The first call makes the pipelines; the replays are timed from their
 * first encoding to the end of the last.
 */
vjp_status gpu_measure(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, int replays,
                       double *seconds);

/* For vjp_backend.cache_bytes: neither API says; the largest of today's GPUs that they reach have this much. */
size_t gpu_cache_bytes(const vjp_device *device);

/* The kernels of a pass; NULL where there are none. */
const vjp_kernel *gpu_kernel(const vjp_op *op, vjp_pass pass);

/* Goes through the launches of a call in another mode than GPU_RUN. `*mode` is the device's. */
vjp_status gpu_rehearse(const vjp_work *work, gpu_mode *mode, gpu_mode during);

#endif
