/* SPDX-License-Identifier: MIT */
/*
 * The CUDA backend's host side: what a device holds, how a kernel is launched, and how a workspace is laid out.
 *
 * A call enqueues on the device's stream and returns: it never waits and never allocates, so it can be captured in a
 * CUDA graph. Results depend on the problem alone: work is split by its size, never by the number of multiprocessors.
 */
#ifndef VJP_CUDA_H
#define VJP_CUDA_H

#include <sys/types.h>

#include <cuda_runtime.h>

extern "C" {
#include "core/arithmetic.h"
#include "core/core.h"
#include "op/op.h"
}

namespace vjp {

/*
 * A value that a kernel could not use, the first of its pass by position: one record per op and pass, in device memory
 * (findings.cuh writes and collects them).
 */
struct finding {
    unsigned lock;
    unsigned count;     /* bad values seen; 0: none */
    long long position; /* of the first of them */
    double value;
    long long first, limit; /* good values are integers in [first, limit) */
};

constexpr int RECORDS = (int)VJP_OP_COUNT * (int)VJP_PASS_COUNT;

/* Host memory that the device writes: whether any record is set, and the records when they are collected. */
struct findings_page {
    int found;
    finding collected[RECORDS];
};

/* Where a kernel reports. */
struct findings {
    finding *record;
    int *found;
};

struct products; /* cuBLASLt and the algorithms chosen so far: gemm/products.cu */

struct device_state {
    int ordinal;
    pid_t process;       /* that opened the device: CUDA does not work in a process forked from it */
    cudaStream_t stream; /* where calls are enqueued: own_stream, or one of the caller's */
    cudaStream_t own_stream;
    cudaStream_t copy_stream; /* for uploads beside the calls, and the event that calls wait for */
    cudaEvent_t copied;
    cudaStream_t away_stream[2]; /* for copies beside the calls: back, and to the host. Made when first needed */
    cudaEvent_t *ticket;         /* [tickets]: the end of each such copy, or NULL */
    int tickets;
    bool chains;                   /* a kernel may begin while the one before it ends: compute capability 9 */
    bool tf32;                     /* f32 products may round their operands to TF32 */
    finding *record;               /* [RECORDS], device memory */
    findings_page *page;           /* host memory */
    findings_page *page_on_device; /* the same memory, as the device addresses it */
    size_t l2_bytes;
    int capability;          /* 90: compute capability 9.0 */
    int64_t multiprocessors; /* for the grid of a persistent kernel; it never decides how work is split */
    products *matrix_products;
};

inline device_state *state_of(const vjp_device *device) {
    return static_cast<device_state *>(device->state);
}

inline cudaStream_t stream_of(const vjp_work *work) {
    return state_of(work->device)->stream;
}

/*
 * How many products of 16-bit numbers tensor cores may add to one result. They truncate the bits that an addition
 * shifts out, so a long sum drifts towards 0: cards before Hopper twice as much, and numbers of f16, whose products
 * have more digits, twice as much as those of bf16. An f32 result must be within 1e-5, one of f16 within 5e-4;
 * docs/ops/linear.md has the errors.
 */
inline int64_t max_tensor_terms(const vjp_device *device, vjp_dtype storage, bool f32_result) {
    int64_t terms = f32_result ? 3072 : 131072;
    if (state_of(device)->capability < 90) terms /= 2;
    return storage == VJP_F16 ? terms / 2 : terms;
}

/* Where the kernels of this call report. */
inline findings findings_of(const vjp_work *work) {
    device_state *state = state_of(work->device);
    return {state->record + (int)work->op->id * VJP_PASS_COUNT + work->pass, &state->page_on_device->found};
}

/* VJP_OK, or DEVICE_FAILED with the words of the CUDA runtime. */
vjp_status result_of(const vjp_work *work, cudaError_t error);
vjp_status device_result(vjp_device *device, const char *doing, cudaError_t error);

/* gemm/products.cu: called when a device is opened and closed. */
vjp_status products_open(vjp_device *device);
void products_close(products *p);

/*
 * Enqueues kernel<<<grid, threads, shared>>>(arguments...). With `chained`, the kernel may begin while the previous
 * kernel on the stream ends, whichever it is, and must call wait_for_previous() before it touches memory.
 */
template <class... Parameters, class... Arguments>
vjp_status launch(const vjp_work *work, bool chained, void (*kernel)(Parameters...), int64_t grid, int threads,
                  size_t shared, Arguments... arguments) {
    if (grid <= 0) return VJP_OK;
    /* A kernel needs permission for more than 48 KiB, its static shared variables included. */
    if (shared > 32 << 10) {
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error != cudaSuccess) return result_of(work, error);
    }
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)grid);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream_of(work);
    config.attrs = &overlap;
    config.numAttrs = chained && state_of(work->device)->chains ? 1 : 0;
    return result_of(work, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

/* The largest grid of a launch; a kernel with more to do loops. */
constexpr int64_t MAX_BLOCKS = 1 << 30;

inline bool is_aligned(const void *data, size_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

/*
 * Lays arrays out in a workspace, one behind the other. Without a workspace it returns NULL and only counts: the first
 * time a pass is planned for the size of its workspace, the second time to run.
 */
struct workspace_layout {
    static constexpr size_t ALIGNMENT = 256;
    char *base;       /* NULL: only count */
    size_t used, max; /* bytes in use now, and at any time; max is SIZE_MAX after an overflow */

    explicit workspace_layout(void *workspace) : base(static_cast<char *>(workspace)), used(0), max(0) {
    }

    template <class E> E *take(int64_t count, size_t size = sizeof(E)) {
        size_t at = used, bytes, aligned;
        if (max == SIZE_MAX || !vjp_mul_size((size_t)count, size, &bytes) ||
            !vjp_align_size(bytes, ALIGNMENT, &aligned) || !vjp_add_size(at, aligned, &used)) {
            max = SIZE_MAX;
            return nullptr;
        }
        if (used > max) max = used;
        return base ? reinterpret_cast<E *>(base + at) : nullptr;
    }
};

/*
 * Blocks that the work of a persistent kernel is split into where each block leaves a partial sum: two for each
 * multiprocessor of the largest Hopper cards (132). A constant, because the split decides the bits and must not depend
 * on the card.
 */
constexpr int64_t CHUNKS = 264;

/* The longest run of terms added in one f32 chain: 2^8 equal terms stay accurate to about 4e-6. */
constexpr int64_t CHAIN = 256;

} // namespace vjp

#endif
