/* SPDX-License-Identifier: MIT */
/*
 * The CUDA device: opening, memory, streams and events, what kernels found, and captured graphs for replay and timing.
 *
 * Everything that can fail for the lack of a GPU, a driver or memory fails here, when the device is opened, with the
 * runtime's own words. CUDA does not survive a fork: in a child of the process that opened the device every function
 * returns a status, and closing leaves the GPU alone.
 */
#include "cuda/common/many.cuh"
#include "cuda/common/pairs.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

extern "C" {
#define OP(name, family, cuda, gpu) extern const vjp_kernel vjp_cuda_##name[];
#include "op/ops.def"
}

namespace vjp {

static const vjp_kernel *const kernels[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) OP_KERNELS_##cuda(vjp_cuda_##name),
#include "op/ops.def"
};

/* CUDA's own words, and more where they do not say what to do. */
static const char *words_of(cudaError_t error) {
    if (error != cudaErrorNoKernelImageForDevice) return cudaGetErrorString(error);
    return "this library has no code for this card: it was compiled for sm " VJP_CUDA_CARDS
           "; configure it with -DVJP_CUDA_ARCHITECTURES and the card's number";
}

vjp_status device_result(vjp_device *device, const char *doing, cudaError_t error) {
    if (error == cudaSuccess) return VJP_OK;
    vjp_status status = error == cudaErrorMemoryAllocation ? VJP_OUT_OF_MEMORY : VJP_DEVICE_FAILED;
    return vjp_fail(device, status, "%s: %s: %s", device->name, doing, words_of(error));
}

vjp_status result_of(const vjp_work *work, cudaError_t error) {
    if (error == cudaSuccess) return VJP_OK;
    return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: %s", work->device->name, words_of(error));
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

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

static const char *products_name(const device_state *state) {
    return state->tf32 ? "tf32" : "f32";
}

static vjp_status open_stream(vjp_device *device, const vjp_options *options, device_state *state) {
    cudaError_t error = cudaStreamCreateWithFlags(&state->own_stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&state->copy_stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&state->copied, cudaEventDisableTiming);
    state->stream = options->stream ? static_cast<cudaStream_t>(options->stream) : state->own_stream;
    return device_result(device, "creating a stream", error);
}

static vjp_status open_findings(vjp_device *device, device_state *state) {
    void *host = nullptr, *mapped = nullptr;
    cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&state->record), RECORDS * sizeof(finding));
    if (error == cudaSuccess) error = cudaMemset(state->record, 0, RECORDS * sizeof(finding));
    if (error == cudaSuccess) error = cudaHostAlloc(&host, sizeof(findings_page), cudaHostAllocMapped);
    state->page = static_cast<findings_page *>(host);
    if (error == cudaSuccess) {
        memset(host, 0, sizeof(findings_page));
        error = cudaHostGetDevicePointer(&mapped, host, 0);
    }
    state->page_on_device = static_cast<findings_page *>(mapped);
    return device_result(device, "allocating memory for findings", error);
}

static bool is_forked(const device_state *state) {
    return getpid() != state->process;
}

static void close_state(device_state *state) {
    if (!is_forked(state)) {
        cudaSetDevice(state->ordinal);
        if (state->stream) cudaStreamSynchronize(state->stream);
        if (state->own_stream) cudaStreamSynchronize(state->own_stream);
        if (state->copy_stream) cudaStreamSynchronize(state->copy_stream);
        if (state->matrix_products) products_close(state->matrix_products);
        if (state->record) cudaFree(state->record);
        if (state->page) cudaFreeHost(state->page);
        if (state->copied) cudaEventDestroy(state->copied);
        for (cudaStream_t away : state->away_stream)
            if (away) cudaStreamSynchronize(away), cudaStreamDestroy(away);
        for (int i = 0; i < state->tickets; i++)
            if (state->ticket[i]) cudaEventDestroy(state->ticket[i]);
        if (state->copy_stream) cudaStreamDestroy(state->copy_stream);
        if (state->own_stream) cudaStreamDestroy(state->own_stream);
    }
    free(state->ticket);
    free(state);
}

/* The number of GPUs, or 0 and in `why` the reason. */
static int count_devices(const char **why) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    cudaGetLastError();
    if (error == cudaSuccess || error == cudaErrorNoDevice)
        *why = "this machine has no NVIDIA GPU that CUDA can use";
    else if (error == cudaErrorInsufficientDriver)
        *why = "no NVIDIA driver is loaded, or it is older than this CUDA";
    else
        *why = cudaGetErrorString(error);
    return 0;
}

static int count() {
    const char *why;
    return count_devices(&why);
}

/* The properties of a GPU, or a status and the reason in `text`. */
static vjp_status find_device(int ordinal, cudaDeviceProp *properties, char *text, size_t bytes) {
    const char *why = nullptr;
    int devices = count_devices(&why);
    if (!devices) {
        snprintf(text, bytes, "%s", why);
        return VJP_NO_DEVICE;
    }
    if (ordinal < 0 || ordinal >= devices) {
        snprintf(text, bytes, "this machine has %d GPU%s, numbered from 0", devices, devices == 1 ? "" : "s");
        return VJP_NO_DEVICE;
    }
    cudaError_t error = cudaGetDeviceProperties(properties, ordinal);
    if (error == cudaSuccess) return VJP_OK;
    cudaGetLastError();
    snprintf(text, bytes, "reading its properties: %s", cudaGetErrorString(error));
    return VJP_DEVICE_FAILED;
}

static void describe_properties(const cudaDeviceProp &p, char *text, size_t bytes) {
    snprintf(text, bytes, "%.120s, %d multiprocessors, compute capability %d.%d", p.name, p.multiProcessorCount,
             p.major, p.minor);
}

static vjp_status describe(int index, char *text, size_t bytes) {
    cudaDeviceProp properties;
    vjp_status status = find_device(index, &properties, text, bytes);
    if (status == VJP_OK) describe_properties(properties, text, bytes);
    return status;
}

static vjp_status open(vjp_device *device, const vjp_options *options) {
    int ordinal;
    cudaDeviceProp properties;
    char text[200];
    if (!read_ordinal(device->name, &ordinal))
        return vjp_fail(device, VJP_NO_DEVICE, "unknown device \"%s\"; the name is cuda or cuda:N", device->name);
    vjp_status status = find_device(ordinal, &properties, text, sizeof text);
    if (status != VJP_OK) return vjp_fail(device, status, "%s: %s", device->name, text);
    describe_properties(properties, text, sizeof text);
    if (properties.major < 8)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: %s; the kernels need 8.0", device->name, text);
    cudaError_t error = cudaSetDevice(ordinal);
    if (error != cudaSuccess) return device_result(device, "opening", error);

    device_state *state = static_cast<device_state *>(calloc(1, sizeof *state));
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    state->ordinal = ordinal;
    state->process = getpid();
    state->l2_bytes = (size_t)properties.l2CacheSize;
    state->chains = properties.major >= 9;
    state->capability = 10 * properties.major + properties.minor;
    state->multiprocessors = properties.multiProcessorCount;
    device->state = state;
    status = choose_products(device, options, state);
    if (status == VJP_OK) status = open_stream(device, options, state);
    if (status == VJP_OK) status = open_findings(device, state);
    if (status == VJP_OK) status = products_open(device);
    if (status != VJP_OK) {
        close_state(state);
        device->state = nullptr;
        return status;
    }
    snprintf(device->summary, sizeof device->summary, "%s, matrix products by cuBLASLt (%s)", text,
             products_name(state));
    return VJP_OK;
}

static void close(vjp_device *device) {
    close_state(state_of(device));
}

#define FORKED "opened before this process was forked; CUDA does not work in a fork of a process that uses it"

/* Several devices may be open, each on its own GPU: CUDA's current GPU is per thread. */
static vjp_status use(vjp_device *device) {
    const device_state *state = state_of(device);
    if (is_forked(state)) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: " FORKED, device->name);
    return device_result(device, "choosing the GPU", cudaSetDevice(state->ordinal));
}

static vjp_status refuse_forked(const vjp_work *work) {
    return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: " FORKED, work->device->name);
}

/* Every call comes through here, so this is where its GPU becomes the thread's current one. */
static const vjp_kernel *kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    static const vjp_kernel forked = {refuse_forked, nullptr, VJP_STORAGE_16_32};
    if (!kernels[op->id]) return nullptr;
    if (device->state) {
        if (is_forked(state_of(device))) return &forked;
        cudaSetDevice(state_of(device)->ordinal);
    }
    return &kernels[op->id][pass];
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

static vjp_status upload_async(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    return device_result(device, "uploading",
                         cudaMemcpyAsync(static_cast<char *>(data) + offset, host, bytes, cudaMemcpyHostToDevice,
                                         state_of(device)->stream));
}

static vjp_status download_async(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    return device_result(device, "downloading",
                         cudaMemcpyAsync(host, static_cast<const char *>(data) + offset, bytes, cudaMemcpyDeviceToHost,
                                         state_of(device)->stream));
}

static vjp_status wait_for_stream(vjp_device *device, const char *doing) {
    return device_result(device, doing, cudaStreamSynchronize(state_of(device)->stream));
}

static vjp_status upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    vjp_status status = upload_async(device, data, offset, host, bytes);
    return status == VJP_OK && bytes ? wait_for_stream(device, "uploading") : status;
}

static vjp_status download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    vjp_status status = download_async(device, host, data, offset, bytes);
    return status == VJP_OK && bytes ? wait_for_stream(device, "downloading") : status;
}

static vjp_status copy(vjp_device *device, void *to, const void *from, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    return device_result(device, "copying",
                         cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, state_of(device)->stream));
}

static vjp_status alloc_host(vjp_device *device, size_t bytes, void **data) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    cudaError_t error = cudaHostAlloc(data, bytes ? bytes : 1, cudaHostAllocDefault);
    if (error == cudaSuccess) return VJP_OK;
    *data = nullptr;
    cudaGetLastError();
    return device_result(device, "allocating host memory", error);
}

static void free_host(vjp_device *device, void *data) {
    if (use(device) == VJP_OK) cudaFreeHost(data);
}

static vjp_status upload_beside(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    vjp_status status = use(device);
    if (status != VJP_OK || !bytes) return status;
    device_state *state = state_of(device);
    cudaError_t error =
        cudaMemcpyAsync(static_cast<char *>(data) + offset, host, bytes, cudaMemcpyHostToDevice, state->copy_stream);
    if (error == cudaSuccess) error = cudaEventRecord(state->copied, state->copy_stream);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(state->stream, state->copied, 0);
    return device_result(device, "uploading", error);
}

/* ---- Copies to the host's memory and back, beside the calls ------------------------------------------- */

/* Makes the stream of a direction, and the event of a ticket, when they are first needed. */
static vjp_status prepare_copy(vjp_device *device, int to_host, int ticket) {
    device_state *state = state_of(device);
    if (ticket >= state->tickets) {
        size_t count = (size_t)ticket + 1;
        cudaEvent_t *more = static_cast<cudaEvent_t *>(realloc(state->ticket, count * sizeof *more));
        if (!more) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu copies", device->name, count);
        for (int i = state->tickets; i <= ticket; i++)
            more[i] = nullptr;
        state->ticket = more;
        state->tickets = (int)count;
    }
    cudaError_t error = cudaSuccess;
    if (!state->away_stream[to_host])
        error = cudaStreamCreateWithFlags(&state->away_stream[to_host], cudaStreamNonBlocking);
    if (error == cudaSuccess && !state->ticket[ticket])
        error = cudaEventCreateWithFlags(&state->ticket[ticket], cudaEventDisableTiming);
    return device_result(device, "preparing a copy", error);
}

/* The ticket's event is first the moment at which the copy may begin, then its end. */
static vjp_status copy_begin(vjp_device *device, void *to, const void *from, size_t bytes, int to_host, int ticket) {
    vjp_status status = use(device);
    if (status == VJP_OK) status = prepare_copy(device, to_host != 0, ticket);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    cudaStream_t beside = state->away_stream[to_host != 0];
    cudaError_t error = cudaEventRecord(state->ticket[ticket], state->stream);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(beside, state->ticket[ticket], 0);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(to, from, bytes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, beside);
    if (error == cudaSuccess) error = cudaEventRecord(state->ticket[ticket], beside);
    return device_result(device, to_host ? "copying to the host" : "copying from the host", error);
}

static vjp_status copy_wait(vjp_device *device, int ticket) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    if (ticket >= state->tickets || !state->ticket[ticket]) return VJP_OK; /* no copy has begun */
    return device_result(device, "waiting for a copy", cudaStreamWaitEvent(state->stream, state->ticket[ticket], 0));
}

/* ---- Streams and events ------------------------------------------------------------------------------ */

static vjp_status set_stream(vjp_device *device, void *stream) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    state->stream = stream ? static_cast<cudaStream_t>(stream) : state->own_stream;
    return VJP_OK;
}

static void event_destroy(vjp_device *device, void *event) {
    if (use(device) == VJP_OK) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

static vjp_status event_create(vjp_device *device, void **event) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    cudaEvent_t made;
    cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    if (error != cudaSuccess) return device_result(device, "creating an event", error);
    error = cudaEventRecord(made, state_of(device)->stream);
    if (error == cudaSuccess)
        *event = made;
    else
        cudaEventDestroy(made);
    return device_result(device, "recording an event", error);
}

/* ---- Waiting, and what was found --------------------------------------------------------------------- */

/* The index slot of a pass, for the sentence. */
static const char *index_name(const vjp_op_info *info, int pass) {
    const vjp_pass_info *p = &info->pass[pass];
    for (size_t i = p->outputs; i < p->count; i++)
        if (p->slots[i].kind == VJP_KIND_INDEX || p->slots[i].kind == VJP_KIND_ARGMAX) return p->slots[i].name;
    return "index";
}

/* Moves the records to host memory, a thread for each. */
static __global__ void collect_findings(finding *records, finding *collected) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= RECORDS) return;
    volatile finding *r = lock_record(records + i);
    collected[i] = {0, r->count, r->position, r->value, r->first, r->limit};
    r->count = 0;
    unlock_record(records + i);
}

/* `found` is cleared first: a report that comes while records are collected is in this collection or the next. */
static vjp_status report_findings(vjp_device *device, device_state *state) {
    constexpr int THREADS = 128;
    *static_cast<volatile int *>(&state->page->found) = 0;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)vjp_divide_up(RECORDS, THREADS));
    config.blockDim = dim3(THREADS);
    config.stream = state->stream;
    cudaError_t error = cudaLaunchKernelEx(&config, collect_findings, state->record, state->page_on_device->collected);
    if (error == cudaSuccess) error = cudaStreamSynchronize(state->stream);
    if (error != cudaSuccess) return device_result(device, "collecting findings", error);
    for (int i = 0; i < RECORDS; i++) {
        const finding &f = state->page->collected[i];
        if (!f.count) continue;
        const vjp_op_info *info = vjp_op_describe(vjp_op_at((size_t)(i / VJP_PASS_COUNT)));
        const char *pass = vjp_pass_name((vjp_pass)(i % VJP_PASS_COUNT));
        const char *name = index_name(info, i % VJP_PASS_COUNT);
        const char *then = i / VJP_PASS_COUNT == OP_ID(attention) ? "the results are not valid" : "it was left out";
        if (f.value == (double)(long long)f.value && !(f.value >= (double)f.first && f.value < (double)f.limit))
            return vjp_fail(device, VJP_INVALID, "%s.%s: %s[%lld] is %.0f, outside [%lld, %lld); %s", info->name, pass,
                            name, f.position, f.value, f.first, f.limit, then);
        return vjp_fail(device, VJP_INVALID,
                        "%s.%s: %s[%lld] is %.9g, which is not an integer that f32 holds exactly; %s", info->name, pass,
                        name, f.position, f.value, then);
    }
    return VJP_OK;
}

static vjp_status synchronize(vjp_device *device) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    status = wait_for_stream(device, "running");
    if (status != VJP_OK || !*static_cast<volatile int *>(&state->page->found)) return status;
    return report_findings(device, state);
}

/* What kernels have found by then is reported as vjp_synchronize() would. */
static vjp_status event_wait(vjp_device *device, void *event) {
    vjp_status status = use(device);
    if (status != VJP_OK) return status;
    device_state *state = state_of(device);
    status = device_result(device, "waiting for an event", cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
    if (status != VJP_OK || !*static_cast<volatile int *>(&state->page->found)) return status;
    return report_findings(device, state);
}

/* ---- Many calls as one ------------------------------------------------------------------------------- */

static int merges(const vjp_device *, const vjp_op *op, vjp_pass pass) {
    int id = op->id;
    return id == OP_ID(adamw) || id == OP_ID(sgd) || id == OP_ID(sum_squares) || id == OP_ID(rope) ||
           (id == OP_ID(cast) && pass == VJP_FORWARD);
}

static vjp_status run_many(const vjp_work *const *works, size_t count) {
    vjp_status status = use(works[0]->device);
    if (status != VJP_OK) return status;
    switch (works[0]->op->id) {
    case OP_ID(adamw): return run_many_adamw(works, count);
    case OP_ID(sgd): return run_many_sgd(works, count);
    case OP_ID(sum_squares): return run_many_sum_squares(works, count);
    case OP_ID(rope): return run_many_rope(works, count);
    default: return run_many_cast(works, count);
    }
}

static vjp_status run_pair(const vjp_work *first, const vjp_work *second) {
    vjp_status status = use(first->device);
    return status == VJP_OK ? run_linear_pair(first, second) : status;
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

static void forget(vjp_device *device, void *recording) {
    capture *c = static_cast<capture *>(recording);
    if (!is_forked(state_of(device))) release_capture(c);
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

/* Bytes of memory are text, too. The free ones are of this moment: other processes use the same GPU. */
static const char *property(const vjp_device *device, const char *name, char *text, size_t bytes) {
    const device_state *state = state_of(device);
    if (strcmp(name, "matrix_products") == 0) {
        snprintf(text, bytes, "%s", products_name(state));
        return text;
    }
    size_t free = 0, total = 0;
    bool asks_free = strcmp(name, "memory_free") == 0;
    if ((!asks_free && strcmp(name, "memory_total") != 0) || is_forked(state)) return nullptr;
    if (cudaSetDevice(state->ordinal) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess) {
        cudaGetLastError(); /* the next call must not fail because of this question */
        return nullptr;
    }
    snprintf(text, bytes, "%zu", asks_free ? free : total);
    return text;
}

} // namespace vjp

/* A member that is not named here is NULL, which means that the device cannot do it. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .name = "cuda",
    .version = VJP_VERSION,
    .open = vjp::open,
    .close = vjp::close,
    .kernel = vjp::kernel,
    .alloc = vjp::alloc,
    .free = vjp::release,
    .upload = vjp::upload,
    .download = vjp::download,
    .synchronize = vjp::synchronize,
    .copy = vjp::copy,
    .measure = vjp::measure,
    .cache_bytes = vjp::cache_bytes,
    .record = vjp::record,
    .replay = vjp::replay,
    .forget = vjp::forget,
    .set_stream = vjp::set_stream,
    .upload_async = vjp::upload_async,
    .download_async = vjp::download_async,
    .event_create = vjp::event_create,
    .event_wait = vjp::event_wait,
    .event_destroy = vjp::event_destroy,
    .count = vjp::count,
    .describe = vjp::describe,
    .property = vjp::property,
    .takes_allocator = 1,
    .merges = vjp::merges,
    .run_many = vjp::run_many,
    .alloc_host = vjp::alloc_host,
    .free_host = vjp::free_host,
    .upload_beside = vjp::upload_beside,
    .gates_products = 1,
    .pairs = vjp::linear_pairs,
    .run_pair = vjp::run_pair,
    .copy_begin = vjp::copy_begin,
    .copy_wait = vjp::copy_wait,
    /* On an H200 77 (4.26 TB/s and 55 GB/s) and, in a training step, 130 to 150. */
    .copy_cost = 80,
    .flops_per_byte = 150,
};

extern "C" __attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : nullptr;
}
