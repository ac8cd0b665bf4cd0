/* SPDX-License-Identifier: MIT */
/*
 * What the two paths of maxpool2d share: the call, several adjacent elements in as few registers as hold them, and
 * which of two elements is the maximum.
 */
#ifndef VJP_CUDA_MAXPOOL2D_CUH
#define VJP_CUDA_MAXPOOL2D_CUH

#include <type_traits>

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

struct axis {
    int64_t size, windows, kernel, stride, padding, dilation;
};

/* Element e of plane q is at (q * plane + e) * inner + i: inner is the channels where they are last, else 1. */
struct pool_call {
    const void *x, *dy, *saved; /* saved: the backward's argmax */
    void *y, *argmax, *dx;
    vjp_dtype argmax_type; /* of the one that is present */
    bool add;              /* to y or dx */
    findings found;
    int64_t planes, inner;
    axis down, across;
};

/* ---- Several adjacent elements ----------------------------------------------------------------------- */

/* N elements in as few registers as hold them, extracted only where they are used. */
template <class E, int N> struct alignas(N * sizeof(E) < 16 ? N * sizeof(E) : 16) packed {
    static constexpr int BYTES = N * (int)sizeof(E), WORDS = BYTES < 4 ? 1 : BYTES / 4;
    using word = std::conditional_t<BYTES == 2, unsigned short, unsigned>;
    word words[WORDS];

    /* i must be a compile-time constant. */
    __device__ E operator[](int i) const {
        E e;
        if constexpr (sizeof(E) == 2) {
            unsigned short half = (unsigned short)(words[i / 2] >> i % 2 * 16);
            memcpy(&e, &half, 2);
        } else {
            memcpy(&e, &words[i * (int)(sizeof(E) / 4)], sizeof e);
        }
        return e;
    }

    /* A bf16 is the upper half of its f32: one instruction for either half of a word. */
    __device__ float as_f32(int i) const {
        if constexpr (std::is_same_v<E, bf16>)
            return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : (unsigned)words[i / 2] << 16);
        else
            return to_f32((*this)[i]);
    }
};

/* Packs at(0), at(1), ... */
template <class E, int N, class AT> __device__ packed<E, N> make_packed(AT at) {
    packed<E, N> r = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        E e = at(i);
        if constexpr (sizeof(E) == 2) {
            unsigned short half;
            memcpy(&half, &e, 2);
            r.words[i / 2] |= (typename packed<E, N>::word)(half << i % 2 * 16);
        } else {
            memcpy(&r.words[i * (int)(sizeof(E) / 4)], &e, sizeof e);
        }
    }
    return r;
}

template <class WORD, class E, int N> __device__ packed<E, N> load_words(const E *from) {
    packed<E, N> r;
#pragma unroll
    for (int i = 0; i < (int)(sizeof r / sizeof(WORD)); i++) {
        WORD part = __ldg(reinterpret_cast<const WORD *>(from) + i);
        memcpy(&r.words[i * (int)(sizeof part / sizeof r.words[0])], &part, sizeof part);
    }
    return r;
}

/* The address is aligned to the size of all elements, or to 16 bytes. */
template <class E, int N> __device__ packed<E, N> load_packed(const E *from) {
    if constexpr (N * sizeof(E) == 2)
        return load_words<unsigned short, E, N>(from);
    else if constexpr (N * sizeof(E) == 4)
        return load_words<unsigned, E, N>(from);
    else if constexpr (N * sizeof(E) == 8)
        return load_words<uint2, E, N>(from);
    else
        return load_words<uint4, E, N>(from);
}

template <class E, int N> __device__ void store_packed(E *to, const packed<E, N> &r) {
    *reinterpret_cast<packed<E, N> *>(to) = r;
}

/* ---- The maximum ------------------------------------------------------------------------------------- */

/* The first element is taken whatever it is; a later one must be greater, or the first NaN. */
template <class PLACE> struct best {
    float value;
    PLACE place;

    __device__ void take(float other, PLACE at) {
        bool wins = !(other <= value) && value == value;
        value = wins ? other : value;
        place = wins ? at : place;
    }
};

} // namespace
} // namespace vjp

#endif
