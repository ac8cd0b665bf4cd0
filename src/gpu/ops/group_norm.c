/* SPDX-License-Identifier: MIT */
/*
 * group_norm: how the work is split. The kernels are in group_norm.wgsl and group_norm.metal.
 *
 *     up to WHOLE_EACH elements per thread   a team of threads has a group: `forward`; `backward` and `finish`
 *     larger groups                          split into chunks, whose numbers go through the workspace:
 *                                            `moments`, `normalise`; `moments`, `sums`, `gradient` and `finish`
 *
 * The workspace has
 *
 *     chunks       [batch, groups, chunks]: statistics of a chunk of a group's flat run of elements
 *     part_sums    [batch, groups, parts]: sums of g and g * xh over some channels at some positions, also scaled
 *     plane_sums   [batch, chunks of the plane, channels]: sums of dy and dy * xh, which add up to dbeta and dgamma
 */
#include "gpu/gpu.h"

enum {
    WHOLE_EACH = 32,   /* elements per thread where a team has a whole group: 8192 are 64 KiB of x and dy */
    CHUNK_EACH = 16,   /* elements per thread of a chunk, while there are no more than MAX_CHUNKS */
    MAX_CHUNKS = 256,  /* of a group: each team that needs the group's numbers reads those of all chunks */
    NEAR = 16,         /* neighbouring elements that the teams of one workgroup should cover: 64 bytes of f32 */
    COLUMNS = 8,       /* channels that a workgroup adds over the batch */
    LARGEST_SCALE = 60 /* groups of 1e-20 need 2^60 for their squares; eps * 2^120 must stay finite, so eps < 1 there */
};

typedef struct split {
    vjp_group_norm_sizes s;
    bool last, whole, saved;
    bool dx, sums, normal; /* of the backward: what is wanted, and whether that needs xh */
    int64_t rows, count;   /* groups of all samples, elements of one */
    int64_t threads, lanes, teams, along, columns;
    int64_t chunk, chunks;
    int64_t channel_chunk, position_chunk, position_chunks, parts;
    size_t part_sums, plane_sums, bytes; /* offsets in the workspace, after the chunks; its size */
} split;

/* Parts by channel: whole planes where they are small, else chunks of them. A whole group is one part. */
static void split_parts(split *c) {
    int64_t channels = c->s.group_channels, plane = c->s.plane;
    c->channel_chunk = channels;
    c->position_chunk = plane;
    if (!c->whole && c->last) {
        c->channel_chunk = vjp_min(channels, 2 * c->lanes);
        c->position_chunk = vjp_max(1, c->chunk / c->channel_chunk);
    } else if (!c->whole) {
        c->channel_chunk = vjp_min(channels, vjp_max(1, c->chunk / plane));
        c->position_chunk = vjp_min(plane, c->chunk);
    }
    c->position_chunks = vjp_divide_up(plane, c->position_chunk);
    c->parts = c->position_chunks * vjp_divide_up(channels, c->channel_chunk);
    c->along = c->last ? c->lanes / gpu_power_of_two(vjp_divide_up(c->channel_chunk, 2), c->lanes)
                       : gpu_power_of_two(vjp_divide_up(c->position_chunk, 2), c->lanes);
}

static split split_of(const vjp_work *work) {
    split c = {.s = vjp_group_norm_sizes_of(work)};
    const vjp_group_norm_attributes *a = work->attributes;
    bool backward = work->pass == VJP_BACKWARD;
    c.last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    c.saved = backward && work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    c.dx = backward && work->tensor[GROUP_NORM_B_DX];
    c.sums = backward && (work->tensor[GROUP_NORM_B_DGAMMA] || work->tensor[GROUP_NORM_B_DBETA]);
    c.normal = !backward || c.dx || work->tensor[GROUP_NORM_B_DGAMMA];
    c.rows = c.s.batch * c.s.groups;
    c.count = c.s.group_channels * c.s.plane;
    c.threads = gpu_power_of_two(gpu_threads(work->device) / 2 + 1,
                                 GPU_THREADS); /* the largest power of two that the device has */
    c.lanes = gpu_power_of_two(vjp_divide_up(c.count, 2), c.threads);
    if (c.last) {
        int64_t beside = vjp_min(vjp_divide_up(NEAR, c.s.group_channels), c.s.groups);
        c.lanes = vjp_min(c.lanes, c.threads / gpu_power_of_two(beside, vjp_min(NEAR, c.threads)));
    }
    c.teams = c.threads / c.lanes;
    c.columns = gpu_power_of_two(c.s.channels, vjp_min(COLUMNS, c.threads));
    c.whole = c.count <= c.lanes * WHOLE_EACH;
    int64_t step = 2 * c.lanes; /* elements that a team has at a time */
    c.chunk = vjp_max(c.lanes * CHUNK_EACH, vjp_divide_up(vjp_divide_up(c.count, MAX_CHUNKS), step) * step);
    c.chunks = vjp_divide_up(c.count, c.chunk);
    split_parts(&c);
    bool measures = !c.whole && !c.saved && c.normal;
    c.part_sums = measures ? gpu_scratch_bytes(c.rows * c.chunks * 4, 4) : 0;
    c.plane_sums = c.part_sums + (!c.whole && c.dx ? gpu_scratch_bytes(c.rows * c.parts * 4, 4) : 0);
    c.bytes = c.plane_sums + (c.sums ? gpu_scratch_bytes(c.s.batch * c.position_chunks * c.s.channels * 2, 4) : 0);
    return c;
}

static size_t workspace(const vjp_work *work) {
    return split_of(work).bytes;
}

/* `group_items`: how many items each group is split into; a team has one. */
static gpu_launch begin(const vjp_work *work, const split *c, const char *kernel, int64_t group_items) {
    const vjp_group_norm_attributes *a = work->attributes;
    gpu_launch l = gpu_begin(work, kernel);
    int64_t inner = c->last ? c->s.group_channels : c->s.plane;
    l.threads = (int)c->threads;
    gpu_constant(&l, "LAST", c->last);
    gpu_constant(&l, "SAVED", c->saved);
    gpu_constant(&l, "NORMAL", c->normal);
    gpu_u32(&l, c->rows * group_items);
    gpu_u32(&l, c->s.groups);
    gpu_u32(&l, group_items);
    gpu_u32(&l, c->s.channels);
    gpu_u32(&l, c->s.group_channels);
    gpu_u32(&l, c->s.plane);
    gpu_u32(&l, c->lanes);
    gpu_u32(&l, c->teams);
    gpu_u32(&l, c->along);
    gpu_u32(&l, inner);
    gpu_u32(&l, c->last ? c->s.channels : c->s.plane);
    gpu_u32(&l, 2 * c->lanes / inner);
    gpu_u32(&l, 2 * c->lanes % inner);
    gpu_u32(&l, c->chunk);
    gpu_u32(&l, c->chunks);
    gpu_u32(&l, c->channel_chunk);
    gpu_u32(&l, c->position_chunk);
    gpu_u32(&l, c->position_chunks);
    gpu_u32(&l, c->parts);
    gpu_u32(&l, c->s.batch * c->position_chunks);
    gpu_u32(&l, c->columns);
    gpu_u32(&l, a->eps < 1 ? LARGEST_SCALE : 0);
    gpu_f32(&l, a->eps);
    gpu_f32(&l, 1 / (double)c->count);
    return l;
}

static vjp_status enqueue(const gpu_launch *l, const split *c, int64_t group_items) {
    return gpu_enqueue(l, vjp_divide_up(c->rows * group_items, c->teams));
}

/* The length of runs that start at a multiple of it and are stored two elements at a time. */
static int64_t run_of(const split *c) {
    if (!c->last || c->s.groups == 1) return c->count;
    return c->s.group_channels % 2 ? 1 : c->s.group_channels;
}

static void bind_chunks(gpu_launch *l, const split *c, bool output) {
    gpu_scratch(l, "chunks", VJP_F32, 0, c->rows * c->chunks * 4, output);
}

/* Absent where nothing needs them, like the tensors. */
static void bind_part_sums(gpu_launch *l, const split *c, bool output) {
    gpu_scratch(l, "part_sums", VJP_F32, c->part_sums, c->dx ? c->rows * c->parts * 4 : 0, output);
}

static void bind_plane_sums(gpu_launch *l, const split *c, bool output) {
    int64_t count = c->s.batch * c->position_chunks * c->s.channels * 2;
    gpu_scratch(l, "plane_sums", VJP_F32, c->plane_sums, c->sums ? count : 0, output);
}

static vjp_status moments(const vjp_work *work, const split *c, int x) {
    gpu_launch l = begin(work, c, "moments", c->chunks);
    gpu_tensor(&l, "x", x, run_of(c));
    bind_chunks(&l, c, true);
    return enqueue(&l, c, c->chunks);
}

static vjp_status forward(const vjp_work *work) {
    split c = split_of(work);
    bool y = work->tensor[GROUP_NORM_Y];
    if (!c.rows || (!y && !work->tensor[GROUP_NORM_MEAN] && !work->tensor[GROUP_NORM_RSTD])) return VJP_OK;
    vjp_status status = c.whole ? VJP_OK : moments(work, &c, GROUP_NORM_X);
    if (status != VJP_OK) return status;
    int64_t group_items = !c.whole && y ? c.chunks : 1;
    gpu_launch l = begin(work, &c, c.whole ? "forward" : "normalise", group_items);
    gpu_tensor(&l, "y", GROUP_NORM_Y, run_of(&c));
    gpu_tensor(&l, "mean", GROUP_NORM_MEAN, 1);
    gpu_tensor(&l, "rstd", GROUP_NORM_RSTD, 1);
    gpu_tensor(&l, "x", GROUP_NORM_X, run_of(&c));
    gpu_tensor(&l, "gamma", GROUP_NORM_GAMMA, 1);
    gpu_tensor(&l, "beta", GROUP_NORM_BETA, 1);
    if (!c.whole) bind_chunks(&l, &c, false);
    return enqueue(&l, &c, group_items);
}

static void bind_inputs(gpu_launch *l, const split *c) {
    gpu_tensor(l, "dy", GROUP_NORM_B_DY, run_of(c));
    gpu_tensor(l, "x", GROUP_NORM_B_X, run_of(c));
    gpu_tensor(l, "gamma", GROUP_NORM_B_GAMMA, 1);
    if (c->saved) {
        gpu_tensor(l, "mean_in", GROUP_NORM_B_MEAN, 1);
        gpu_tensor(l, "rstd_in", GROUP_NORM_B_RSTD, 1);
    } else if (!c->whole && c->normal) {
        bind_chunks(l, c, false);
    }
}

static vjp_status backward_whole(const vjp_work *work, const split *c) {
    gpu_launch l = begin(work, c, "backward", 1);
    gpu_tensor(&l, "dx", GROUP_NORM_B_DX, run_of(c));
    bind_inputs(&l, c);
    bind_plane_sums(&l, c, true);
    return enqueue(&l, c, 1);
}

static vjp_status backward_split(const vjp_work *work, const split *c) {
    vjp_status status = c->saved || !c->normal ? VJP_OK : moments(work, c, GROUP_NORM_B_X);
    if (status != VJP_OK) return status;
    gpu_launch l = begin(work, c, "sums", c->parts);
    bind_inputs(&l, c);
    bind_part_sums(&l, c, true);
    bind_plane_sums(&l, c, true);
    status = enqueue(&l, c, c->parts);
    if (status != VJP_OK || !c->dx) return status;
    l = begin(work, c, "gradient", c->chunks);
    gpu_tensor(&l, "dx", GROUP_NORM_B_DX, run_of(c));
    bind_inputs(&l, c);
    bind_part_sums(&l, c, false);
    return enqueue(&l, c, c->chunks);
}

/* Without samples the sums are 0. */
static vjp_status finish(const vjp_work *work, const split *c) {
    gpu_launch l = begin(work, c, "finish", 1);
    gpu_tensor(&l, "dgamma", GROUP_NORM_B_DGAMMA, 1);
    gpu_tensor(&l, "dbeta", GROUP_NORM_B_DBETA, 1);
    bind_plane_sums(&l, c, false);
    return gpu_enqueue(&l, vjp_divide_up(c->s.channels, c->columns));
}

static vjp_status backward(const vjp_work *work) {
    split c = split_of(work);
    if (!c.dx && !c.sums) return VJP_OK;
    vjp_status status = VJP_OK;
    if (c.rows) status = c.whole ? backward_whole(work, &c) : backward_split(work, &c);
    return status == VJP_OK && c.sums ? finish(work, &c) : status;
}

const vjp_kernel gpu_group_norm[VJP_PASS_COUNT] = {{forward, workspace, VJP_STORAGE_16_32},
                                                   {backward, workspace, VJP_STORAGE_16_32}};
