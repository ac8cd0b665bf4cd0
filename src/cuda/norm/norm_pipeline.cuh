/* SPDX-License-Identifier: MIT */
/*
 * How a team of threads streams through rows, for norm_rows.cuh: which columns each thread owns, sums over a team,
 * 16-byte vectors, and the ring in shared memory that holds the next rows.
 *
 * A thread copies only what it will read itself, so the ring needs no barrier: the thread waits for its own copies,
 * reads the row (once or more) and starts the copy of a later row into its place.
 */
#ifndef VJP_CUDA_NORM_PIPELINE_CUH
#define VJP_CUDA_NORM_PIPELINE_CUH

#include "cuda/norm/norm.cuh"

namespace vjp {
namespace {

/*
 * How rows are spread over a block's threads. With TEAM > 0 all of it is known when compiling: for the calls of
 * training. TEAM = 0 is for all other calls; the team is known at run time there, so that one kernel serves all sizes.
 */
template <class T, int TEAM> struct norm_shape {
    static constexpr bool FIXED = TEAM > 0;
    static constexpr int ELEMENTS = norm_team_elements(TEAM), VECTORS = ELEMENTS / WIDE<T>;
    int team_at_run_time;

    __host__ __device__ constexpr int team() const {
        return FIXED ? TEAM : team_at_run_time;
    }
    __host__ __device__ constexpr int threads() const {
        return norm_block_threads(team());
    }
    __host__ __device__ constexpr int teams() const {
        return threads() / team();
    }
    /* Columns of a team, one vector per thread. */
    __host__ __device__ constexpr int vector_columns() const {
        return team() * WIDE<T>;
    }
    /*
     * A team's column sums in shared memory, [dgamma, dbeta][ELEMENTS][stride]. The stride is an odd multiple of GROUP,
     * so that reads of neighbouring columns fall on different banks, and so do the writes of the teams of a warp.
     */
    __host__ __device__ constexpr int stride() const {
        constexpr int GROUP = 32 / WIDE<T>;
        return (team() / GROUP | 1) * GROUP;
    }
    __host__ __device__ constexpr int team_sums() const {
        return 2 * ELEMENTS * stride() + (team() < 32 ? team() : 0);
    }
    __host__ __device__ constexpr int sum_bytes() const {
        return teams() * team_sums() * (int)sizeof(float);
    }
    /* Of one tensor. */
    __host__ __device__ constexpr int stage_bytes() const {
        return VECTORS * threads() * 16;
    }
    /* Teams of several warps, but not of all of the block, have their own barriers. */
    __host__ __device__ constexpr bool own_barriers() const {
        return team() > 32 && team() < threads();
    }
};

/* Of the largest block, for shared variables and launch bounds. */
template <int TEAM> constexpr int norm_max_threads = TEAM ? norm_block_threads(TEAM) : NORM_ROWS_THREADS;
template <class T, bool LAYER, int TEAM, bool BACKWARD>
constexpr int norm_min_blocks = TEAM ? norm_resident_blocks(TEAM, LAYER, BACKWARD, (int)sizeof(T)) : 1;

/* ---- Shared memory by its 32-bit address ------------------------------------------------------------- */

/*
 * A pinned address is not computed again from thread and block indices each time, which would be a third of a loop of
 * otherwise 12 instructions per element.
 */
template <int N, class S> __device__ void norm_shared_put(unsigned to, const S *x) {
#pragma unroll
    for (int i = 0; i < N; i++)
        store_shared(to + i * (int)sizeof(S), x[i]);
}

/* N values, 16 bytes at a time where N allows. */
template <int N, class S> __device__ void norm_shared_get(unsigned from, S *x) {
    constexpr int E = 16 / (int)sizeof(S);
    static_assert(N % E == 0 || N == 2);
#pragma unroll
    for (int i = 0; i < N; i += E) { /* a buffer has room for the 16 bytes in any case */
        uint4 raw;
        load_shared(from + i * (int)sizeof(S), raw);
        const S *v = reinterpret_cast<const S *>(&raw);
#pragma unroll
        for (int e = 0; e < E && i + e < N; e++)
            x[i + e] = v[e];
    }
}

/*
 * The columns of a thread: element e of vector p is at base + p * VECTOR_COLUMNS + e * step. If rows are whole vectors,
 * a thread owns 16 adjacent bytes; otherwise no vector is aligned, and adjacent columns belong to adjacent threads, so
 * that loads of single elements are coalesced.
 */
template <class T, class Shape> struct norm_columns {
    Shape shape;
    int dim, base;
    bool in_vectors;

    __device__ explicit norm_columns(const norm_call &c)
        : shape{c.team}, dim((int)c.dim), base((int)threadIdx.x % shape.team() * (c.in_vectors ? WIDE<T> : 1)),
          in_vectors(c.in_vectors) {
        pin(base);
    }

    /* Whether any column of vector p is in the row. Those that are come first in it. */
    __device__ bool has(int p) const {
        return base + p * shape.vector_columns() < dim;
    }

    __device__ int count(int p) const {
        int rest = dim - base - p * shape.vector_columns();
        return in_vectors ? rest : divide_up(rest, shape.team());
    }

    __device__ int step() const {
        return in_vectors ? 1 : shape.team();
    }

    __device__ int column(int p, int e) const {
        return base + p * shape.vector_columns() + e * step();
    }
};

/* ---- Sums over a team -------------------------------------------------------------------------------- */

/* Shared memory for sums over a team: two buffers of up to two sums of every warp, addressed by 32 bits. */
constexpr int NORM_MAX_SUMS = 2;
template <int TEAM> constexpr int norm_sum_buffer = 2 * NORM_MAX_SUMS *norm_max_threads<TEAM> / 32;

template <class Shape> struct norm_team_buffers {
    Shape shape;
    unsigned address; /* of the team's first buffer */
    int turn;         /* 0 or bytes() */
    int barriers;     /* that the team has passed */

    __device__ norm_team_buffers(Shape s, double *shared)
        : shape(s), address(shared_address(shared)), turn(0), barriers(0) {
        address += (int)threadIdx.x / shape.team() * 2 * bytes();
        pin(address);
    }

    __device__ int bytes() const {
        return NORM_MAX_SUMS * (int)sizeof(double) * (shape.team() / 32);
    }
};

template <class Shape> __device__ void norm_team_barrier(Shape shape) {
    int id = (int)threadIdx.x / shape.team() + 1;
    if constexpr (Shape::FIXED)
        named_barrier<Shape{}.team()>(id);
    else
        named_barrier(id, shape.team());
}

/* The lanes of this thread's team in its warp: how many, and which. */
template <class Shape> __device__ int norm_team_lanes(Shape shape) {
    return shape.team() < 32 ? shape.team() : 32;
}

template <class Shape> __device__ unsigned norm_team_mask(Shape shape) {
    int lanes = norm_team_lanes(shape);
    return lanes < 32 ? ((1u << lanes % 32) - 1) << threadIdx.x % 32 / lanes * lanes : 0xffffffffu;
}

/*
 * N sums over the threads of a team, the same bits in all of them. As in block_sum(), two buffers alternate and there
 * is one barrier; but each team of a block has its own barrier and does not wait for the others.
 */
template <int N, class S, class Shape> __device__ void norm_team_sum(S *x, norm_team_buffers<Shape> &buffers) {
    const int team = buffers.shape.team(), lanes = norm_team_lanes(buffers.shape);
    unsigned mask = norm_team_mask(buffers.shape);
#pragma unroll
    for (int step = 16; step; step /= 2)
        if (step < lanes)
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] += __shfl_xor_sync(mask, x[i], step);
    if (team <= 32) return;
    static_assert(N <= NORM_MAX_SUMS);
    int warp = (int)threadIdx.x % team / 32;
    unsigned sums = buffers.address + buffers.turn;
    if (threadIdx.x % 32 == 0) norm_shared_put<N>(sums + warp * N * (int)sizeof(S), x);
    if (team == buffers.shape.threads())
        __syncthreads();
    else
        norm_team_barrier(buffers.shape);
    buffers.barriers++;
    if constexpr (!Shape::FIXED) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            load_shared(sums + i * (int)sizeof(S), x[i]);
#pragma unroll 1
            for (int w = 1; w < team / 32; w++) {
                S of_warp;
                load_shared(sums + (w * N + i) * (int)sizeof(S), of_warp);
                x[i] += of_warp;
            }
        }
    } else if constexpr (Shape{}.team() > 32) {
        constexpr int WARPS = Shape{}.team() / 32;
        S all[WARPS * N];
        norm_shared_get<WARPS * N>(sums, all);
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = all[i];
#pragma unroll
            for (int w = 1; w < WARPS; w++)
                x[i] += all[w * N + i];
        }
    }
    buffers.turn ^= buffers.bytes();
}

/* ---- Parameters -------------------------------------------------------------------------------------- */

/*
 * A parameter at the thread's columns. A fixed shape loads 16 bytes at a time, and converts in read(), so that gamma
 * and beta are in flight together: in 16 bits that is one trip to memory and 4 loads, where one by one they would be
 * two trips and 32 loads, before the first row. Other shapes load in read().
 */
template <class T, class Shape> struct norm_parameter {
    parameter p;
    uint4 stored[Shape::ELEMENTS / WIDE<float>];

    __device__ norm_parameter(parameter given, const norm_columns<T, Shape> &k) : p(given), stored{} {
        if (!Shape::FIXED || !p.data) return;
        if (p.f32)
            load<float>(k);
        else
            load<T>(k);
    }

    template <class P> __device__ void load(const norm_columns<T, Shape> &k) {
        constexpr int EACH = WIDE<T> / WIDE<P>; /* loads for a vector: two for f32 beside 16 bits */
#pragma unroll
        for (int i = 0; i < Shape::VECTORS * EACH; i++)
            if (k.has(i / EACH))
                stored[i] = *reinterpret_cast<const uint4 *>(static_cast<const P *>(p.data) +
                                                             k.column(i / EACH, i % EACH * WIDE<P>));
    }

    __device__ void read(float absent, const norm_columns<T, Shape> &k, float (&v)[Shape::ELEMENTS]) const {
        if (!p.data)
#pragma unroll
            for (int i = 0; i < Shape::ELEMENTS; i++)
                v[i] = absent;
        else if (p.f32)
            read_as<float>(k, v);
        else
            read_as<T>(k, v);
    }

    template <class P> __device__ void read_as(const norm_columns<T, Shape> &k, float (&v)[Shape::ELEMENTS]) const {
#pragma unroll
        for (int i = 0; i < Shape::ELEMENTS; i += WIDE<P>) {
            float vector[WIDE<P>];
            if constexpr (Shape::FIXED) unpack<P>(stored[i / WIDE<P>], vector);
#pragma unroll
            for (int e = 0; e < WIDE<P>; e++) {
                int column = k.column((i + e) / WIDE<T>, (i + e) % WIDE<T>);
                if (!Shape::FIXED) vector[e] = column < k.dim ? to_f32(static_cast<const P *>(p.data)[column]) : 0.0f;
                v[i + e] = vector[e];
            }
        }
    }
};

/* ---- Rows -------------------------------------------------------------------------------------------- */

/*
 * A team's loop over its rows of the chunk, from the last to the first: TENSORS inputs, and the old values of an output
 * that is added to, are staged. A fixed shape means that all tensors are aligned; otherwise the call decides at run
 * time.
 */
template <class T, class Shape, int TENSORS> struct norm_pipeline {
    using columns = norm_columns<T, Shape>;
    using shape = Shape;
    using element = T;
    static constexpr bool FIXED = Shape::FIXED;
    int64_t at, jump; /* byte offset of the thread's first element of this row, and the distance to the next row */
    int64_t scalar, scalar_jump; /* the same for a tensor with one f32 per row */
    int rows;                    /* left, with this one */
    unsigned ring, now;          /* the thread's first vector in the first stage, and in the stage of this row */
    int slot_bytes;              /* between a thread's vectors in a stage */

    __device__ norm_pipeline(const norm_call &c, const columns &k, void *shared) {
        /*
         * A chunk's rows are as far apart as there are chunks, so that the whole card moves through one narrow window
         * of each tensor: up to 0.09 of the limit more than with adjacent rows (H200, 16384 x 4096 in bf16). The window
         * moves from the end to the beginning, see block_from_the_end().
         */
        int64_t apart = k.shape.teams() * c.chunks;
        rows = (int)rows_of(c, k.shape, (int)threadIdx.x / k.shape.team());
        int64_t row = blockIdx.x + (int)threadIdx.x / k.shape.team() * c.chunks + (rows - 1) * apart;
        at = (row * c.dim + k.base) * (int64_t)sizeof(T);
        jump = -apart * c.dim * (int64_t)sizeof(T);
        scalar = row * (int64_t)sizeof(float);
        scalar_jump = -apart * (int64_t)sizeof(float);
        ring = shared_address(shared) + threadIdx.x * 16;
        pin(at);
        pin(jump);
        pin(scalar);
        pin(scalar_jump);
        pin(ring);
        now = ring;
        slot_bytes = k.shape.threads() * 16;
    }

    /* Rows of one of the block's teams. */
    static __device__ int64_t rows_of(const norm_call &c, Shape shape, int team) {
        int64_t first = blockIdx.x + team * c.chunks;
        return first < c.rows ? divide_up(c.rows - first, shape.teams() * c.chunks) : 0;
    }

    static __device__ bool aligned(const norm_call &c) {
        return FIXED || c.aligned;
    }

    /* The thread's first element of the row `ahead` rows further, of x, dy or (t = TENSORS) the output. */
    __device__ const T *from(const norm_call &c, int t, int ahead) const {
        const void *tensor = t == TENSORS ? c.out : t ? c.dy : c.x;
        return reinterpret_cast<const T *>(static_cast<const char *>(tensor) + (at + ahead * jump));
    }

    __device__ int slot(int t, int p) const {
        return (t * Shape::VECTORS + p) * slot_bytes;
    }

    /* Starts the copy of a tensor's row `ahead` rows further, if there is one. */
    __device__ void copy(const norm_call &c, const columns &k, int t, int ahead, unsigned to) const {
        const T *first = from(c, t, ahead);
        pin(first);
#pragma unroll
        for (int p = 0; p < Shape::VECTORS; p++)
            if (ahead < rows && k.has(p)) copy_async(to + slot(t, p), first + p * k.shape.vector_columns());
    }

    /*
     * While the previous kernel still runs, the first rows are brought into L2. That reads nothing: if that kernel
     * writes them, its writes land in L2 too. Vectors beyond the row are 0 in the ring.
     */
    __device__ void start(const norm_call &c, const columns &k) {
        int tensors = TENSORS + c.add;
        let_next_begin();
#pragma unroll 1
        for (int s = 0; aligned(c) && s < c.stages && s < rows; s++)
#pragma unroll
            for (int p = 0; p < Shape::VECTORS; p++)
                for (int t = 0; k.has(p) && t < tensors; t++)
                    prefetch(from(c, t, s) + p * k.shape.vector_columns());
#pragma unroll
        for (int p = 0; p < Shape::VECTORS; p++)
            if (!k.has(p))
#pragma unroll 1
                for (int s = 0; s < c.stages; s++)
#pragma unroll
                    for (int t = 0; t < TENSORS; t++)
                        clear_shared(ring + s * c.stage_bytes + slot(t, p));
        wait_for_previous();
#pragma unroll 1
        for (int s = 0; aligned(c) && s < c.stages; s++) {
            for (int t = 0; t < tensors; t++)
                copy(c, k, t, s, ring + s * c.stage_bytes);
            commit_copies();
        }
    }

    /*
     * Copies a row that is not aligned, element by element, into the thread's place in the ring. Not unrolled, so that
     * it takes no registers from the other path. Columns beyond the row get the x of a column in it and a dy of 0: they
     * add nothing.
     */
    __device__ void read_row(const norm_call &c, const columns &k) {
#pragma unroll 1
        for (int i = 0; i < TENSORS * Shape::VECTORS; i++) {
            int t = i / Shape::VECTORS, p = i % Shape::VECTORS, count = k.count(p);
            if (count <= 0) continue;
            const T *element = from(c, t, 0) + p * k.shape.vector_columns();
            T past = t ? from_f32<T>(0.0f) : *element;
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++, element += k.step())
                store_shared(ring + slot(t, p) + e * (int)sizeof(T), e < count ? *element : past);
        }
    }

    /* Copies are committed in one group per row, so all but the later rows' groups must have arrived. */
    __device__ void wait_for_copies(const norm_call &c) {
        switch (c.stages) {
        case 1: return wait_copies<0>();
        case 2: return wait_copies<1>();
        case 3: return wait_copies<2>();
        case 4: return wait_copies<3>();
        default: return wait_copies<5>();
        }
    }

    /* Waits until this row is in the ring. */
    __device__ void wait_for_row(const norm_call &c, const columns &k) {
        if (aligned(c))
            wait_for_copies(c);
        else
            read_row(c, k);
    }

    __device__ void read(int t, int p, float (&v)[WIDE<T>]) const {
        uint4 raw;
        load_shared(now + slot(t, p), raw);
        unpack<T>(raw, v);
    }

    /* This row's inputs are not needed any more: starts the copies of a later row into their place. */
    __device__ void release_inputs(const norm_call &c, const columns &k) {
        if (!aligned(c)) return;
#pragma unroll
        for (int t = 0; t < TENSORS; t++)
            copy(c, k, t, c.stages, now);
    }

    /* This row's element of a tensor with one f32 per row, or that of the row after it. */
    template <class F> __device__ F *scalar_of(F *tensor, bool after = false) const {
        using byte = std::conditional_t<std::is_const_v<F>, const char, char>;
        return reinterpret_cast<F *>(reinterpret_cast<byte *>(tensor) + (after ? scalar + scalar_jump : scalar));
    }

    /* To the next row. The old values of this one have been used, too. */
    __device__ void next(const norm_call &c, const columns &k) {
        if (aligned(c)) {
            if (c.add) copy(c, k, TENSORS, c.stages, now);
            commit_copies();
            now += c.stage_bytes;
            if (now == ring + c.stages * c.stage_bytes) now = ring;
        }
        at += jump;
        scalar += scalar_jump;
        rows--;
    }

    /* Writes this row's values of out, or (Y) of y, whose old values are not staged: a fixed shape does not add. */
    template <bool Y = false>
    __device__ void write(const norm_call &c, const columns &k, int p, float (&values)[WIDE<T>]) const {
        T *out = reinterpret_cast<T *>(static_cast<char *>(Y ? c.y : c.out) + at) + p * k.shape.vector_columns();
        if (aligned(c)) {
            if (!Y && c.add) {
                float old[WIDE<T>];
                read(TENSORS, p, old);
#pragma unroll
                for (int e = 0; e < WIDE<T>; e++)
                    values[e] = old[e] + values[e];
            }
            if (Y && !FIXED && c.add_y && k.has(p)) {
                float old[WIDE<T>];
                unpack<T>(*reinterpret_cast<const uint4 *>(out), old);
#pragma unroll
                for (int e = 0; e < WIDE<T>; e++)
                    values[e] = old[e] + values[e];
            }
            uint4 packed = pack<T>(values);
            if (!k.has(p)) return;
            if constexpr (TENSORS == 1) /* what the next product reads may stay in L2; backwards are slower with this */
                store_global(out, packed);
            else
                __stcs(reinterpret_cast<uint4 *>(out), packed);
            return;
        }
        int count = k.count(p), step = k.step();
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++, out += step)
            if (e < count) write_one(out, values[e], Y ? c.add_y : c.add);
    }
};

} // namespace
} // namespace vjp

#endif
