/*
 * How a team of threads walks through rows, for norm_rows.cuh: which columns are a thread's, sums over a team, 16-byte
 * pieces, and the ring in shared memory that holds the rows to come.
 *
 * A thread copies only what it will read itself, so the ring needs no barrier: the thread waits for its own copies,
 * reads the row (once or more) and asks for another in its place.
 */
#ifndef VJP_CUDA_NORM_WALK_CUH
#define VJP_CUDA_NORM_WALK_CUH

#include "cuda/norm.cuh"

namespace vjp {
namespace {

template <class T, int TEAM_THREADS> struct norm_shape {
    static constexpr int TEAM = TEAM_THREADS;
    static constexpr int ELEMENTS = norm_team_elements(TEAM);
    static constexpr int PIECES = ELEMENTS / WIDE<T>;
    static constexpr int THREADS = NORM_ROWS_THREADS;
    static constexpr int TEAMS = THREADS / TEAM;
    static constexpr int PIECE_COLUMNS = TEAM * WIDE<T>; /* of the team, one piece each */
    /*
     * A team's column sums in shared memory, [dgamma, dbeta][ELEMENTS][STRIDE]. STRIDE is an odd multiple of GROUP, so
     * that reads of neighbouring columns fall on different banks, and so do the writes of the teams of a warp.
     */
    static constexpr int GROUP = 32 / WIDE<T>, STRIDE = (TEAM / GROUP | 1) * GROUP;
    static constexpr int TEAM_SUMS = 2 * ELEMENTS * STRIDE + (TEAM < 32 ? TEAM : 0);
    static constexpr int SUM_BYTES = TEAMS * TEAM_SUMS * (int)sizeof(float);
    static constexpr int STAGE_BYTES = PIECES * THREADS * 16; /* of one tensor */
};

/*
 * The columns of a thread: element e of piece p is at base + p * PIECE_COLUMNS + e * step. Rows of whole pieces have 16
 * bytes side by side in a thread; in others, whose pieces no address is aligned for, neighbours belong to neighbouring
 * threads, so that loads of single elements are coalesced.
 */
template <class T, class Shape> struct norm_columns {
    int dim, base;
    bool whole;

    __device__ explicit norm_columns(const norm_call &c)
        : dim((int)c.dim), base(threadIdx.x % Shape::TEAM * (c.whole ? WIDE<T> : 1)), whole(c.whole) {
    }

    /* Is there anything of piece p? Columns of a piece that are in the row are its first ones. */
    __device__ bool has(int p) const {
        return base + p * Shape::PIECE_COLUMNS < dim;
    }

    __device__ int left(int p) const {
        int rest = dim - base - p * Shape::PIECE_COLUMNS;
        return whole ? rest : (rest + Shape::TEAM - 1) / Shape::TEAM;
    }

    __device__ int step() const {
        return whole ? 1 : Shape::TEAM;
    }

    __device__ int column(int p, int e) const {
        return base + p * Shape::PIECE_COLUMNS + e * step();
    }
};

/* ---- Sums over a team -------------------------------------------------------------------------------- */

/* Sums that norm_team_sum() adds at once, and its room in shared memory: two buffers for every warp. */
constexpr int NORM_MOST_SUMS = 2;
template <class Shape> constexpr int norm_sum_room = 2 * NORM_MOST_SUMS *Shape::THREADS / 32;

/*
 * N sums over the threads of a team, the same bits in all of them. As block_sum(): two buffers in turns, one barrier;
 * but the teams of a block have a barrier each and do not wait for one another.
 */
template <class Shape, int N, class S> __device__ void norm_team_sum(S *x, double *shared, int &turn) {
    constexpr int TEAM = Shape::TEAM, LANES = TEAM < 32 ? TEAM : 32;
    unsigned mask = TEAM < 32 ? ((1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES : 0xffffffffu;
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] += __shfl_xor_sync(mask, x[i], step);
    if constexpr (TEAM > 32) {
        constexpr int WARPS = TEAM / 32;
        static_assert(N <= NORM_MOST_SUMS);
        int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / 32;
        S *sums = reinterpret_cast<S *>(shared + (team * 2 + turn) * NORM_MOST_SUMS * WARPS);
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int i = 0; i < N; i++)
                sums[i * WARPS + warp] = x[i];
        if constexpr (TEAM == Shape::THREADS)
            __syncthreads();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = sums[i * WARPS];
#pragma unroll
            for (int w = 1; w < WARPS; w++)
                x[i] += sums[i * WARPS + w];
        }
        turn ^= 1;
    }
}

/* ---- Pieces ------------------------------------------------------------------------------------------ */

/*
 * 16 bytes stay in four registers until they are used, two 16-bit elements a register: as a struct of elements the
 * compiler would keep each in a register of its own.
 */
template <class T> __device__ void norm_unpack(uint4 raw, float (&v)[WIDE<T>]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; w++)
        if constexpr (sizeof(T) == 4) {
            v[w] = __uint_as_float(words[w]);
        } else {
            float2 two;
            if constexpr (__is_same(T, bf16))
                two = {__uint_as_float(words[w] << 16), __uint_as_float(words[w] & 0xffff0000u)};
            else
                two = __half22float2(*reinterpret_cast<const __half2 *>(&words[w]));
            v[2 * w] = two.x;
            v[2 * w + 1] = two.y;
        }
}

template <class T> __device__ uint4 norm_pack(const float (&v)[WIDE<T>]) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; w++)
        if constexpr (sizeof(T) == 4) {
            words[w] = __float_as_uint(v[w]);
        } else if constexpr (__is_same(T, bf16)) {
            __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * w], v[2 * w + 1]);
            words[w] = *reinterpret_cast<unsigned *>(&two);
        } else {
            __half2 two = __floats2half2_rn(v[2 * w], v[2 * w + 1]);
            words[w] = *reinterpret_cast<unsigned *>(&two);
        }
    return {words[0], words[1], words[2], words[3]};
}

/* A parameter's value at each of the thread's columns. No branch between the loads: they are all under way at once. */
template <class T, class P, class Shape>
__device__ void norm_read_as(const P *data, const norm_columns<T, Shape> &k, float (&v)[Shape::ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < Shape::ELEMENTS; i++) {
        int column = k.column(i / WIDE<T>, i % WIDE<T>);
        v[i] = column < k.dim ? to_f32(data[column]) : 0.0f;
    }
}

template <class T, class Shape>
__device__ void norm_read_columns(parameter p, float absent, const norm_columns<T, Shape> &k,
                                  float (&v)[Shape::ELEMENTS]) {
    if (!p.data)
#pragma unroll
        for (int i = 0; i < Shape::ELEMENTS; i++)
            v[i] = absent;
    else if (p.f32)
        norm_read_as<T>(static_cast<const float *>(p.data), k, v);
    else
        norm_read_as<T>(static_cast<const T *>(p.data), k, v);
}

/* ---- Rows -------------------------------------------------------------------------------------------- */

/*
 * A team's walk through its rows of the chunk, which are TEAMS apart. With STAGES > 0 tensors are aligned and that many
 * rows staged; with 0 the call says.
 */
template <class T, class Shape, int TENSORS, int STAGES> struct norm_walk {
    using columns = norm_columns<T, Shape>;
    using shape = Shape;
    using element = T;
    int64_t row, at; /* `at`: the thread's first element of the row */
    int rows;        /* still to do, with this one */
    int stage;       /* that holds this row */
    char *ring;      /* the thread's 16 bytes of the first piece of the first stage */

    __device__ norm_walk(const norm_call &c, const columns &k, void *shared) {
        row = norm_chunk_begin(c, blockIdx.x) + threadIdx.x / Shape::TEAM;
        int64_t end = norm_chunk_begin(c, blockIdx.x + 1ll);
        at = row * c.dim + k.base;
        rows = row < end ? (int)((end - row + Shape::TEAMS - 1) / Shape::TEAMS) : 0;
        stage = 0;
        ring = static_cast<char *>(shared) + threadIdx.x * 16;
    }

    static __device__ int stages(const norm_call &c) {
        return STAGES ? STAGES : c.stages;
    }
    static __device__ bool aligned(const norm_call &c) {
        return STAGES || c.aligned;
    }
    static __device__ const T *tensor(const norm_call &c, int t) {
        return static_cast<const T *>(t ? c.dy : c.x);
    }
    static __device__ int64_t jump(const norm_call &c) {
        return Shape::TEAMS * c.dim;
    }

    __device__ char *slot(int s, int t, int p) const {
        return ring + ((s * TENSORS + t) * Shape::PIECES + p) * (Shape::THREADS * 16);
    }

    /* Asks for the row `ahead` rows on, if there is one, and closes a group in any case: groups count rows. */
    __device__ void ask(const norm_call &c, const columns &k, int ahead, int s) {
        int64_t there = at + ahead * jump(c);
        if (ahead < rows)
#pragma unroll
            for (int p = 0; p < Shape::PIECES; p++)
                if (k.has(p))
#pragma unroll
                    for (int t = 0; t < TENSORS; t++)
                        copy_async(slot(s, t, p), tensor(c, t) + there + p * Shape::PIECE_COLUMNS);
        close_copies();
    }

    /*
     * While the kernel ahead still runs, the first rows are brought into L2. That reads nothing: should that kernel
     * write them, L2 is where its writes land.
     */
    __device__ void begin(const norm_call &c, const columns &k) {
        let_next_begin();
        for (int s = 0; aligned(c) && s < stages(c) && s < rows; s++)
#pragma unroll
            for (int p = 0; p < Shape::PIECES; p++)
                if (k.has(p))
#pragma unroll
                    for (int t = 0; t < TENSORS; t++)
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(tensor(c, t) + at + s * jump(c) +
                                                                      p * Shape::PIECE_COLUMNS));
        wait_for_previous();
        for (int s = 0; aligned(c) && s < stages(c); s++)
            ask(c, k, s, s);
    }

    /*
     * A row that is not aligned, an element at a time into the thread's place in the ring: rolled up, so that it takes
     * no registers from the other path. Columns past the row have the x of one in it, and a dy of 0: they add nothing.
     */
    __device__ void fetch(const norm_call &c, const columns &k) {
#pragma unroll 1
        for (int i = 0; i < TENSORS * Shape::PIECES; i++) {
            int t = i / Shape::PIECES, p = i % Shape::PIECES, left = k.left(p);
            if (left <= 0) continue;
            const T *from = tensor(c, t) + at + p * Shape::PIECE_COLUMNS;
            T *to = reinterpret_cast<T *>(slot(0, t, p));
            T past = t ? from_f32<T>(0.0f) : *from;
#pragma unroll
            for (int e = 0; e < WIDE<T>; e++, from += k.step())
                to[e] = e < left ? *from : past;
        }
    }

    __device__ void wait(const norm_call &c) {
        if constexpr (STAGES > 0)
            wait_copies<STAGES - 1>();
        else if (c.stages == 1)
            wait_copies<0>();
        else if (c.stages == 2)
            wait_copies<1>();
        else
            wait_copies<2>();
    }

    /* Waits for this row to be in the ring. */
    __device__ void arrive(const norm_call &c, const columns &k) {
        if (aligned(c))
            wait(c);
        else
            fetch(c, k);
    }

    __device__ void read(int t, int p, float (&v)[WIDE<T>]) const {
        norm_unpack<T>(*reinterpret_cast<const uint4 *>(slot(stage, t, p)), v);
    }

    /* This row's place in the ring is free: asks for another. */
    __device__ void leave(const norm_call &c, const columns &k) {
        if (!aligned(c)) return;
        ask(c, k, stages(c), stage);
        stage = stage + 1 == stages(c) ? 0 : stage + 1;
    }

    __device__ void next(const norm_call &c) {
        row += Shape::TEAMS;
        at += jump(c);
        rows--;
    }

    __device__ void write(const norm_call &c, const columns &k, int p, const float (&values)[WIDE<T>]) const {
        T *out = static_cast<T *>(c.out) + at + p * Shape::PIECE_COLUMNS;
        if (aligned(c) && (STAGES || !c.add)) {
            __stcs(reinterpret_cast<uint4 *>(out), norm_pack<T>(values));
            return;
        }
        int left = k.left(p), step = k.step();
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++, out += step)
            if (e < left) write_one(out, values[e], c.add);
    }
};

} // namespace
} // namespace vjp

#endif
