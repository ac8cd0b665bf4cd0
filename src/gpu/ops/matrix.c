/* SPDX-License-Identifier: MIT */
/* See matrix.h. */
#include "gpu/ops/matrix.h"

gpu_matrix gpu_matrix_of(int slot) {
    return (gpu_matrix){.place = GPU_TENSOR, .slot = slot};
}

gpu_matrix gpu_matrix_scratch(size_t offset, int64_t count) {
    return (gpu_matrix){.place = GPU_WORKSPACE, .offset = offset, .count = count};
}

gpu_matrix gpu_matrix_slice(const gpu_matrix *m, int64_t first, int64_t count) {
    gpu_matrix slice = *m;
    if (m->place == GPU_TENSOR)
        slice.first += first;
    else
        slice.offset += (size_t)first * sizeof(float);
    slice.count = count;
    return slice;
}

void gpu_matrix_bind(gpu_launch *l, const char *name, const gpu_matrix *m, int64_t run, bool output) {
    if (m->place == GPU_TENSOR) {
        if (output)
            gpu_tensor(l, name, m->slot, run);
        else
            gpu_fours(l, name, m->slot, run);
        if (m->count) gpu_part(l, m->first, m->count);
    } else {
        gpu_scratch(l, name, VJP_F32, m->offset, m->place == GPU_WORKSPACE ? m->count : 0, output);
    }
    gpu_operand *o = &l->operand[l->operands - 1];
    if (m->place != GPU_TENSOR) {
        o->output = o->present && output;
        o->paired = o->present;
        o->fours = o->present && run % 4 == 0;
    }
    o->adds = o->adds || (o->present && m->adds);
}
