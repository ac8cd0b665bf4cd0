/*
 * Norms of rows of 16 to 8192 elements: a team of threads a row, from a part of a warp to a whole block.
 *
 * Least bytes, which are what is moved: the forward reads x and writes y, the backward reads x and dy and writes dx.
 * A thread owns the same columns of every row: it keeps gamma and its sums of dgamma and dbeta in registers, and a row
 * in registers from its arrival to its dx. What would cost is waiting: a row's sums take about as long as its loads. So
 * each thread copies its own 16-byte pieces of the next rows to shared memory, up to four rows ahead (no barrier:
 * nobody else reads them), and asks for another before a row's sums are complete. That keeps 96 KiB (16-bit) or
 * 128 KiB (f32) under way on a multiprocessor, where 32 would do, and the teams of a block hide one another's barriers.
 *
 * Which columns are a thread's (norm_walk.cuh) and the order of all additions depend on dim alone. Tensors that are not
 * aligned are copied an element at a time to the same places, so the bits are the same. The thread that reads an
 * element is the one that writes it, after: out may be x or dy.
 *
 * Statistics are measured around a first mean (one sum), with that mean's own error corrected (a second): a row at
 * 1000 +- 1 loses nothing. Where f32 squares leave their range (rows of 1e20 or 1e-20) it is done again in double.
 */
#ifndef VJP_CUDA_NORM_ROWS_CUH
#define VJP_CUDA_NORM_ROWS_CUH

#include "cuda/norm_walk.cuh"

namespace vjp {
namespace {

/* ---- Statistics -------------------------------------------------------------------------------------- */

/* The sums of x - mean and of its square over the thread's columns of a row. */
template <class S, class Walk>
__device__ void norm_moments(const Walk &walk, const typename Walk::columns &k, S mean, S &sum, S &squares) {
    sum = squares = 0;
#pragma unroll 1 /* from shared memory, so it need not be unrolled; in double it would be long */
    for (int p = 0; p < Walk::shape::PIECES; p++) {
        if (!k.has(p)) continue;
        float x[WIDE<typename Walk::element>];
        walk.read(0, p, x);
        int left = k.left(p);
#pragma unroll
        for (int e = 0; e < WIDE<typename Walk::element>; e++)
            if (e < left) {
                S d = (S)x[e] - mean;
                sum += d;
                squares = fma(d, d, squares);
            }
    }
}

/* Plainly, in double. */
template <bool LAYER, class Walk>
__device__ norm_scale norm_measure_exact(const Walk &walk, const typename Walk::columns &k, double eps, double *shared,
                                         int &turn) {
    double sum, squares, mean = 0;
    if (LAYER) {
        norm_moments(walk, k, 0.0, sum, squares);
        norm_team_sum<typename Walk::shape, 1>(&sum, shared, turn);
        mean = sum / k.dim;
    }
    norm_moments(walk, k, mean, sum, squares);
    norm_team_sum<typename Walk::shape, 1>(&squares, shared, turn);
    return norm_scale_of(mean, squares / k.dim, eps);
}

template <bool LAYER, class Walk>
__device__ norm_scale norm_measure(const Walk &walk, const typename Walk::columns &k, double eps, double *shared,
                                   int &turn) {
    /* Squares below 1e-38 lose digits, 1e-8 of the smallest sum that is trusted; an eps may drown them. */
    const float largest = 3e38f, smallest = 1e-30f, drowning = 1e-22f, far = 4;
    float inverse = 1.0f / (float)k.dim, bias = (float)eps, mean = 0, offset = 0, square;
    if (LAYER) {
        float sum, both[2];
        norm_moments(walk, k, 0.0f, sum, square);
        norm_team_sum<typename Walk::shape, 1>(&sum, shared, turn);
        mean = sum * inverse;
        norm_moments(walk, k, mean, both[0], both[1]);
        norm_team_sum<typename Walk::shape, 2>(both, shared, turn);
        offset = both[0] * inverse;
        square = fmaf(-offset, offset, both[1] * inverse);
    } else {
        float unused, squares;
        norm_moments(walk, k, 0.0f, unused, squares);
        norm_team_sum<typename Walk::shape, 1>(&squares, shared, turn);
        square = squares * inverse;
    }
    bool trusted = square <= largest && (square >= smallest || bias >= drowning) && bias <= largest &&
                   offset * offset <= far * (square + bias);
    if (!trusted) return norm_measure_exact<LAYER>(walk, k, eps, shared, turn);
    norm_scale s;
    s.rstd = rsqrtf(square + bias);
    s.mean = mean + offset;
    s.rest = ((s.mean - mean) - offset) * s.rstd;
    return s;
}

/* ---- The kernels ------------------------------------------------------------------------------------- */

template <class T, bool LAYER, int TEAM>
__global__ void __launch_bounds__(NORM_ROWS_THREADS, 1) norm_rows_forward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    extern __shared__ uint4 dynamic[];
    __shared__ alignas(16) double shared[norm_sum_room<Shape>];
    norm_columns<T, Shape> k(c);
    norm_walk<T, Shape, 1, 0> walk(c, k, dynamic);
    walk.begin(c, k);
    float gamma[Shape::ELEMENTS], beta[Shape::ELEMENTS];
    norm_read_columns(c.gamma, 1.0f, k, gamma);
    norm_read_columns(c.beta, 0.0f, k, beta);
    for (int turn = 0; walk.rows > 0; walk.next(c)) {
        walk.arrive(c, k);
        norm_scale s = norm_measure<LAYER>(walk, k, c.eps, shared, turn);
        if (threadIdx.x % TEAM == 0) {
            if (c.mean_out) c.mean_out[walk.row] = s.mean;
            if (c.rstd_out) c.rstd_out[walk.row] = s.rstd;
        }
#pragma unroll
        for (int p = 0; p < Shape::PIECES; p++) {
            if (!k.has(p) || !c.out) continue;
            float y[WIDE<T>];
            walk.read(0, p, y);
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++)
                y[e] = fmaf(norm_xh<LAYER>(s, y[e]), gamma[p * WIDE<T> + e], beta[p * WIDE<T> + e]);
            walk.write(c, k, p, y);
        }
        walk.leave(c, k);
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

/*
 * Compiled twice: for what training calls (STAGES > 0: tensors are aligned, statistics saved, dx is overwritten) with
 * nothing in it but that, and with all choices at run time (STAGES = 0).
 */
template <class T, bool LAYER, int TEAM, int STAGES>
__global__ void __launch_bounds__(NORM_ROWS_THREADS, 1) norm_rows_backward(norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    extern __shared__ uint4 dynamic[];
    __shared__ alignas(16) double shared[norm_sum_room<Shape>];
    norm_columns<T, Shape> k(c);
    norm_walk<T, Shape, 2, STAGES> walk(c, k, dynamic);
    walk.begin(c, k);
    float gamma[Shape::ELEMENTS], dgamma[Shape::ELEMENTS], dbeta[Shape::ELEMENTS], inverse = 1.0f / (float)k.dim;
    norm_read_columns(c.gamma, 1.0f, k, gamma);
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++)
        dgamma[i] = dbeta[i] = 0;
    constexpr bool KEEP = STAGES > 0; /* xh and g, in registers; else they are made again from the staged row */
    bool saved = STAGES || c.rstd_in;
    norm_scale next{};
    if (saved && walk.rows > 0) next = norm_scale_saved<LAYER>(c, walk.row);
    for (int turn = 0; walk.rows > 0; walk.next(c)) {
        norm_scale s = next;
        walk.arrive(c, k);
        if (!saved)
            s = norm_measure<LAYER>(walk, k, c.eps, shared, turn);
        else if (walk.rows > 1)
            next = norm_scale_saved<LAYER>(c, walk.row + Shape::TEAMS);

        float xh[Shape::ELEMENTS], g[Shape::ELEMENTS], sum_g = 0, sum_gxh = 0;
#pragma unroll
        for (int p = 0; p < Shape::PIECES; p++) {
            if (!k.has(p)) continue;
            float x[WIDE<T>], dy[WIDE<T>];
            walk.read(0, p, x);
            walk.read(1, p, dy);
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++) {
                int i = p * WIDE<T> + e;
                xh[i] = norm_xh<LAYER>(s, x[e]);
                dgamma[i] = fmaf(dy[e], xh[i], dgamma[i]);
                dbeta[i] += dy[e];
                g[i] = dy[e] * gamma[i];
                sum_g += g[i];
                sum_gxh = fmaf(g[i], xh[i], sum_gxh);
            }
        }
        if (KEEP) walk.leave(c, k);
        if (c.out) {
            /* dx = rstd * g + (slope * xh + level) */
            float sums[2] = {sum_gxh, sum_g}, slope, level = 0;
            norm_team_sum<Shape, LAYER ? 2 : 1>(sums, shared, turn);
            slope = -s.rstd * (sums[0] * inverse);
            if (LAYER) level = -s.rstd * (sums[1] * inverse);
#pragma unroll
            for (int p = 0; p < Shape::PIECES; p++) {
                if (!k.has(p)) continue;
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
    if (c.sums) norm_leave_sums<T, Shape>(c, reinterpret_cast<float *>(dynamic), dgamma, dbeta);
}

/* ---- Launching --------------------------------------------------------------------------------------- */

/*
 * The usual backward stages four rows where they fit in the 227 KiB of a Hopper multiprocessor, three of f32; anything
 * else, and cards with less, up to three. The bits do not depend on it.
 */
constexpr int NORM_ROOM = 224 << 10, NORM_MOST_STAGES = 4, NORM_STAGES_AT_RUN_TIME = 3;

template <class Shape>
constexpr int norm_stages = NORM_ROOM / (2 * Shape::STAGE_BYTES) < NORM_MOST_STAGES
                                ? NORM_ROOM / (2 * Shape::STAGE_BYTES)
                                : NORM_MOST_STAGES;

template <class T, bool LAYER, int TEAM> vjp_status norm_rows_launch(const vjp_work *work, norm_call c) {
    using Shape = norm_shape<T, TEAM>;
    constexpr int STAGES = norm_stages<Shape>;
    bool backward = work->pass == VJP_BACKWARD;
    int stage_bytes = (backward ? 2 : 1) * Shape::STAGE_BYTES, room = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal);
    if (error != cudaSuccess) return result_of(work, error);
    room -= (int)sizeof(double) * norm_sum_room<Shape>;
    c.whole = c.dim % WIDE<T> == 0;
    c.aligned = c.whole && is_aligned(c.x, 16) && is_aligned(c.dy, 16) && is_aligned(c.out, 16);
    bool usual = backward && c.aligned && !c.add && c.rstd_in && STAGES * stage_bytes <= room;
    c.stages = usual ? STAGES : c.aligned ? (int)most(1, least(NORM_STAGES_AT_RUN_TIME, room / stage_bytes)) : 1;
    auto kernel = usual      ? norm_rows_backward<T, LAYER, TEAM, STAGES>
                  : backward ? norm_rows_backward<T, LAYER, TEAM, 0>
                             : norm_rows_forward<T, LAYER, TEAM>;
    size_t shared = (size_t)most(c.stages * stage_bytes, c.sums ? Shape::SUM_BYTES : 0);
    return launch(work, true, kernel, c.chunks, Shape::THREADS, shared, c);
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
