/*
 * The CUDA device: memory, stream, what kernels found, and timing by replay of a captured graph.
 *
 * Everything that can fail for the lack of a GPU, a driver or memory fails here, when the device is opened, with the
 * runtime's own words.
 */
#include "cuda/common/cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
#define OP(name, family, cuda, gpu) extern const vjp_kernel vjp_cuda_##name[];
#include "op/ops.def"
}

namespace vjp {

static const vjp_kernel *const kernels[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) OP_KERNELS_##cuda(vjp_cuda_##name),
#include "op/ops.def"
};

constexpr int RECORDS = (int)VJP_OP_COUNT * (int)VJP_PASS_COUNT;

vjp_status device_result(vjp_device *device, const char *doing, cudaError_t error) {
    if (error == cudaSuccess) return VJP_OK;
    vjp_status status = error == cudaErrorMemoryAllocation ? VJP_OUT_OF_MEMORY : VJP_DEVICE_FAILED;
    return vjp_fail(device, status, "%s: %s: %s", device->name, doing, cudaGetErrorString(error));
}

vjp_status result_of(const vjp_work *work, cudaError_t error) {
    if (error == cudaSuccess) return VJP_OK;
    return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: %s", work->device->name, cudaGetErrorString(error));
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

static vjp_status no_device(vjp_device *device, const char *why) {
    return vjp_fail(device, VJP_NO_DEVICE, "%s: %s", device->name, why);
}

/* "cuda" is "cuda:0". */
static bool read_ordinal(const char *name, int *ordinal) {
    const char *colon = strchr(name, ':');
    *ordinal = 0;
    if (!colon) return true;
    char *end;
    long value = strtol(colon + 1, &end, 10);
    *ordinal = (int)value;
    return end != colon + 1 && *end == 0 && value >= 0 && value < 1024;
}

static vjp_status choose_products(vjp_device *device, const vjp_options *options, device_state *state) {
    const char *choice = options->matrix_products;
    if (!choice) choice = "f32";
    if (strcmp(choice, "f32") != 0 && strcmp(choice, "tf32") != 0)
        return vjp_fail(device, VJP_INVALID, "%s: matrix_products is \"%s\"; it must be f32 or tf32", device->name,
                        choice);
    state->tf32 = choice[0] == 't';
    return VJP_OK;
}

static vjp_status open_stream(vjp_device *device, const vjp_options *options, device_state *state) {
    state->stream = static_cast<cudaStream_t>(options->stream);
    if (state->stream) return VJP_OK;
    state->own_stream = true;
    return device_result(device, "making a stream", cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking));
}

static vjp_status open_findings(vjp_device *device, device_state *state) {
    void *host = nullptr, *mapped = nullptr;
    cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&state->record), RECORDS * sizeof(finding));
    if (error == cudaSuccess) error = cudaMemset(state->record, 0, RECORDS * sizeof(finding));
    if (error == cudaSuccess) error = cudaHostAlloc(&host, sizeof(int), cudaHostAllocMapped);
    state->found = static_cast<int *>(host);
    if (error == cudaSuccess) {
        *state->found = 0;
        error = cudaHostGetDevicePointer(&mapped, host, 0);
    }
    state->found_on_device = static_cast<int *>(mapped);
    return device_result(device, "reserving memory for findings", error);
}

static void close_state(device_state *state) {
    cudaSetDevice(state->ordinal);
    if (state->stream) cudaStreamSynchronize(state->stream);
    if (state->matrix_products) products_close(state->matrix_products);
    if (state->record) cudaFree(state->record);
    if (state->found) cudaFreeHost(const_cast<int *>(state->found));
    if (state->own_stream && state->stream) cudaStreamDestroy(state->stream);
    free(state);
}

static vjp_status open(vjp_device *device, const vjp_options *options) {
    int ordinal, count = 0;
    if (!read_ordinal(device->name, &ordinal))
        return vjp_fail(device, VJP_NO_DEVICE, "\"%s\" is no device; the name is cuda or cuda:N", device->name);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice)
        return no_device(device, error == cudaErrorNoDevice ? "this machine has no NVIDIA GPU that CUDA can use"
                                                            : "no NVIDIA driver is loaded, or it is older than this "
                                                              "CUDA");
    if (error != cudaSuccess) return no_device(device, cudaGetErrorString(error));
    if (ordinal >= count)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: this machine has %d GPU%s, numbered from 0", device->name, count,
                        count == 1 ? "" : "s");
    cudaDeviceProp properties;
    error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, ordinal);
    if (error != cudaSuccess) return device_result(device, "opening", error);
    if (properties.major < 8)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: %s has compute capability %d.%d; the kernels need 8.0",
                        device->name, properties.name, properties.major, properties.minor);

    device_state *state = static_cast<device_state *>(calloc(1, sizeof *state));
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    state->ordinal = ordinal;
    state->l2_bytes = (size_t)properties.l2CacheSize;
    state->chains = properties.major >= 9;
    device->state = state;
    vjp_status status = choose_products(device, options, state);
    if (status == VJP_OK) status = open_stream(device, options, state);
    if (status == VJP_OK) status = open_findings(device, state);
    if (status == VJP_OK) status = products_open(device);
    if (status != VJP_OK) {
        close_state(state);
        device->state = nullptr;
        return status;
    }
    snprintf(device->summary, sizeof device->summary,
             "%.120s, %d multiprocessors, compute capability %d.%d, matrix products by cuBLASLt (%s)", properties.name,
             properties.multiProcessorCount, properties.major, properties.minor, state->tf32 ? "tf32" : "f32");
    return VJP_OK;
}

static void close(vjp_device *device) {
    close_state(state_of(device));
}

/* Several devices may be open, each on a card of its own; the runtime's current one is the thread's. */
static vjp_status use(vjp_device *device) {
    return device_result(device, "choosing the GPU", cudaSetDevice(state_of(device)->ordinal));
}

/* The door of every call, so this is where its card becomes the thread's current one. */
static const vjp_kernel *kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    if (device->state) cudaSetDevice(state_of(device)->ordinal);
    return kernels[op->id] ? &kernels[op->id][pass] : nullptr;
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static vjp_status alloc(vjp_device *device, size_t bytes, void **data) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    cudaError_t error = cudaMalloc(data, bytes ? bytes : 1);
    if (error == cudaSuccess) return VJP_OK;
    *data = nullptr;
    cudaGetLastError(); /* a failed allocation is not the next call's failure */
    return vjp_fail(device, error == cudaErrorMemoryAllocation ? VJP_OUT_OF_MEMORY : VJP_DEVICE_FAILED,
                    "%s: %zu bytes: %s", device->name, bytes, cudaGetErrorString(error));
}

static void release(vjp_device *device, void *data) {
    if (use(device) == VJP_OK) cudaFree(data);
}

static vjp_status upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    cudaStream_t stream = state_of(device)->stream;
    cudaError_t error =
        cudaMemcpyAsync(static_cast<char *>(data) + offset, host, bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    return device_result(device, "uploading", error);
}

static vjp_status download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    cudaStream_t stream = state_of(device)->stream;
    cudaError_t error =
        cudaMemcpyAsync(host, static_cast<const char *>(data) + offset, bytes, cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    return device_result(device, "downloading", error);
}

static vjp_status copy(vjp_device *device, void *to, const void *from, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    return device_result(device, "copying",
                         cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, state_of(device)->stream));
}

/* ---- Waiting, and what was found --------------------------------------------------------------------- */

/* The index slot of a pass, for the sentence. */
static const char *index_name(const vjp_op_info *info, int pass) {
    const vjp_pass_info *p = &info->pass[pass];
    for (size_t i = p->outputs; i < p->count; i++)
        if (p->slots[i].kind == VJP_KIND_INDEX || p->slots[i].kind == VJP_KIND_ARGMAX) return p->slots[i].name;
    return "index";
}

static vjp_status report_findings(vjp_device *device, device_state *state) {
    finding record[RECORDS];
    cudaError_t error = cudaMemcpy(record, state->record, sizeof record, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = cudaMemset(state->record, 0, sizeof record);
    if (error != cudaSuccess) return device_result(device, "reading what was found", error);
    *state->found = 0;
    for (int i = 0; i < RECORDS; i++) {
        const finding &f = record[i];
        if (!f.count) continue;
        const vjp_op_info *info = vjp_op_describe(vjp_op_at((size_t)(i / VJP_PASS_COUNT)));
        const char *pass = vjp_pass_name((vjp_pass)(i % VJP_PASS_COUNT));
        const char *name = index_name(info, i % VJP_PASS_COUNT);
        if (f.value == (double)(long long)f.value && !(f.value >= 0 && f.value < (double)f.limit))
            return vjp_fail(device, VJP_INVALID, "%s.%s: %s[%lld] is %.0f, outside [0, %lld); it was left out",
                            info->name, pass, name, f.position, f.value, f.limit);
        return vjp_fail(device, VJP_INVALID,
                        "%s.%s: %s[%lld] is %.9g, which is not an integer that f32 holds exactly; it was left out",
                        info->name, pass, name, f.position, f.value);
    }
    return VJP_OK;
}

static vjp_status synchronize(vjp_device *device) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    status = device_result(device, "running", cudaStreamSynchronize(state->stream));
    if (status != VJP_OK || !*state->found) return status;
    return report_findings(device, state);
}

/* ---- Timing ------------------------------------------------------------------------------------------ */

struct capture {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cudaEvent_t begin, end;
};

static void release_capture(capture *c) {
    if (c->ready) cudaGraphExecDestroy(c->ready);
    if (c->graph) cudaGraphDestroy(c->graph);
    if (c->begin) cudaEventDestroy(c->begin);
    if (c->end) cudaEventDestroy(c->end);
}

/* Captures what enqueue() puts on the stream. */
static vjp_status make_capture(vjp_device *device, vjp_status (*enqueue)(void *), void *argument, capture *c) {
    cudaStream_t stream = state_of(device)->stream;
    vjp_status status = VJP_OK;
    cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
        status = enqueue(argument);
        error = cudaStreamEndCapture(stream, &c->graph);
    }
    if (status == VJP_OK && error == cudaSuccess) error = cudaGraphInstantiate(&c->ready, c->graph, 0);
    return status == VJP_OK ? device_result(device, "capturing", error) : status;
}

static vjp_status time_capture(vjp_device *device, capture *c, int replays, double *seconds) {
    cudaStream_t stream = state_of(device)->stream;
    float ms = 0;
    cudaError_t error = cudaGraphLaunch(c->ready, stream); /* the first uploads the graph */
    if (error == cudaSuccess) error = cudaEventRecord(c->begin, stream);
    for (int i = 0; i < replays && error == cudaSuccess; i++)
        error = cudaGraphLaunch(c->ready, stream);
    if (error == cudaSuccess) error = cudaEventRecord(c->end, stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(c->end);
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, c->begin, c->end);
    *seconds = 1e-3 * (double)ms / replays;
    return device_result(device, "timing", error);
}

/* Captures what enqueue() puts on the stream, replays it, and tells the time of one replay on the device. */
static vjp_status measure(vjp_device *device, vjp_status (*enqueue)(void *), void *argument, int replays,
                          double *seconds) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    capture c{};
    cudaError_t error = cudaEventCreate(&c.begin);
    if (error == cudaSuccess) error = cudaEventCreate(&c.end);
    status = device_result(device, "timing", error);
    if (status == VJP_OK) status = make_capture(device, enqueue, argument, &c);
    if (status == VJP_OK) status = time_capture(device, &c, replays, seconds);
    release_capture(&c);
    return status;
}

/* ---- Recordings -------------------------------------------------------------------------------------- */

static void forget(vjp_device *, void *recording) {
    capture *c = static_cast<capture *>(recording);
    release_capture(c);
    free(c);
}

static vjp_status record(vjp_device *device, vjp_status (*enqueue)(void *), void *argument, void **recording) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    capture *c = static_cast<capture *>(calloc(1, sizeof *c));
    if (!c) return vjp_fail(device, VJP_OUT_OF_MEMORY, "no memory for a recording");
    status = make_capture(device, enqueue, argument, c);
    if (status == VJP_OK)
        *recording = c;
    else
        forget(device, c);
    return status;
}

static vjp_status replay(vjp_device *device, void *recording) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    return device_result(device, "replaying",
                         cudaGraphLaunch(static_cast<capture *>(recording)->ready, state_of(device)->stream));
}

static size_t cache_bytes(const vjp_device *device) {
    return state_of(device)->l2_bytes;
}

} // namespace vjp

static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .name = "cuda",
    .host_memory = 0,
    .open = vjp::open,
    .close = vjp::close,
    .kernel = vjp::kernel,
    .alloc = vjp::alloc,
    .free = vjp::release,
    .upload = vjp::upload,
    .download = vjp::download,
    .synchronize = vjp::synchronize,
    .parallel = nullptr,
    .copy = vjp::copy,
    .measure = vjp::measure,
    .cache_bytes = vjp::cache_bytes,
    .record = vjp::record,
    .replay = vjp::replay,
    .forget = vjp::forget,
    .note = nullptr,
    .takes_allocator = 1,
};

extern "C" __attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : nullptr;
}
