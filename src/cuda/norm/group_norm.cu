/* SPDX-License-Identifier: MIT */
/*
 * group_norm on CUDA: which path a call takes, how it is split, and the sums over the batch. The first that applies:
 *
 *     path       when                                       what                         file
 *     tiny       groups of fewer than 16 elements           a thread per group, double   group_norm_small.cuh
 *     small      groups of up to 1024 elements              lanes of a warp per group    group_norm_small.cuh
 *     passes     channels last                              x and dy read twice or more  group_norm_passes.cuh
 *     passes     few large groups: multiprocessors idle     x and dy read twice or more  group_norm_passes.cuh
 *     registers  fits in a cluster's registers              x and dy read once           group_norm_registers.cuh
 *     shared     fits in a cluster's shared memory          x and dy read once           group_norm_shared.cuh
 *     passes     everything else                            x and dy read twice or more  group_norm_passes.cuh
 *
 * A cluster is up to eight blocks on cards that have clusters (9.x, 10.x), otherwise one block. All paths leave their
 * sums of dy and dy * xh as partials in the workspace, by part of the batch, channel and chunk of the plane; the last
 * kernel adds a channel's partials up, in double and in a fixed order.
 */
#include "cuda/norm/group_norm_passes.cuh"
#include "cuda/norm/group_norm_registers.cuh"
#include "cuda/norm/group_norm_shared.cuh"
#include "cuda/norm/group_norm_small.cuh"

namespace vjp {
namespace {

/* first_, last_: channels first, channels last. */
enum class group_path { tiny, small, registers, shared, first_passes, last_passes };

struct group_plan {
    group_call call;
    group_path path;
    bool wide; /* units of 16 bytes */
    small_split small;
    register_plan registers;
    shared_plan shared;
    last_split last;
    size_t workspace;
    parameter_output dgamma, dbeta;
};

/* ---- Sums over the batch ----------------------------------------------------------------------------- */

constexpr int TOTAL_THREADS = 128, TOTAL_WARPS = TOTAL_THREADS / 32;

/*
 * A warp per channel, in blocks of 4096 registers: as many as register_groups() leaves free, so that this kernel is
 * resident when that one ends. If blocks there counted themselves, so that this one began before all dx is written, it
 * would gain 0.01 of the limit in bf16 and nothing in f32: not worth a counter that outlives the call.
 */
template <class T>
__global__ void __launch_bounds__(TOTAL_THREADS, resident_blocks(TOTAL_THREADS, 16))
    channel_totals(group_call call, parameter_output dgamma, parameter_output dbeta) {
    begin_chained();
    /* 32 bits count a channel's partials: up to MAX_PARTS, or fewer than elements by a factor of a thousand. */
    unsigned lane = threadIdx.x % 32, count = (unsigned)(call.parts * call.chunks), chunks = (unsigned)call.chunks;
    for (int64_t channel = (int64_t)blockIdx.x * TOTAL_WARPS + threadIdx.x / 32; channel < call.channels;
         channel += (int64_t)gridDim.x * TOTAL_WARPS) {
        double sum = 0, product = 0;
#pragma unroll 2
        for (unsigned k = lane; k < count; k += 32) {
            double2 partial = __ldcg(partial_at(call, k / chunks, channel, k % chunks));
            sum += partial.x;
            product += partial.y;
        }
        sum = warp_sum(sum);
        product = warp_sum(product);
        if (lane) continue;
        if (dbeta.data) write_parameter<T>(dbeta, channel, (float)sum);
        if (dgamma.data) write_parameter<T>(dgamma, channel, (float)product);
    }
}

/* ---- The plan ---------------------------------------------------------------------------------------- */

/*
 * Parts of the batch, each with its own partials: one per item of the batch while the partials stay few and small. A
 * block or warp then works through its part in order.
 */
constexpr int64_t MAX_PARTS = 1024;
constexpr int64_t MAX_PARTIAL_BYTES = 64 << 20;

/* With fewer blocks than this, groups with more elements than this together are faster in several passes. */
constexpr int64_t FEW_BLOCKS = 64;
constexpr int64_t LARGE_ELEMENTS = 1 << 18;

/* Channels last: the blocks wanted before a thread takes more than one chain, and the largest number of chains. */
constexpr int64_t LAST_BLOCKS = 1024;
constexpr int64_t LAST_CHAINS = 8;

/* Clusters of eight blocks: data-centre cards since Hopper. */
bool has_clusters(const vjp_work *work) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, state_of(work->device)->ordinal);
    return major == 9 || major == 10;
}

int64_t shared_limit(const vjp_work *work) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal);
    return bytes;
}

int64_t power_of_two_within(int64_t n) {
    int64_t power = 1;
    while (2 * power <= n)
        power *= 2;
    return power;
}

group_call call_of(const vjp_work *work) {
    const auto *a = static_cast<const vjp_group_norm_attributes *>(work->attributes);
    vjp_group_norm_sizes s = vjp_group_norm_sizes_of(work);
    bool backward = work->pass == VJP_BACKWARD;
    bool saved = backward && work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    group_call call{};
    call.x = vjp_data(work, backward ? (int)GROUP_NORM_B_X : (int)GROUP_NORM_X);
    call.out = vjp_data(work, 0);
    call.add = vjp_accumulates(work, 0);
    call.gamma = parameter_of(work, backward ? (int)GROUP_NORM_B_GAMMA : (int)GROUP_NORM_GAMMA);
    if (backward) {
        call.dy = vjp_data(work, GROUP_NORM_B_DY);
        call.mean_in = saved ? static_cast<const float *>(vjp_data(work, GROUP_NORM_B_MEAN)) : nullptr;
        call.rstd_in = saved ? static_cast<const float *>(vjp_data(work, GROUP_NORM_B_RSTD)) : nullptr;
    } else {
        call.beta = parameter_of(work, GROUP_NORM_BETA);
        call.mean_out = static_cast<float *>(vjp_data(work, GROUP_NORM_MEAN));
        call.rstd_out = static_cast<float *>(vjp_data(work, GROUP_NORM_RSTD));
    }
    call.eps = a->eps;
    call.batch = s.batch;
    call.channels = s.channels;
    call.groups = s.groups;
    call.group_channels = s.group_channels;
    call.plane = s.plane;
    call.share = 1 / (double)(s.group_channels * s.plane);
    /* With one channel, or a plane of one element, both layouts are the same. */
    bool last = s.channel_stride == 1 && s.plane > 1 && s.channels > 1;
    call.channel_stride = last ? 1 : s.plane;
    call.place_stride = last ? s.channels : 1;
    call.aligned = is_aligned(call.x, 16) && is_aligned(call.dy, 16) && is_aligned(call.out, 16);
    return call;
}

/* Lanes for a small group: at least one element each. */
small_split split_small(const group_call &call, int64_t width) {
    bool last = call.place_stride != 1;
    int64_t units = call.plane / width, lanes = vjp_min(32, power_of_two_within(call.group_channels * units));
    int64_t along = last ? lanes / vjp_min(lanes, power_of_two_within(call.group_channels))
                         : vjp_min(lanes, power_of_two_within(units));
    int64_t across = lanes / along;
    return {(int)lanes, (int)along, last ? (int)across : 1, last ? 1 : (int)along, (int)units};
}

last_split split_last(const group_call &call, int64_t width) {
    int64_t units = call.channels / width, tiles = vjp_divide_up(units, LAST_THREADS),
            columns = vjp_divide_up(units, tiles);
    int64_t abreast = LAST_THREADS / columns;
    int64_t blocks = vjp_divide_up(call.plane, abreast * CHAIN_UNITS) * call.batch * tiles;
    int64_t chains = vjp_max(1, vjp_min(LAST_CHAINS, blocks / LAST_BLOCKS));
    return {tiles, (int)columns, (int)abreast, (int)(chains * CHAIN_UNITS)};
}

/* The layout of the partials: [part][channel][chunk], or [part][chunk][channel]. */
void lay_out_partials(group_call *call, int64_t parts, bool channels_inside) {
    call->each = parts ? vjp_divide_up(call->batch, parts) : 1;
    call->parts = vjp_divide_up(call->batch, call->each);
    call->part_step = call->channels * call->chunks;
    call->channel_step = channels_inside ? 1 : call->chunks;
    call->chunk_step = channels_inside ? call->channels : 1;
}

int64_t max_parts(const group_call &call, int64_t chunks) {
    int64_t part_bytes = call.channels * chunks * (int64_t)sizeof(double2);
    return vjp_max(1, vjp_min(MAX_PARTS, MAX_PARTIAL_BYTES / part_bytes));
}

group_path choose(const vjp_work *work, group_plan *plan) {
    group_call &call = plan->call;
    bool backward = work->pass == VJP_BACKWARD, last = call.place_stride != 1;
    int64_t bytes = (int64_t)vjp_dtype_size(work->storage), span = call.group_channels * call.plane;
    int64_t wide = 16 / bytes, rows = call.batch * call.groups;
    if (span < TINY) return group_path::tiny;
    plan->wide = (last ? call.channels : call.plane) % wide == 0 && !(last && span <= SMALL);
    int width = plan->wide ? (int)wide : 1;
    if (span <= SMALL) {
        plan->small = split_small(call, width);
        return group_path::small;
    }
    if (last) {
        plan->last = split_last(call, width);
        return group_path::last_passes;
    }
    int64_t blocks = 0;
    group_path path = group_path::first_passes;
    if (plan->wide && plan_registers(call, bytes, backward, has_clusters(work), shared_limit(work), &plan->registers) &&
        (!backward || call.batch <= max_parts(call, plan->registers.split.segments))) {
        path = group_path::registers;
        blocks = plan->registers.split.blocks;
    } else if ((plan->wide || bytes == 4) && /* copies of single 16-bit elements cannot be asynchronous */
               plan_shared(call, width, bytes, backward ? 2 : 1, has_clusters(work), shared_limit(work),
                           &plan->shared)) {
        path = group_path::shared;
        blocks = plan->shared.split.blocks;
    }
    bool few = rows * blocks < FEW_BLOCKS && rows * span > LARGE_ELEMENTS;
    return few ? group_path::first_passes : path;
}

/* Partials are needed for dgamma and dbeta, and where one kernel passes moments or sums to the next. */
group_plan plan_of(const vjp_work *work) {
    group_plan plan{};
    plan.call = call_of(work);
    group_call &call = plan.call;
    bool backward = work->pass == VJP_BACKWARD;
    if (backward) {
        plan.dgamma = parameter_output_of(work, GROUP_NORM_B_DGAMMA);
        plan.dbeta = parameter_output_of(work, GROUP_NORM_B_DBETA);
    }
    bool totals = plan.dgamma.data || plan.dbeta.data;
    plan.path = choose(work, &plan);
    call.chunks = 1;
    call.chunk = call.plane;
    workspace_layout layout(work->workspace);
    if (plan.path == group_path::first_passes || plan.path == group_path::last_passes) {
        bool last = plan.path == group_path::last_passes;
        if (last) {
            call.chunk = (int64_t)plan.last.abreast * plan.last.depth;
        } else {
            int64_t width = plan.wide ? 16 / (int64_t)vjp_dtype_size(work->storage) : 1, units = call.plane / width;
            call.chunk = vjp_divide_up(units, vjp_divide_up(units, 32 * CHAIN_UNITS)) * width;
        }
        call.chunks = vjp_divide_up(call.plane, call.chunk);
        lay_out_partials(&call, call.batch, last);
        int64_t rows = call.batch * call.groups;
        if (!call.mean_in) call.scales = layout.take<scale>(rows);
        if (backward) call.maps = layout.take<affine>(rows);
        call.partials = layout.take<double2>(call.parts * call.part_step);
    } else {
        if (plan.path == group_path::registers) call.chunks = plan.registers.split.segments;
        if (plan.path == group_path::shared) call.chunks = plan.shared.split.segments;
        lay_out_partials(&call, totals ? vjp_min(call.batch, max_parts(call, call.chunks)) : call.batch, false);
        if (totals) call.partials = layout.take<double2>(call.parts * call.part_step);
    }
    plan.workspace = layout.max;
    return plan;
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

/* Clusters that are resident at once. */
template <class... Parameters>
cudaError_t clusters_at_once(const vjp_work *work, void (*kernel)(Parameters...), const cudaLaunchConfig_t &config,
                             int blocks, int resident, int *clusters) {
    if (blocks > 1) return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
    cudaError_t error =
        cudaDeviceGetAttribute(clusters, cudaDevAttrMultiProcessorCount, state_of(work->device)->ordinal);
    *clusters *= resident;
    return error;
}

/* As launch(), chained, but persistent clusters: no more than are resident at once, or than there are work items. */
template <class Split>
vjp_status launch_persistent(const vjp_work *work, const group_call &call, const Split &split, int threads,
                             size_t shared, int resident, void (*kernel)(group_call, Split), int64_t items) {
    /* As much of the multiprocessor's memory as possible is shared memory. */
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess && shared > 48 << 10)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return result_of(work, error);
    int blocks = split.blocks, clusters = 0;
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream_of(work);
    config.attrs = attributes;
    if (blocks > 1) {
        cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = (unsigned)blocks;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    error = clusters_at_once(work, kernel, config, blocks, resident, &clusters);
    if (error != cudaSuccess) return result_of(work, error);
    config.gridDim = dim3((unsigned)(blocks * vjp_min(items, vjp_max(1, clusters))));
    if (state_of(work->device)->chains) {
        cudaLaunchAttribute &overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    return result_of(work, cudaLaunchKernelEx(&config, kernel, call, split));
}

/* A launch for each pass over the tensors. */
template <class T, int WIDTH, bool BACKWARD> vjp_status run_passes(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    bool last = plan.path == group_path::last_passes;
    int64_t rows = vjp_min(call.batch * call.groups, MAX_BLOCKS);
    int64_t first_grid = vjp_min(vjp_divide_up(call.batch * call.channels * call.chunks, FIRST_WARPS), MAX_BLOCKS);
    int64_t last_grid = last ? vjp_min(call.batch * call.chunks * plan.last.tiles, MAX_BLOCKS) : 0;
    vjp_status status = VJP_OK;
    if (!call.mean_in) {
        status = last ? launch(work, true, last_moments<T, WIDTH>, last_grid, LAST_THREADS, 0, call, plan.last)
                      : launch(work, true, first_moments<T, WIDTH>, first_grid, FIRST_THREADS, 0, call);
        if (status == VJP_OK) status = launch(work, true, group_scales, rows, GROUP_THREADS, 0, call);
    }
    if (BACKWARD && status == VJP_OK) {
        status = last ? launch(work, true, last_sums<T, WIDTH>, last_grid, LAST_THREADS, 0, call, plan.last)
                      : launch(work, true, first_sums<T, WIDTH>, first_grid, FIRST_THREADS, 0, call);
        if (call.out && status == VJP_OK) status = launch(work, true, group_maps<T>, rows, GROUP_THREADS, 0, call);
    }
    if (!call.out || status != VJP_OK) return status;
    return last ? launch(work, true, last_results<T, WIDTH, BACKWARD>, last_grid, LAST_THREADS, 0, call, plan.last)
                : launch(work, true, first_results<T, WIDTH, BACKWARD>, first_grid, FIRST_THREADS, 0, call);
}

template <class T, int LINES, bool BACKWARD> vjp_status run_lines(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    const register_plan &registers = plan.registers;
    bool usual = call.aligned && call.out && !call.add && (!BACKWARD || call.mean_in);
    return launch_persistent(
        work, call, registers.split, registers.split.warps * 32, registers.shared, registers.resident,
        usual ? register_groups<T, LINES, BACKWARD, true> : register_groups<T, LINES, BACKWARD, false>,
        call.batch * call.groups);
}

template <class T, bool BACKWARD> vjp_status run_registers(const vjp_work *work, const group_plan &plan) {
    if constexpr (!BACKWARD)
        if (plan.registers.lines == 16) return run_lines<T, 16, BACKWARD>(work, plan);
    return plan.registers.lines == 8 ? run_lines<T, 8, BACKWARD>(work, plan) : run_lines<T, 4, BACKWARD>(work, plan);
}

template <class T, int WIDTH, bool BACKWARD> vjp_status run_path(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    int64_t items = call.parts * call.groups;
    switch (plan.path) {
    case group_path::tiny: /* for any width and either pass */
        return launch(work, true, tiny_groups<T>, vjp_min(vjp_divide_up(items, TINY_THREADS), MAX_BLOCKS), TINY_THREADS,
                      0, call);
    case group_path::small: {
        int64_t grid = vjp_min(vjp_divide_up(items, SMALL_THREADS / plan.small.lanes), MAX_BLOCKS);
        return launch(work, true, small_groups<T, WIDTH, BACKWARD>, grid, SMALL_THREADS, 0, call, plan.small);
    }
    case group_path::registers:
        if constexpr (WIDTH > 1) return run_registers<T, BACKWARD>(work, plan);
        [[fallthrough]];
    case group_path::shared:
        if constexpr (WIDTH * sizeof(T) >= 4)
            return launch_persistent(work, call, plan.shared.split, plan.shared.threads, plan.shared.shared,
                                     plan.shared.resident, shared_groups<T, WIDTH, BACKWARD>, items);
        [[fallthrough]];
    default: return run_passes<T, WIDTH, BACKWARD>(work, plan);
    }
}

vjp_status run(const vjp_work *work) {
    group_plan plan = plan_of(work);
    const group_call &call = plan.call;
    bool totals = plan.dgamma.data || plan.dbeta.data;
    if (!call.out && !call.mean_out && !call.rstd_out && !totals) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        vjp_status status = VJP_OK;
        if (call.batch)
            status = with_bool(plan.wide, [&](auto wide) {
                return with_bool(work->pass == VJP_BACKWARD, [&](auto backward) {
                    constexpr int width = decltype(wide)::value ? WIDE<T> : 1;
                    return run_path<T, width, decltype(backward)::value>(work, plan);
                });
            });
        if (!totals || status != VJP_OK) return status;
        return launch(work, true, channel_totals<T>, vjp_min(vjp_divide_up(call.channels, TOTAL_WARPS), MAX_BLOCKS),
                      TOTAL_THREADS, 0, call, plan.dgamma, plan.dbeta);
    });
}

size_t workspace(const vjp_work *work) {
    return plan_of(work).workspace;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_group_norm[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_group_norm[VJP_PASS_COUNT] = {
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
};
}
