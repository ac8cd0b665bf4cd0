/* SPDX-License-Identifier: MIT */
/*
 * From a launch to the queue: its library (compiled once per shader), its pipeline (made once for each choice of
 * dtypes, present operands and constants), its buffers, and its dispatch in the command buffer that is being encoded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/metal/device.h"

enum {
    UINT_TYPE = 33,    /* MTLDataTypeUInt */
    SAFE_MATH = 0,     /* MTLMathModeSafe */
    PRECISE = 1,       /* MTLMathFloatingPointFunctionsPrecise */
    STATUS_FAILED = 5, /* MTLCommandBufferStatusError */
    PAIRED = 8,        /* as in common.metal */
    FOURS = 16
};

/* The message of an NSError on one line; NULL: no reason was given. */
static void message_of(const metal_state *state, objc_id error, char *text, size_t room) {
    const char *said = objc_text(&state->objc, error ? objc_get(&state->objc, error, OBJC_DESCRIPTION) : NULL);
    gpu_one_line(said, strlen(said), text, room);
}

/* ---- Libraries --------------------------------------------------------------------------------------- */

/* Reads a list as common.metal describes it: `word(..., number, name)`, repeated, up to the next #define. */
static int read_list(const char *text, const char *list, const char *word, int max, char name[][METAL_NAME]) {
    const char *at = strstr(text, list), *end = at ? strstr(at + 1, "\nstruct ") : NULL;
    const char *next = at ? strstr(at + 1, "\n#define ") : NULL;
    int count = 0;
    if (next && (!end || next < end)) end = next;
    at = at ? strchr(at, ')') : NULL; /* after the list's own argument */
    for (at = at ? strstr(at, word) : NULL; at && end && at < end && count < max; at = strstr(at + 1, word)) {
        const char *close = strchr(at, ')'), *comma = close;
        if (!close) break;
        while (*comma != ',')
            comma--;
        if (sscanf(comma, ", %31[A-Za-z0-9_]", name[count]) == 1) count++;
    }
    return count;
}

/* Arithmetic as written: divisions and square roots correctly rounded, no sum reordered. */
static objc_id compile_options(const objc *o) {
    objc_id options = objc_new(o, "MTLCompileOptions");
    if (!options) return NULL;
    if (objc_responds(o, options, OBJC_SET_MATH_MODE))
        objc_set_number(o, options, OBJC_SET_MATH_MODE, SAFE_MATH);
    else
        objc_set_flag(o, options, OBJC_SET_FAST_MATH, false);
    if (objc_responds(o, options, OBJC_SET_MATH_FUNCTIONS))
        objc_set_number(o, options, OBJC_SET_MATH_FUNCTIONS, PRECISE);
    return options;
}

static vjp_status find_library(vjp_device *device, const char *shader, metal_library **found) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    metal_library *l = state->library;
    while (l < state->library + METAL_LIBRARIES && l->shader && strcmp(l->shader, shader) != 0)
        l++;
    const char *text = metal_shader(shader);
    if (l == state->library + METAL_LIBRARIES || !text)
        return vjp_fail(device, VJP_UNSUPPORTED, "%s: there is no %s.metal", device->name, shader);
    *found = l;
    if (l->shader) return VJP_OK;
    objc_id error = NULL, options = compile_options(o);
    l->library = objc_make_with(o, state->device, OBJC_NEW_LIBRARY, objc_string(o, text), options, &error);
    objc_release(o, options);
    if (!l->library) {
        char said[400];
        message_of(state, error, said, sizeof said);
        return vjp_fail(device, VJP_DEVICE_FAILED, "%s: %s.metal: %s", device->name, shader, said);
    }
    l->shader = shader;
    l->operands = read_list(text, "#define OPERANDS(", "operand(", METAL_OPERANDS, l->operand);
    l->operands +=
        read_list(text, "#define MORE_OPERANDS(", "operand(", METAL_OPERANDS - l->operands, l->operand + l->operands);
    l->numbers = read_list(text, "#define NUMBERS(", "number(", METAL_NUMBERS, l->number);
    return VJP_OK;
}

void metal_release_libraries(metal_state *state) {
    for (int i = 0; i < METAL_LIBRARIES; i++) {
        objc_release(&state->objc, state->library[i].library);
        state->library[i] = (metal_library){0};
    }
}

/* ---- Function constants ------------------------------------------------------------------------------ */

/* The function constants of a launch, and its operands in the shader's order. */
typedef struct choice {
    uint32_t type[METAL_OPERANDS], number[METAL_NUMBERS], merged;
    const gpu_operand *operand[METAL_OPERANDS]; /* NULL: absent */
} choice;

static uint32_t type_of(const gpu_operand *o) {
    return (uint32_t)o->dtype + 1 + (o->paired ? PAIRED : 0) + (o->fours ? FOURS : 0);
}

static int find_name(const char name[][METAL_NAME], int count, const char *wanted) {
    for (int i = 0; i < count; i++)
        if (strcmp(name[i], wanted) == 0) return i;
    return -1;
}

/* A number that the launch does not give is 1, an operand absent. */
static vjp_status choose(vjp_device *device, const metal_library *library, const gpu_launch *l, choice *c) {
    *c = (choice){0};
    for (int i = 0; i < METAL_NUMBERS; i++)
        c->number[i] = 1;
    for (int i = 0; i < l->constants; i++) {
        int at = find_name(library->number, library->numbers, l->constant[i].name);
        if (at < 0)
            return gpu_refuse(device, l, VJP_UNSUPPORTED, "is not among the numbers of its shader",
                              l->constant[i].name);
        c->number[at] = l->constant[i].value;
    }
    for (int i = 0; i < l->operands; i++) {
        const gpu_operand *o = &l->operand[i];
        if (!o->present && o->form != GPU_BAD_INDEX) continue;
        int at = find_name(library->operand, library->operands, o->name);
        if (at < 0) return gpu_refuse(device, l, VJP_UNSUPPORTED, "is not among the operands of its shader", o->name);
        c->operand[at] = o;
        c->type[at] = type_of(o);
    }
    return VJP_OK;
}

static size_t key_of(const metal_library *library, const gpu_launch *l, const choice *c, char key[METAL_KEY]) {
    size_t at = (size_t)snprintf(key, METAL_KEY / 2, "%s %s %u", l->shader, l->kernel, (unsigned)c->merged) + 1;
    for (int i = 0; i < library->operands; i++)
        key[at++] = (char)c->type[i];
    memcpy(key + at, c->number, (size_t)library->numbers * sizeof c->number[0]);
    return at + (size_t)library->numbers * sizeof c->number[0];
}

/* ---- Pipelines --------------------------------------------------------------------------------------- */

static objc_id make_function(metal_state *state, const metal_library *library, const gpu_launch *l, const choice *c,
                             objc_id *error) {
    const objc *o = &state->objc;
    char name[64];
    objc_id values = objc_new(o, "MTLFunctionConstantValues");
    if (!values) return NULL;
    for (int i = 0; i < library->operands; i++)
        objc_set_bytes(o, values, OBJC_SET_CONSTANT, &c->type[i], UINT_TYPE, (unsigned long)i);
    for (int i = 0; i < library->numbers; i++)
        objc_set_bytes(o, values, OBJC_SET_CONSTANT, &c->number[i], UINT_TYPE, (unsigned long)(METAL_FIRST_NUMBER + i));
    objc_set_bytes(o, values, OBJC_SET_CONSTANT, &c->merged, UINT_TYPE, METAL_MERGED);
    snprintf(name, sizeof name, "run_%s", l->kernel);
    objc_id function = objc_make_with(o, library->library, OBJC_NEW_FUNCTION, objc_string(o, name), values, error);
    objc_release(o, values);
    return function;
}

typedef struct wanted {
    const metal_library *library;
    const gpu_launch *launch;
    const choice *choice;
} wanted;

/* A kernel that does not compile fails with the compiler's message. */
static vjp_status make_pipeline(vjp_device *device, const void *what, gpu_pipeline *made) {
    const wanted *w = what;
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    objc_id error = NULL, function = make_function(state, w->library, w->launch, w->choice, &error);
    if (function) made->pipeline = objc_make(o, state->device, OBJC_NEW_PIPELINE, function, &error);
    objc_release(o, function);
    if (made->pipeline) {
        made->max_threads = objc_number(o, made->pipeline, OBJC_MAX_THREADS);
        return VJP_OK;
    }
    char said[400];
    message_of(state, error, said, sizeof said);
    return vjp_fail(device, VJP_DEVICE_FAILED, "%s: %s.metal, %s(): %s", device->name, w->launch->shader,
                    w->launch->kernel, said);
}

static vjp_status find_pipeline(vjp_device *device, const metal_library *library, const gpu_launch *l, const choice *c,
                                const gpu_pipeline **found) {
    metal_state *state = metal_of(device);
    char key[METAL_KEY];
    size_t bytes = key_of(library, l, c, key);
    /* Command buffers retain the pipelines that they use. */
    if (gpu_pipelines_are_many(&state->pipelines)) metal_release_pipelines(state);
    return gpu_pipelines_find(device, &state->pipelines, key, bytes, make_pipeline, &(wanted){library, l, c}, found);
}

static void release_pipeline(const void *state, const gpu_pipeline *p) {
    objc_release(&((const metal_state *)state)->objc, p->pipeline);
}

void metal_release_pipelines(metal_state *state) {
    gpu_pipelines_forget(&state->pipelines, release_pipeline, state);
}

/* ---- Encoding ---------------------------------------------------------------------------------------- */

/* As common.metal's Uniforms has it. Rows of a merged launch have fewer parameters. */
typedef struct uniforms {
    uint32_t groups, adds, before, calls, base[METAL_BASES], param[GPU_MAX_PARAMS];
} uniforms;

enum { ROW_PARAMS = (METAL_ROW_BYTES - 16 - 4 * METAL_BASES) / 4 };

static uniforms uniforms_of(const metal_library *library, const gpu_launch *l, const choice *c, const gpu_row *row,
                            int rows) {
    uniforms u = {.groups = row->groups, .before = row->first, .calls = (uint32_t)rows};
    for (int i = 0; i < library->operands; i++) {
        if (!c->operand[i]) continue;
        ptrdiff_t own = c->operand[i] - l->operand; /* rows have the same operands in the same order */
        if (row->launch->operand[own].adds) u.adds |= 1u << i;
        if (i < METAL_BASES) u.base[i] = row->base[own];
    }
    memcpy(u.param, row->launch->param, sizeof u.param);
    return u;
}

static vjp_status begin_commands(vjp_device *device) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    if (state->encoder) return VJP_OK;
    objc_id commands = objc_get(o, state->queue, OBJC_COMMANDS);
    objc_id encoder = commands ? objc_get(o, commands, OBJC_ENCODER) : NULL;
    if (!encoder) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: the device gives no command buffer", device->name);
    state->commands = objc_get(o, commands, OBJC_RETAIN);
    state->encoder = objc_get(o, encoder, OBJC_RETAIN);
    return VJP_OK;
}

/* The buffer of an operand and its offset there. An absent one (NULL) is never read; any buffer will do. */
static vjp_status find_buffer(vjp_device *device, const gpu_launch *l, const gpu_operand *operand, objc_id *buffer,
                              uint64_t *offset) {
    metal_state *state = metal_of(device);
    *buffer = state->bad_indices;
    *offset = 0;
    if (!operand) return VJP_OK;
    if (operand->form == GPU_BAD_INDEX) {
        *offset = (uint64_t)gpu_bad_index_record(l) * sizeof(gpu_bad_index);
        return VJP_OK;
    }
    const gpu_buffer *found = gpu_buffers_hold(&state->buffers, operand->address, operand->bytes, offset);
    if (!found) return gpu_refuse_memory(device, l, operand);
    *buffer = found->handle;
    return VJP_OK;
}

/* Sets the parameters: of one launch all, of several a table. */
static void set_parameters(const metal_state *state, const metal_library *library, const gpu_launch *l, const choice *c,
                           const gpu_row *row, int rows) {
    unsigned char table[METAL_ROWS][METAL_ROW_BYTES];
    uniforms u = uniforms_of(library, l, c, row, rows);
    if (rows == 1) {
        objc_set_bytes(&state->objc, state->encoder, OBJC_SET_BYTES, &u, sizeof u, METAL_UNIFORMS);
        return;
    }
    for (int i = 0; i < rows; i++) {
        u = uniforms_of(library, l, c, &row[i], rows);
        memcpy(table[i], &u, METAL_ROW_BYTES);
    }
    objc_set_bytes(&state->objc, state->encoder, OBJC_SET_BYTES, table, (size_t)rows * METAL_ROW_BYTES, METAL_UNIFORMS);
}

static vjp_status encode(vjp_device *device, const metal_library *library, const gpu_launch *l, const choice *c,
                         const gpu_pipeline *pipeline, const gpu_row *row, int count, uint32_t groups) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    vjp_status status = begin_commands(device);
    for (int i = 0; i < library->operands && status == VJP_OK; i++) {
        objc_id buffer;
        uint64_t offset;
        status = find_buffer(device, l, c->operand[i], &buffer, &offset);
        if (status == VJP_OK) objc_set_buffer(o, state->encoder, buffer, offset, (unsigned long)i);
    }
    if (status != VJP_OK) return status;
    gpu_bad_index_remember(&state->bad_index_context, l);
    if (gpu_bad_index_record(l) >= 0) state->may_have_bad_index = true;
    objc_set_object(o, state->encoder, OBJC_SET_PIPELINE, pipeline->pipeline);
    set_parameters(state, library, l, c, row, count);
    unsigned long rows = (groups + METAL_GRID_WIDTH - 1) / METAL_GRID_WIDTH, columns = (groups + rows - 1) / rows;
    objc_dispatch(o, state->encoder, (objc_size){columns, rows, 1}, (objc_size){(unsigned long)l->threads, 1, 1});
    state->launches++;
    state->counts.dispatches++;
    return VJP_OK;
}

/* Whether the launch can be encoded, as far as that is known without its pipeline. */
static vjp_status check(vjp_device *device, const gpu_launch *l, int64_t groups) {
    vjp_status status = gpu_launch_counts(device, l, groups);
    for (int i = 0; i < l->operands && status == VJP_OK; i++) {
        objc_id buffer;
        uint64_t offset;
        if (l->operand[i].present) status = find_buffer(device, l, &l->operand[i], &buffer, &offset);
    }
    return status;
}

/* A launch, or with several rows a merged one, of `groups` groups in all. */
static vjp_status enqueue(vjp_device *device, const gpu_launch *l, const gpu_row *row, int rows, uint32_t groups) {
    metal_library *library;
    const gpu_pipeline *pipeline;
    choice c;
    vjp_status status = find_library(device, l->shader, &library);
    if (status == VJP_OK) status = choose(device, library, l, &c);
    if (rows > 1) c.merged = (uint32_t)l->merge;
    if (status == VJP_OK) status = find_pipeline(device, library, l, &c, &pipeline);
    if (status != VJP_OK) return status;
    if (pipeline->max_threads < (unsigned long)l->threads)
        return gpu_refuse(device, l, VJP_UNSUPPORTED, "needs more threads than this device gives it", l->kernel);
    if (metal_of(device)->mode == GPU_WARM) return VJP_OK;
    status = encode(device, library, l, &c, pipeline, row, rows, groups);
    return status == VJP_OK && metal_of(device)->launches == METAL_LAUNCHES ? metal_commit(device) : status;
}

vjp_status metal_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups) {
    metal_state *state = metal_of(device);
    if (groups <= 0) return VJP_OK;
    if (state->mode == GPU_GATHER) return gpu_gather_launch(device, &state->merger, l, groups);
    vjp_status status = check(device, l, groups);
    if (status != VJP_OK || state->mode == GPU_CHECK) return status;
    void *pool = metal_begin(state);
    status = enqueue(device, l, &(gpu_row){.launch = l, .groups = (uint32_t)groups}, 1, (uint32_t)groups);
    metal_end(state, pool);
    return status;
}

/* Bases count halves of a word from where the operand of all rows begins. */
bool metal_together(vjp_device *device, const gpu_launch *all, gpu_row *row, int rows, uint32_t groups,
                    vjp_status *status) {
    metal_state *state = metal_of(device);
    if (rows > METAL_ROWS || all->params > ROW_PARAMS) return false;
    for (int i = 0; i < all->operands; i++) {
        const gpu_operand *o = &all->operand[i];
        uint64_t offset;
        if (!o->present) continue;
        if (o->bytes / 2 > UINT32_MAX || !gpu_buffers_hold(&state->buffers, o->address, o->bytes, &offset))
            return false;
        for (int k = 0; k < rows; k++)
            row[k].base[i] = (uint32_t)((uint64_t)(row[k].launch->operand[i].address - o->address) / 2);
    }
    void *pool = metal_begin(state);
    *status = enqueue(device, all, row, rows, groups);
    metal_end(state, pool);
    return true;
}

vjp_status gpu_enqueue(const gpu_launch *l, int64_t groups) {
    return metal_enqueue(l->work->device, l, groups);
}

int gpu_threads(const vjp_device *device) {
    return metal_of(device)->threads;
}

bool gpu_has_matrices(const vjp_device *device) {
    return metal_of(device)->matrices;
}

bool gpu_merges(const vjp_device *device) {
    (void)device;
    return true;
}

vjp_status metal_probe(vjp_device *device, unsigned long *threads, unsigned long *width) {
    gpu_launch l = {.shader = "tools", .kernel = "words"};
    metal_library *library;
    const gpu_pipeline *pipeline;
    choice c;
    vjp_status status = find_library(device, l.shader, &library);
    if (status == VJP_OK) status = choose(device, library, &l, &c);
    if (status == VJP_OK) status = find_pipeline(device, library, &l, &c, &pipeline);
    if (status != VJP_OK) return status;
    *threads = pipeline->max_threads;
    *width = objc_number(&metal_of(device)->objc, pipeline->pipeline, OBJC_WIDTH);
    return VJP_OK;
}

/* ---- Committing and waiting -------------------------------------------------------------------------- */

/* Waits for the oldest command buffer; its failure is a status. */
static vjp_status finish_oldest(vjp_device *device) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    objc_id commands = state->committed[0];
    vjp_status status = VJP_OK;
    objc_do(o, commands, OBJC_WAIT);
    if (objc_number(o, commands, OBJC_STATUS) == STATUS_FAILED) {
        char said[400];
        message_of(state, objc_get(o, commands, OBJC_ERROR), said, sizeof said);
        status = vjp_fail(device, VJP_DEVICE_FAILED, "%s: running: %s", device->name, said);
    }
    objc_release(o, commands);
    memmove(state->committed, state->committed + 1, (size_t)--state->committed_count * sizeof state->committed[0]);
    state->finished++;
    return status;
}

static vjp_status commit(vjp_device *device) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    vjp_status status = VJP_OK;
    if (!state->encoder) return VJP_OK;
    if (state->committed_count == METAL_COMMITTED) status = finish_oldest(device);
    objc_do(o, state->encoder, OBJC_END);
    objc_do(o, state->commands, OBJC_COMMIT);
    state->counts.submissions++;
    objc_release(o, state->encoder);
    state->committed[state->committed_count++] = state->commands;
    state->encoder = state->commands = NULL;
    state->launches = 0;
    return status;
}

vjp_status metal_commit(vjp_device *device) {
    metal_state *state = metal_of(device);
    void *pool = metal_begin(state);
    vjp_status status = commit(device);
    metal_end(state, pool);
    return status;
}

uint64_t metal_committed(const vjp_device *device) {
    const metal_state *state = metal_of(device);
    return state->finished + (uint64_t)state->committed_count;
}

vjp_status metal_wait_for(vjp_device *device, uint64_t committed) {
    metal_state *state = metal_of(device);
    void *pool = metal_begin(state);
    vjp_status status = VJP_OK;
    state->counts.waits += state->committed_count && state->finished < committed;
    while (state->committed_count && state->finished < committed) {
        vjp_status next = finish_oldest(device);
        if (status == VJP_OK) status = next;
    }
    metal_end(state, pool);
    return status;
}

vjp_status metal_wait(vjp_device *device) {
    vjp_status status = metal_commit(device), others = metal_wait_for(device, UINT64_MAX);
    return status == VJP_OK ? others : status;
}
