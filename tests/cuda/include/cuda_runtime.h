/* SPDX-License-Identifier: MIT */
/* What src/cuda uses of CUDA's runtime and of its C++, for the emulator (../emulate.h). Nothing is ever asynchronous.
 */
#ifndef VJP_TESTS_CUDA_RUNTIME_H
#define VJP_TESTS_CUDA_RUNTIME_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cuda/emulate.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __noinline__ /* also an attribute in the C++ library */
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

/* ---- Types ------------------------------------------------------------------------------------------- */

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned n = 1) : x(n), y(1), z(1) {
    }
};

/* What a kernel reads of its place: threadIdx.x is a question to the emulator. */
namespace emulated {
template <indices (*ASK)()> struct first_index {
    operator unsigned() const {
        return ASK().x;
    }
};
template <indices (*ASK)()> struct place { first_index<ASK> x; };
} // namespace emulated
constexpr emulated::place<emulated::thread_index> threadIdx{};
constexpr emulated::place<emulated::block_index> blockIdx{};
constexpr emulated::place<emulated::block_size> blockDim{};
constexpr emulated::place<emulated::grid_size> gridDim{};

/* ---- The runtime ------------------------------------------------------------------------------------- */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureUnjoined = 904
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocMapped = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, l2CacheSize;
};

typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef struct emulated_graph *cudaGraph_t;
typedef struct emulated_graph *cudaGraphExec_t;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *found);

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);

cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void **>(memory), bytes);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready);

namespace emulated {

/* Runs it, or records it where the stream is captured. */
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);

/* The kernel's arguments, `bytes` of them, become the launch's, which destroys them. */
struct held_arguments {
    void *data;
    size_t bytes;
    void (*call)(const void *kernel, const void *data);
    void (*destroy)(void *data);
};
cudaError_t enqueue_kernel(const cudaLaunchConfig_t &config, const void *kernel, const held_arguments &arguments);
cudaError_t set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);

} // namespace emulated

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...arguments) {
    using tuple = std::tuple<P...>;
    emulated::held_arguments held{new tuple(static_cast<P>(arguments)...), sizeof(tuple),
                                  [](const void *called, const void *data) {
                                      std::apply(reinterpret_cast<void (*)(P...)>(const_cast<void *>(called)),
                                                 *static_cast<const tuple *>(data));
                                  },
                                  [](void *data) { delete static_cast<tuple *>(data); }};
    return emulated::enqueue_kernel(*config, reinterpret_cast<const void *>(kernel), held);
}

template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return emulated::set_attribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

/* Static shared memory is one for all blocks of a cluster here (../emulate.h): kernels that can do without take another
 * path. */
template <class... P> cudaError_t cudaOccupancyMaxActiveClusters(int *, void (*)(P...), const cudaLaunchConfig_t *) {
    return cudaErrorNotSupported;
}

/* ---- What threads do together ------------------------------------------------------------------------ */

#define VJP_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(VJP_PLACE) {
    emulated::wait_at_barrier(0, 0, false, file, line);
}
inline int __syncthreads_or(int says, VJP_PLACE) {
    return emulated::wait_at_barrier(0, 0, says != 0, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, VJP_PLACE) {
    emulated::meet_and_see(mask, file, line);
}

namespace emulated {

template <class T> struct exchanged {
    T mine, theirs;
    int from; /* a lane */
};

/* The value of a lane that takes no part is not defined: bytes of ones. */
template <class T> T exchange(unsigned mask, T value, int from, const char *file, int line) {
    exchanged<T> own{value, value, from};
    meet(
        mask, &own,
        [](void *const *brought, uint32_t) {
            for (int lane = 0; lane < WARP; lane++) {
                auto *to = static_cast<exchanged<T> *>(brought[lane]);
                if (!to) continue;
                auto *source = static_cast<const exchanged<T> *>(brought[to->from]);
                if (source)
                    to->theirs = source->mine;
                else
                    memset(static_cast<void *>(&to->theirs), 0xff, sizeof(T));
            }
        },
        file, line);
    return own.theirs;
}

inline int own_lane() {
    return (int)(thread_index().x % WARP);
}

} // namespace emulated

/* A lane outside of the section of `width` lanes: the own value. */
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32, VJP_PLACE) {
    int own = emulated::own_lane();
    return emulated::exchange(mask, value, own / width * width + lane % width, file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, VJP_PLACE) {
    int own = emulated::own_lane(), from = own ^ bits;
    return emulated::exchange(mask, value, from >= (own / width + 1) * width ? own : from, file, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, VJP_PLACE) {
    int own = emulated::own_lane(), from = own - (int)distance;
    return emulated::exchange(mask, value, from < own / width * width ? own : from, file, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, VJP_PLACE) {
    int own = emulated::own_lane(), from = own + (int)distance;
    return emulated::exchange(mask, value, from >= (own / width + 1) * width ? own : from, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int says, VJP_PLACE) {
    struct vote {
        bool says;
        unsigned all;
    } own{says != 0, 0};
    emulated::meet(
        mask, &own,
        [](void *const *brought, uint32_t) {
            unsigned all = 0;
            for (int lane = 0; lane < emulated::WARP; lane++)
                if (brought[lane] && static_cast<const vote *>(brought[lane])->says) all |= 1u << lane;
            for (int lane = 0; lane < emulated::WARP; lane++)
                if (brought[lane]) static_cast<vote *>(brought[lane])->all = all;
        },
        file, line);
    return own.all;
}
inline int __all_sync(unsigned mask, int says, VJP_PLACE) {
    return __ballot_sync(mask, !says, file, line) == 0;
}

/* One thread runs at a time. */
inline void __threadfence() {
}
inline unsigned atomicAdd(unsigned *at, unsigned value) {
    emulated::touch(at, sizeof *at, true, true);
    unsigned before = *at;
    *at = before + value;
    return before;
}
inline unsigned atomicExch(unsigned *at, unsigned value) {
    emulated::touch(at, sizeof *at, true, true);
    unsigned before = *at;
    *at = value;
    return before;
}
inline unsigned atomicCAS(unsigned *at, unsigned expected, unsigned value) {
    emulated::touch(at, sizeof *at, true, true);
    unsigned before = *at;
    if (before == expected) *at = value;
    return before;
}
inline int atomicAdd(int *at, int value) {
    return (int)atomicAdd(reinterpret_cast<unsigned *>(at), (unsigned)value);
}
template <class T> T atomicMax(T *at, T value) {
    emulated::touch(at, sizeof *at, true, true);
    T before = *at;
    if (value > before) *at = value;
    return before;
}
template <class T> T atomicMin(T *at, T value) {
    emulated::touch(at, sizeof *at, true, true);
    T before = *at;
    if (value < before) *at = value;
    return before;
}

/* ---- Loads, stores, numbers -------------------------------------------------------------------------- */

template <class T> T __ldcs(const T *from) {
    return *from;
}
template <class T> T __ldcg(const T *from) {
    return *from;
}
template <class T> T __ldg(const T *from) {
    return *from;
}
template <class T> void __stcs(T *to, T value) {
    *to = value;
}
template <class T> void __stcg(T *to, T value) {
    *to = value;
}

namespace emulated {
template <class To, class From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(static_cast<void *>(&to), &from, sizeof to);
    return to;
}
} // namespace emulated

inline float __uint_as_float(unsigned x) {
    return emulated::same_bits<float>(x);
}
inline float __int_as_float(int x) {
    return emulated::same_bits<float>(x);
}
inline unsigned __float_as_uint(float x) {
    return emulated::same_bits<unsigned>(x);
}
inline int __float_as_int(float x) {
    return emulated::same_bits<int>(x);
}
inline long long __double_as_longlong(double x) {
    return emulated::same_bits<long long>(x);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned result = 0;
    uint64_t both = (uint64_t)high << 32 | low;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float rsqrtf(float x) {
    return 1 / sqrtf(x);
}
inline double rsqrt(double x) {
    return 1 / sqrt(x);
}
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmin(a, b);
    return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? a : b;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmax(a, b);
    return static_cast<std::common_type_t<A, B>>(a) > static_cast<std::common_type_t<A, B>>(b) ? a : b;
}

#endif
