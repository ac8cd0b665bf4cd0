/*
 * How ops become launches of kernels on a GPU that is driven from plain C: told once here, for every backend whose
 * shaders take their operands by name (WebGPU's .wgsl, Metal's .metal). A file gpu/<op>.c cuts the problem, says which
 * tensors a kernel sees under which names, and hands the launch to gpu_enqueue(), which each backend provides.
 *
 *     gpu_launch l = gpu_begin(work, "columns");           a function of the op's shader
 *     gpu_tensor(&l, "dx", LAYER_NORM_B_DX, dim);           dx_set_two() and the like exist there
 *     gpu_scratch(&l, "partials", VJP_F32, 0, count, true); a piece of the workspace
 *     gpu_u32(&l, rows);                                    members of the shader's Params, in their order
 *     gpu_constant(&l, "PAIRS", 4);                         a constant that the shader is compiled with
 *     return gpu_enqueue(&l, groups);                       workgroups of 256 threads
 *
 * A shader sees an operand through functions that the backend makes for its dtype; docs/webgpu.md lists them. 16-bit
 * elements lie two in a word, and only words can be written: where runs of elements start on whole words (`run` even,
 * the tensor on a word), a thread stores two at once; else single halves are stored by integer atomics, which is slower
 * and as right. What a shader names and a launch does not give is absent there: name_is is false. A kernel therefore
 * walks runs in twos: two(i), set_two(i, v) for even i within a run, at() and set() for a last odd one. A kernel that
 * stores single elements says run 1.
 *
 * Results depend on the problem alone: launches are cut by its size, sums go along fixed trees, floats are never added
 * by atomics. A launch of more groups than a grid dimension holds is folded by the backend.
 */
#ifndef VJP_GPU_H
#define VJP_GPU_H

#include "core/core.h"
#include "op/op.h"

enum {
    GPU_THREADS = 256, /* of a workgroup: what every WebGPU device has */
    GPU_MOST_OPERANDS = 16,
    GPU_MOST_WINDOWS = 8, /* distinct pieces of memory that a launch may see */
    GPU_MOST_PARAMS = 36,
    GPU_MOST_CONSTANTS = 12,
    GPU_PIECE = 1 << 24, /* elements of a tensor that every device binds at once, with room: 64 of 128 MiB in f32 */
    GPU_CHAIN = 256      /* the longest run of terms added in one f32 chain: 2^8 equal terms stay right to 4e-6 */
};

typedef enum gpu_form {
    GPU_FLOAT,   /* f32, bf16, f16: at, two, four; set, set_two */
    GPU_INDEX,   /* i32, i64, f32 holding integers: in(i, limit), raw(i); put(i, v) where it is an output */
    GPU_WORD,    /* u32: word(i), put(i, v) */
    GPU_FINDINGS /* where bad values are reported */
} gpu_form;

typedef struct gpu_operand {
    const char *name;
    gpu_form form;
    vjp_dtype dtype;
    bool present, output, adds;
    bool paired; /* 16-bit: every two of a run that starts at an even element are one word */
    bool fours;  /* read by fours that are one load */
    const char *address;
    uint64_t bytes;
} gpu_operand;

typedef struct gpu_constant_value {
    const char *name;
    uint32_t value;
} gpu_constant_value;

typedef struct gpu_launch {
    const vjp_work *work;
    const char *shader; /* the op's name */
    const char *kernel;
    gpu_operand operand[GPU_MOST_OPERANDS];
    int operands;
    gpu_constant_value constant[GPU_MOST_CONSTANTS];
    int constants;
    uint32_t param[GPU_MOST_PARAMS];
    int params;
    int threads;         /* of a workgroup */
    bool parts;          /* it sees parts of tensors: gpu_part() */
    int64_t limit;       /* what an index must stay below, for the sentence */
    const char *too_big; /* the operand or size that 32-bit indices cannot hold; NULL: all fit */
} gpu_launch;

gpu_launch gpu_begin(const vjp_work *work, const char *kernel);

/*
 * A tensor of the call, under a name; absent where it is. `run`: the length of the runs that the kernel walks in
 * twos, each starting at a multiple of it. 1: elements are stored one by one.
 */
void gpu_tensor(gpu_launch *l, const char *name, int slot, int64_t run);

/* The same for an input that the kernel reads by name_four(i), i a multiple of four: one load where runs allow it. */
void gpu_fours(gpu_launch *l, const char *name, int slot, int64_t run);

/*
 * Of the tensor given last the kernel sees elements [first, first + count) alone, as 0, 1, 2, ...: a device may bind no
 * more than 128 MiB at once. `first` is a multiple of 4, or of the run.
 */
void gpu_part(gpu_launch *l, int64_t first, int64_t count);

/* `count` elements of the workspace from byte `offset`, a multiple of 16: f32 (GPU_FLOAT) or, as i32, words. */
void gpu_scratch(gpu_launch *l, const char *name, vjp_dtype dtype, size_t offset, int64_t count, bool output);

/*
 * What a kernel finds wrong with an index goes to found_report(position); the first of a pass is what the next
 * vjp_synchronize() tells, against `limit`. After the kernels of the call comes gpu_explain().
 */
void gpu_findings(gpu_launch *l, int64_t limit);

/* Enqueues the kernel that notes the value of the first bad index of slot `slot`, for the sentence. */
vjp_status gpu_explain(const vjp_work *work, int slot);

void gpu_u32(gpu_launch *l, int64_t value);
void gpu_f32(gpu_launch *l, double value);
void gpu_constant(gpu_launch *l, const char *name, int64_t value);

/* Refuses a launch for what its operand or kernel `name` is or needs. */
vjp_status gpu_refuse(vjp_device *device, const gpu_launch *l, vjp_status status, const char *what, const char *name);

/* Whether a shader can count a launch in 32 bits. */
vjp_status gpu_launch_counts(vjp_device *device, const gpu_launch *l, int64_t groups);

/* Provided by the backend: enqueues `groups` workgroups. None is no work. */
vjp_status gpu_enqueue(const gpu_launch *l, int64_t groups);

/*
 * Provided by the backend: how many threads a workgroup of this device has, GPU_THREADS or fewer, any number. A cut
 * that goes by it sets the launch's `threads`; the others have GPU_THREADS, and a device that gives fewer refuses them.
 */
int gpu_threads(const vjp_device *device);

static inline int64_t gpu_divide_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

static inline int64_t gpu_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t gpu_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* The least power of two that is `n` or more, at most `most`. */
static inline int64_t gpu_power(int64_t n, int64_t most) {
    int64_t power = 1;
    while (power < n && power < most)
        power *= 2;
    return power;
}

/* The next piece of workspace: offsets stay multiples of 256, so that pieces can be bound by themselves. */
static inline size_t gpu_piece(int64_t count, size_t size) {
    return ((size_t)count * size + 255) / 256 * 256;
}

/* The kernels of a pass; NULL where there are none. */
const vjp_kernel *gpu_kernel(const vjp_op *op, vjp_pass pass);

#endif
