/* SPDX-License-Identifier: MIT */
/*
 * Ops, attributes and shapes as text, for the command line, the golden files' metadata and the names of cases. All of
 * it comes from the op table; no op is named here.
 *
 * Functions that can fail return false and leave one sentence in the caller's buffer, which says what was wrong and
 * what is allowed. Nothing is changed then.
 */
#ifndef VJP_PROOF_TEXT_H
#define VJP_PROOF_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

enum { TEXT_ERROR = 512 };

/* Room for any op's attribute struct, aligned for it. Fill it with vjp_op_defaults(op, values.bytes) first. */
typedef union text_values {
    int64_t integer;
    double real;
    unsigned char bytes[256];
} text_values;

/* ---- Attributes -------------------------------------------------------------------------------------- */

/*
 * Sets the attribute that "name=value" names. Integers and reals are decimal (reals also hexadecimal, inf, nan),
 * booleans true, false, 1, 0, choices one of their names.
 */
bool text_set_attribute(const vjp_op *op, void *attributes, const char *assignment, char error[TEXT_ERROR]);

/* Sets several, separated by blanks: "axes=1 eps=1e-5". Empty text sets none. */
bool text_set_attributes(const vjp_op *op, void *attributes, const char *text, char error[TEXT_ERROR]);

/* One attribute's value as text_set_attribute() reads it. A value that is not one of the choices prints as its number.
 */
enum { TEXT_VALUE = 32 };
const char *text_attribute(const vjp_attribute *attribute, const void *attributes, char text[TEXT_VALUE]);

/* The same for its default. */
const char *text_default(const vjp_attribute *attribute, char text[TEXT_VALUE]);

/* "axes=1 eps=1e-5": all attributes, or only those that differ from the defaults. Truncated to `bytes`. */
const char *text_attributes(const vjp_op *op, const void *attributes, bool only_changed, char *text, size_t bytes);

/* ---- Ops, passes, shapes, numbers ------------------------------------------------------------------- */

/* "layer_norm.backward". The sentence lists ops or passes, or suggests the nearest. */
bool text_parse_pass(const char *text, const vjp_op **op, vjp_pass *pass, char error[TEXT_ERROR]);

const char *text_pass_name(vjp_pass pass);

/* "[7,65]", "[7, 65]" or "7,65"; "[]" is a scalar. Sizes are 0 or more. */
bool text_parse_shape(const char *text, int *ndim, int64_t shape[VJP_MAX_DIMS], char error[TEXT_ERROR]);

/* "[7, 65]". */
enum { TEXT_SHAPE = 192 };
const char *text_shape(int ndim, const int64_t *shape, char text[TEXT_SHAPE]);

/*
 * The word of `words` (NULL-terminated) that `word` was probably meant to be, or NULL when none is near: at most a
 * third of its letters wrong.
 */
const char *text_nearest(const char *word, const char *const *words);

#endif
