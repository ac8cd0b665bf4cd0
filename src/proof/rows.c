/* SPDX-License-Identifier: MIT */
/* Rows that lie apart: see rows.h. */
#include "proof/rows.h"

#include <stdlib.h>
#include <string.h>

#include "proof/values.h"

/* An output in place of an input has no rows of its own. */
static bool is_apart(const proof_problem *p, const proof_call *call, size_t slot) {
    const proof_values *v = &p->slot[call->pass][slot];
    bool aliased = call->alias_input && (int)slot == call->alias_output;
    return call->rows != PROOF_PACKED && call->present >> slot & 1 && !aliased && v->slot->flags & VJP_SLOT_ROWS &&
           v->tensor.ndim > 2 && v->count;
}

/*
 * Elements between two rows of a slot with a buffer of its own, different for each slot. Eight elements keep the
 * alignment of a row to 16 bytes; an odd number does not, although the first row keeps it.
 */
static size_t gap_of(proof_rows rows, size_t slot) {
    return rows == PROOF_ROWS_APART ? 16 * slot + 8 : 2 * slot + 1;
}

static rows_place place_of(const proof_problem *p, const proof_call *call, size_t slot) {
    if (!is_apart(p, call, slot)) return (rows_place){0};
    const proof_values *v = &p->slot[call->pass][slot];
    const int64_t *shape = &v->tensor.shape[v->tensor.ndim - 2];
    size_t size = vjp_dtype_size((vjp_dtype)v->tensor.dtype), row = (size_t)(shape[0] * shape[1]);
    return (rows_place){.apart = true,
                        .buffer = (int)slot,
                        .rows = (size_t)v->count / row,
                        .row = row * size,
                        .step = (row + gap_of(call->rows, slot)) * size};
}

/* Puts the rows of slots [from, to) into the buffer of the first of them, one slot's after the other's. */
static void place_together(rows_layout *l, size_t from, size_t to) {
    int first = -1;
    size_t step = 0;
    for (size_t i = from; i < to; i++) {
        if (!l->place[i].apart) continue;
        if (first < 0) first = (int)i;
        l->place[i].buffer = first;
        l->place[i].begin = step;
        step += l->place[i].row;
    }
    for (size_t i = from; i < to; i++)
        if (l->place[i].apart) l->place[i].step = step;
}

static unsigned char *row_at(const rows_place *place, unsigned char *buffer, size_t row) {
    return buffer + place->begin + row * place->step;
}

static void fill_rows(const rows_place *place, unsigned char *buffer, const unsigned char *content) {
    for (size_t i = 0; i < place->rows; i++)
        if (content)
            memcpy(row_at(place, buffer, i), content + i * place->row, place->row);
        else
            memset(row_at(place, buffer, i), ROWS_POISON_BYTE, place->row);
}

void rows_make(rows_layout *l, const proof_problem *p, const proof_call *call,
               const void *const content[VJP_MAX_SLOTS]) {
    const vjp_pass_info *info = &p->info->pass[call->pass];
    memset(l, 0, sizeof *l);
    for (size_t i = 0; i < info->count; i++)
        l->place[i] = place_of(p, call, i);
    if (call->rows == PROOF_ROWS_TOGETHER) {
        place_together(l, 0, info->outputs);
        place_together(l, info->outputs, info->count);
    }
    for (size_t i = 0; i < info->count; i++) {
        const rows_place *place = &l->place[i];
        if (!place->apart) continue;
        size_t end = place->begin + (place->rows - 1) * place->step + place->row;
        if (end > l->buffer[place->buffer].bytes) l->buffer[place->buffer].bytes = end;
    }
    for (size_t i = 0; i < info->count; i++) {
        rows_buffer *buffer = &l->buffer[l->place[i].buffer];
        if (!l->place[i].apart) continue;
        if (!buffer->image) {
            buffer->image = proof_memory(buffer->bytes);
            memset(buffer->image, i < info->outputs ? ROWS_GUARD_BYTE : ROWS_POISON_BYTE, buffer->bytes);
        }
        fill_rows(&l->place[i], buffer->image, content[i]);
    }
}

void rows_free(rows_layout *l) {
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        free(l->buffer[i].image);
}

void rows_describe(const rows_place *place, vjp_tensor *tensor) {
    int64_t stride = (int64_t)(place->step / vjp_dtype_size((vjp_dtype)tensor->dtype));
    for (int i = tensor->ndim - 3; i >= 0; i--) {
        tensor->stride[i] = stride;
        stride *= tensor->shape[i];
    }
    tensor->offset += place->begin;
}

void *rows_take(const rows_layout *l, int slot, unsigned char *now) {
    const rows_place *place = &l->place[slot];
    unsigned char *taken = proof_memory(place->rows * place->row);
    for (size_t i = 0; i < place->rows; i++) {
        unsigned char *row = row_at(place, now, i);
        memcpy(taken + i * place->row, row, place->row);
        memcpy(row, row_at(place, l->buffer[place->buffer].image, i), place->row);
    }
    return taken;
}
