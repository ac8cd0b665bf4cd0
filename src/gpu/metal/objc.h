/* SPDX-License-Identifier: MIT */
/*
 * The few Objective-C messages that the Metal device sends, from plain C: the runtime and the frameworks are loaded
 * when a device is opened, so that this compiles anywhere, and opening fails with a reason on other systems. Each
 * function sends messages with one kind of arguments and result.
 */
#ifndef VJP_METAL_OBJC_H
#define VJP_METAL_OBJC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *objc_id;
typedef struct objc_size { /* MTLSize */
    unsigned long width, height, depth;
} objc_size;

typedef enum objc_message {
    /* Any object. */
    OBJC_NEW,
    OBJC_RETAIN,
    OBJC_RELEASE,
    OBJC_RESPONDS,
    /* NSString, NSError. */
    OBJC_STRING,
    OBJC_TEXT,
    OBJC_DESCRIPTION,
    /* The device. */
    OBJC_NAME,
    OBJC_MAX_BYTES,
    OBJC_SUPPORTS,
    OBJC_NEW_QUEUE,
    OBJC_NEW_BUFFER,
    OBJC_NEW_LIBRARY,
    OBJC_NEW_PIPELINE,
    /* Options of a library and of a function. */
    OBJC_SET_FAST_MATH,
    OBJC_SET_MATH_MODE,
    OBJC_SET_MATH_FUNCTIONS,
    OBJC_SET_CONSTANT,
    OBJC_NEW_FUNCTION,
    OBJC_MAX_THREADS,
    OBJC_WIDTH,
    OBJC_CONTENTS,
    /* A command buffer and its encoder. */
    OBJC_COMMANDS,
    OBJC_ENCODER,
    OBJC_SET_PIPELINE,
    OBJC_SET_BUFFER,
    OBJC_SET_BYTES,
    OBJC_DISPATCH,
    OBJC_END,
    OBJC_COMMIT,
    OBJC_WAIT,
    OBJC_STATUS,
    OBJC_ERROR,
    OBJC_MESSAGES
} objc_message;

/* Their selectors, by number: "newCommandQueue" and the like. */
extern const char *const objc_selectors[OBJC_MESSAGES];

typedef void (*objc_method)(void);

/* The functions of macOS; a test replaces them. */
typedef struct objc_system {
    objc_id (*class_named)(const char *name);
    void *(*selector)(const char *name);
    objc_method (*method)(objc_id object, void *selector); /* what a message to it calls; NULL: objc_msgSend */
    void *(*push_pool)(void);
    void (*pop_pool)(void *pool);
    objc_id (*create_device)(void); /* MTLCreateSystemDefaultDevice */
} objc_system;

typedef struct objc {
    objc_system system;
    objc_method send; /* objc_msgSend, for a system without `method` */
    void *selector[OBJC_MESSAGES];
    void *library[4]; /* what was loaded */
} objc;

/* False: `why` says what is missing. */
bool objc_open(objc *o, char *why, size_t room);
void objc_close(objc *o);

/* From now on objc_open() uses these functions; NULL: the system's again. For tests. */
void objc_use(const objc_system *instead);

/* ---- Sending: named by what goes in and what comes out ------------------------------------------------ */

objc_id objc_get(const objc *o, objc_id object, objc_message m);
unsigned long objc_number(const objc *o, objc_id object, objc_message m);
void objc_do(const objc *o, objc_id object, objc_message m);
void objc_set_object(const objc *o, objc_id object, objc_message m, objc_id value);
void objc_set_number(const objc *o, objc_id object, objc_message m, long value);
void objc_set_flag(const objc *o, objc_id object, objc_message m, bool value);
bool objc_supports(const objc *o, objc_id device, long family);
bool objc_responds(const objc *o, objc_id object, objc_message to);
objc_id objc_string(const objc *o, const char *text);    /* autoreleased */
const char *objc_text(const objc *o, objc_id string);    /* as long as the string */
objc_id objc_new(const objc *o, const char *class_name); /* to be released */
objc_id objc_new_buffer(const objc *o, objc_id device, unsigned long bytes, unsigned long options);
objc_id objc_make(const objc *o, objc_id object, objc_message m, objc_id from, objc_id *error);
objc_id objc_make_with(const objc *o, objc_id object, objc_message m, objc_id from, objc_id with, objc_id *error);
void objc_set_bytes(const objc *o, objc_id object, objc_message m, const void *bytes, unsigned long a, unsigned long b);
void objc_set_buffer(const objc *o, objc_id encoder, objc_id buffer, unsigned long offset, unsigned long index);
void objc_dispatch(const objc *o, objc_id encoder, objc_size groups, objc_size threads);

/* Releases an object; NULL does nothing. */
void objc_release(const objc *o, objc_id object);

#endif
