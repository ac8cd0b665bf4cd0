/* SPDX-License-Identifier: MIT */
/*
 * From a launch to the queue: which ranges of which buffers it sees, its pipeline (made once), its uniforms, and its
 * dispatch in the submission that is being encoded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/device.h"

/* ---- Windows ----------------------------------------------------------------------------------------- */

/* Offsets of bindings are multiples of the device's alignment, at most 256. */
enum { ALIGN = 256 };

typedef struct range {
    const gpu_buffer *of;
    uint64_t begin, end;
    int operand;
} range;

/* The ranges of a launch, sorted by buffer and offset. */
static vjp_status find_ranges(vjp_device *device, const gpu_launch *l, range *ranges, int *count) {
    const webgpu_state *state = webgpu_of(device);
    *count = 0;
    for (int i = 0; i < l->operands; i++) {
        const gpu_operand *o = &l->operand[i];
        if (!o->present) continue;
        uint64_t begin;
        const gpu_buffer *buffer = gpu_buffers_hold(&state->buffers, o->address, o->bytes, &begin);
        if (!buffer) return gpu_refuse_memory(device, l, o);
        range r = {buffer, begin / ALIGN * ALIGN, (begin + o->bytes + ALIGN - 1) / ALIGN * ALIGN, i};
        int at = (*count)++;
        for (; at > 0 && (ranges[at - 1].of > r.of || (ranges[at - 1].of == r.of && ranges[at - 1].begin > r.begin));
             at--)
            ranges[at] = ranges[at - 1];
        ranges[at] = r;
    }
    return VJP_OK;
}

static bool buffer_is_written(const gpu_launch *l, const range *ranges, int count, const gpu_buffer *of) {
    for (int i = 0; i < count; i++)
        if (ranges[i].of == of && l->operand[ranges[i].operand].output) return true;
    return false;
}

/*
 * The end of range i and of those after it that overlap it or each other, as tensors do whose rows lie between each
 * other's: of a buffer that is written they must share a window. Where no binding holds so much, only that of range i.
 */
static uint64_t end_of_overlap(const range *ranges, int count, int i, uint64_t max_bytes) {
    uint64_t end = ranges[i].end;
    for (int k = i + 1; k < count && ranges[k].of == ranges[i].of && ranges[k].begin < end; k++)
        if (ranges[k].end > end) end = ranges[k].end;
    return end - ranges[i].begin <= max_bytes ? end : ranges[i].end;
}

/* One window for as much of a buffer as a binding holds; windows of one buffer that is written do not overlap. */
static vjp_status make_windows(vjp_device *device, const gpu_launch *l, webgpu_view *view) {
    webgpu_state *state = webgpu_of(device);
    range ranges[GPU_MAX_OPERANDS];
    int count;
    vjp_status status = find_ranges(device, l, ranges, &count);
    if (status != VJP_OK) return status;
    uint64_t max_bytes = state->limits.maxStorageBufferBindingSize / ALIGN * ALIGN;
    int max_windows = GPU_MAX_WINDOWS - (gpu_bad_index_record(l) >= 0); /* which is one more */
    for (int i = 0; i < count; i++) {
        const range *r = &ranges[i];
        webgpu_window *w = view->windows ? &view->window[view->windows - 1] : NULL;
        bool written = buffer_is_written(l, ranges, count, r->of);
        uint64_t begin = r->begin, end = written ? end_of_overlap(ranges, count, i, max_bytes) : r->end;
        if (w && w->of == r->of && end - w->begin <= max_bytes) {
            if (r->end - w->begin > w->bytes) w->bytes = r->end - w->begin;
        } else {
            if (r->end - begin > max_bytes) {
                char what[128];
                snprintf(what, sizeof what, "has %llu bytes; this device binds at most %llu",
                         (unsigned long long)l->operand[r->operand].bytes, (unsigned long long)max_bytes);
                return gpu_refuse(device, l, VJP_UNSUPPORTED, what, l->operand[r->operand].label);
            }
            if (w && w->of == r->of && written && w->begin + w->bytes > begin)
                return gpu_refuse(device, l, VJP_UNSUPPORTED,
                                  "shares 256 bytes with another tensor, or lies between its rows, and this device "
                                  "cannot bind both at once: put it on a multiple of 256, or pack the rows",
                                  l->operand[r->operand].label);
            if (view->windows == max_windows)
                return gpu_refuse(device, l, VJP_UNSUPPORTED, "is one tensor too many in a buffer of its own",
                                  l->operand[r->operand].label);
            view->window[view->windows++] =
                (webgpu_window){r->of->handle, r->of, begin, r->end - begin, written, false};
            w = &view->window[view->windows - 1];
        }
        const gpu_operand *o = &l->operand[r->operand];
        if (o->output && !o->paired) w->atomic = true;
        view->window_of[r->operand] = view->windows - 1;
        view->base[r->operand] =
            (uint32_t)((uint64_t)(o->address - (r->of->begin + w->begin)) / vjp_dtype_size(o->dtype));
    }
    return VJP_OK;
}

/* Numbers windows by the first operand in them, not by address: the same shader then serves any placement. */
static void order_windows(webgpu_view *view) {
    webgpu_view old = *view;
    int number[GPU_MAX_WINDOWS], next = 0;
    for (int w = 0; w < view->windows; w++)
        number[w] = -1;
    for (int i = 0; i < view->launch->operands; i++) {
        int w = old.window_of[i];
        if (w < 0) continue;
        if (number[w] < 0) {
            number[w] = next++;
            view->window[number[w]] = old.window[w];
        }
        view->window_of[i] = number[w];
    }
}

/* The window through which this call's op and pass report bad indices. */
static void add_bad_index(webgpu_state *state, const gpu_launch *l, webgpu_view *view) {
    int record = gpu_bad_index_record(l);
    for (int i = 0; i < l->operands; i++) {
        if (l->operand[i].form != GPU_BAD_INDEX) continue;
        view->window_of[i] = view->windows;
        view->base[i] = (uint32_t)(record * (int)(sizeof(gpu_bad_index) / 4));
        view->window[view->windows++] =
            (webgpu_window){state->bad_indices, NULL, 0, GPU_BAD_INDEX_RECORDS * sizeof(gpu_bad_index), true, true};
    }
}

/* ---- Pipelines --------------------------------------------------------------------------------------- */

static WGPUBindGroupLayout make_layout(webgpu_state *state, const webgpu_view *view) {
    WGPUBindGroupLayoutEntry entries[GPU_MAX_WINDOWS + 2];
    memset(entries, 0, sizeof entries);
    entries[0].visibility = WGPUShaderStage_Compute;
    entries[0].buffer = (WGPUBufferBindingLayout){.type = view->merged ? WGPUBufferBindingType_ReadOnlyStorage
                                                                       : WGPUBufferBindingType_Uniform,
                                                  .hasDynamicOffset = true,
                                                  .minBindingSize = WEBGPU_PARAMS};
    for (int i = 0; i < view->windows; i++) {
        entries[i + 1].binding = (uint32_t)i + 1;
        entries[i + 1].visibility = WGPUShaderStage_Compute;
        entries[i + 1].buffer.type =
            view->window[i].written ? WGPUBufferBindingType_Storage : WGPUBufferBindingType_ReadOnlyStorage;
    }
    WGPUBindGroupLayoutDescriptor descriptor = {.entryCount = (size_t)view->windows + 1, .entries = entries};
    return state->api.DeviceCreateBindGroupLayout(state->device, &descriptor);
}

/* VJP_WEBGPU_SHADERS names a folder to write every compiled shader to, for reading and for tests. */
static void write_source(const webgpu_view *view, const char *source) {
    const char *folder = getenv("VJP_WEBGPU_SHADERS");
    char path[512];
    if (!folder || !folder[0]) return;
    snprintf(path, sizeof path, "%s/%s-%s-%016llx.wgsl", folder, view->launch->shader, view->launch->kernel,
             (unsigned long long)gpu_hash(source, strlen(source)));
    FILE *file = fopen(path, "w");
    if (!file) return;
    fputs(source, file);
    fclose(file);
}

/* A shader that does not compile fails with the compiler's message. */
static vjp_status make_pipeline(vjp_device *device, const void *what, gpu_pipeline *made) {
    const webgpu_view *view = what;
    webgpu_state *state = webgpu_of(device);
    const webgpu_api *api = &state->api;
    char message[WEBGPU_MESSAGE];
    char *source = webgpu_source(view);
    if (!source) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for a shader", device->name);
    write_source(view, source);
    WGPUShaderSourceWGSL wgsl = {.chain = {.sType = WGPUSType_ShaderSourceWGSL}, .code = webgpu_text(source)};
    WGPUShaderModuleDescriptor module = {.nextInChain = &wgsl.chain, .label = webgpu_text(view->launch->shader)};
    api->DevicePushErrorScope(state->device, WGPUErrorFilter_Validation);
    WGPUShaderModule shader = api->DeviceCreateShaderModule(state->device, &module);
    WGPUBindGroupLayout bindings = make_layout(state, view);
    WGPUPipelineLayoutDescriptor layout = {.bindGroupLayoutCount = 1, .bindGroupLayouts = &bindings};
    WGPUPipelineLayout whole = api->DeviceCreatePipelineLayout(state->device, &layout);
    WGPUComputePipelineDescriptor pipeline = {.label = webgpu_text(view->launch->kernel),
                                              .layout = whole,
                                              .compute = {.module = shader, .entryPoint = webgpu_text("main")}};
    *made = (gpu_pipeline){.pipeline = api->DeviceCreateComputePipeline(state->device, &pipeline), .layout = bindings};
    webgpu_pop_scope(state, message, sizeof message);
    if (shader) api->ShaderModuleRelease(shader);
    if (whole) api->PipelineLayoutRelease(whole);
    free(source);
    if (!message[0] && made->pipeline) return webgpu_result(device, "making a pipeline");
    if (made->pipeline) api->ComputePipelineRelease(made->pipeline);
    if (made->layout) api->BindGroupLayoutRelease(made->layout);
    if (state->lost) return webgpu_result(device, "making a pipeline");
    return vjp_fail(device, VJP_DEVICE_FAILED, "%s: %s.wgsl, %s(): %s", device->name, view->launch->shader,
                    view->launch->kernel, message);
}

static vjp_status find_pipeline(vjp_device *device, const webgpu_view *view, const gpu_pipeline **found) {
    webgpu_state *state = webgpu_of(device);
    char key[WEBGPU_KEY];
    size_t bytes = webgpu_key(view, key);
    if (!bytes) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: the names of a launch are too long", device->name);
    if (gpu_pipelines_are_many(&state->pipelines)) {
        vjp_status status = webgpu_submit(device);
        if (status != VJP_OK) return status;
        webgpu_release_pipelines(state);
    }
    return gpu_pipelines_find(device, &state->pipelines, key, bytes, make_pipeline, view, found);
}

static void release_pipeline(const void *state, const gpu_pipeline *p) {
    const webgpu_api *api = &((const webgpu_state *)state)->api;
    api->ComputePipelineRelease(p->pipeline);
    api->BindGroupLayoutRelease(p->layout);
}

void webgpu_release_pipelines(webgpu_state *state) {
    gpu_pipelines_forget(&state->pipelines, release_pipeline, state);
}

/* ---- Encoding ---------------------------------------------------------------------------------------- */

static WGPUBindGroup make_bindings(webgpu_state *state, const webgpu_view *view, int rows,
                                   const gpu_pipeline *pipeline) {
    WGPUBindGroupEntry entries[GPU_MAX_WINDOWS + 2];
    memset(entries, 0, sizeof entries);
    entries[0] = (WGPUBindGroupEntry){.buffer = state->params, .size = (uint64_t)rows * WEBGPU_PARAMS};
    for (int i = 0; i < view->windows; i++) {
        const webgpu_window *w = &view->window[i];
        entries[i + 1] =
            (WGPUBindGroupEntry){.binding = (uint32_t)i + 1, .buffer = w->buffer, .offset = w->begin, .size = w->bytes};
    }
    WGPUBindGroupDescriptor descriptor = {
        .layout = pipeline->layout, .entryCount = (size_t)view->windows + 1, .entries = entries};
    return state->api.DeviceCreateBindGroup(state->device, &descriptor);
}

/* As source.c's Uniforms has it. */
static void write_params(const gpu_row *row, int rows, unsigned char *to) {
    uint32_t head[4] = {row->groups, 0, row->first, (uint32_t)rows};
    for (int i = 0; i < row->launch->operands; i++)
        head[1] |= (uint32_t)row->launch->operand[i].adds << i;
    memcpy(to, row->base, sizeof row->base);
    memcpy(to + sizeof row->base, head, sizeof head);
    memcpy(to + sizeof row->base + sizeof head, row->launch->param, sizeof row->launch->param);
}

static void dispatch(webgpu_state *state, const gpu_pipeline *pipeline, WGPUBindGroup bindings, uint32_t groups) {
    const webgpu_api *api = &state->api;
    uint32_t offset = (uint32_t)(state->launches * WEBGPU_PARAMS);
    uint32_t width = state->limits.maxComputeWorkgroupsPerDimension;
    uint32_t rows = (groups + width - 1) / width, columns = (groups + rows - 1) / rows;
    if (!state->encoder) state->encoder = api->DeviceCreateCommandEncoder(state->device, NULL);
    if (!state->pass) state->pass = api->CommandEncoderBeginComputePass(state->encoder, NULL);
    api->ComputePassEncoderSetPipeline(state->pass, pipeline->pipeline);
    api->ComputePassEncoderSetBindGroup(state->pass, 0, bindings, 1, &offset);
    api->ComputePassEncoderDispatchWorkgroups(state->pass, columns, rows, 1);
    state->counts.dispatches++;
}

vjp_status webgpu_encode(vjp_device *device, const webgpu_view *view, const gpu_row *row, int rows, uint32_t groups) {
    webgpu_state *state = webgpu_of(device);
    const gpu_pipeline *pipeline = NULL;
    vjp_status status = state->launches + rows > WEBGPU_LAUNCHES ? webgpu_submit(device) : VJP_OK;
    if (status == VJP_OK) status = find_pipeline(device, view, &pipeline);
    if (status != VJP_OK || state->mode == GPU_WARM) return status;
    WGPUBindGroup bindings = make_bindings(state, view, rows, pipeline);
    status = webgpu_result(device, "binding");
    if (status != VJP_OK) return status;
    gpu_bad_index_remember(&state->bad_index_context, view->launch);
    if (gpu_bad_index_record(view->launch) >= 0) state->may_have_bad_index = true;
    for (int i = 0; i < rows; i++)
        write_params(&row[i], rows, state->param_bytes + (size_t)(state->launches + i) * WEBGPU_PARAMS);
    dispatch(state, pipeline, bindings, groups);
    state->launches += rows;
    state->api.BindGroupRelease(bindings);
    return webgpu_result(device, "encoding");
}

vjp_status webgpu_find_windows(vjp_device *device, const gpu_launch *l, webgpu_view *view) {
    *view = (webgpu_view){.launch = l};
    for (int i = 0; i < GPU_MAX_OPERANDS; i++)
        view->window_of[i] = -1;
    vjp_status status = make_windows(device, l, view);
    if (status != VJP_OK) return status;
    order_windows(view);
    add_bad_index(webgpu_of(device), l, view);
    return VJP_OK;
}

static vjp_status check_iterations(vjp_device *device, const gpu_launch *l) {
    int64_t max = webgpu_of(device)->max_iterations;
    char what[128];
    if (!max || l->iterations <= max) return VJP_OK;
    snprintf(what, sizeof what, "needs %lld iterations of loops; this software GPU ends them after %lld",
             (long long)l->iterations, (long long)max);
    return gpu_refuse(device, l, VJP_UNSUPPORTED, what, l->kernel);
}

vjp_status webgpu_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = webgpu_result(device, "running");
    if (status != VJP_OK || groups <= 0) return status;
    if (state->mode == GPU_GATHER) return gpu_gather_launch(device, &state->merger, l, groups);
    webgpu_view view;
    status = gpu_launch_counts(device, l, groups);
    if (status == VJP_OK) status = check_iterations(device, l);
    if (status == VJP_OK) status = webgpu_find_windows(device, l, &view);
    if (status != VJP_OK || state->mode == GPU_CHECK) return status;
    gpu_row row = {.launch = l, .groups = (uint32_t)groups};
    memcpy(row.base, view.base, sizeof row.base);
    return webgpu_encode(device, &view, &row, 1, (uint32_t)groups);
}

vjp_status gpu_enqueue(const gpu_launch *l, int64_t groups) {
    return webgpu_enqueue(l->work->device, l, groups);
}

int gpu_threads(const vjp_device *device) {
    (void)device;
    return GPU_THREADS;
}

/* Matrices of subgroups are no part of WebGPU's standard. */
bool gpu_has_matrices(const vjp_device *device) {
    (void)device;
    return false;
}

bool gpu_merges(const vjp_device *device) {
    (void)device;
    return true;
}

void webgpu_end_pass(webgpu_state *state) {
    if (!state->pass) return;
    state->api.ComputePassEncoderEnd(state->pass);
    state->api.ComputePassEncoderRelease(state->pass);
    state->pass = NULL;
}

/*
 * wgpu-native aborts the process when a submission is refused, so nothing is submitted that could be: an encoder that
 * had an error, or one of a lost device, is released instead.
 */
vjp_status webgpu_submit(vjp_device *device) {
    webgpu_state *state = webgpu_of(device);
    const webgpu_api *api = &state->api;
    if (!state->encoder) return webgpu_result(device, "running");
    WGPUCommandEncoder encoder = state->encoder;
    int launches = state->launches;
    webgpu_end_pass(state);
    state->encoder = NULL;
    state->launches = 0;
    if (!state->lost) api->InstanceProcessEvents(state->instance); /* a loss arrives as an event */
    if (launches && !state->lost)
        api->QueueWriteBuffer(state->queue, state->params, 0, state->param_bytes, (size_t)launches * WEBGPU_PARAMS);
    WGPUCommandBuffer commands = state->lost ? NULL : api->CommandEncoderFinish(encoder, NULL);
    vjp_status status = webgpu_result(device, "submitting");
    if (status == VJP_OK && commands) {
        state->counts.submissions++;
        if (api->QueueSubmitForIndex)
            state->submission = api->QueueSubmitForIndex(state->queue, 1, &commands);
        else
            api->QueueSubmit(state->queue, 1, &commands);
    }
    if (commands) api->CommandBufferRelease(commands);
    api->CommandEncoderRelease(encoder);
    return status == VJP_OK ? webgpu_result(device, "submitting") : status;
}
