/* SPDX-License-Identifier: MIT */
/* Adding the gradients of shards. */
#include "train/trainer/shards.h"

#include <stdlib.h>

#include "core/arithmetic.h"
#include "core/core.h"
#include "core/system.h"

bool shards_split(shards *s, vjp_device *device, vjp_group *group, int64_t count, char error[TRAIN_ERROR]) {
    int64_t size = vjp_group_size(group);
    if (count < 1 || count > SHARDS_MAX || (count & (count - 1)) != 0)
        return train_fail(error, "there are %lld shards; it must be a power of two up to %d", (long long)count,
                          SHARDS_MAX);
    if (count % size != 0)
        return train_fail(error,
                          "%lld process%s cannot share %lld shard%s: --shards must be a multiple of their number",
                          (long long)size, size == 1 ? "" : "es", (long long)count, count == 1 ? "" : "s");
    *s = (shards){.device = device, .group = group, .count = count, .own = count / size};
    s->first = s->own * vjp_group_rank(group);
    return true;
}

int shards_buffers(const shards *s) {
    int levels = 0;
    while ((int64_t)1 << levels < s->own)
        levels++;
    return levels || s->own == s->count ? levels : 1; /* the group sums one tensor of all gradients */
}

vjp_status shards_create(shards *s, const vjp_tensor *gradient, size_t gradients) {
    size_t bytes = 0, own;
    s->gradient = calloc(gradients + 1, sizeof *s->gradient);
    bool fits = s->gradient != NULL;
    for (size_t i = 0; i < gradients && fits; i++) {
        int64_t count = 1;
        for (int axis = 0; axis < gradient[i].ndim; axis++)
            count *= gradient[i].shape[axis];
        s->gradient[i] = vjp_tensor_of(gradient[i].data, VJP_F32, 1, &count);
        s->gradient[i].offset = gradient[i].offset;
        fits = vjp_mul_size((size_t)count, sizeof(float), &own) && vjp_add_size(bytes, own, &bytes);
    }
    if (!fits) return vjp_fail(s->device, VJP_OUT_OF_MEMORY, "there is no memory to sum the gradients of shards");
    s->gradients = gradients;
    s->elements = bytes / sizeof(float);
    vjp_status status = VJP_OK;
    for (int k = 0; k < shards_buffers(s) && status == VJP_OK; k++)
        status = vjp_alloc(s->device, bytes, &s->buffer[k]);
    return status;
}

void shards_free(shards *s) {
    for (int k = 0; k < SHARDS_MAX_LEVELS; k++)
        if (s->buffer[k]) vjp_free(s->device, s->buffer[k]);
    free(s->gradient);
    *s = (shards){0};
}

/* What is done with each tensor and its place in a buffer. */
typedef enum action { SAVE, RESTORE, ADD } action;

static vjp_status for_each(shards *s, const vjp_tensor *tensor, size_t first, size_t last, void *buffer, action what) {
    vjp_status status = VJP_OK;
    uint64_t at = 0;
    for (size_t i = 0; i < last && status == VJP_OK; i++) {
        const vjp_tensor *own = &tensor[i];
        size_t bytes = (size_t)own->shape[0] * sizeof(float);
        vjp_tensor saved = vjp_tensor_of(buffer, VJP_F32, 1, own->shape);
        saved.offset = at;
        at += bytes;
        if (i < first) continue;
        switch (what) {
        case SAVE: status = vjp_copy(s->device, buffer, saved.offset, own->data, own->offset, bytes); break;
        case RESTORE: status = vjp_copy(s->device, own->data, own->offset, buffer, saved.offset, bytes); break;
        case ADD: status = vjp_add_forward(s->device, own, own, &saved, NULL); break;
        }
    }
    return status;
}

vjp_status shards_pack(shards *s, const vjp_tensor *tensor, size_t first, size_t last) {
    return for_each(s, tensor, first, last, s->buffer[0], SAVE);
}

vjp_status shards_unpack(shards *s, const vjp_tensor *tensor, size_t first, size_t last) {
    return for_each(s, tensor, first, last, s->buffer[0], RESTORE);
}

vjp_status shards_add(shards *s, int64_t index) {
    vjp_status status = VJP_OK;
    int k = 0;
    for (; index >> k & 1 && status == VJP_OK; k++)
        status = for_each(s, s->gradient, 0, s->gradients, s->buffer[k], ADD);
    if (status != VJP_OK || index + 1 == s->own) return status;
    return for_each(s, s->gradient, 0, s->gradients, s->buffer[k], SAVE);
}

vjp_status shards_finish(shards *s, size_t gradient) {
    vjp_status status = VJP_OK;
    for (int k = 0; (int64_t)1 << k < s->own && status == VJP_OK; k++)
        status = for_each(s, s->gradient, gradient, gradient + 1, s->buffer[k], ADD);
    return status == VJP_OK ? shards_pack(s, s->gradient, gradient, gradient + 1) : status;
}

vjp_status shards_sum(shards *s, bool reduced) {
    if (vjp_group_size(s->group) == 1) return VJP_OK;
    double begin = system_seconds();
    const int64_t elements = (int64_t)s->elements;
    const vjp_tensor all = vjp_tensor_of(s->buffer[0], VJP_F32, 1, &elements);
    vjp_status status = reduced ? VJP_OK : shards_pack(s, s->gradient, 0, s->gradients);
    if (status == VJP_OK) status = reduced ? vjp_group_all_gather(s->group, &all) : vjp_group_sum(s->group, &all);
    if (status == VJP_OK) status = shards_unpack(s, s->gradient, 0, s->gradients);
    s->seconds += system_seconds() - begin;
    return status;
}
