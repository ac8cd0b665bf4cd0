/*
 * Norms of rows of 16 to 8192 elements: a team of threads a row, from a part of a warp to a whole block.
 *
 * Least bytes, which are what is moved: the forward reads x and writes y, the backward reads x and dy and writes dx.
 * A thread owns the same columns of every row: it keeps gamma and its sums of dgamma and dbeta in registers, and a row
 * in registers from its arrival to its dx. What would cost is waiting: a row's sums take about as long as its loads. So
 * each thread copies its own 16-byte pieces of the next rows to shared memory, several rows ahead (no barrier: nobody
 * else reads them), and asks for another before a row's sums are complete. That keeps about 100 KiB under way on a
 * multiprocessor, where 32 would do, and the teams of a block, and its two blocks, hide one another's barriers.
 *
 * Which columns are a thread's (norm_walk.cuh) and the order of all additions depend on dim alone. Tensors that are not
 * aligned are copied an element at a time to the same places, so the bits are the same. The thread that reads an
 * element is the one that writes it, after: out may be x or dy.
 *
 * Statistics are measured in one go around a guess, the row's first element, whose distance from the mean is then
 * corrected: a row at 1000 +- 1 loses nothing. A guess that was far off is mended and the row measured again; where f32
 * squares leave their range (rows of 1e20 or 1e-20) it is done in double.
 */
#ifndef VJP_CUDA_NORM_ROWS_CUH
#define VJP_CUDA_NORM_ROWS_CUH

#include "cuda/norm/norm_walk.cuh"

namespace vjp {
namespace {

/* ---- Statistics -------------------------------------------------------------------------------------- */

/*
 * The sums of x - mean and of its square over the thread's columns of a row. Pieces past the row are 0, and so is their
 * mean.
 */
template <class Walk>
__device__ void norm_moments(const float (&x)[Walk::shape::ELEMENTS], const typename Walk::columns &k, float mean,
                             float *both) {
    constexpr int E = WIDE<typename Walk::element>;
    both[0] = both[1] = 0;
#pragma unroll
    for (int p = 0; p < Walk::shape::PIECES; p++) {
        float middle = k.has(p) ? mean : 0.0f;
        int left = k.left(p);
#pragma unroll
        for (int e = 0; e < E; e++) {
            float d = x[p * E + e] - middle;
            if (!Walk::WHOLE && e >= left) d = 0;
            both[0] += d;
            both[1] = fmaf(d, d, both[1]);
        }
    }
}

/* The same in double, from the staged row: rolled up, for it would be long. */
template <class Walk>
__device__ void norm_moments_exact(const Walk &walk, const typename Walk::columns &k, double mean, double *both) {
    both[0] = both[1] = 0;
#pragma unroll 1
    for (int p = 0; p < Walk::shape::PIECES; p++) {
        float x[WIDE<typename Walk::element>];
        walk.read(0, p, x);
        int left = k.left(p);
#pragma unroll
        for (int e = 0; e < WIDE<typename Walk::element>; e++)
            if (e < left) {
                double d = (double)x[e] - mean;
                both[0] += d;
                both[1] = fma(d, d, both[1]);
            }
    }
}

/* Plainly, in double. */
template <bool LAYER, class Walk>
__device__ norm_scale norm_measure_exact(const Walk &walk, const typename Walk::columns &k, double eps,
                                         norm_team_room<typename Walk::shape> &room) {
    double both[2], mean = 0;
    if (LAYER) {
        norm_moments_exact(walk, k, 0.0, both);
        norm_team_sum<typename Walk::shape, 1>(both, room);
        mean = both[0] / k.dim;
    }
    norm_moments_exact(walk, k, mean, both);
    norm_team_sum<typename Walk::shape, 1>(both + 1, room);
    return norm_scale_of(mean, both[1] / k.dim, eps);
}

/*
 * Statistics of the row in x, measured around `mean`, a first guess. Where that is farther from the mean than three
 * standard deviations, what is found of the mean is the next guess.
 */
template <bool LAYER, class Walk>
__device__ norm_scale norm_measure(const norm_call &c, const Walk &walk, const typename Walk::columns &k,
                                   const float (&x)[Walk::shape::ELEMENTS], float mean,
                                   norm_team_room<typename Walk::shape> &room) {
    /* Squares below 1e-38 lose digits, 1e-8 of the smallest sum that is trusted; an eps may drown them. */
    const float largest = 3e38f, smallest = 1e-30f, drowning = 1e-22f, far = 9;
    float both[2], offset = 0, square;
    bool near;
    int guesses = LAYER ? 2 : 1;
#pragma unroll 1
    do {
        mean += offset;
        norm_moments<Walk>(x, k, mean, both);
        norm_team_sum<typename Walk::shape, LAYER ? 2 : 1>(both + !LAYER, room);
        offset = LAYER ? both[0] * c.inverse : 0.0f;
        square = fmaf(-offset, offset, both[1] * c.inverse);
        near = offset * offset <= far * (square + c.bias);
    } while (!near && --guesses);
    bool trusted = near && square <= largest && (square >= smallest || c.bias >= drowning) && c.bias <= largest;
    if (!trusted) return norm_measure_exact<LAYER>(walk, k, c.eps, room);
    norm_scale s;
    s.rstd = rsqrtf(square + c.bias);
    s.mean = mean + offset;
    s.rest = ((s.mean - mean) - offset) * s.rstd;
    return s;
}

/* The guess at the mean of this row or the one after: its first element. */
template <class Walk>
__device__ typename Walk::element norm_guess(const norm_call &c, const Walk &walk, const typename Walk::columns &k,
                                             bool after) {
    return walk.from(c, 0, after)[-k.base];
}

/* The statistics saved of this row or the one after. */
template <bool LAYER, class Walk> __device__ norm_scale norm_saved(const norm_call &c, const Walk &walk, bool after) {
    return {*walk.single(c.rstd_in, after), LAYER ? *walk.single(c.mean_in, after) : 0.0f, 0.0f};
}

/* The thread's elements of this row of x or dy. */
template <class Walk> __device__ void norm_read_row(const Walk &walk, int t, float (&v)[Walk::shape::ELEMENTS]) {
    constexpr int E = WIDE<typename Walk::element>;
#pragma unroll
    for (int p = 0; p < Walk::shape::PIECES; p++) {
        float piece[E];
        walk.read(t, p, piece);
#pragma unroll
        for (int e = 0; e < E; e++)
            v[p * E + e] = piece[e];
    }
}

/* ---- The kernels ------------------------------------------------------------------------------------- */

/*
 * Each is compiled twice: for what training calls (STAGES > 0: tensors are aligned, the output is wanted and
 * overwritten, statistics of a backward saved) with nothing in it but that, and with all choices at run time (STAGES =
 * 0).
 */
template <class T, bool LAYER, int TEAM, int STAGES>
__global__ void __launch_bounds__(norm_shape<T, TEAM>::THREADS, norm_shape<T, TEAM>::BLOCKS)
    norm_rows_forward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    extern __shared__ uint4 dynamic[];
    __shared__ alignas(16) double shared[norm_sum_room<Shape>];
    norm_columns<T, Shape> k(c);
    using Walk = norm_walk<T, Shape, 1, STAGES>;
    Walk walk(c, k, dynamic);
    walk.begin(c, k);
    float gamma[Shape::ELEMENTS], beta[Shape::ELEMENTS];
    T next{}; /* as it is stored: made an f32 here, it would be waited for at once */
    norm_read_columns(c.gamma, 1.0f, k, gamma);
    norm_read_columns(c.beta, 0.0f, k, beta);
    if (LAYER && walk.rows > 0) next = norm_guess(c, walk, k, false);
    for (norm_team_room<Shape> room(shared); walk.rows > 0; walk.next()) {
        float guess = to_f32(next);
        walk.arrive(c, k);
        float x[Shape::ELEMENTS];
        norm_read_row(walk, 0, x);
        if (LAYER && walk.rows > 1) next = norm_guess(c, walk, k, true);
        norm_scale s = norm_measure<LAYER>(c, walk, k, x, guess, room);
        walk.leave(c, k);
        if (threadIdx.x % TEAM == 0) {
            if (c.mean_out) *walk.single(c.mean_out) = s.mean;
            if (c.rstd_out) *walk.single(c.rstd_out) = s.rstd;
        }
        if (!STAGES && !c.out) continue;
#pragma unroll
        for (int p = 0; p < Shape::PIECES; p++) {
            float y[WIDE<T>];
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++) {
                int i = p * WIDE<T> + e;
                y[e] = fmaf(norm_xh<LAYER>(s, x[i]), gamma[i], beta[i]);
            }
            walk.write(c, k, p, y);
        }
    }
}

/*
 * Lets every team of the block pass as many barriers of its own as the one that passed the most. The block's barrier
 * needs none of this; racecheck, which numbers what happens between barriers, takes teams that are out of step for a
 * race across it. Where the barriers are one a row, only the last row can be missing; else they are counted.
 */
template <class Shape, class Walk>
__device__ void norm_even_out(const norm_call &c, const Walk &walk, int barriers, int *greatest) {
    if constexpr (Walk::WHOLE) {
        /* Where the first team would be: behind its last row, or at it. */
        int64_t first = walk.one / (int64_t)sizeof(float) - threadIdx.x / Shape::TEAM * c.chunks;
        if (first < c.rows) norm_team_barrier<Shape>();
    } else {
        atomicMax(greatest, barriers);
        __syncthreads();
        for (int most_passed = atomicMax(greatest, 0); barriers < most_passed; barriers++)
            norm_team_barrier<Shape>();
    }
}

/*
 * Adds the teams' column sums, in order, and writes the chunk's partials: the teams leave theirs in shared memory,
 * where the staged rows stood, then a thread takes a column.
 */
template <class T, class Shape>
__device__ void norm_leave_sums(const norm_call &c, float *room, const float (&dgamma)[Shape::ELEMENTS],
                                const float (&dbeta)[Shape::ELEMENTS]) {
    constexpr int HALF = Shape::ELEMENTS * Shape::STRIDE;
    float *own = room + threadIdx.x / Shape::TEAM * Shape::TEAM_SUMS + threadIdx.x % Shape::TEAM;
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++) {
        own[i * Shape::STRIDE] = dgamma[i];
        own[i * Shape::STRIDE + HALF] = dbeta[i];
    }
    __syncthreads();
    int dim = (int)c.dim;
    float *partials = c.partials + (int64_t)blockIdx.x * 2 * dim;
    for (int n = threadIdx.x; n < 2 * dim; n += Shape::THREADS) {
        int is_beta = n >= dim, column = is_beta ? n - dim : n;
        int piece = column / WIDE<T>, element = piece / Shape::TEAM * WIDE<T> + column % WIDE<T>;
        int thread = piece % Shape::TEAM;
        if (!c.whole) {
            element = column / Shape::TEAM;
            thread = column % Shape::TEAM;
        }
        const float *from = room + is_beta * HALF + element * Shape::STRIDE + thread;
        double sum = 0;
#pragma unroll 8
        for (int team = 0; team < Shape::TEAMS; team++)
            sum += (double)from[team * Shape::TEAM_SUMS];
        partials[n] = (float)sum;
    }
}

template <class T, bool LAYER, int TEAM, int STAGES>
__global__ void __launch_bounds__(norm_shape<T, TEAM>::THREADS, norm_shape<T, TEAM>::BLOCKS)
    norm_rows_backward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    extern __shared__ uint4 dynamic[];
    __shared__ alignas(16) double shared[norm_sum_room<Shape>];
    norm_columns<T, Shape> k(c);
    using Walk = norm_walk<T, Shape, 2, STAGES>;
    constexpr bool COUNT = norm_own_barriers<Shape> && !STAGES;
    __shared__ int greatest;
    if (COUNT) {
        if (threadIdx.x == 0) greatest = 0;
        __syncthreads();
    }
    Walk walk(c, k, dynamic);
    walk.begin(c, k);
    float gamma[Shape::ELEMENTS], dgamma[Shape::ELEMENTS], dbeta[Shape::ELEMENTS];
    norm_read_columns(c.gamma, 1.0f, k, gamma);
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++)
        dgamma[i] = dbeta[i] = 0;
    constexpr bool KEEP = STAGES > 0; /* xh and g, in registers; else they are made again from the staged row */
    bool saved = STAGES || c.rstd_in;
    norm_scale next{};
    if (saved && walk.rows > 0) next = norm_saved<LAYER>(c, walk, false);
    norm_team_room<Shape> room(shared);
    for (; walk.rows > 0; walk.next()) {
        norm_scale s = next;
        walk.arrive(c, k);
        if (!saved) {
            float x[Shape::ELEMENTS];
            norm_read_row(walk, 0, x);
            s = norm_measure<LAYER>(c, walk, k, x, LAYER ? to_f32(norm_guess(c, walk, k, false)) : 0.0f, room);
        } else if (walk.rows > 1) {
            next = norm_saved<LAYER>(c, walk, true);
        }

        float xh[Shape::ELEMENTS], g[Shape::ELEMENTS], sum_g = 0, sum_gxh = 0;
#pragma unroll
        for (int p = 0; p < Shape::PIECES; p++) {
            float x[WIDE<T>], dy[WIDE<T>];
            walk.read(0, p, x);
            walk.read(1, p, dy);
            norm_scale here = s;
            if (!k.has(p)) here.mean = 0; /* as are x and dy there: they add nothing */
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
        }
        if (KEEP) walk.leave(c, k);
        if (STAGES || c.out) {
            /* dx = rstd * g + (slope * xh + level) */
            float sums[2] = {sum_gxh, sum_g}, slope, level = 0;
            norm_team_sum<Shape, LAYER ? 2 : 1>(sums, room);
            slope = -s.rstd * (sums[0] * c.inverse);
            if (LAYER) level = -s.rstd * (sums[1] * c.inverse);
#pragma unroll
            for (int p = 0; p < Shape::PIECES; p++) {
                float x[WIDE<T>], dx[WIDE<T>];
                if (!KEEP) {
                    walk.read(0, p, x);
                    walk.read(1, p, dx);
                }
#pragma unroll
                for (int e = 0; e < WIDE<T>; e++) {
                    int i = p * WIDE<T> + e;
                    float h = KEEP ? xh[i] : norm_xh<LAYER>(s, x[e]), weighted = KEEP ? g[i] : dx[e] * gamma[i];
                    dx[e] = fmaf(s.rstd, weighted, LAYER ? fmaf(slope, h, level) : slope * h);
                }
                walk.write(c, k, p, dx);
            }
        }
        if (!KEEP) walk.leave(c, k);
    }
    if (c.sums && norm_own_barriers<Shape>) norm_even_out<Shape>(c, walk, room.barriers, &greatest);
    if (c.sums) norm_leave_sums<T, Shape>(c, reinterpret_cast<float *>(dynamic), dgamma, dbeta);
}

/* ---- Launching --------------------------------------------------------------------------------------- */

/*
 * The usual calls stage as many rows as fit in the 227 KiB of a Hopper multiprocessor, up to four of two tensors or six
 * of one; anything else, and cards with less, up to three. The bits do not depend on it.
 */
constexpr int NORM_ROOM = 224 << 10, NORM_STAGES_AT_RUN_TIME = 3;

template <class Shape, int TENSORS> constexpr int norm_stages() {
    int fit = NORM_ROOM / Shape::BLOCKS / (TENSORS * Shape::STAGE_BYTES), enough = TENSORS == 2 ? 4 : 6;
    return fit < enough ? fit : enough;
}

template <class T, bool LAYER, int TEAM, int TENSORS> vjp_status norm_rows_launch(const vjp_work *work, norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    constexpr int STAGES = norm_stages<Shape, TENSORS>(), STAGE_BYTES = TENSORS * Shape::STAGE_BYTES;
    int room = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal);
    if (error != cudaSuccess) return result_of(work, error);
    room -= (int)sizeof(double) * norm_sum_room<Shape>;
    c.whole = c.dim % WIDE<T> == 0;
    c.aligned = c.whole && is_aligned(c.x, 16) && is_aligned(c.dy, 16) && is_aligned(c.out, 16);
    bool usual = c.aligned && c.out && !c.add && (TENSORS == 1 || c.rstd_in) && STAGES * STAGE_BYTES <= room;
    c.stages = usual ? STAGES : c.aligned ? (int)most(1, least(NORM_STAGES_AT_RUN_TIME, room / STAGE_BYTES)) : 1;
    size_t shared = (size_t)most(c.stages * STAGE_BYTES, c.sums ? Shape::SUM_BYTES : 0);
    auto kernel = norm_rows_forward < T, LAYER, TEAM, TENSORS == 1 ? STAGES : 0 > ;
    if constexpr (TENSORS == 2)
        kernel = usual ? norm_rows_backward<T, LAYER, TEAM, STAGES> : norm_rows_backward<T, LAYER, TEAM, 0>;
    else if (!usual)
        kernel = norm_rows_forward<T, LAYER, TEAM, 0>;
    return launch(work, true, kernel, c.chunks, Shape::THREADS, shared, c);
}

template <class T, bool LAYER, int TEAM> vjp_status norm_rows_launch(const vjp_work *work, const norm_call &c) {
    return work->pass == VJP_BACKWARD ? norm_rows_launch<T, LAYER, TEAM, 2>(work, c)
                                      : norm_rows_launch<T, LAYER, TEAM, 1>(work, c);
}

template <class T, bool LAYER> vjp_status norm_rows_run(const vjp_work *work, const norm_call &c) {
    switch (norm_team_threads(c.dim)) {
    case 8: return norm_rows_launch<T, LAYER, 8>(work, c);
    case 16: return norm_rows_launch<T, LAYER, 16>(work, c);
    case 64: return norm_rows_launch<T, LAYER, 64>(work, c);
    case 256: return norm_rows_launch<T, LAYER, 256>(work, c);
    default: return norm_rows_launch<T, LAYER, 512>(work, c);
    }
}

} // namespace
} // namespace vjp

#endif
