/* SPDX-License-Identifier: MIT */
/* An op's attributes inside a call: omitted members are zero, which may not be the default. */
#ifndef TESTS_ATTRIBUTES_H
#define TESTS_ATTRIBUTES_H

#include "vjp.h"

#define WITH(op, ...) (&(vjp_##op##_attributes){.struct_size = sizeof(vjp_##op##_attributes), __VA_ARGS__})

#endif
