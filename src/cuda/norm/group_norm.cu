/*
 * group_norm on CUDA: which of its forms a call takes, how it is cut, and the sums over the batch.
 *
 *   handfuls  fewer than 16 elements a group: a thread a group, in double          group_norm_small.cuh
 *   small     up to 1024: some lanes of a warp a group
 *   held      backward, channels first, what a cluster's registers hold: one read  group_norm_held.cuh
 *   whole     channels first, what a cluster's shared memory holds: one read       group_norm_whole.cuh
 *   pieces    everything else: a kernel for each look at x and dy                  group_norm_pieces.cuh
 *
 * All leave their sums of dy and dy * xh in cells of the workspace, by part of the batch, channel and piece of the
 * plane; the last kernel adds a channel's cells up, in double and in a fixed order.
 */
#include "cuda/norm/group_norm_held.cuh"
#include "cuda/norm/group_norm_pieces.cuh"
#include "cuda/norm/group_norm_small.cuh"
#include "cuda/norm/group_norm_whole.cuh"

namespace vjp {
namespace {

enum class form { handfuls, small, held, whole, first_pieces, last_pieces };

struct group_plan {
    group_call call;
    form how;
    bool wide; /* units of 16 bytes */
    small_cut small;
    held_plan held;
    whole_plan whole;
    last_cut last;
    size_t workspace;
    parameter_output dgamma, dbeta;
};

/* ---- Sums over the batch ----------------------------------------------------------------------------- */

constexpr int TOTAL_THREADS = 128, TOTAL_WARPS = TOTAL_THREADS / 32;

/*
 * A warp a channel, in blocks of 4096 registers: as many as held_groups() leaves free, so that this one is on the card
 * when that ends. Blocks there that count themselves in, for this one to begin before all dx is written, were worth
 * 0.01 of the limit in bf16 and nothing in f32: less than a count that outlives the call.
 */
template <class T>
__global__ void __launch_bounds__(TOTAL_THREADS, resident_blocks(TOTAL_THREADS, 16))
    channel_totals(group_call call, parameter_output dgamma, parameter_output dbeta) {
    take_turn();
    /* 32 bits count a channel's cells: up to MOST_PARTS, or fewer than elements by a thousand. */
    unsigned lane = threadIdx.x % 32, count = (unsigned)(call.parts * call.pieces), pieces = (unsigned)call.pieces;
    for (int64_t channel = (int64_t)blockIdx.x * TOTAL_WARPS + threadIdx.x / 32; channel < call.channels;
         channel += (int64_t)gridDim.x * TOTAL_WARPS) {
        double sum = 0, product = 0;
#pragma unroll 2
        for (unsigned k = lane; k < count; k += 32) {
            double2 cell = __ldcg(cell_at(call, k / pieces, channel, k % pieces));
            sum += cell.x;
            product += cell.y;
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
 * Parts of the batch, each with cells of its own: one for each of the batch while the cells stay few and small. A
 * block or warp then works through its part in order.
 */
constexpr int64_t MOST_PARTS = 1024;
constexpr int64_t MOST_CELL_BYTES = 64 << 20;

/* With fewer blocks than this, groups that are large together are better cut into pieces. */
constexpr int64_t WHOLE_BLOCKS = 64;
constexpr int64_t WHOLE_ELEMENTS = 1 << 18;

/* Channels last: blocks wanted before a thread walks further than one chain, and chains that it walks at most. */
constexpr int64_t LAST_BLOCKS = 1024;
constexpr int64_t LAST_CHAINS = 8;

/* Clusters as wide as ours: cards of the data centre since Hopper. */
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
    /* With one channel, or a plane of one element, the layouts are the same memory. */
    bool last = s.channel_stride == 1 && s.plane > 1 && s.channels > 1;
    call.channel_stride = last ? 1 : s.plane;
    call.place_stride = last ? s.channels : 1;
    call.aligned = is_aligned(call.x, 16) && is_aligned(call.dy, 16) && is_aligned(call.out, 16);
    return call;
}

/* Lanes for a small group: at least an element each. */
small_cut cut_small(const group_call &call, int64_t width) {
    bool last = call.place_stride != 1;
    int64_t units = call.plane / width, lanes = least(32, power_of_two_within(call.group_channels * units));
    int64_t along = last ? lanes / least(lanes, power_of_two_within(call.group_channels))
                         : least(lanes, power_of_two_within(units));
    int64_t across = lanes / along;
    return {(int)lanes, (int)along, last ? (int)across : 1, last ? 1 : (int)along, (int)units};
}

last_cut cut_last(const group_call &call, int64_t width) {
    int64_t units = call.channels / width, tiles = divide_up(units, LAST_THREADS), columns = divide_up(units, tiles);
    int64_t abreast = LAST_THREADS / columns;
    int64_t blocks = divide_up(call.plane, abreast * CHAIN_UNITS) * call.batch * tiles;
    int64_t chains = most(1, least(LAST_CHAINS, blocks / LAST_BLOCKS));
    return {tiles, (int)columns, (int)abreast, (int)(chains * CHAIN_UNITS)};
}

/* Lays the cells out: [part][channel][piece], or [part][piece][channel]. */
void lay_cells(group_call *call, int64_t parts, bool channels_inside) {
    call->each = parts ? divide_up(call->batch, parts) : 1;
    call->parts = divide_up(call->batch, call->each);
    call->part_step = call->channels * call->pieces;
    call->channel_step = channels_inside ? 1 : call->pieces;
    call->piece_step = channels_inside ? call->channels : 1;
}

int64_t most_parts(const group_call &call, int64_t pieces) {
    int64_t a_part = call.channels * pieces * (int64_t)sizeof(double2);
    return most(1, least(MOST_PARTS, MOST_CELL_BYTES / a_part));
}

form choose(const vjp_work *work, group_plan *plan) {
    group_call &call = plan->call;
    bool backward = work->pass == VJP_BACKWARD, last = call.place_stride != 1;
    int64_t bytes = (int64_t)vjp_dtype_size(work->storage), span = call.group_channels * call.plane;
    int64_t wide = 16 / bytes, rows = call.batch * call.groups;
    if (span < HANDFUL) return form::handfuls;
    plan->wide = (last ? call.channels : call.plane) % wide == 0 && !(last && span <= SMALL);
    int width = plan->wide ? (int)wide : 1;
    if (span <= SMALL) {
        plan->small = cut_small(call, width);
        return form::small;
    }
    if (last) {
        plan->last = cut_last(call, width);
        return form::last_pieces;
    }
    int64_t blocks = 0;
    form how = form::first_pieces;
    if (backward && plan->wide && plan_held(call, bytes, has_clusters(work), shared_limit(work), &plan->held) &&
        call.batch <= most_parts(call, plan->held.cut.segments)) {
        how = form::held;
        blocks = plan->held.cut.blocks;
    } else if ((plan->wide || bytes == 4) && /* copies of one 16-bit element cannot be asynchronous */
               plan_whole(call, width, bytes, backward ? 2 : 1, has_clusters(work), shared_limit(work), &plan->whole)) {
        how = form::whole;
        blocks = plan->whole.cut.blocks;
    }
    bool few = rows * blocks < WHOLE_BLOCKS && rows * span > WHOLE_ELEMENTS;
    return few ? form::first_pieces : how;
}

/* Takes `bytes` of the workspace, from `*used` on. */
void *take(const vjp_work *work, size_t *used, int64_t bytes) {
    void *at = work->workspace ? static_cast<char *>(work->workspace) + *used : nullptr;
    *used += (size_t)divide_up(bytes, 64) * 64;
    return at;
}

/* Cells are wanted for dgamma and dbeta, and where kernels hand moments or sums on. */
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
    plan.how = choose(work, &plan);
    call.pieces = 1;
    call.piece = call.plane;
    size_t used = 0;
    if (plan.how == form::first_pieces || plan.how == form::last_pieces) {
        bool last = plan.how == form::last_pieces;
        if (last) {
            call.piece = (int64_t)plan.last.abreast * plan.last.walk;
        } else {
            int64_t width = plan.wide ? 16 / (int64_t)vjp_dtype_size(work->storage) : 1, units = call.plane / width;
            call.piece = divide_up(units, divide_up(units, 32 * CHAIN_UNITS)) * width;
        }
        call.pieces = divide_up(call.plane, call.piece);
        lay_cells(&call, call.batch, last);
        int64_t rows = call.batch * call.groups;
        if (!call.mean_in) call.scales = static_cast<scale *>(take(work, &used, rows * (int64_t)sizeof(scale)));
        if (backward) call.lines = static_cast<slopes *>(take(work, &used, rows * (int64_t)sizeof(slopes)));
        call.cells = static_cast<double2 *>(take(work, &used, call.parts * call.part_step * (int64_t)sizeof(double2)));
    } else {
        if (plan.how == form::held) call.pieces = plan.held.cut.segments;
        if (plan.how == form::whole) call.pieces = plan.whole.cut.segments;
        lay_cells(&call, totals ? least(call.batch, most_parts(call, call.pieces)) : call.batch, false);
        if (totals)
            call.cells =
                static_cast<double2 *>(take(work, &used, call.parts * call.part_step * (int64_t)sizeof(double2)));
    }
    plan.workspace = used;
    return plan;
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

/* Clusters that are on the card at a time. */
template <class... Parameters>
cudaError_t clusters_at_once(const vjp_work *work, void (*kernel)(Parameters...), const cudaLaunchConfig_t &config,
                             int blocks, int resident, int *clusters) {
    if (blocks > 1) return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
    cudaError_t error =
        cudaDeviceGetAttribute(clusters, cudaDevAttrMultiProcessorCount, state_of(work->device)->ordinal);
    *clusters *= resident;
    return error;
}

/* launch(), chained, in clusters that stay: no more than there is room for, or than there are items. */
template <class Cut>
vjp_status launch_whole(const vjp_work *work, const group_call &call, const Cut &cut, int threads, size_t shared,
                        int resident, void (*kernel)(group_call, Cut), int64_t items) {
    /* All of the multiprocessor's memory that can be shared is. */
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess && shared > 48 << 10)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return result_of(work, error);
    int blocks = cut.blocks, clusters = 0;
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
    config.gridDim = dim3((unsigned)(blocks * least(items, most(1, clusters))));
    if (state_of(work->device)->chains) {
        cudaLaunchAttribute &overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    return result_of(work, cudaLaunchKernelEx(&config, kernel, call, cut));
}

/* A launch for each look at the tensors, each behind the one before. */
template <class T, int WIDTH, bool BACKWARD> vjp_status run_pieces(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    bool last = plan.how == form::last_pieces;
    int64_t rows = least(call.batch * call.groups, MOST_BLOCKS);
    int64_t first_grid = least(divide_up(call.batch * call.channels * call.pieces, FIRST_WARPS), MOST_BLOCKS);
    int64_t last_grid = last ? least(call.batch * call.pieces * plan.last.tiles, MOST_BLOCKS) : 0;
    vjp_status status = VJP_OK;
    if (!call.mean_in) {
        status = last ? launch(work, true, last_moments<T, WIDTH>, last_grid, LAST_THREADS, 0, call, plan.last)
                      : launch(work, true, first_moments<T, WIDTH>, first_grid, FIRST_THREADS, 0, call);
        if (status == VJP_OK) status = launch(work, true, group_scales, rows, CELL_THREADS, 0, call);
    }
    if (BACKWARD && status == VJP_OK) {
        status = last ? launch(work, true, last_sums<T, WIDTH>, last_grid, LAST_THREADS, 0, call, plan.last)
                      : launch(work, true, first_sums<T, WIDTH>, first_grid, FIRST_THREADS, 0, call);
        if (call.out && status == VJP_OK) status = launch(work, true, group_lines<T>, rows, CELL_THREADS, 0, call);
    }
    if (!call.out || status != VJP_OK) return status;
    return last ? launch(work, true, last_results<T, WIDTH, BACKWARD>, last_grid, LAST_THREADS, 0, call, plan.last)
                : launch(work, true, first_results<T, WIDTH, BACKWARD>, first_grid, FIRST_THREADS, 0, call);
}

template <class T> vjp_status run_held(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    const held_plan &held = plan.held;
    bool usual = call.aligned && call.out && !call.add && call.mean_in;
    auto kernel = held.lines == 8 ? (usual ? held_groups<T, 8, true> : held_groups<T, 8, false>)
                                  : (usual ? held_groups<T, 4, true> : held_groups<T, 4, false>);
    return launch_whole(work, call, held.cut, held.cut.warps * 32, held.shared, held.resident, kernel,
                        call.batch * call.groups);
}

template <class T, int WIDTH, bool BACKWARD> vjp_status run_form(const vjp_work *work, const group_plan &plan) {
    const group_call &call = plan.call;
    int64_t items = call.parts * call.groups;
    switch (plan.how) {
    case form::handfuls: /* of any width, and of either pass */
        return launch(work, true, handfuls<T>, least(divide_up(items, HANDFUL_THREADS), MOST_BLOCKS), HANDFUL_THREADS,
                      0, call);
    case form::small: {
        int64_t grid = least(divide_up(items, SMALL_THREADS / plan.small.lanes), MOST_BLOCKS);
        return launch(work, true, small_groups<T, WIDTH, BACKWARD>, grid, SMALL_THREADS, 0, call, plan.small);
    }
    case form::held:
        if constexpr (BACKWARD && WIDTH > 1) return run_held<T>(work, plan);
        [[fallthrough]];
    case form::whole:
        if constexpr (WIDTH * sizeof(T) >= 4)
            return launch_whole(work, call, plan.whole.cut, plan.whole.threads, plan.whole.shared, plan.whole.resident,
                                whole_groups<T, WIDTH, BACKWARD>, items);
        [[fallthrough]];
    default: return run_pieces<T, WIDTH, BACKWARD>(work, plan);
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
            status = with_truth(plan.wide, [&](auto wide) {
                return with_truth(work->pass == VJP_BACKWARD, [&](auto backward) {
                    constexpr int width = decltype(wide)::value ? WIDE<T> : 1;
                    return run_form<T, width, decltype(backward)::value>(work, plan);
                });
            });
        if (!totals || status != VJP_OK) return status;
        return launch(work, true, channel_totals<T>, least(divide_up(call.channels, TOTAL_WARPS), MOST_BLOCKS),
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
    {vjp::run, vjp::workspace, VJP_BITS_CPU},
    {vjp::run, vjp::workspace, VJP_BITS_CPU},
};
}
