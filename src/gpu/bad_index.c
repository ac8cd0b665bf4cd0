/* SPDX-License-Identifier: MIT */
/* See bad_index.h. */
#include "gpu/bad_index.h"

#include <string.h>

int gpu_bad_index_record(const gpu_launch *l) {
    for (int i = 0; i < l->operands; i++)
        if (l->operand[i].form == GPU_BAD_INDEX) return (int)l->work->op->id * VJP_PASS_COUNT + (int)l->work->pass;
    return -1;
}

void gpu_bad_index_remember(gpu_bad_index_context *context, const gpu_launch *l) {
    int record = gpu_bad_index_record(l);
    if (record < 0) return;
    if (l->limit >= 0) {
        context->first[record] = l->first;
        context->limit[record] = l->limit;
    }
    for (int i = 0; i < l->operands; i++)
        if (l->operand[i].form == GPU_INDEX && !l->operand[i].output)
            context->index_dtype[record] = (int32_t)l->operand[i].dtype;
}

static double value_of(const gpu_bad_index *r, vjp_dtype dtype) {
    int64_t wide = (int64_t)((uint64_t)r->high << 32 | r->low);
    float narrow;
    memcpy(&narrow, &r->low, sizeof narrow);
    return dtype == VJP_F32 ? (double)narrow : dtype == VJP_I64 ? (double)wide : (double)(int32_t)r->low;
}

static const char *index_name(const vjp_pass_info *p) {
    for (size_t i = p->outputs; i < p->count; i++)
        if (p->slots[i].kind == VJP_KIND_INDEX || p->slots[i].kind == VJP_KIND_ARGMAX) return p->slots[i].name;
    return "index";
}

static vjp_status fail(const gpu_bad_index_context *context, vjp_device *device, int i, const gpu_bad_index *r) {
    const vjp_op_info *info = vjp_op_describe(vjp_op_at((size_t)(i / VJP_PASS_COUNT)));
    const char *pass = vjp_pass_name((vjp_pass)(i % VJP_PASS_COUNT)),
               *name = index_name(&info->pass[i % VJP_PASS_COUNT]);
    double value = value_of(r, (vjp_dtype)context->index_dtype[i]);
    int64_t first = context->first[i], limit = context->limit[i];
    bool ordered = i / VJP_PASS_COUNT == OP_ID(attention);
    const char *then = ordered ? "the results are not valid" : "it was left out";
    bool whole = value == (double)(int64_t)value;
    if (whole && ordered)
        return vjp_fail(device, VJP_INVALID,
                        "%s.%s: %s[%u] is %.0f, before that of the query before it or past the query's own key; %s",
                        info->name, pass, name, (unsigned)r->position, value, then);
    if (whole && !(value >= (double)first && value < (double)limit))
        return vjp_fail(device, VJP_INVALID, "%s.%s: %s[%u] is %.0f, outside [%lld, %lld); %s", info->name, pass, name,
                        (unsigned)r->position, value, (long long)first, (long long)limit, then);
    return vjp_fail(device, VJP_INVALID, "%s.%s: %s[%u] is %.9g, which is not an integer that f32 holds exactly; %s",
                    info->name, pass, name, (unsigned)r->position, value, then);
}

vjp_status gpu_bad_index_report(const gpu_bad_index_context *context, vjp_device *device, const gpu_bad_index *record) {
    for (int i = 0; i < GPU_BAD_INDEX_RECORDS; i++)
        if (record[i].position != UINT32_MAX) return fail(context, device, i, &record[i]);
    return VJP_OK;
}
