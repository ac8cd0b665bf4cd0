/* SPDX-License-Identifier: MIT */
/*
 * add and mul: a is [rows, dim], b is [dim]. The formulas are in add.wgsl and mul.wgsl, add.metal and mul.metal. In the
 * backward da and, where there is one row, db are elementwise; else db is a sum over the rows. It comes first, because
 * da may be the memory of dy or a.
 */
#include "gpu/ops/elementwise.h"
#include "gpu/ops/sums.h"

static bool is_mul(const vjp_work *work) {
    return work->op->id == OP_ID(mul);
}

static vjp_status forward(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    gpu_elements e = {.operand = {{"out0", ADD_Y}, {"in0", ADD_A}}};
    if (s.rows == 1) {
        e.operand[2] = (gpu_element_operand){"in1", ADD_B};
    } else {
        e.row = ADD_B;
        e.inner = s.dim;
        e.span = s.rows * s.dim;
    }
    return gpu_run_elements(work, &e);
}

/* db as a sum. */
static gpu_sums sums_of(const vjp_work *work, const vjp_broadcast_sizes *s) {
    return (gpu_sums){.term = is_mul(work) ? GPU_PRODUCTS : GPU_ELEMENTS,
                      .out = ADD_B_DB,
                      .in = {ADD_B_DY, MUL_B_A},
                      .outer = 1,
                      .length = s->rows,
                      .inner = s->dim,
                      .factor = 1};
}

static vjp_status backward(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    bool whole = s.rows == 1, in_place = vjp_data(work, ADD_B_DA) == vjp_data(work, ADD_B_DY);
    gpu_sums sums = sums_of(work, &s);
    vjp_status status = whole ? VJP_OK : gpu_run_sums(work, &sums);
    gpu_elements e = {.operand = {{"in0", ADD_B_DY}}};
    int count = 1;
    /* da of add is dy: in place it is there already. */
    if (is_mul(work) || !in_place || vjp_accumulates(work, ADD_B_DA))
        e.operand[count++] = (gpu_element_operand){"out0", ADD_B_DA};
    if (whole) e.operand[count++] = (gpu_element_operand){"out1", ADD_B_DB};
    if (is_mul(work) && whole && vjp_data(work, MUL_B_DB)) e.operand[count++] = (gpu_element_operand){"in2", MUL_B_A};
    if (is_mul(work) && vjp_data(work, MUL_B_DA)) {
        if (whole) {
            e.operand[count++] = (gpu_element_operand){"in1", MUL_B_B};
        } else {
            e.row = MUL_B_B;
            e.inner = s.dim;
            e.span = s.rows * s.dim;
        }
    }
    return status == VJP_OK ? gpu_run_elements(work, &e) : status;
}

static size_t workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    gpu_sums sums = sums_of(work, &s);
    return s.rows == 1 ? 0 : gpu_sums_workspace(work, &sums);
}

const vjp_kernel gpu_add[VJP_PASS_COUNT] = {{forward, NULL, VJP_STORAGE_16_32},
                                            {backward, workspace, VJP_STORAGE_16_32}};
const vjp_kernel gpu_mul[VJP_PASS_COUNT] = {{forward, NULL, VJP_STORAGE_16_32},
                                            {backward, workspace, VJP_STORAGE_16_32}};
