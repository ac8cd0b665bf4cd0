/* SPDX-License-Identifier: MIT */
// CUDA's runtime for two cards that are this processor: what is enqueued runs at once, or is recorded for a graph.
#include <cub/device/device_radix_sort.cuh>
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

// While a stream is recorded, others may join it by waiting for one of its events; it must wait for all that they do.
struct emulated_graph {
    std::vector<std::function<cudaError_t()>> work;
    std::vector<emulated_stream *> joined;
    std::vector<emulated_event *> events;
};
struct emulated_stream {
    emulated_graph *captured = nullptr; // null: runs at once
    size_t recorded = 0, waited = 0;    // of a stream that joined: its work, and how much of it is waited for
};
struct emulated_event {
    emulated_graph *of = nullptr; // while that is recorded
    emulated_stream *stream = nullptr;
    size_t after = 0; // of the stream's work
};

namespace {

constexpr int CAPABILITIES[] = {8, 9}; // of the cards
constexpr emulated::tensor_cores CORES[] = {emulated::AMPERE, emulated::HOPPER};
constexpr size_t SHARED[] = {163 << 10, emulated::MAX_SHARED};
constexpr int MULTIPROCESSORS = 6; // few, so that a persistent kernel's blocks have several items of work each
constexpr size_t MEMORY = (size_t)8 << 30;

// What a caller may have without creating it: the default streams.
constexpr uintptr_t NAMED_STREAMS = 16;

std::mutex lock; // of all of this
std::map<void *, size_t> memories;
size_t used;
thread_local int card;                     // that is used
std::map<const void *, int> shared_limits; // that kernels were given
thread_local cudaError_t last;
char failure[emulated::MESSAGE + 64] = "a kernel failed";

cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
}

cudaError_t allocate(void **memory, size_t bytes, bool on_card) {
    std::lock_guard<std::mutex> held(lock);
    if (!bytes || bytes > MEMORY - used) return result(bytes ? cudaErrorMemoryAllocation : cudaErrorInvalidValue);
    size_t room = (bytes + 511) / 256 * 256; // no two of them side by side
    *memory = aligned_alloc(256, room);
    if (!*memory) return result(cudaErrorMemoryAllocation);
    memset(*memory, 0xff, room);
    memories[*memory] = on_card ? bytes : 0;
    used += on_card ? bytes : 0;
    emulated::add_memory(*memory, bytes);
    return cudaSuccess;
}

cudaError_t release(void *memory) {
    std::lock_guard<std::mutex> held(lock);
    if (!memory) return cudaSuccess;
    auto found = memories.find(memory);
    if (found == memories.end()) return result(cudaErrorInvalidValue);
    used -= found->second;
    memories.erase(found);
    emulated::remove_memory(memory);
    free(memory);
    return cudaSuccess;
}

} // namespace

namespace emulated {

cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work) {
    if (reinterpret_cast<uintptr_t>(stream) >= NAMED_STREAMS && stream->captured) {
        stream->captured->work.push_back(std::move(work));
        stream->recorded++;
        return cudaSuccess;
    }
    return result(work());
}

cudaError_t set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    std::lock_guard<std::mutex> held(lock);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > SHARED[card]) return result(cudaErrorInvalidValue);
    shared_limits[kernel] = value;
    return cudaSuccess;
}

// Of a cluster of this kernel's, as the empty instructions at its beginning say (VJP_IN_CLUSTERS).
static unsigned cluster_of(const void *kernel) {
#if defined __x86_64__
    const unsigned char nothing[] = {0x90};
#else
    const unsigned char nothing[] = {0x1f, 0x20, 0x03, 0xd5};
#endif
    unsigned count = 0;
    for (auto *at = static_cast<const unsigned char *>(kernel); !memcmp(at, nothing, sizeof nothing);
         at += sizeof nothing)
        count++;
    return std::max(count, 1u);
}

cudaError_t enqueue_kernel(const cudaLaunchConfig_t &config, const void *kernel, const held_arguments &held) {
    std::shared_ptr<void> data(held.data, held.destroy);
    auto thread = [=] { held.call(kernel, data.get()); };
    launch l{config.gridDim.x, config.blockDim.x, cluster_of(kernel), config.dynamicSmemBytes,
             thread,           held.data,         held.bytes,         CORES[card]};
    size_t limit = 48 << 10;
    {
        std::lock_guard<std::mutex> held(lock);
        auto given = shared_limits.find(kernel);
        if (given != shared_limits.end() && (size_t)given->second > limit) limit = (size_t)given->second;
    }
    if (!l.grid || l.grid > INT32_MAX || !l.threads || l.threads > MAX_THREADS || l.shared > limit ||
        held.bytes > 32764 || l.cluster > MAX_CLUSTER || l.grid % l.cluster)
        return result(cudaErrorInvalidValue);
    return enqueue(config.stream, [l] {
        char message[MESSAGE];
        if (run(l, message)) return cudaSuccess;
        snprintf(failure, sizeof failure, "a kernel failed: %s", message);
        return cudaErrorLaunchFailure;
    });
}

cudaError_t sort_pairs(const uint64_t *keys, uint64_t *sorted_keys, const int64_t *values, int64_t *sorted_values,
                       int64_t count, int first_bit, int end_bit, cudaStream_t stream) {
    return enqueue(stream, [=] {
        auto digits = [=](int64_t i) {
            return (end_bit < 64 ? keys[i] & ((UINT64_C(1) << end_bit) - 1) : keys[i]) >> first_bit;
        };
        std::vector<int64_t> order((size_t)count);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return digits(a) < digits(b); });
        for (int64_t i = 0; i < count; i++) {
            sorted_keys[i] = keys[order[(size_t)i]];
            sorted_values[i] = values[order[(size_t)i]];
        }
        return cudaSuccess;
    });
}

} // namespace emulated

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return failure;
    case cudaErrorNotSupported: return "operation not supported";
    default: return "invalid argument";
    }
}

cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

// CUDA_VISIBLE_DEVICES: one of the cards by its number; otherwise both are seen.
static bool sees_only(int card) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && visible == std::to_string(card);
}

// The card that a caller names by its number.
static int card_of(int device) {
    return device + sees_only(1);
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = sees_only(0) || sees_only(1) ? 1 : 2;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    int count;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count) return result(cudaErrorInvalidDevice);
    *properties = {"emulated on this processor", CAPABILITIES[card_of(device)], 0, MULTIPROCESSORS, 1 << 20};
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = CAPABILITIES[card_of(device)]; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)SHARED[card_of(device)]; break;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    std::string wanted = name;
    *function = wanted == "cuTensorMapEncodeTiled"    ? reinterpret_cast<void *>(cuTensorMapEncodeTiled)
                : wanted == "cuTensorMapEncodeIm2col" ? reinterpret_cast<void *>(cuTensorMapEncodeIm2col)
                                                      : nullptr;
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error == cudaSuccess) card = card_of(device);
    return error;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    std::lock_guard<std::mutex> held(lock);
    *total = MEMORY;
    *free = MEMORY - used;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    return allocate(memory, bytes, true);
}
cudaError_t cudaFree(void *memory) {
    return release(memory);
}
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
    return allocate(memory, bytes, false);
}
cudaError_t cudaFreeHost(void *memory) {
    return release(memory);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    memset(memory, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    return emulated::enqueue(stream, [=] { return cudaMemset(memory, value, bytes); });
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return emulated::enqueue(stream, [=] {
        memmove(to, from, bytes);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = new emulated_stream;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event->of || reinterpret_cast<uintptr_t>(stream) < NAMED_STREAMS) return cudaSuccess;
    if (!stream->captured) {
        stream->captured = event->of;
        stream->recorded = stream->waited = 0;
        event->of->joined.push_back(stream);
    } else if (event->stream->waited < event->after) {
        event->stream->waited = event->after;
    }
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new emulated_event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    bool captured = reinterpret_cast<uintptr_t>(stream) >= NAMED_STREAMS && stream->captured;
    event->of = captured ? stream->captured : nullptr;
    if (!captured) return cudaSuccess;
    event->stream = stream;
    event->after = stream->recorded;
    event->of->events.push_back(event);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1; // no time is measured
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (reinterpret_cast<uintptr_t>(stream) < NAMED_STREAMS || stream->captured) return result(cudaErrorNotSupported);
    stream->captured = new emulated_graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->captured;
    bool waits = true;
    for (emulated_stream *other : stream->captured->joined) {
        waits = waits && other->waited >= other->recorded;
        other->captured = nullptr;
    }
    for (emulated_event *event : stream->captured->events)
        event->of = nullptr;
    stream->captured = nullptr;
    if (waits) return cudaSuccess;
    delete *graph;
    *graph = nullptr;
    return result(cudaErrorStreamCaptureUnjoined);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long) {
    *ready = new emulated_graph(*graph);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t) {
    for (auto &work : ready->work) {
        cudaError_t error = work();
        if (error != cudaSuccess) return result(error);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
    delete ready;
    return cudaSuccess;
}
