/* SPDX-License-Identifier: MIT */
/*
 * The module for browsers: what web/vjp.js calls besides vjp's own functions.
 *
 * Numbers and pointers pass as they are; texts are UTF-8 and end with a zero. A text that is returned as char * is
 * freed by the caller. A function that fails returns NULL or 0, and vjp_web_error() says why.
 */
#ifndef VJP_WEB_MODULE_H
#define VJP_WEB_MODULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files/json.h"
#include "vjp.h"

/* Before the definition of a function that the page may call by its own name. */
#define WEB_EXPORT(name) __attribute__((export_name(#name)))

enum { WEB_ERROR = 1024 };

/* Keeps the sentence for vjp_web_error(); returns false. */
bool web_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The writer's text; NULL: out of memory, which is kept as the sentence. */
char *web_take(json_writer *w);

/* A call in the making: an op, a pass, and what was named so far. */
typedef struct web_call {
    const vjp_op *op;
    const vjp_pass_info *pass;
    vjp_pass number;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    bool present[VJP_MAX_SLOTS];
    bool wanted[VJP_MAX_SLOTS]; /* outputs */
    bool chosen;                /* the caller said which outputs it wants */
    bool owned[VJP_MAX_SLOTS];  /* the tensor's memory is the call's */
    vjp_value value[VJP_MAX_SLOTS];
    uint64_t attributes[32]; /* the op's struct */
} web_call;

/* The op's attribute struct; NULL where it has none. */
const void *web_call_attributes(const web_call *call);

#endif
