/* SPDX-License-Identifier: MIT */
/*
 * First values of parameters: Philox4x32-10 with the seed as its key and (element, name, kind of number) as its
 * counter, so that no number depends on how many were drawn before it.
 */
#include <math.h>
#include <stdlib.h>

#include "core/half.h"
#include "core/philox.h"
#include "graph/program.h"

typedef enum drawn { NORMAL = 0, UNIFORM = 1 } drawn;

typedef struct distribution {
    drawn kind;
    double a, b; /* mean and standard deviation, or both ends */
} distribution;

static float draw(const distribution *d, uint32_t name, uint64_t seed, uint64_t i) {
    if (d->kind == NORMAL && d->b == 0) return (float)d->a;
    vjp_philox words = {{(uint32_t)i, (uint32_t)(i >> 32), name, (uint32_t)d->kind}};
    words = vjp_philox4x32_10(words, (uint32_t)seed, (uint32_t)(seed >> 32));
    double unit = ((double)words.word[0] + 0.5) * 0x1p-32;
    if (d->kind == UNIFORM) return (float)(d->a + (d->b - d->a) * unit);
    /* One normal number from 64 random bits by Box and Muller. */
    double angle = 2 * 3.14159265358979323846 * (double)words.word[1] * 0x1p-32;
    return (float)d->a + (float)(d->b * sqrt(-2 * log(unit)) * cos(angle));
}

static void put(void *to, vjp_dtype dtype, size_t i, float value) {
    switch (dtype) {
    case VJP_F32: ((float *)to)[i] = value; break;
    case VJP_F64: ((double *)to)[i] = value; break;
    case VJP_BF16: ((uint16_t *)to)[i] = vjp_f32_to_bf16(value); break;
    default: ((uint16_t *)to)[i] = vjp_f32_to_f16(value); break;
    }
}

enum { CHUNK = 1 << 18, PIECE = 1 << 13 }; /* elements that are uploaded at once, and that one thread draws */

typedef struct filling {
    const distribution *d;
    uint32_t name;
    uint64_t seed;
    vjp_dtype dtype;
    void *chunk;
    size_t first, count; /* the elements of the chunk */
} filling;

static void fill_piece(void *argument, size_t piece) {
    const filling *f = argument;
    size_t end = (piece + 1) * PIECE < f->count ? (piece + 1) * PIECE : f->count;
    for (size_t i = piece * PIECE; i < end; i++)
        put(f->chunk, f->dtype, i, draw(f->d, f->name, f->seed, f->first + i));
}

/*
 * In chunks, so that a large parameter needs no second copy of itself. Every number is drawn by itself, so all threads
 * of the host can draw: those of the device, or of one opened for it. (A thousand million numbers take 20 s by one.)
 */
static vjp_status fill(vjp_program *program, vjp_value value, const distribution *d, uint64_t seed) {
    const program_value *found = NULL;
    vjp_status status = program_find(program, value, &found);
    if (status != VJP_OK) return status;
    vjp_dtype dtype = (vjp_dtype)found->tensor.dtype;
    if (!graph_is_float(dtype) || found->role == GRAPH_CONSTANT || !graph_is_persistent(found->role))
        return vjp_fail(program->device, VJP_INVALID,
                        "%s cannot be given first values: it is not an input, parameter or state of a float type",
                        found->name);
    size_t size = vjp_dtype_size(dtype), count = program_bytes(&found->tensor) / size;
    filling f = {.d = d, .name = names_hash(found->name), .seed = seed, .dtype = dtype};
    f.chunk = malloc((count < CHUNK ? count : CHUNK) * size + 1);
    if (!f.chunk) return vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to fill %s", found->name);
    vjp_device *host = NULL;
    if (!vjp_device_is_host(program->device) && count >= CHUNK && vjp_open("cpu", NULL, &host) != VJP_OK) {
        vjp_close(host); /* it goes without */
        host = NULL;
    }
    for (f.first = 0; f.first < count && status == VJP_OK; f.first += CHUNK) {
        f.count = count - f.first < CHUNK ? count - f.first : CHUNK;
        vjp_parallel(host ? host : program->device, (f.count + PIECE - 1) / PIECE, fill_piece, &f);
        status = program_upload(program, found, f.first, f.chunk, f.count);
    }
    vjp_close(host);
    free(f.chunk);
    return status;
}

static vjp_status refuse(vjp_program *program, const char *what, double a, double b) {
    return vjp_fail(program->device, VJP_INVALID, "%s of %g and %g: both must be finite, and the second not %s", what,
                    a, b, what[0] == 'b' ? "below the first" : "negative");
}

vjp_status vjp_program_init_normal(vjp_program *program, vjp_value value, double mean, double deviation,
                                   uint64_t seed) {
    if (!program) return VJP_INVALID;
    if (!isfinite(mean) || !isfinite(deviation) || deviation < 0)
        return refuse(program, "a mean and a standard deviation", mean, deviation);
    return fill(program, value, &(distribution){NORMAL, mean, deviation}, seed);
}

vjp_status vjp_program_init_uniform(vjp_program *program, vjp_value value, double low, double high, uint64_t seed) {
    if (!program) return VJP_INVALID;
    if (!isfinite(low) || !isfinite(high) || high < low) return refuse(program, "bounds", low, high);
    return fill(program, value, &(distribution){UNIFORM, low, high}, seed);
}

vjp_status vjp_program_init_kaiming(vjp_program *program, vjp_value value, uint64_t seed) {
    const program_value *found = NULL;
    vjp_status status = program_find(program, value, &found);
    if (status != VJP_OK) return status;
    const vjp_tensor *tensor = &found->tensor;
    double inputs = 1;
    for (int i = 1; i < tensor->ndim; i++)
        inputs *= (double)tensor->shape[i];
    if (tensor->ndim < 2 || inputs < 1)
        return vjp_fail(program->device, VJP_INVALID,
                        "%s has %d axes; Kaiming's first values need two or more, none of "
                        "them empty",
                        found->name, (int)tensor->ndim);
    return fill(program, value, &(distribution){NORMAL, 0, sqrt(2 / inputs)}, seed);
}

vjp_status vjp_program_init(vjp_program *program, uint64_t seed) {
    if (!program) return VJP_INVALID;
    vjp_status status = VJP_OK;
    for (int32_t v = 1; v < program->values && status == VJP_OK; v++) {
        const program_value *value = &program->value[v];
        if (value->name && value->role == GRAPH_PARAMETER && value->tensor.ndim > 1)
            status = vjp_program_init_kaiming(program, v, seed);
    }
    return status;
}
