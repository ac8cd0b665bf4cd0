/* SPDX-License-Identifier: MIT */
/* See objc.h. */
#include "gpu/metal/objc.h"

#include <dlfcn.h>
#include <stdio.h>

const char *const objc_selectors[OBJC_MESSAGES] = {
    [OBJC_NEW] = "new",
    [OBJC_RETAIN] = "retain",
    [OBJC_RELEASE] = "release",
    [OBJC_RESPONDS] = "respondsToSelector:",
    [OBJC_STRING] = "stringWithUTF8String:",
    [OBJC_TEXT] = "UTF8String",
    [OBJC_DESCRIPTION] = "localizedDescription",
    [OBJC_NAME] = "name",
    [OBJC_MAX_BYTES] = "maxBufferLength",
    [OBJC_SUPPORTS] = "supportsFamily:",
    [OBJC_NEW_QUEUE] = "newCommandQueue",
    [OBJC_NEW_BUFFER] = "newBufferWithLength:options:",
    [OBJC_NEW_LIBRARY] = "newLibraryWithSource:options:error:",
    [OBJC_NEW_PIPELINE] = "newComputePipelineStateWithFunction:error:",
    [OBJC_SET_FAST_MATH] = "setFastMathEnabled:",
    [OBJC_SET_MATH_MODE] = "setMathMode:",
    [OBJC_SET_MATH_FUNCTIONS] = "setMathFloatingPointFunctions:",
    [OBJC_SET_CONSTANT] = "setConstantValue:type:atIndex:",
    [OBJC_NEW_FUNCTION] = "newFunctionWithName:constantValues:error:",
    [OBJC_MAX_THREADS] = "maxTotalThreadsPerThreadgroup",
    [OBJC_WIDTH] = "threadExecutionWidth",
    [OBJC_CONTENTS] = "contents",
    [OBJC_COMMANDS] = "commandBuffer",
    [OBJC_ENCODER] = "computeCommandEncoder",
    [OBJC_SET_PIPELINE] = "setComputePipelineState:",
    [OBJC_SET_BUFFER] = "setBuffer:offset:atIndex:",
    [OBJC_SET_BYTES] = "setBytes:length:atIndex:",
    [OBJC_DISPATCH] = "dispatchThreadgroups:threadsPerThreadgroup:",
    [OBJC_END] = "endEncoding",
    [OBJC_COMMIT] = "commit",
    [OBJC_WAIT] = "waitUntilCompleted",
    [OBJC_STATUS] = "status",
    [OBJC_ERROR] = "error",
};

/* ---- Opening ----------------------------------------------------------------------------------------- */

static const objc_system *instead;

void objc_use(const objc_system *system) {
    instead = system;
}

/* A program without windows gets a default device only where CoreGraphics is loaded too. */
static const char *const libraries[4] = {
    "/usr/lib/libobjc.A.dylib",
    "/System/Library/Frameworks/Foundation.framework/Foundation",
    "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics",
    "/System/Library/Frameworks/Metal.framework/Metal",
};

static bool load(objc *o, char *why, size_t room) {
    for (int i = 0; i < 4; i++) {
        o->library[i] = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
        if (o->library[i]) continue;
        snprintf(why, room, "Metal needs macOS: %s", dlerror());
        return false;
    }
    const struct {
        void **to;
        int library;
        const char *name;
    } functions[] = {
        {(void **)&o->system.class_named, 0, "objc_getClass"},
        {(void **)&o->system.selector, 0, "sel_registerName"},
        {(void **)&o->send, 0, "objc_msgSend"},
        {(void **)&o->system.push_pool, 0, "objc_autoreleasePoolPush"},
        {(void **)&o->system.pop_pool, 0, "objc_autoreleasePoolPop"},
        {(void **)&o->system.create_device, 3, "MTLCreateSystemDefaultDevice"},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        *functions[i].to = dlsym(o->library[functions[i].library], functions[i].name);
        if (*functions[i].to) continue;
        snprintf(why, room, "%s has no %s()", libraries[functions[i].library], functions[i].name);
        return false;
    }
    return true;
}

bool objc_open(objc *o, char *why, size_t room) {
    *o = (objc){0};
    if (instead)
        o->system = *instead;
    else if (!load(o, why, room)) {
        objc_close(o);
        return false;
    }
    for (int i = 0; i < OBJC_MESSAGES; i++)
        o->selector[i] = o->system.selector(objc_selectors[i]);
    return true;
}

void objc_close(objc *o) {
    for (int i = 3; i >= 0; i--)
        if (o->library[i]) dlclose(o->library[i]);
    *o = (objc){0};
}

/* ---- Sending ----------------------------------------------------------------------------------------- */

static objc_method method(const objc *o, objc_id object, objc_message m) {
    return o->system.method ? o->system.method(object, o->selector[m]) : o->send;
}

/* Sends message m to `object`: (type of the function)(arguments after object and selector). */
#define SEND(type, ...)  ((type)method(o, object, m))(object, o->selector[m], __VA_ARGS__)
#define SEND_ALONE(type) ((type)method(o, object, m))(object, o->selector[m])

objc_id objc_get(const objc *o, objc_id object, objc_message m) {
    typedef objc_id (*function)(objc_id, void *);
    return SEND_ALONE(function);
}

unsigned long objc_number(const objc *o, objc_id object, objc_message m) {
    typedef unsigned long (*function)(objc_id, void *);
    return SEND_ALONE(function);
}

void objc_do(const objc *o, objc_id object, objc_message m) {
    typedef void (*function)(objc_id, void *);
    SEND_ALONE(function);
}

void objc_set_object(const objc *o, objc_id object, objc_message m, objc_id value) {
    typedef void (*function)(objc_id, void *, objc_id);
    SEND(function, value);
}

void objc_set_number(const objc *o, objc_id object, objc_message m, long value) {
    typedef void (*function)(objc_id, void *, long);
    SEND(function, value);
}

/* BOOL is one byte, signed on one processor and not on the other. */
void objc_set_flag(const objc *o, objc_id object, objc_message m, bool value) {
    typedef void (*function)(objc_id, void *, signed char);
    SEND(function, (signed char)value);
}

bool objc_supports(const objc *o, objc_id object, long family) {
    typedef signed char (*function)(objc_id, void *, long);
    objc_message m = OBJC_SUPPORTS;
    return objc_responds(o, object, m) && SEND(function, family) != 0;
}

bool objc_responds(const objc *o, objc_id object, objc_message to) {
    typedef signed char (*function)(objc_id, void *, void *);
    objc_message m = OBJC_RESPONDS;
    return SEND(function, o->selector[to]) != 0;
}

objc_id objc_string(const objc *o, const char *text) {
    typedef objc_id (*function)(objc_id, void *, const char *);
    objc_message m = OBJC_STRING;
    objc_id object = o->system.class_named("NSString");
    return SEND(function, text);
}

const char *objc_text(const objc *o, objc_id object) {
    typedef const char *(*function)(objc_id, void *);
    objc_message m = OBJC_TEXT;
    const char *text = object ? SEND_ALONE(function) : NULL;
    return text ? text : "no reason was given";
}

objc_id objc_new(const objc *o, const char *class_name) {
    objc_id object = o->system.class_named(class_name);
    return object ? objc_get(o, object, OBJC_NEW) : NULL;
}

objc_id objc_new_buffer(const objc *o, objc_id object, unsigned long bytes, unsigned long options) {
    typedef objc_id (*function)(objc_id, void *, unsigned long, unsigned long);
    objc_message m = OBJC_NEW_BUFFER;
    return SEND(function, bytes, options);
}

objc_id objc_make(const objc *o, objc_id object, objc_message m, objc_id from, objc_id *error) {
    typedef objc_id (*function)(objc_id, void *, objc_id, objc_id *);
    return SEND(function, from, error);
}

objc_id objc_make_with(const objc *o, objc_id object, objc_message m, objc_id from, objc_id with, objc_id *error) {
    typedef objc_id (*function)(objc_id, void *, objc_id, objc_id, objc_id *);
    return SEND(function, from, with, error);
}

void objc_set_bytes(const objc *o, objc_id object, objc_message m, const void *bytes, unsigned long a,
                    unsigned long b) {
    typedef void (*function)(objc_id, void *, const void *, unsigned long, unsigned long);
    SEND(function, bytes, a, b);
}

void objc_set_buffer(const objc *o, objc_id object, objc_id buffer, unsigned long offset, unsigned long index) {
    typedef void (*function)(objc_id, void *, objc_id, unsigned long, unsigned long);
    objc_message m = OBJC_SET_BUFFER;
    SEND(function, buffer, offset, index);
}

void objc_dispatch(const objc *o, objc_id object, objc_size groups, objc_size threads) {
    typedef void (*function)(objc_id, void *, objc_size, objc_size);
    objc_message m = OBJC_DISPATCH;
    SEND(function, groups, threads);
}

void objc_release(const objc *o, objc_id object) {
    if (object) objc_do(o, object, OBJC_RELEASE);
}
