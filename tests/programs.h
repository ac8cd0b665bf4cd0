/* SPDX-License-Identifier: MIT */
/*
 * Programs of graphs on "cpu" or "ref", whose memory is the host's: compiled, filled with random numbers, run and
 * compared. What goes wrong fails the test with the device's error. Include it after cmocka.h.
 */
#ifndef VJP_TESTS_PROGRAMS_H
#define VJP_TESTS_PROGRAMS_H

#include <string.h>

#include "attributes.h"
#include "numbers.h"
#include "vjp.h"

/* The mean of a matrix, in f32. */
static inline vjp_value mean_of(vjp_graph *g, vjp_value x) {
    return vjp_graph_mean(g, vjp_graph_cast(g, x, VJP_F32), WITH(mean, .axis = 0, .axes = 2));
}

static inline vjp_program *compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                                   const vjp_program_options *options) {
    vjp_program *program;
    if (vjp_compile(device, graph, results, count, options, &program) != VJP_OK) fail_msg("%s", vjp_error(device));
    return program;
}

static inline void run(vjp_device *device, vjp_program *program) {
    if (vjp_program_run(program) != VJP_OK) fail_msg("%s", vjp_error(device));
}

/* Where a value of a program lies. */
static inline vjp_tensor place(vjp_program *program, vjp_value value) {
    vjp_tensor tensor;
    assert_int_equal(vjp_program_tensor(program, value, &tensor), VJP_OK);
    return tensor;
}

static inline void fill(vjp_program *program, vjp_value value, uint64_t seed, double size) {
    vjp_tensor tensor = place(program, value);
    for (int64_t i = 0; i < count_of(&tensor); i++)
        put(&tensor, i, size * random_of(7, seed, (uint64_t)i));
}

/* Fails unless the two values have the same bits, one in each program. */
static inline void same_bits_of(vjp_program *one, vjp_value in_one, vjp_program *other, vjp_value in_other) {
    vjp_tensor a = place(one, in_one), b = place(other, in_other);
    size_t bytes = (size_t)count_of(&a) * vjp_dtype_size((vjp_dtype)a.dtype);
    if (memcmp((char *)a.data + a.offset, (char *)b.data + b.offset, bytes) != 0)
        fail_msg("the values %d and %d have other bits", in_one, in_other);
}

#endif
