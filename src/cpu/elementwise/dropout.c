/* SPDX-License-Identifier: MIT */
/*
 * dropout on the CPU: the generator's words for a few dozen elements at a time (philox.h), compared as integers with a
 * threshold; the products that are kept. The backward is the forward with dy for x: the same words, the same elements.
 */
#include "cpu/elementwise/elementwise.h"
#include "cpu/simd/philox.h"

extern const vjp_kernel CPU_NAME(dropout)[VJP_PASS_COUNT];

_Static_assert(ELEMENT_UNIT % PHILOX_ELEMENTS == 0, "a task begins with a whole batch of words");

typedef struct dropout_parameters {
    vjp_dropout_key key;
    uint32_t threshold;
    float factor;
    const philox_rounds *rounds; /* of the task, as are the words of the batch that it has reached */
    native_u *words;
} dropout_parameters;

/* x * factor where the word is not below the threshold, else zero. A task comes to every vector, in order. */
INLINE void kept(const void *parameters, element_vectors *e) {
    const dropout_parameters *d = parameters;
    int64_t k = e->i % PHILOX_ELEMENTS / NATIVE_LANES;
    if (k == 0) philox_words(d->rounds, (uint64_t)e->i / 4, d->words);
    vf r = vf_mul(e->in[0], vf_set(d->factor));
    native_u threshold = d->threshold - (native_u){0};
    EACH_PART r.v[p] = (native_f)((native_i)(d->words[k + p] >= threshold) & (native_i)r.v[p]);
    e->out[0] = r;
}

static const element_op op = {
    .inputs = 1, .in = {{DROPOUT_X, STORED}}, .outputs = 1, .out = {{DROPOUT_Y, STORED}}, .whole_vectors = true};

static void task(void *argument, size_t i) {
    element_call call = *(const element_call *)argument;
    dropout_parameters parameters = *(const dropout_parameters *)call.parameters;
    philox_rounds rounds;
    native_u words[2 * PHILOX_GROUPS];
    philox_rounds_make(&rounds, &parameters.key);
    parameters.rounds = &rounds;
    parameters.words = words;
    call.parameters = &parameters;
    element_task(kept, &op, &call, i);
}

static vjp_status run(const vjp_work *work) {
    const vjp_dropout_attributes *attributes = work->attributes;
    dropout_parameters parameters = {.key = vjp_dropout_key_read(work),
                                     .threshold = vjp_dropout_threshold(attributes->p),
                                     .factor = (float)(1 / (1 - attributes->p))};
    return element_run(work, &op, task, &parameters);
}

const vjp_kernel CPU_NAME(dropout)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_STORAGE_16_32},
    {run, NULL, VJP_STORAGE_16_32},
};
