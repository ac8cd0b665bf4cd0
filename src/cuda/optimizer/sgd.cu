/* SPDX-License-Identifier: MIT */
/*
 * sgd on CUDA, by the loop of optimizer.cuh: w, g and momentum are read once, w and momentum written once (20 bytes per
 * element in f32). The formulas are those of the CPU; lr and scale are read on the device.
 */
#include "cuda/optimizer/optimizer.cuh"

namespace vjp {
namespace {

template <class T, class G> struct sgd_step {
    void *w_out, *momentum_out;
    const void *w, *momentum, *g; /* without momentum its old value is not even 0: 0 * beta + -0 is 0 */
    const float *lr, *scale;
    float decay, beta;
    bool nesterov;

    struct factors {
        float lr, scale;
        bool skips; /* the scale is not finite */
    };

    template <int W> struct streams {
        elements<T, W> w;
        elements<G, W> g;
        elements<float, W> momentum;
    };

    /* A step in place; momentum NULL: there is none. */
    struct member {
        void *w, *momentum;
        const void *g;
        int64_t count;
        float decay;
    };

    __device__ void use(const member &own) {
        w_out = own.w;
        momentum_out = own.momentum;
        w = own.w;
        momentum = own.momentum;
        g = own.g;
        decay = own.decay;
    }

    /* Whether all but the member is the same. */
    bool shares(const sgd_step &o) const {
        return lr == o.lr && scale == o.scale && beta == o.beta && nesterov == o.nesterov;
    }

    __device__ void prefetch_at(int64_t i) const {
        prefetch(static_cast<const T *>(w) + i);
        prefetch(static_cast<const G *>(g) + i);
        if (momentum) prefetch(static_cast<const float *>(momentum) + i);
    }

    __device__ bool prepare(factors &f) const {
        f.lr = *lr;
        f.scale = scale ? *scale : 1;
        f.skips = !isfinite(f.scale);
        return true;
    }

    template <int W> __device__ void load(streams<W> &s, int64_t i) const {
        s.w = load_elements<T, W>(w, i);
        s.g = load_elements<G, W>(g, i);
        if (momentum) s.momentum = load_elements<float, W>(momentum, i);
    }

    template <int W> __device__ void update(const streams<W> &s, const factors &f, int64_t i) const {
        float new_w[W], new_momentum[W];
#pragma unroll
        for (int k = 0; k < W; k++) {
            float old_w = to_f32(s.w.v[k]), gradient = decayed(old_w, decay, to_f32(s.g.v[k]) * f.scale);
            new_momentum[k] = momentum ? fmaf(s.momentum.v[k], beta, gradient) : gradient;
            float direction = nesterov ? fmaf(new_momentum[k], beta, gradient) : new_momentum[k];
            new_w[k] = fmaf(direction, -f.lr, old_w);
            if (f.skips) {
                new_w[k] = old_w;
                new_momentum[k] = momentum ? s.momentum.v[k] : 0;
            }
        }
        store_elements<T>(w_out, i, new_w);
        store_elements<float>(momentum_out, i, new_momentum);
    }
};

template <class T, class G> sgd_step<T, G> step_of(const vjp_work *work) {
    const vjp_sgd_attributes *a = static_cast<const vjp_sgd_attributes *>(work->attributes);
    sgd_step<T, G> s{};
    s.w_out = vjp_data(work, SGD_W_OUT);
    s.momentum_out = vjp_data(work, SGD_MOMENTUM_OUT);
    s.w = vjp_data(work, SGD_W);
    s.momentum = vjp_data(work, SGD_MOMENTUM);
    s.g = vjp_data(work, SGD_G);
    s.lr = static_cast<const float *>(vjp_data(work, SGD_LR));
    s.scale = static_cast<const float *>(vjp_data(work, SGD_SCALE));
    s.decay = (float)a->weight_decay;
    s.beta = (float)a->beta;
    s.nesterov = a->nesterov;
    return s;
}

template <class T, class G> bool is_aligned_step(const sgd_step<T, G> &s) {
    constexpr size_t SINGLE = VECTOR * sizeof(float), STORED = VECTOR * sizeof(T);
    return is_aligned(s.w, STORED) && is_aligned(s.w_out, STORED) && is_aligned(s.g, VECTOR * sizeof(G)) &&
           is_aligned(s.momentum, SINGLE) && is_aligned(s.momentum_out, SINGLE);
}

vjp_status run(const vjp_work *work) {
    int64_t count = vjp_elements(work, SGD_W);
    if (count == 0) return VJP_OK;
    return with_step_types(work, SGD_G, [&](auto weight, auto gradient) {
        sgd_step<decltype(weight), decltype(gradient)> s = step_of<decltype(weight), decltype(gradient)>(work);
        return is_aligned_step(s) ? enqueue_step<VECTOR>(work, s, count) : enqueue_step<1>(work, s, count);
    });
}

} // namespace

vjp_status run_many_sgd(const vjp_work *const *works, size_t count) {
    auto same_types = [](const vjp_work *a, const vjp_work *b) {
        return a->storage == b->storage && vjp_type(a, SGD_G) == vjp_type(b, SGD_G);
    };
    return for_each_kind(works, count, same_types, [](const vjp_work *const *kind, size_t found) {
        return with_step_types(kind[0], SGD_G, [&](auto weight, auto gradient) {
            using T = decltype(weight);
            using G = decltype(gradient);
            auto describe = [](const vjp_work *work, sgd_step<T, G> *s, typename sgd_step<T, G>::member *m) {
                *s = step_of<T, G>(work);
                *m = {s->w_out, s->momentum_out, s->g, vjp_elements(work, SGD_W), s->decay};
                return s->w_out == s->w && s->momentum_out == s->momentum && is_aligned_step(*s);
            };
            return run_steps<sgd_step<T, G>>(kind, found, describe, run);
        });
    });
}

} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_sgd[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_sgd[VJP_PASS_COUNT] = {{vjp::run, nullptr, VJP_STORAGE_16_32}};
}
