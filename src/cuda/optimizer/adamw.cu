/* SPDX-License-Identifier: MIT */
/*
 * adamw on CUDA, by the loop of optimizer.cuh: w, m, v and g are read once, w, m and v written once (28 bytes per
 * element in f32). The formulas are those of the CPU, operation by operation (docs/ops/adamw.md says why each has its
 * form).
 *
 * Moments may be bf16: then 20 bytes per element with f32 weights and gradients. f32 weights may lie in halves: the
 * same bytes, in two streams.
 *
 * lr, step and scale are read on the device, so that a captured graph runs unchanged every step. Each block computes
 * the bias corrections itself, in double: two threads in two warps, beside the loads of the block's first tile. A step
 * that is not an integer of at least 1 is reported, and nothing is written.
 */
#include <cmath>

#include "cuda/optimizer/optimizer.cuh"

namespace vjp {
namespace {

/* The type of f32 weights that lie in halves: all upper ones, then all lower ones (core/half.h). */
struct halved {};

template <class T, int W> struct weights {
    elements<T, W> whole;

    __device__ void load(const void *w, int64_t, int64_t i) {
        whole = load_elements<T, W>(w, i);
    }
    __device__ float at(int k) const {
        return to_f32(whole.v[k]);
    }
    static __device__ void store(void *w, int64_t, int64_t i, const float (&values)[W]) {
        store_elements<T>(w, i, values);
    }
};

template <int W> struct weights<halved, W> {
    elements<uint16_t, W> upper, lower;

    __device__ void load(const void *w, int64_t count, int64_t i) {
        upper = load_elements<uint16_t, W>(w, i);
        lower = load_elements<uint16_t, W>(static_cast<const uint16_t *>(w) + count, i);
    }
    __device__ float at(int k) const {
        return __uint_as_float(((uint32_t)upper.v[k] << 16) + (uint32_t)(int32_t)(int16_t)lower.v[k]);
    }
    static __device__ void store(void *w, int64_t count, int64_t i, const float (&values)[W]) {
        if (!w) return;
        elements<uint16_t, W> high, low;
#pragma unroll
        for (int k = 0; k < W; k++) {
            uint32_t bits = __float_as_uint(values[k]);
            bool nan = values[k] != values[k];
            high.v[k] = (uint16_t)(nan ? (bits >> 16 & 0x8000u) | 0x7fc0u : (bits + 0x8000u) >> 16);
            low.v[k] = nan ? 0 : (uint16_t)bits;
        }
        store_raw(static_cast<uint16_t *>(w) + i, high);
        store_raw(static_cast<uint16_t *>(w) + count + i, low);
    }
};

template <class T> constexpr size_t STORED_BYTES = sizeof(T);
template <> constexpr size_t STORED_BYTES<halved> = sizeof(uint16_t);

template <class T, class G, class M> struct adamw_step {
    void *w_out, *m_out, *v_out;
    const void *w, *m, *v, *g;
    int64_t count;
    const float *lr, *scale;
    const void *step;
    vjp_dtype step_type;
    findings found;
    double log_beta[2];
    float decay, eps;
    float keep_m, take_m; /* beta1, 1 - beta1 */
    float keep_v, take_v; /* beta2, 1 - beta2 */

    struct factors {
        float lr, scale;
        float correct_m, correct_root; /* 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step) */
        bool skips;                    /* the scale is not finite */
    };

    template <int W> struct streams {
        weights<T, W> w;
        elements<G, W> g;
        elements<M, W> m, v;
    };

    /* A step in place. */
    struct member {
        void *w, *m, *v;
        const void *g;
        int64_t count;
        float decay;
    };

    __device__ void use(const member &own) {
        count = own.count;
        w_out = own.w;
        m_out = own.m;
        v_out = own.v;
        w = own.w;
        m = own.m;
        v = own.v;
        g = own.g;
        decay = own.decay;
    }

    /* Whether all but the member is the same. */
    bool shares(const adamw_step &o) const {
        return lr == o.lr && scale == o.scale && step == o.step && step_type == o.step_type && eps == o.eps &&
               log_beta[0] == o.log_beta[0] && log_beta[1] == o.log_beta[1] && take_m == o.take_m && take_v == o.take_v;
    }

    __device__ void prefetch_at(int64_t i) const {
        const char *stored = static_cast<const char *>(w);
        prefetch(stored + i * STORED_BYTES<T>);
        if constexpr (std::is_same_v<T, halved>) prefetch(stored + (count + i) * STORED_BYTES<T>);
        prefetch(static_cast<const G *>(g) + i);
        prefetch(static_cast<const M *>(m) + i);
        prefetch(static_cast<const M *>(v) + i);
    }

    __device__ bool prepare(factors &f) const {
        __shared__ float correct[2]; /* 0: the step is bad */
        if (threadIdx.x == 0 || threadIdx.x == 32) {
            int root = threadIdx.x / 32;
            int64_t number = read_index(found, step, step_type, 0, INT64_MAX, 1);
            /* 1 - beta^step, without the cancellation of that difference. */
            double correction = -expm1((double)number * (root ? log_beta[1] : log_beta[0]));
            correct[root] = number < 0 ? 0 : (float)(1 / (root ? sqrt(correction) : correction));
        }
        f.lr = *lr;
        f.scale = scale ? *scale : 1;
        f.skips = !isfinite(f.scale);
        __syncthreads();
        f.correct_m = correct[0];
        f.correct_root = correct[1];
        return f.correct_m != 0;
    }

    template <int W> __device__ void load(streams<W> &s, int64_t i) const {
        s.w.load(w, count, i);
        s.g = load_elements<G, W>(g, i);
        s.m = load_elements<M, W>(m, i);
        s.v = load_elements<M, W>(v, i);
    }

    template <int W> __device__ void update(const streams<W> &s, const factors &f, int64_t i) const {
        float new_w[W], new_m[W], new_v[W];
#pragma unroll
        for (int k = 0; k < W; k++) {
            float old_w = s.w.at(k), gradient = to_f32(s.g.v[k]) * f.scale;
            new_m[k] = fmaf(to_f32(s.m.v[k]), keep_m, gradient * take_m);
            new_v[k] = fmaf(to_f32(s.v.v[k]), keep_v, gradient * take_v * gradient);
            float size = fmaf(sqrtf(new_v[k]), f.correct_root, eps);
            /* Nothing averaged yet and no eps: 0 / 0, and the weight stays. */
            float direction = size == 0 ? 0 : new_m[k] * f.correct_m / size;
            new_w[k] = fmaf(decayed(old_w, decay, direction), -f.lr, old_w);
            if (f.skips) {
                new_w[k] = old_w;
                new_m[k] = to_f32(s.m.v[k]);
                new_v[k] = to_f32(s.v.v[k]);
            }
        }
        weights<T, W>::store(w_out, count, i, new_w);
        store_elements<M>(m_out, i, new_m);
        store_elements<M>(v_out, i, new_v);
    }
};

template <class T, class G, class M> adamw_step<T, G, M> step_of(const vjp_work *work) {
    const vjp_adamw_attributes *a = static_cast<const vjp_adamw_attributes *>(work->attributes);
    adamw_step<T, G, M> s{};
    s.count = vjp_elements(work, ADAMW_W);
    s.w_out = vjp_data(work, ADAMW_W_OUT);
    s.m_out = vjp_data(work, ADAMW_M_OUT);
    s.v_out = vjp_data(work, ADAMW_V_OUT);
    s.w = vjp_data(work, ADAMW_W);
    s.m = vjp_data(work, ADAMW_M);
    s.v = vjp_data(work, ADAMW_V);
    s.g = vjp_data(work, ADAMW_G);
    s.lr = static_cast<const float *>(vjp_data(work, ADAMW_LR));
    s.scale = static_cast<const float *>(vjp_data(work, ADAMW_SCALE));
    s.step = vjp_data(work, ADAMW_STEP);
    s.step_type = vjp_type(work, ADAMW_STEP);
    s.found = findings_of(work);
    s.log_beta[0] = std::log(a->beta1);
    s.log_beta[1] = std::log(a->beta2);
    s.decay = (float)a->weight_decay;
    s.eps = (float)a->eps;
    s.keep_m = (float)a->beta1;
    s.take_m = (float)(1 - a->beta1);
    s.keep_v = (float)a->beta2;
    s.take_v = (float)(1 - a->beta2);
    return s;
}

template <class T, class G, class M> bool is_aligned_step(const adamw_step<T, G, M> &s) {
    constexpr size_t MOMENT = VECTOR * sizeof(M), STORED = VECTOR * STORED_BYTES<T>;
    if (std::is_same_v<T, halved> && s.count % VECTOR) return false; /* the lower halves are not aligned */
    return is_aligned(s.w, STORED) && is_aligned(s.w_out, STORED) && is_aligned(s.g, VECTOR * sizeof(G)) &&
           is_aligned(s.m, MOMENT) && is_aligned(s.m_out, MOMENT) && is_aligned(s.v, MOMENT) &&
           is_aligned(s.v_out, MOMENT);
}

bool lies_in_halves(const vjp_work *work) {
    return static_cast<const vjp_adamw_attributes *>(work->attributes)->halves != 0;
}

/* Calls f with values of the types of the weights, the gradient and the moments. */
template <class F> auto with_adamw_types(const vjp_work *work, F f) {
    auto with_moments = [&](auto weight, auto gradient) {
        return vjp_type(work, ADAMW_M) == VJP_BF16 ? f(weight, gradient, bf16{}) : f(weight, gradient, float{});
    };
    if (lies_in_halves(work))
        return vjp_type(work, ADAMW_G) == VJP_BF16 ? with_moments(halved{}, bf16{}) : with_moments(halved{}, float{});
    return with_step_types(work, ADAMW_G, with_moments);
}

vjp_status run(const vjp_work *work) {
    int64_t count = vjp_elements(work, ADAMW_W);
    if (count == 0) return VJP_OK;
    return with_adamw_types(work, [&](auto weight, auto gradient, auto moment) {
        auto s = step_of<decltype(weight), decltype(gradient), decltype(moment)>(work);
        return is_aligned_step(s) ? enqueue_step<VECTOR>(work, s, count) : enqueue_step<1>(work, s, count);
    });
}

bool same_types(const vjp_work *a, const vjp_work *b) {
    return a->storage == b->storage && vjp_type(a, ADAMW_G) == vjp_type(b, ADAMW_G) &&
           vjp_type(a, ADAMW_M) == vjp_type(b, ADAMW_M) && lies_in_halves(a) == lies_in_halves(b);
}

} // namespace

vjp_status run_many_adamw(const vjp_work *const *works, size_t count) {
    return for_each_kind(works, count, same_types, [](const vjp_work *const *kind, size_t found) {
        return with_adamw_types(kind[0], [&](auto weight, auto gradient, auto moment) {
            using T = decltype(weight);
            using G = decltype(gradient);
            using M = decltype(moment);
            using step = adamw_step<T, G, M>;
            auto describe = [](const vjp_work *work, step *s, typename step::member *m) {
                *s = step_of<T, G, M>(work);
                *m = {s->w_out, s->m_out, s->v_out, s->g, vjp_elements(work, ADAMW_W), s->decay};
                return s->w_out == s->w && s->m_out == s->m && s->v_out == s->v && is_aligned_step(*s);
            };
            return run_steps<step>(kind, found, describe, run);
        });
    });
}

} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_adamw[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_adamw[VJP_PASS_COUNT] = {{vjp::run, nullptr, VJP_STORAGE_16_32 | VJP_TAKES_HALVES}};
}
