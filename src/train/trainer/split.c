/* SPDX-License-Identifier: MIT */
/* Ranges of parameters, and what travels between their owners. */
#include "train/trainer/split.h"

#include <stdlib.h>

#include "comm/group.h"
#include "core/core.h"
#include "core/system.h"
#include "op/op.h"

/* ---- Ranges ------------------------------------------------------------------------------------------ */

/* Fills ranges of at most `room` elements from the front; returns whether `ranges` of them hold everything. */
static bool fill(const int64_t *elements, size_t count, int64_t room, size_t ranges, size_t *begin) {
    size_t at = 0;
    for (size_t k = 0; k < ranges; k++) {
        begin[k] = at;
        for (int64_t used = 0; at < count && used + elements[at] <= room; at++)
            used += elements[at];
    }
    begin[ranges] = at;
    return at == count;
}

bool split_choose(parameter_split *s, vjp_group *group, const int64_t *elements, size_t count,
                  char error[TRAIN_ERROR]) {
    size_t size = (size_t)vjp_group_size(group);
    *s = (parameter_split){
        .group = group, .bounds = calloc(size + 1, sizeof *s->bounds), .begin = calloc(size + 1, sizeof *s->begin)};
    if (!s->bounds || !s->begin) return train_fail(error, "there is no memory to split %zu parameters", count);
    int64_t low = 0, high = 0; /* the least room is in [low, high] */
    for (size_t i = 0; i < count; i++)
        high += elements[i];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (fill(elements, count, middle, size, s->begin))
            high = middle;
        else
            low = middle + 1;
    }
    fill(elements, count, high, size, s->begin);
    for (size_t k = 0; k < size; k++) {
        s->bounds[k + 1] = s->bounds[k];
        for (size_t i = s->begin[k]; i < s->begin[k + 1]; i++)
            s->bounds[k + 1] += elements[i];
    }
    int32_t own = vjp_group_range_of(group, vjp_group_rank(group));
    s->first = s->begin[own];
    s->last = s->begin[own + 1];
    return true;
}

void split_take_longest(parameter_split *s) {
    int32_t longest = 0;
    for (int32_t k = 1; k < vjp_group_size(s->group); k++)
        if (s->bounds[k + 1] - s->bounds[k] > s->bounds[longest + 1] - s->bounds[longest]) longest = k;
    s->first = s->begin[longest];
    s->last = s->begin[longest + 1];
}

vjp_status split_create(parameter_split *s, const shards *sum, const vjp_tensor *weight) {
    s->weight = calloc(sum->gradients + 1, sizeof *s->weight);
    if (!s->weight) return vjp_fail(sum->device, VJP_OUT_OF_MEMORY, "there is no memory for a list of weights");
    for (size_t i = 0; i < sum->gradients; i++) {
        s->weight[i] = vjp_tensor_of(weight[i].data, VJP_F32, 1, sum->gradient[i].shape);
        s->weight[i].offset = weight[i].offset;
    }
    vjp_status status = vjp_alloc(sum->device, sizeof(float), &s->square);
    const vjp_tensor y = vjp_tensor_of(s->square, VJP_F32, 0, NULL);
    size_t most = 0;
    for (size_t i = s->first; i < s->last && status == VJP_OK; i++) {
        const vjp_tensor *const tensors[] = {&y, &sum->gradient[i]};
        size_t bytes = 0;
        status = vjp_workspace_size(sum->device, &vjp_op_sum_squares, VJP_FORWARD, tensors, 2, NULL, &bytes);
        if (bytes > most) most = bytes;
    }
    return status == VJP_OK ? vjp_reserve(sum->device, most) : status;
}

void split_free(parameter_split *s, vjp_device *device) {
    if (s->square) vjp_free(device, s->square);
    free(s->weight);
    free(s->begin);
    free(s->bounds);
    *s = (parameter_split){0};
}

bool split_owns(const parameter_split *s, size_t parameter) {
    return !s->group || (parameter >= s->first && parameter < s->last);
}

/* ---- A step ------------------------------------------------------------------------------------------ */

typedef struct adding {
    const parameter_split *s;
    const shards *sum;
} adding;

/* Adds the squares of the own gradients to those of the parameters before them. */
static vjp_status add_squares(void *context, void *host) {
    const adding *a = context;
    vjp_device *device = a->sum->device;
    vjp_tensor y = vjp_tensor_of(a->s->square, VJP_F32, 0, NULL);
    y.flags |= VJP_ACCUMULATE;
    vjp_status status = vjp_upload(device, y.data, 0, host, sizeof(float));
    for (size_t i = a->s->first; i < a->s->last && status == VJP_OK; i++)
        status = vjp_sum_squares_forward(device, &y, &a->sum->gradient[i]);
    return status == VJP_OK ? vjp_download(device, host, y.data, 0, sizeof(float)) : status;
}

vjp_status split_sum(parameter_split *s, shards *sum, bool reduced, float *squares) {
    double begin = system_seconds();
    const int64_t elements = (int64_t)sum->elements;
    const vjp_tensor all = vjp_tensor_of(sum->buffer[0], VJP_F32, 1, &elements);
    vjp_status status = reduced ? VJP_OK : shards_pack(sum, sum->gradient, 0, sum->gradients);
    if (status == VJP_OK && !reduced) status = vjp_group_reduce_scatter_at(s->group, &all, s->bounds);
    if (status == VJP_OK) status = shards_unpack(sum, sum->gradient, s->first, s->last);
    *squares = 0;
    adding own = {s, sum};
    if (status == VJP_OK) status = vjp_group_relay(s->group, squares, sizeof *squares, add_squares, &own);
    sum->seconds += system_seconds() - begin;
    return status;
}

vjp_status split_share_weights(parameter_split *s, shards *sum) {
    double begin = system_seconds();
    const int64_t elements = (int64_t)sum->elements;
    const vjp_tensor all = vjp_tensor_of(sum->buffer[0], VJP_F32, 1, &elements);
    vjp_status status = shards_pack(sum, s->weight, s->first, s->last);
    if (status == VJP_OK) status = vjp_group_all_gather_at(s->group, &all, s->bounds);
    if (status == VJP_OK) status = shards_unpack(sum, s->weight, 0, s->first);
    if (status == VJP_OK) status = shards_unpack(sum, s->weight, s->last, sum->gradients);
    sum->seconds += system_seconds() - begin;
    return status;
}
