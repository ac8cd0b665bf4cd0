/* SPDX-License-Identifier: MIT */
/*
 * add and mul on CUDA. a is [rows, dim], b is [dim]; y = a + b or a * b. In the backward da is dy or dy * b, and db is
 * dy or dy * a, summed over the rows unless there is only one (column_sums.cuh). One pass makes both, so dy and a are
 * read once.
 */
#ifndef VJP_CUDA_BROADCAST_CUH
#define VJP_CUDA_BROADCAST_CUH

#include "cuda/elementwise/column_sums.cuh"

namespace vjp {
namespace {

/* b is repeated over the rows, without end. */
inline repetition broadcast_row(const vjp_broadcast_sizes &s) {
    return {divider_of(vjp_max(s.dim, 1)), divider_of(INT64_MAX), repetition::SINGLE};
}

/* The formula has the inputs a and b; b is in slot b_slot. */
template <class Formula>
vjp_status broadcast_elements(const vjp_work *work, const vjp_broadcast_sizes &s, const void *a, const void *b,
                              int b_slot, void *y, bool add) {
    element_call c{.in = {a, b}, .out = {y}, .add = {add}, .count = s.rows * s.dim, .row = broadcast_row(s)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return with_parameter_type<T>(vjp_type(work, b_slot) == VJP_F32, [&](auto b_zero) {
            using B = decltype(b_zero);
            if (s.rows == 1) return run_elements(work, Formula{}, types<T, B>{}, types<T>{}, c);
            return run_elements<true>(work, Formula{}, types<T, B>{}, types<T>{}, c);
        });
    });
}

template <class Formula> vjp_status broadcast_forward(const vjp_work *work) {
    return broadcast_elements<Formula>(work, vjp_broadcast_sizes_of(work), vjp_data(work, ADD_A), vjp_data(work, ADD_B),
                                       ADD_B, vjp_data(work, ADD_Y), vjp_accumulates(work, ADD_Y));
}

/* Whether db is a sum. */
inline bool broadcast_sums(const vjp_work *work, const vjp_broadcast_sizes &s) {
    return work->tensor[ADD_B_DB] && s.rows != 1 && s.dim > 0;
}

inline column_call broadcast_plan(const vjp_work *work, const vjp_broadcast_sizes &s) {
    column_call c = column_plan(1, s.rows, s.dim, work->storage == VJP_F32 ? WIDE<float> : WIDE<bf16>);
    c.to = parameter_output_of(work, ADD_B_DB);
    c.out = vjp_data(work, ADD_B_DA);
    c.add = vjp_accumulates(work, ADD_B_DA);
    return c;
}

inline size_t broadcast_workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    if (!broadcast_sums(work, s)) return 0;
    workspace_layout layout(nullptr);
    double *partial;
    return column_workspace(broadcast_plan(work, s), layout, &partial);
}

/* db, and da in passing. `in` are the formula's inputs without b. */
template <class Formula, int INPUTS>
vjp_status broadcast_sum(const vjp_work *work, const vjp_broadcast_sizes &s, const element_call &e, parameter b) {
    column_call c = broadcast_plan(work, s);
    workspace_layout layout(work->workspace);
    column_workspace(c, layout, &c.partial);
    c.out = e.out[0];
    c.in[0] = e.in[0];
    c.in[1] = Formula::ROW == 1 ? nullptr : e.in[1];
    c.row = b;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (s.rows == 0) return run_finish_columns<T>(work, c); /* no terms: 0 */
        return run_columns<T, INPUTS, 2>(work, Formula{}, c);
    });
}

} // namespace
} // namespace vjp

#endif
