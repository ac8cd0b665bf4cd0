/* SPDX-License-Identifier: MIT */
/* An op's attributes in the middle of a call: members that are not given are zero, which may not be the default. */
#ifndef TESTS_ATTRIBUTES_H
#define TESTS_ATTRIBUTES_H

#include "vjp.h"

#define WITH(op, ...) (&(vjp_##op##_attributes){.struct_size = sizeof(vjp_##op##_attributes), __VA_ARGS__})

#endif
