/* SPDX-License-Identifier: MIT */
/*
 * Groups of processes. An engine moves bytes between two of them; the order of every sum is decided here.
 *
 * A sum is a binary tree over the rank: neighbours (0,1), (2,3), ... are added first, then (01,23), ... It is computed
 * by recursive halving: on level k a process and its partner, rank ^ 2^k, each keep one half of what they hold, send
 * the other half and add what they receive. After log2(size) levels each owns 1/size of the elements, with the whole
 * sum; recursive doubling in the opposite order copies these ranges to all. That is the volume of any reduce-scatter
 * and all-gather, 2 (size - 1) / size of the tensor, and the tree is the same for every element, whatever the size of
 * the tensor and of the blocks in which it travels.
 */
#include "comm/group.h"

#include <stdio.h>

#include "comm/state.h"
#include "core/arithmetic.h"

vjp_status group_failed(vjp_group *g, vjp_status status) {
    g->failed = true;
    return g->beside ? status : vjp_fail(g->device, status, "%s", g->sentence);
}

/* Whose queue copies and adds: the thread that the group has beside the device's own has a queue of its own, too. */
static vjp_device *queue_of(const vjp_group *g) {
    return g->beside && g->second ? g->second : g->device;
}

/* ---- Messages ---------------------------------------------------------------------------------------- */

static vjp_status exchange(vjp_group *g, int32_t peer, const void *send, size_t send_bytes, void *receive,
                           size_t receive_bytes) {
    if (!send_bytes && !receive_bytes) return VJP_OK;
    const vjp_message message = {.peer = peer,
                                 .call = g->call,
                                 .send = send,
                                 .send_bytes = send_bytes,
                                 .receive = receive,
                                 .receive_bytes = receive_bytes};
    vjp_engine_failure failure = {.sentence = g->sentence, .bytes = sizeof g->sentence, .reporter = -1};
    vjp_status status = g->engine->exchange(g->state, &message, g->timeout, &failure);
    if (status == VJP_OK) return VJP_OK;
    g->reporter = failure.reporter;
    return group_failed(g, status);
}

/* Every call begins with this. */
static vjp_status begin(vjp_group *g) {
    if (!g) return VJP_INVALID;
    g->call++;
    return g->failed ? group_failed(g, VJP_GROUP_FAILED) : VJP_OK;
}

/*
 * The same, of the device's memory, by the carrier. It may not wait for long: the processes meet by the engine first,
 * which names the one that does not come.
 */
static vjp_status carry(vjp_group *g, const vjp_message *message) {
    vjp_engine_failure failure = {.sentence = g->sentence, .bytes = sizeof g->sentence, .reporter = -1};
    vjp_status status = g->carrier->exchange(g->carrier_state, message, g->timeout, &failure);
    return status == VJP_OK ? VJP_OK : group_failed(g, status);
}

/* A range of a tensor's bytes. */
typedef struct span {
    size_t at, bytes;
} span;

static span part_of(span whole, size_t offset, size_t block) {
    size_t left = offset < whole.bytes ? whole.bytes - offset : 0;
    return (span){whole.at + offset, left < block ? left : block};
}

static void *address(const vjp_tensor *tensor, size_t at) {
    return (char *)tensor->data + tensor->offset + at;
}

/* The block in host memory: where it is, or copied to a stage. */
static vjp_status fetch(vjp_group *g, const vjp_tensor *tensor, span block, int stage, void **host) {
    *host = vjp_device_is_host(g->device) ? address(tensor, block.at) : g->stage + (size_t)stage * BLOCK_BYTES;
    if (vjp_device_is_host(g->device) || !block.bytes) return VJP_OK;
    return vjp_download(queue_of(g), *host, tensor->data, tensor->offset + block.at, block.bytes);
}

static vjp_status put_back(vjp_group *g, const vjp_tensor *tensor, span block, const void *host) {
    if (vjp_device_is_host(g->device) || !block.bytes) return VJP_OK;
    return vjp_upload(queue_of(g), tensor->data, tensor->offset + block.at, host, block.bytes);
}

/* swap() by a carrier: the device adds what it has received. */
static vjp_status swap_on_device(vjp_group *g, const vjp_tensor *tensor, int32_t peer, span send, span receive,
                                 bool add) {
    char own = 1, other;
    if (!send.bytes && !receive.bytes) return VJP_OK;
    vjp_status status = exchange(g, peer, &own, 1, &other, 1);
    for (size_t offset = 0; status == VJP_OK && (offset < send.bytes || offset < receive.bytes);
         offset += DEVICE_BLOCK_BYTES) {
        span from = part_of(send, offset, DEVICE_BLOCK_BYTES), to = part_of(receive, offset, DEVICE_BLOCK_BYTES);
        const vjp_message message = {.peer = peer,
                                     .call = g->call,
                                     .send = address(tensor, from.at),
                                     .send_bytes = from.bytes,
                                     .receive = add ? g->device_stage : address(tensor, to.at),
                                     .receive_bytes = to.bytes};
        status = carry(g, &message);
        if (status != VJP_OK || !add || !to.bytes) continue;
        const int64_t count = (int64_t)(to.bytes / sizeof(float));
        vjp_tensor sum = vjp_tensor_of(tensor->data, VJP_F32, 1, &count);
        const vjp_tensor more = vjp_tensor_of(g->device_stage, VJP_F32, 1, &count);
        sum.offset = tensor->offset + to.at;
        status = vjp_add_forward(queue_of(g), &sum, &sum, &more, NULL);
        if (status == VJP_OK) status = vjp_synchronize(queue_of(g)); /* the carrier has a queue of its own */
    }
    return status;
}

/* Sends one range of a tensor, and receives another in its place, or adds it there. */
static vjp_status swap(vjp_group *g, const vjp_tensor *tensor, int32_t peer, span send, span receive, bool add) {
    vjp_status status = VJP_OK;
    if (g->carrier) return swap_on_device(g, tensor, peer, send, receive, add);
    for (size_t offset = 0; status == VJP_OK && (offset < send.bytes || offset < receive.bytes);
         offset += BLOCK_BYTES) {
        span from = part_of(send, offset, BLOCK_BYTES), to = part_of(receive, offset, BLOCK_BYTES);
        void *sent, *own = NULL, *received = g->stage + BLOCK_BYTES;
        status = fetch(g, tensor, from, 0, &sent);
        if (status == VJP_OK && (add || vjp_device_is_host(g->device))) status = fetch(g, tensor, to, 2, &own);
        if (status != VJP_OK) return status;
        if (!add && vjp_device_is_host(g->device)) received = own;
        status = exchange(g, peer, sent, from.bytes, received, to.bytes);
        if (status != VJP_OK) return status;
        if (add) {
            float *sum = own;
            const float *more = received;
            for (size_t i = 0; i < to.bytes / sizeof *sum; i++)
                sum[i] += more[i];
        }
        status = put_back(g, tensor, to, add ? own : received);
    }
    return status;
}

/* ---- Sums and copies --------------------------------------------------------------------------------- */

/* How a tensor is split into one range for each process. */
typedef struct ranges {
    int64_t elements;
    const int64_t *bounds; /* [size + 1]; NULL: equal, the first ones one element longer where that does not fit */
} ranges;

static int64_t begin_of(const vjp_group *g, const ranges *r, int64_t index) {
    if (r->bounds) return r->bounds[index];
    return r->elements / g->size * index + vjp_min(index, r->elements % g->size);
}

/* The ranges [first, last) that a process holds after the first `level` levels of halving. */
static void held(const vjp_group *g, int32_t rank, int32_t level, int64_t *first, int64_t *last) {
    *first = 0;
    *last = g->size;
    for (int32_t k = 0; k < level; k++) {
        int64_t middle = (*first + *last) / 2;
        *(rank >> k & 1 ? first : last) = middle;
    }
}

static span span_of(const vjp_group *g, const vjp_tensor *tensor, const ranges *r, int32_t rank, int32_t level) {
    int64_t first, last;
    size_t each = vjp_dtype_size((vjp_dtype)tensor->dtype);
    held(g, rank, level, &first, &last);
    size_t begins = (size_t)begin_of(g, r, first) * each, ends = (size_t)begin_of(g, r, last) * each;
    return (span){begins, ends - begins};
}

/* What two ranges have in common. */
static span common(span a, span b) {
    size_t first = a.at > b.at ? a.at : b.at, end_a = a.at + a.bytes, end_b = b.at + b.bytes;
    size_t last = end_a < end_b ? end_a : end_b;
    return (span){first, last > first ? last - first : 0};
}

/* Refuses what is not a packed tensor of the device, before anything is written. */
static vjp_status check(vjp_group *g, const char *what, const vjp_tensor *tensor, bool sums, ranges *r) {
    vjp_status status = begin(g);
    if (status != VJP_OK) return status;
    int64_t *elements = &r->elements;
    *elements = 1;
    bool known = tensor && tensor->dtype >= 0 && tensor->dtype < VJP_DTYPE_COUNT && tensor->ndim >= 0 &&
                 tensor->ndim <= VJP_MAX_DIMS && vjp_sizes_fit(tensor->ndim, tensor->shape);
    if (!known) return vjp_fail(g->device, VJP_INVALID, "group.%s: the tensor is NULL or has no valid shape", what);
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] > 1 && tensor->stride[i] != *elements)
            return vjp_fail(g->device, VJP_UNSUPPORTED, "group.%s: the tensor is not packed", what);
        *elements *= tensor->shape[i];
    }
    if (sums && tensor->dtype != VJP_F32)
        return vjp_fail(g->device, VJP_UNSUPPORTED, "group.%s: the tensor is %s; sums are of f32", what,
                        vjp_dtype_name((vjp_dtype)tensor->dtype));
    if (*elements && !tensor->data) return vjp_fail(g->device, VJP_INVALID, "group.%s: the tensor has no data", what);
    bool split = !r->bounds || (r->bounds[0] == 0 && r->bounds[g->size] == *elements);
    for (int32_t i = 0; r->bounds && i < g->size; i++)
        split = split && r->bounds[i] <= r->bounds[i + 1];
    if (!split) return vjp_fail(g->device, VJP_INVALID, "group.%s: the ranges do not cover the tensor", what);
    return g->size > 1 ? vjp_synchronize(g->device) : VJP_OK;
}

/* Of the elements in `part`. */
static vjp_status halve(vjp_group *g, const vjp_tensor *tensor, const ranges *r, span part) {
    vjp_status status = VJP_OK;
    for (int32_t k = 0; k < g->levels && status == VJP_OK; k++) {
        int32_t peer = g->rank ^ 1 << k;
        status = swap(g, tensor, peer, common(part, span_of(g, tensor, r, peer, k + 1)),
                      common(part, span_of(g, tensor, r, g->rank, k + 1)), true);
    }
    return status;
}

static const span EVERYTHING = {0, SIZE_MAX};

static vjp_status copy_ranges(vjp_group *g, const vjp_tensor *tensor, const ranges *r) {
    vjp_status status = VJP_OK;
    for (int32_t k = g->levels; k-- > 0 && status == VJP_OK;) {
        int32_t peer = g->rank ^ 1 << k;
        status =
            swap(g, tensor, peer, span_of(g, tensor, r, g->rank, k + 1), span_of(g, tensor, r, peer, k + 1), false);
    }
    return status;
}

int32_t vjp_group_range_of(const vjp_group *g, int32_t rank) {
    int64_t index = 0, next = 1;
    if (g) held(g, rank, g->levels, &index, &next);
    return (int32_t)index;
}

void vjp_group_range(const vjp_group *g, int64_t elements, int64_t *first, int64_t *count) {
    const ranges equal = {.elements = elements};
    int64_t index = vjp_group_range_of(g, g->rank);
    *first = begin_of(g, &equal, index);
    *count = begin_of(g, &equal, index + 1) - *first;
}

vjp_status vjp_group_reduce_scatter_at(vjp_group *g, const vjp_tensor *tensor, const int64_t *bounds) {
    ranges r = {.bounds = bounds};
    vjp_status status = check(g, "reduce_scatter", tensor, true, &r);
    return status == VJP_OK ? halve(g, tensor, &r, EVERYTHING) : status;
}

bool vjp_group_is_any_thread(const vjp_group *g) {
    bool can = vjp_device_is_host(g->device) ? !g->carrier : g->device->backend->set_stream != NULL;
    return can && g->state && g->engine->any_thread && g->engine->any_thread(g->state);
}

/* What the second queue reports is the group's failure: its sentence must outlive the thread. */
static vjp_status result_of_queue(vjp_group *g, vjp_status status) {
    if (status == VJP_OK || g->failed || !g->second) return status;
    snprintf(g->sentence, sizeof g->sentence, "%s", vjp_error(g->second));
    return group_failed(g, status);
}

vjp_status vjp_group_reduce_await(vjp_group *g, vjp_event *event) {
    return g->failed ? VJP_GROUP_FAILED : result_of_queue(g, vjp_event_wait(queue_of(g), event));
}

vjp_status vjp_group_reduce_begin(vjp_group *g, const vjp_tensor *tensor, const int64_t *bounds) {
    ranges r = {.bounds = bounds};
    vjp_status status = check(g, "reduce_scatter", tensor, true, &r);
    g->beside = status == VJP_OK;
    return status;
}

vjp_status vjp_group_reduce_part(vjp_group *g, const vjp_tensor *tensor, const int64_t *bounds, int64_t first,
                                 int64_t last) {
    const ranges r = {.elements = tensor->shape[0], .bounds = bounds};
    const span part = {(size_t)first * sizeof(float), (size_t)(last - first) * sizeof(float)};
    return g->failed ? VJP_GROUP_FAILED : result_of_queue(g, halve(g, tensor, &r, part));
}

void vjp_group_reduce_end(vjp_group *g) {
    g->beside = false;
}

vjp_status vjp_group_all_gather_at(vjp_group *g, const vjp_tensor *tensor, const int64_t *bounds) {
    ranges r = {.bounds = bounds};
    vjp_status status = check(g, "all_gather", tensor, false, &r);
    return status == VJP_OK ? copy_ranges(g, tensor, &r) : status;
}

vjp_status vjp_group_reduce_scatter(vjp_group *g, const vjp_tensor *tensor) {
    return vjp_group_reduce_scatter_at(g, tensor, NULL);
}

vjp_status vjp_group_all_gather(vjp_group *g, const vjp_tensor *tensor) {
    return vjp_group_all_gather_at(g, tensor, NULL);
}

vjp_status vjp_group_sum(vjp_group *g, const vjp_tensor *tensor) {
    ranges r = {0};
    vjp_status status = check(g, "sum", tensor, true, &r);
    if (status == VJP_OK) status = halve(g, tensor, &r, EVERYTHING);
    return status == VJP_OK ? copy_ranges(g, tensor, &r) : status;
}

/* A binomial tree: on each level those that have the tensor send it to as many others. */
vjp_status vjp_group_broadcast(vjp_group *g, const vjp_tensor *tensor, int32_t root) {
    ranges r = {0};
    vjp_status status = check(g, "broadcast", tensor, false, &r);
    if (status != VJP_OK) return status;
    if (root < 0 || root >= g->size)
        return vjp_fail(g->device, VJP_INVALID, "group.broadcast: root is %d; there are %d processes", (int)root,
                        (int)g->size);
    const span all = {0, (size_t)r.elements * vjp_dtype_size((vjp_dtype)tensor->dtype)}, none = {0, 0};
    int32_t place = g->rank ^ root; /* the root is at 0 */
    for (int32_t k = 0; k < g->levels && status == VJP_OK; k++) {
        int32_t peer = g->rank ^ 1 << k;
        if (place < 1 << k) status = swap(g, tensor, peer, all, none, false);
        if (place >> k == 1) status = swap(g, tensor, peer, none, all, false);
    }
    return status;
}

/* ---- Host memory ------------------------------------------------------------------------------------- */

vjp_status vjp_group_share(vjp_group *g, void *host, size_t bytes) {
    vjp_status status = begin(g);
    size_t all;
    if (status != VJP_OK) return status;
    if (!host || !vjp_mul_size(bytes, (size_t)g->size, &all) || all > INT32_MAX)
        return vjp_fail(g->device, VJP_INVALID, "group.share: %zu bytes for each process cannot be shared", bytes);
    for (int32_t k = 0; k < g->levels && status == VJP_OK; k++) {
        int32_t peer = g->rank ^ 1 << k;
        size_t own = (size_t)(g->rank >> k << k) * bytes, other = (size_t)(peer >> k << k) * bytes;
        status = exchange(g, peer, (char *)host + own, bytes << k, (char *)host + other, bytes << k);
    }
    return status;
}

vjp_status vjp_group_barrier(vjp_group *g) {
    vjp_status status = begin(g);
    for (int32_t k = 0; status == VJP_OK && k < g->levels; k++) {
        char own = 1, other;
        status = exchange(g, g->rank ^ 1 << k, &own, 1, &other, 1);
    }
    return status;
}

/* To all, from the process that has them. */
vjp_status group_spread(vjp_group *g, int32_t root, void *host, size_t bytes) {
    vjp_status status = VJP_OK;
    int32_t place = g->rank ^ root; /* the root is at 0 */
    for (int32_t k = 0; k < g->levels && status == VJP_OK; k++) {
        int32_t peer = g->rank ^ 1 << k;
        if (place < 1 << k) status = exchange(g, peer, host, bytes, NULL, 0);
        if (place >> k == 1) status = exchange(g, peer, NULL, 0, host, bytes);
    }
    return status;
}

vjp_status vjp_group_relay(vjp_group *g, void *host, size_t bytes, vjp_status (*turn)(void *context, void *host),
                           void *context) {
    vjp_status status = begin(g);
    if (status != VJP_OK) return status;
    /* Ranks and ranges are each other's bits in the opposite order, so the same function maps both ways. */
    int32_t index = vjp_group_range_of(g, g->rank), last = g->size - 1;
    if (index > 0) status = exchange(g, vjp_group_range_of(g, index - 1), NULL, 0, host, bytes);
    if (status == VJP_OK) status = turn(context, host);
    if (status == VJP_OK && index < last) status = exchange(g, vjp_group_range_of(g, index + 1), host, bytes, NULL, 0);
    return status == VJP_OK ? group_spread(g, vjp_group_range_of(g, last), host, bytes) : status;
}
