/* SPDX-License-Identifier: MIT */
/*
 * Norms of rows of 16 to 8192 elements: a team of threads per row, from a part of a warp to a whole block.
 *
 * It moves the fewest bytes possible: the forward reads x and writes y, the backward reads x and dy and writes dx. A
 * thread owns the same columns of every row: it keeps gamma and its sums of dgamma and dbeta in registers, and a row in
 * registers from its arrival to its dx. What would cost is waiting: a row's sums take about as long as its loads. So
 * each thread copies its own 16-byte vectors of the next rows to shared memory, several rows ahead (no barrier: no
 * other thread reads them), and starts another copy before a row's sums are complete. That keeps about 100 KiB in
 * flight per multiprocessor, where 32 would do, and the teams of a block, and its two blocks, hide one another's
 * barriers.
 *
 * Which columns a thread owns (norm_pipeline.cuh) and the order of all additions depend on dim alone. Tensors that are
 * not aligned are copied element by element to the same places, so the bits are the same. The thread that reads an
 * element is the one that writes it, afterwards: out and the backward's y may be x or dy.
 *
 * Statistics are computed in one pass around a guess, the row's first element, whose distance from the mean is then
 * corrected: a row at 1000 +- 1 loses nothing. A guess that was far off is replaced and the row measured again; where
 * f32 squares leave their range (rows of 1e20 or 1e-20) it is done in double.
 */
#ifndef VJP_CUDA_NORM_ROWS_CUH
#define VJP_CUDA_NORM_ROWS_CUH

#include "cuda/norm/norm_pipeline.cuh"

namespace vjp {
namespace {

/* ---- Statistics -------------------------------------------------------------------------------------- */

/*
 * The sums of x - mean and of its square over the thread's columns of a row. Vectors beyond the row are 0, and so is
 * their mean.
 */
template <class Pipeline>
__device__ void norm_moments(const float (&x)[Pipeline::shape::ELEMENTS], const typename Pipeline::columns &k,
                             float mean, float *both) {
    constexpr int E = WIDE<typename Pipeline::element>;
    both[0] = both[1] = 0;
#pragma unroll
    for (int p = 0; p < Pipeline::shape::VECTORS; p++) {
        float middle = k.has(p) ? mean : 0.0f;
        int count = k.count(p);
#pragma unroll
        for (int e = 0; e < E; e++) {
            float d = x[p * E + e] - middle;
            if (!Pipeline::FIXED && e >= count) d = 0;
            both[0] += d;
            both[1] = fmaf(d, d, both[1]);
        }
    }
}

/* The same in double, from the staged row. Not unrolled: it would be long. */
template <class Pipeline>
__device__ void norm_moments_exact(const Pipeline &pipeline, const typename Pipeline::columns &k, double mean,
                                   double *both) {
    both[0] = both[1] = 0;
#pragma unroll 1
    for (int p = 0; p < Pipeline::shape::VECTORS; p++) {
        float x[WIDE<typename Pipeline::element>];
        pipeline.read(0, p, x);
        int count = k.count(p);
#pragma unroll
        for (int e = 0; e < WIDE<typename Pipeline::element>; e++)
            if (e < count) {
                double d = (double)x[e] - mean;
                both[0] += d;
                both[1] = fma(d, d, both[1]);
            }
    }
}

/* In two passes, in double. */
template <bool LAYER, class Pipeline>
__device__ norm_scale norm_measure_exact(const Pipeline &pipeline, const typename Pipeline::columns &k, double eps,
                                         norm_team_buffers<typename Pipeline::shape> &buffers) {
    double both[2], mean = 0;
    if (LAYER) {
        norm_moments_exact(pipeline, k, 0.0, both);
        norm_team_sum<1>(both, buffers);
        mean = both[0] / k.dim;
    }
    norm_moments_exact(pipeline, k, mean, both);
    norm_team_sum<1>(both + 1, buffers);
    return norm_scale_of(mean, both[1] / k.dim, eps);
}

/*
 * Statistics of the row in x, computed around `mean`, a first guess. If that is farther from the mean than three
 * standard deviations, the mean found is the next guess.
 */
template <bool LAYER, class Pipeline>
__device__ norm_scale norm_measure(const norm_call &c, const Pipeline &pipeline, const typename Pipeline::columns &k,
                                   const float (&x)[Pipeline::shape::ELEMENTS], float mean,
                                   norm_team_buffers<typename Pipeline::shape> &buffers) {
    /* Squares below 1e-38 lose digits, 1e-8 of the smallest sum that is trusted; a large eps hides that. */
    const float largest = 3e38f, smallest = 1e-30f, drowning = 1e-22f, far = 9;
    float both[2], offset = 0, square;
    bool near;
    int guesses = LAYER ? 2 : 1;
#pragma unroll 1
    do {
        mean += offset;
        norm_moments<Pipeline>(x, k, mean, both);
        norm_team_sum<LAYER ? 2 : 1>(both + !LAYER, buffers);
        offset = LAYER ? both[0] * c.inverse : 0.0f;
        square = fmaf(-offset, offset, both[1] * c.inverse);
        near = offset * offset <= far * (square + c.bias);
    } while (!near && --guesses);
    bool trusted = near && square <= largest && (square >= smallest || c.bias >= drowning) && c.bias <= largest;
    if (!trusted) return norm_measure_exact<LAYER>(pipeline, k, c.eps, buffers);
    norm_scale s;
    s.rstd = rsqrtf(square + c.bias);
    s.mean = mean + offset;
    s.rest = ((s.mean - mean) - offset) * s.rstd;
    return s;
}

/* The guess at the mean of this row or the next: its first element. */
template <class Pipeline>
__device__ typename Pipeline::element norm_guess(const norm_call &c, const Pipeline &pipeline,
                                                 const typename Pipeline::columns &k, bool after) {
    return pipeline.from(c, 0, after)[-k.base];
}

/* The statistics saved of this row or the one after. */
template <bool LAYER, class Pipeline>
__device__ norm_scale norm_saved(const norm_call &c, const Pipeline &pipeline, bool after) {
    return {*pipeline.scalar_of(c.rstd_in, after), LAYER ? *pipeline.scalar_of(c.mean_in, after) : 0.0f, 0.0f};
}

/* The thread's elements of this row of x or dy. */
template <class Pipeline>
__device__ void norm_read_row(const Pipeline &pipeline, int t, float (&v)[Pipeline::shape::ELEMENTS]) {
    constexpr int E = WIDE<typename Pipeline::element>;
#pragma unroll
    for (int p = 0; p < Pipeline::shape::VECTORS; p++) {
        float vector[E];
        pipeline.read(t, p, vector);
#pragma unroll
        for (int e = 0; e < E; e++)
            v[p * E + e] = vector[e];
    }
}

/* ---- The kernels ------------------------------------------------------------------------------------- */

/*
 * Each is compiled for every team, for the calls of training (tensors and parameters are aligned, the output is wanted,
 * statistics of a backward are saved) with nothing else in it; and once for all other calls (TEAM = 0).
 */
template <class T, bool LAYER, int TEAM>
__global__ void __launch_bounds__(norm_max_threads<TEAM>, norm_min_blocks<T, LAYER, TEAM, false>)
    norm_rows_forward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    uint4 *dynamic = dynamic_shared<uint4>();
    __shared__ __align__(16) double shared[norm_sum_buffer<TEAM>];
    norm_columns<T, Shape> k(c);
    using Pipeline = norm_pipeline<T, Shape, 1>;
    Pipeline pipeline(c, k, dynamic);
    pipeline.start(c, k);
    constexpr bool IN_WARP = Shape::FIXED && TEAM <= 32; /* the guess is in the team's first lane */
    float gamma[Shape::ELEMENTS], beta[Shape::ELEMENTS];
    T next{}; /* as stored: converted to f32 here, it would be waited for at once */
    norm_parameter<T, Shape> all_gamma(c.gamma, k), all_beta(c.beta, k);
    if (LAYER && !IN_WARP && pipeline.rows > 0) next = norm_guess(c, pipeline, k, false);
    all_gamma.read(1, k, gamma);
    all_beta.read(0, k, beta);
    for (norm_team_buffers<Shape> buffers(k.shape, shared); pipeline.rows > 0; pipeline.next(c, k)) {
        float guess = to_f32(next);
        pipeline.wait_for_row(c, k);
        float x[Shape::ELEMENTS];
        norm_read_row(pipeline, 0, x);
        if (LAYER && IN_WARP)
            guess = __shfl_sync(norm_team_mask(k.shape), x[0], 0, norm_team_lanes(k.shape));
        else if (LAYER && pipeline.rows > 1)
            next = norm_guess(c, pipeline, k, true);
        norm_scale s = norm_measure<LAYER>(c, pipeline, k, x, guess, buffers);
        pipeline.release_inputs(c, k);
        if ((int)threadIdx.x % k.shape.team() == 0) {
            if (c.mean_out) *pipeline.scalar_of(c.mean_out) = s.mean;
            if (c.rstd_out) *pipeline.scalar_of(c.rstd_out) = s.rstd;
        }
        if (!Shape::FIXED && !c.out) continue;
#pragma unroll
        for (int p = 0; p < Shape::VECTORS; p++) {
            float y[WIDE<T>];
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++) {
                int i = p * WIDE<T> + e;
                y[e] = fmaf(norm_xh<LAYER>(s, x[i]), gamma[i], beta[i]);
            }
            pipeline.write(c, k, p, y);
        }
    }
}

/*
 * Lets every team of the block pass as many of its own barriers as the team that passed the most. The block's barrier
 * needs none of this; racecheck, which numbers what happens between barriers, takes teams that are out of step for a
 * race across it. With one barrier per row only the last row can be missing; otherwise they are counted.
 */
template <class Pipeline, class Shape>
__device__ void norm_equalize_barriers(const norm_call &c, Shape shape, int barriers, int *greatest) {
    if constexpr (Shape::FIXED) {
        if (Pipeline::rows_of(c, shape, (int)threadIdx.x / shape.team()) < Pipeline::rows_of(c, shape, 0))
            norm_team_barrier(shape);
    } else {
        atomicMax(greatest, barriers);
        __syncthreads();
        for (int max_passed = atomicMax(greatest, 0); barriers < max_passed; barriers++)
            norm_team_barrier(shape);
    }
}

/*
 * Adds the teams' column sums, in order, and writes the chunk's partials: the teams write theirs to shared memory, in
 * place of the staged rows, then each thread adds a column.
 */
template <class T, class Shape>
__device__ void norm_write_partials(const norm_call &c, Shape shape, float *space,
                                    const float (&dgamma)[Shape::ELEMENTS], const float (&dbeta)[Shape::ELEMENTS]) {
    const int team = shape.team(), stride = shape.stride(), half = Shape::ELEMENTS * stride;
    float *own = space + (int)threadIdx.x / team * shape.team_sums() + (int)threadIdx.x % team;
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++) {
        own[i * stride] = dgamma[i];
        if (c.dbeta.data) own[i * stride + half] = dbeta[i];
    }
    __syncthreads();
    int dim = (int)c.dim, sums = c.dbeta.data ? 2 * dim : dim;
    float *partials = c.partials + (int64_t)blockIdx.x * 2 * dim;
    for (int n = threadIdx.x; n < sums; n += shape.threads()) {
        int is_beta = n >= dim, column = is_beta ? n - dim : n;
        int vector = column / WIDE<T>, element = vector / team * WIDE<T> + column % WIDE<T>;
        int thread = vector % team;
        if (!c.in_vectors) {
            element = column / team;
            thread = column % team;
        }
        const float *from = space + is_beta * half + element * stride + thread;
        double sum = 0;
#pragma unroll 8
        for (int i = 0; i < shape.teams(); i++)
            sum += (double)from[i * shape.team_sums()];
        partials[n] = (float)sum;
    }
}

/*
 * The thread's sums of g * xh and g times NORM_GUARD, which fit where those of dy near f32's largest number do not.
 * From registers, or from the staged row where the kernel does not keep them. In f32, because doubles would spill.
 */
constexpr float NORM_GUARD = 0x1p-20f;

template <bool LAYER, bool KEEP, class Pipeline, int N>
__device__ void norm_guarded_sums(const Pipeline &pipeline, const norm_scale &s, const float (&gamma)[N],
                                  const float (&xh)[N], const float (&g)[N], float *sums) {
    constexpr int E = WIDE<typename Pipeline::element>;
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int p = 0; p < Pipeline::shape::VECTORS; p++) {
        float x[E], dy[E];
        if (!KEEP) {
            pipeline.read(0, p, x);
            pipeline.read(1, p, dy);
        }
#pragma unroll
        for (int e = 0; e < E; e++) {
            int i = p * E + e;
            float weighted = KEEP ? g[i] * NORM_GUARD : dy[e] * NORM_GUARD * gamma[i];
            sums[0] = fmaf(weighted, KEEP ? xh[i] : norm_xh<LAYER>(s, x[e]), sums[0]);
            sums[1] += weighted;
        }
    }
}

/* With Y, a kernel of a fixed shape has no beta, which would take registers from the sums, and does not add to y. */
template <class T, bool LAYER, int TEAM, bool Y>
__global__ void __launch_bounds__(norm_max_threads<TEAM>, norm_min_blocks<T, LAYER, TEAM, true>)
    norm_rows_backward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    uint4 *dynamic = dynamic_shared<uint4>();
    __shared__ __align__(16) double shared[norm_sum_buffer<TEAM>];
    norm_columns<T, Shape> k(c);
    using Pipeline = norm_pipeline<T, Shape, 2>;
    __shared__ int greatest;
    if (!Shape::FIXED) {
        if (threadIdx.x == 0) greatest = 0;
        __syncthreads();
    }
    Pipeline pipeline(c, k, dynamic);
    pipeline.start(c, k);
    float gamma[Shape::ELEMENTS], dgamma[Shape::ELEMENTS], dbeta[Shape::ELEMENTS];
    norm_parameter<T, Shape>(c.gamma, k).read(1, k, gamma);
    [[maybe_unused]] float beta[Shape::ELEMENTS] = {};
    if constexpr (Y && !Shape::FIXED) norm_parameter<T, Shape>(c.beta, k).read(0, k, beta);
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++)
        dgamma[i] = dbeta[i] = 0;
    constexpr bool KEEP = Shape::FIXED; /* xh and g, in registers; otherwise computed again from the staged row */
    bool saved = Shape::FIXED || c.rstd_in;
    norm_scale next{};
    if (saved && pipeline.rows > 0) next = norm_saved<LAYER>(c, pipeline, false);
    norm_team_buffers<Shape> buffers(k.shape, shared);
    for (; pipeline.rows > 0; pipeline.next(c, k)) {
        norm_scale s = next;
        pipeline.wait_for_row(c, k);
        if (!saved) {
            float x[Shape::ELEMENTS];
            norm_read_row(pipeline, 0, x);
            s = norm_measure<LAYER>(c, pipeline, k, x, LAYER ? to_f32(norm_guess(c, pipeline, k, false)) : 0.0f,
                                    buffers);
        } else if (pipeline.rows > 1) {
            next = norm_saved<LAYER>(c, pipeline, true);
        }

        float xh[Shape::ELEMENTS], g[Shape::ELEMENTS], sum_g = 0, sum_gxh = 0;
#pragma unroll
        for (int p = 0; p < Shape::VECTORS; p++) {
            float x[WIDE<T>], dy[WIDE<T>];
            pipeline.read(0, p, x);
            pipeline.read(1, p, dy);
            norm_scale here = s;
            if (!k.has(p)) here.mean = 0; /* as are x and dy there, so they add nothing */
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++) {
                int i = p * WIDE<T> + e;
                xh[i] = norm_xh<LAYER>(here, x[e]);
                dgamma[i] = fmaf(dy[e], xh[i], dgamma[i]);
                dbeta[i] += dy[e];
                g[i] = dy[e] * gamma[i];
                sum_g += g[i];
                sum_gxh = fmaf(g[i], xh[i], sum_gxh);
            }
            if constexpr (Y) {
#pragma unroll
                for (int e = 0; e < WIDE<T>; e++)
                    x[e] = fmaf(xh[p * WIDE<T> + e], gamma[p * WIDE<T> + e], beta[p * WIDE<T> + e]);
                pipeline.template write<true>(c, k, p, x);
            }
        }
        if (KEEP) pipeline.release_inputs(c, k);
        if (Shape::FIXED || c.out) {
            /* dx = rstd * g + (slope * xh + level) */
            float sums[2] = {sum_gxh, sum_g}, slope, level = 0;
            norm_team_sum<LAYER ? 2 : 1>(sums, buffers);
            float restore = 1;
            /* Every thread of the team has these sums. */
            if (!norm_fits(sums[0]) || (LAYER && !norm_fits(sums[1]))) {
                norm_guarded_sums<LAYER, KEEP>(pipeline, s, gamma, xh, g, sums);
                norm_team_sum<LAYER ? 2 : 1>(sums, buffers);
                restore = 1 / NORM_GUARD;
            }
            slope = -s.rstd * (sums[0] * c.inverse * restore);
            if (LAYER) level = -s.rstd * (sums[1] * c.inverse * restore);
#pragma unroll
            for (int p = 0; p < Shape::VECTORS; p++) {
                float x[WIDE<T>], dx[WIDE<T>];
                if (!KEEP) {
                    pipeline.read(0, p, x);
                    pipeline.read(1, p, dx);
                }
#pragma unroll
                for (int e = 0; e < WIDE<T>; e++) {
                    int i = p * WIDE<T> + e;
                    float h = KEEP ? xh[i] : norm_xh<LAYER>(s, x[e]), weighted = KEEP ? g[i] : dx[e] * gamma[i];
                    dx[e] = fmaf(s.rstd, weighted, LAYER ? fmaf(slope, h, level) : slope * h);
                }
                pipeline.write(c, k, p, dx);
            }
        }
        if (!KEEP) pipeline.release_inputs(c, k);
    }
    if (c.sums && k.shape.own_barriers()) norm_equalize_barriers<Pipeline>(c, k.shape, buffers.barriers, &greatest);
    if (c.sums) norm_write_partials<T>(c, k.shape, reinterpret_cast<float *>(dynamic), dgamma, dbeta);
}

/* ---- Launching --------------------------------------------------------------------------------------- */

/*
 * Up to this many rows are staged: six where a row is one tensor, four where it is two or three. As many of them as fit
 * into the 227 KiB of a Hopper multiprocessor beside its other blocks, or into what the card has. The bits do not
 * depend on it.
 */
constexpr int NORM_STAGING_BYTES = 224 << 10, NORM_MAX_STAGES = 6, NORM_MAX_STAGES_OF_MORE = 4;

template <class T, bool LAYER, int TEAM, int TENSORS, bool Y>
vjp_status norm_rows_launch(const vjp_work *work, norm_call c) {
    norm_shape<T, TEAM> shape{c.team};
    constexpr bool BACKWARD = TENSORS == 2;
    int limit = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal);
    if (error != cudaSuccess) return result_of(work, error);
    limit -= (int)sizeof(double) * norm_sum_buffer<TEAM>;
    int tensors = TENSORS + c.add,
        share = NORM_STAGING_BYTES / norm_resident_blocks(c.team, LAYER, BACKWARD, (int)sizeof(T));
    c.stage_bytes = tensors * shape.stage_bytes();
    int fit = (int)vjp_min(share, limit) / c.stage_bytes,
        max = tensors == 1 ? NORM_MAX_STAGES : NORM_MAX_STAGES_OF_MORE;
    /* wait_for_copies() has no case for five. */
    c.stages = !c.aligned ? 1 : fit >= max ? max : (int)vjp_max(1, vjp_min(fit, NORM_MAX_STAGES_OF_MORE));
    size_t shared = (size_t)vjp_max(c.stages * c.stage_bytes, c.sums ? shape.sum_bytes() : 0);
    void (*kernel)(norm_call);
    if constexpr (BACKWARD)
        kernel = norm_rows_backward<T, LAYER, TEAM, Y>;
    else
        kernel = norm_rows_forward<T, LAYER, TEAM>;
    return launch(work, true, kernel, c.chunks, shape.threads(), shared, c);
}

template <class T, bool LAYER, int TENSORS, bool Y> vjp_status norm_rows_launch(const vjp_work *work, norm_call c) {
    c.in_vectors = c.dim % WIDE<T> == 0;
    c.aligned =
        c.in_vectors && is_aligned(c.x, 16) && is_aligned(c.dy, 16) && is_aligned(c.out, 16) && is_aligned(c.y, 16);
    bool usual = c.aligned && is_aligned(c.gamma.data, 16) && is_aligned(c.beta.data, 16) && c.out &&
                 (TENSORS == 1 || c.rstd_in) && !(Y && (c.beta.data || c.add_y));
    switch (usual ? c.team : 0) {
    case 8: return norm_rows_launch<T, LAYER, 8, TENSORS, Y>(work, c);
    case 16: return norm_rows_launch<T, LAYER, 16, TENSORS, Y>(work, c);
    case 64: return norm_rows_launch<T, LAYER, 64, TENSORS, Y>(work, c);
    case 256: return norm_rows_launch<T, LAYER, 256, TENSORS, Y>(work, c);
    case 512: return norm_rows_launch<T, LAYER, 512, TENSORS, Y>(work, c);
    default: return norm_rows_launch<T, LAYER, 0, TENSORS, Y>(work, c);
    }
}

template <bool LAYER> vjp_status norm_rows_run(const vjp_work *work, const norm_call &c) {
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (work->pass == VJP_FORWARD) return norm_rows_launch<T, LAYER, 1, false>(work, c);
        if constexpr (!LAYER)
            if (c.y) return norm_rows_launch<T, LAYER, 2, true>(work, c);
        return norm_rows_launch<T, LAYER, 2, false>(work, c);
    });
}

} // namespace
} // namespace vjp

#endif
