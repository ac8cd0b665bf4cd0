/* SPDX-License-Identifier: MIT */
/*
 * The WGSL of a launch. A shader names its operands; here each gets the functions that read and write it, for its dtype
 * and for the window of memory that it lies in. So one .wgsl serves every dtype, and tensors may share a buffer in any
 * way: a buffer is bound once, or in ranges that do not overlap, and never for reading and for writing at once.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/device.h"

/* ---- Text that grows --------------------------------------------------------------------------------- */

typedef struct text {
    char *data;
    size_t length, room;
    bool failed;
} text;

static void put_bytes(text *t, const char *bytes, size_t length) {
    if (t->length + length + 1 > t->room) {
        size_t room = (t->length + length + 1) * 2;
        char *data = t->failed ? NULL : realloc(t->data, room);
        t->failed = !data;
        if (!data) return;
        t->data = data;
        t->room = room;
    }
    memcpy(t->data + t->length, bytes, length);
    t->length += length;
    t->data[t->length] = 0;
}

/*
 * Appends `pattern` with every $ replaced by the operand's name, @ by its window, # by its base, ^ by whether stores
 * add to it, % by `extra`.
 */
static void put(text *t, const char *pattern, const char *name, int window, int index, const char *extra) {
    char number[48];
    for (const char *p = pattern; *p; p++) {
        switch (*p) {
        case '$': put_bytes(t, name, strlen(name)); break;
        case '%': put_bytes(t, extra, strlen(extra)); break;
        case '@': put_bytes(t, number, (size_t)snprintf(number, sizeof number, "%d", window)); break;
        case '^':
            put_bytes(t, number, (size_t)snprintf(number, sizeof number, "(u.adds & %uu) != 0u", 1u << index));
            break;
        case '#':
            put_bytes(t, number, (size_t)snprintf(number, sizeof number, "u.base[%d][%d]", index / 4, index % 4));
            break;
        default: put_bytes(t, p, 1);
        }
    }
}

static void put_plain(text *t, const char *words) {
    put_bytes(t, words, strlen(words));
}

__attribute__((format(printf, 2, 3))) static void put_format(text *t, const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    put_plain(t, line);
}

/* ---- Windows: get(word) and put(word, bits) ---------------------------------------------------------- */

/* Memory that is only read is an array of fours, which loads of 16 bytes need. */
static void put_window(text *t, const webgpu_window *w, int i) {
    const char *type = w->atomic ? "atomic<u32>" : w->written ? "u32" : "vec4<u32>";
    put_format(t, "@group(0) @binding(%d) var<storage, %s> m%d: array<%s>;\n", i + 1,
               w->written ? "read_write" : "read", i, type);
    if (w->atomic)
        put(t,
            "fn m@_get(i: u32) -> u32 { return atomicLoad(&m@[i]); }\n"
            "fn m@_put(i: u32, v: u32) { atomicStore(&m@[i], v); }\n"
            "fn m@_half(e: u32, v: u32) {\n"
            "    let shift = (e & 1u) * 16u;\n"
            "    atomicAnd(&m@[e >> 1u], ~(0xffffu << shift));\n"
            "    atomicOr(&m@[e >> 1u], (v & 0xffffu) << shift);\n"
            "}\n",
            "", i, 0, "");
    else if (w->written)
        put(t,
            "fn m@_get(i: u32) -> u32 { return m@[i]; }\n"
            "fn m@_put(i: u32, v: u32) { m@[i] = v; }\n"
            "fn m@_half(e: u32, v: u32) {\n"
            "    let shift = (e & 1u) * 16u;\n"
            "    m@[e >> 1u] = (m@[e >> 1u] & ~(0xffffu << shift)) | ((v & 0xffffu) << shift);\n"
            "}\n",
            "", i, 0, "");
    else
        put(t, "fn m@_get(i: u32) -> u32 { return m@[i >> 2u][i & 3u]; }\n", "", i, 0, "");
}

/* ---- Operands ---------------------------------------------------------------------------------------- */

/* A shader is compiled with all its kernels, and in another of them this operand may be an output. */
static const char no_stores[] = "fn $_set(i: u32, v: f32) {}\nfn $_set_two(i: u32, v: vec2<f32>) {}\n";
static const char no_put[] = "fn $_put(i: u32, v: u32) {}\n";

static void put_f32(text *t, const gpu_operand *o, const webgpu_window *w, int window, int index) {
    put(t,
        "fn $_at(i: u32) -> f32 { return bitcast<f32>(m@_get(# + i)); }\n"
        "fn $_two(i: u32) -> vec2<f32> { return vec2<f32>($_at(i), $_at(i + 1u)); }\n",
        o->name, window, index, "");
    put(t, "fn $_rounded(v: vec4<f32>) -> vec4<f32> { return v; }\n", o->name, 0, 0, "");
    put(t,
        o->fours && !w->written ? "fn $_four(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(m@[(# + i) >> 2u]); }\n"
                                : "fn $_four(i: u32) -> vec4<f32> { return vec4<f32>($_two(i), $_two(i + 2u)); }\n",
        o->name, window, index, "");
    if (!o->output) {
        put(t, no_stores, o->name, 0, 0, "");
        return;
    }
    put(t,
        "fn $_set(i: u32, v: f32) {\n"
        "    var s = v;\n"
        "    if (^) { s += $_at(i); }\n"
        "    m@_put(# + i, bitcast<u32>(s));\n"
        "}\n",
        o->name, window, index, "");
    put(t, "fn $_set_two(i: u32, v: vec2<f32>) { $_set(i, v.x); $_set(i + 1u, v.y); }\n", o->name, window, index, "");
}

static void put_16(text *t, const gpu_operand *o, int window, int index) {
    const char *type = vjp_dtype_name(o->dtype);
    put(t,
        "fn $_at(i: u32) -> f32 {\n"
        "    let e = # + i;\n"
        "    return %_value((m@_get(e >> 1u) >> ((e & 1u) * 16u)) & 0xffffu);\n"
        "}\n",
        o->name, window, index, type);
    put(t,
        o->paired ? "fn $_two(i: u32) -> vec2<f32> {\n"
                    "    let w = m@_get((# + i) >> 1u);\n"
                    "    return vec2<f32>(%_value(w & 0xffffu), %_value(w >> 16u));\n"
                    "}\n"
                  : "fn $_two(i: u32) -> vec2<f32> { return vec2<f32>($_at(i), $_at(i + 1u)); }\n",
        o->name, window, index, type);
    put(t, "fn $_four(i: u32) -> vec4<f32> { return vec4<f32>($_two(i), $_two(i + 2u)); }\n", o->name, window, index,
        type);
    put(t,
        "fn $_rounded(v: vec4<f32>) -> vec4<f32> {\n"
        "    return vec4<f32>(%_value(%_bits(v.x)), %_value(%_bits(v.y)), %_value(%_bits(v.z)), "
        "%_value(%_bits(v.w)));\n"
        "}\n",
        o->name, 0, 0, type);
    if (!o->output) {
        put(t, no_stores, o->name, 0, 0, "");
        return;
    }
    put(t,
        "fn $_set(i: u32, v: f32) {\n"
        "    var s = v;\n"
        "    if (^) { s += $_at(i); }\n"
        "    m@_half(# + i, %_bits(s));\n"
        "}\n",
        o->name, window, index, type);
    put(t,
        o->paired ? "fn $_set_two(i: u32, v: vec2<f32>) {\n"
                    "    var s = v;\n"
                    "    if (^) { s += $_two(i); }\n"
                    "    m@_put((# + i) >> 1u, %_bits(s.x) | (%_bits(s.y) << 16u));\n"
                    "}\n"
                  : "fn $_set_two(i: u32, v: vec2<f32>) { $_set(i, v.x); $_set(i + 1u, v.y); }\n",
        o->name, window, index, type);
}

static void put_index(text *t, const gpu_operand *o, int window, int index) {
    bool wide = o->dtype == VJP_I64;
    put(t,
        wide ? "fn $_raw(i: u32) -> vec2<u32> { return vec2<u32>(m@_get(2u * (# + i)), m@_get(2u * (# + i) + 1u)); }\n"
             : "fn $_raw(i: u32) -> vec2<u32> { return vec2<u32>(m@_get(# + i), 0u); }\n",
        o->name, window, index, "");
    put(t,
        wide ? "fn $_in(i: u32, limit: u32) -> u32 { let r = $_raw(i); return index_i64(r.x, r.y, limit); }\n"
             : "fn $_in(i: u32, limit: u32) -> u32 { return index_%(m@_get(# + i), limit); }\n",
        o->name, window, index, vjp_dtype_name(o->dtype));
    put(t, "fn $_integer(i: u32) -> vec3<u32> { return integer_%($_raw(i)); }\n", o->name, 0, 0,
        vjp_dtype_name(o->dtype));
    if (!o->output) {
        put(t, no_put, o->name, 0, 0, "");
        return;
    }
    put(t,
        wide ? "fn $_put(i: u32, v: u32) { m@_put(2u * (# + i), v); m@_put(2u * (# + i) + 1u, 0u); }\n"
             : "fn $_put(i: u32, v: u32) { m@_put(# + i, v); }\n",
        o->name, window, index, "");
}

static void put_word(text *t, const gpu_operand *o, int window, int index) {
    put(t, "fn $_word(i: u32) -> u32 { return m@_get(# + i); }\n", o->name, window, index, "");
    put(t, o->output ? "fn $_put(i: u32, v: u32) { m@_put(# + i, v); }\n" : no_put, o->name, window, index, "");
}

static void put_bad_index(text *t, const gpu_operand *o, int window, int index) {
    put(t,
        "fn $_report(position: u32) { atomicMin(&m@[#], position); }\n"
        "fn $_first() -> u32 { return atomicLoad(&m@[#]); }\n"
        "fn $_explained() -> u32 { return atomicLoad(&m@[# + 1u]); }\n"
        "fn $_note(position: u32, low: u32, high: u32) {\n"
        "    atomicStore(&m@[# + 1u], position);\n"
        "    atomicStore(&m@[# + 2u], low);\n"
        "    atomicStore(&m@[# + 3u], high);\n"
        "}\n"
        "fn $_explain(position: u32, raw: vec2<u32>) {\n"
        "    $_report(position);\n"
        "    if ($_first() == position && $_explained() != position) { $_note(position, raw.x, raw.y); }\n"
        "}\n",
        o->name, window, index, "");
}

static void put_operand(text *t, const webgpu_view *view, int i) {
    const gpu_operand *o = &view->launch->operand[i];
    int window = view->window_of[i];
    put(t, "const $_is = true;\n", o->name, 0, 0, "");
    switch (o->form) {
    case GPU_FLOAT:
        if (o->dtype == VJP_F32)
            put_f32(t, o, &view->window[window], window, i);
        else
            put_16(t, o, window, i);
        break;
    case GPU_INDEX: put_index(t, o, window, i); break;
    case GPU_WORD: put_word(t, o, window, i); break;
    case GPU_BAD_INDEX: put_bad_index(t, o, window, i); break;
    }
}

/* An operand or constant that the shader names and the launch does not have. */
static void put_absent(text *t, const char *kind, const char *name) {
    if (strcmp(kind, "const") == 0) {
        put(t, "const $ = 1u;\n", name, 0, 0, "");
        return;
    }
    put(t, "const $_is = false;\n", name, 0, 0, "");
    if (strcmp(kind, "float") == 0)
        put(t,
            "fn $_at(i: u32) -> f32 { return 0.0; }\n"
            "fn $_two(i: u32) -> vec2<f32> { return vec2<f32>(); }\n"
            "fn $_four(i: u32) -> vec4<f32> { return vec4<f32>(); }\n"
            "fn $_rounded(v: vec4<f32>) -> vec4<f32> { return v; }\n"
            "fn $_set(i: u32, v: f32) {}\n"
            "fn $_set_two(i: u32, v: vec2<f32>) {}\n",
            name, 0, 0, "");
    else if (strcmp(kind, "index") == 0)
        put(t,
            "fn $_raw(i: u32) -> vec2<u32> { return vec2<u32>(); }\n"
            "fn $_in(i: u32, limit: u32) -> u32 { return NO_INDEX; }\n"
            "fn $_integer(i: u32) -> vec3<u32> { return vec3<u32>(); }\n"
            "fn $_put(i: u32, v: u32) {}\n",
            name, 0, 0, "");
    else if (strcmp(kind, "word") == 0)
        put(t, "fn $_word(i: u32) -> u32 { return 0u; }\nfn $_put(i: u32, v: u32) {}\n", name, 0, 0, "");
    else
        put(t,
            "fn $_report(position: u32) {}\n"
            "fn $_first() -> u32 { return NO_INDEX; }\n"
            "fn $_explained() -> u32 { return NO_INDEX; }\n"
            "fn $_note(position: u32, low: u32, high: u32) {}\n"
            "fn $_explain(position: u32, raw: vec2<u32>) {}\n",
            name, 0, 0, "");
}

static bool is_given(const webgpu_view *view, const char *name) {
    for (int i = 0; i < view->launch->constants; i++)
        if (strcmp(view->launch->constant[i].name, name) == 0) return true;
    for (int i = 0; i < view->launch->operands; i++)
        if (strcmp(view->launch->operand[i].name, name) == 0) return view->window_of[i] >= 0;
    return false;
}

/* A shader lists its operands by kind, and its constants, in lines "//# kind name name ...". */
static void put_absents(text *t, const webgpu_view *view, const char *shader) {
    for (const char *line = strstr(shader, "//# "); line; line = strstr(line, "//# ")) {
        char kind[16], name[32];
        int taken = 0;
        if (sscanf(line += 4, "%15s%n", kind, &taken) != 1) return;
        if (strcmp(kind, "bad_index") == 0 && !is_given(view, kind)) put_absent(t, kind, kind);
        for (line += taken; *line == ' '; line += taken) {
            if (sscanf(line, " %31[A-Za-z0-9_]%n", name, &taken) != 1) break;
            if (!is_given(view, name)) put_absent(t, kind, name);
        }
    }
}

static void put_constants(text *t, const gpu_launch *l) {
    bool lanes = false;
    for (int i = 0; i < l->constants; i++) {
        put_format(t, "const %s = %uu;\n", l->constant[i].name, (unsigned)l->constant[i].value);
        lanes = lanes || strcmp(l->constant[i].name, "LANES") == 0;
    }
    if (!lanes) put_format(t, "const LANES = %du;\n", GPU_THREADS);
}

/*
 * A launch of more groups than a grid dimension holds has a second one, whose last row may have groups too many. Of a
 * merged launch a workgroup finds its call by the number of groups before it, or has all calls one after another.
 */
static void put_entry(text *t, const webgpu_view *view) {
    put_format(t,
               "@compute @workgroup_size(%d)\n"
               "fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(num_workgroups) size: vec3<u32>,\n"
               "        @builtin(local_invocation_index) lane: u32) {\n",
               GPU_THREADS);
    const char *alone = "    let group = at.y * size.x + at.x;\n"
                        "    if (group < u.groups) {\n"
                        "        $(group, lane);\n"
                        "    }\n"
                        "}\n";
    const char *beside = "    let place = at.y * size.x + at.x;\n"
                         "    var row = 0u;\n"
                         "    for (var end = merged[0].u.calls; end - row > 1u;) {\n"
                         "        let middle = (row + end) / 2u;\n"
                         "        if (merged[middle].u.before <= place) {\n"
                         "            row = middle;\n"
                         "        } else {\n"
                         "            end = middle;\n"
                         "        }\n"
                         "    }\n"
                         "    let group = place - merged[row].u.before;\n"
                         "    u = merged[row].u;\n"
                         "    if (group < merged[row].u.groups) {\n"
                         "        $(group, lane);\n"
                         "    }\n"
                         "}\n";
    const char *in_order = "    for (var row = 0u; row < merged[0].u.calls; row++) {\n"
                           "        u = merged[row].u;\n"
                           "        $(0u, lane);\n"
                           "        storageBarrier();\n"
                           "    }\n"
                           "}\n";
    put(t,
        !view->merged                       ? alone
        : view->launch->merge == GPU_BESIDE ? beside
                                            : in_order,
        view->launch->kernel, 0, 0, "");
}

/* Where a launch's parameters are: for a merged one in a table, with those of the call at hand in a variable. */
static void put_parameters(text *t, bool merged) {
    put_format(t,
               "struct Uniforms { base: array<vec4<u32>, %d>, groups: u32, adds: u32, before: u32, calls: u32, "
               "p: Params }\n",
               GPU_MAX_OPERANDS / 4);
    if (merged)
        put_format(t,
                   "struct Row { @size(%d) u: Uniforms }\n"
                   "@group(0) @binding(0) var<storage, read> merged: array<Row>;\n"
                   "var<private> u: Uniforms;\n"
                   "fn first_half(lanes: u32) -> u32 { return %du; }\n",
                   WEBGPU_PARAMS, GPU_THREADS / 2);
    else
        put_plain(t, "@group(0) @binding(0) var<uniform> u: Uniforms;\n"
                     "fn first_half(lanes: u32) -> u32 { return lanes / 2u; }\n");
}

char *webgpu_source(const webgpu_view *view) {
    text t = {0};
    const char *common = webgpu_shader("common"), *shader = webgpu_shader(view->launch->shader);
    put_parameters(&t, view->merged);
    put_constants(&t, view->launch);
    for (int i = 0; i < view->windows; i++)
        put_window(&t, &view->window[i], i);
    for (int i = 0; i < view->launch->operands; i++)
        if (view->window_of[i] >= 0) put_operand(&t, view, i);
    put_absents(&t, view, shader);
    put_plain(&t, common);
    put_plain(&t, shader);
    put_entry(&t, view);
    if (!t.failed) return t.data;
    free(t.data);
    return NULL;
}

size_t webgpu_key(const webgpu_view *view, char key[WEBGPU_KEY]) {
    const gpu_launch *l = view->launch;
    size_t at = (size_t)snprintf(key, WEBGPU_KEY, "%s %s %d", l->shader, l->kernel, view->merged) + 1;
    for (int i = 0; i < l->constants; i++) { /* a kernel's constants are always the same ones, in the same order */
        memcpy(key + at, &l->constant[i].value, sizeof(uint32_t));
        at += sizeof(uint32_t);
    }
    for (int i = 0; i < l->operands; i++) {
        const gpu_operand *o = &l->operand[i];
        size_t name = strlen(o->name) + 1;
        if (at + name + 32 > WEBGPU_KEY) return 0;
        memcpy(key + at, o->name, name);
        at += name;
        key[at++] = (char)(view->window_of[i] + 1);
        key[at++] = (char)((int)o->dtype | (o->output ? 16 : 0) | (o->paired ? 64 : 0));
        key[at++] = (char)((o->fours ? 1 : 0) | (int)o->form << 1);
    }
    for (int i = 0; i < view->windows; i++)
        key[at++] = (char)((view->window[i].written ? 1 : 0) | (view->window[i].atomic ? 2 : 0));
    return at;
}
