/* See findings.h. */
#include "gpu/findings.h"

#include <string.h>

int gpu_findings_of(gpu_findings_asked *asked, const gpu_launch *l) {
    int record = -1;
    for (int i = 0; i < l->operands; i++)
        if (l->operand[i].form == GPU_FINDINGS) record = (int)l->work->op->id * VJP_PASS_COUNT + (int)l->work->pass;
    if (record < 0) return record;
    if (l->limit >= 0) asked->limit[record] = l->limit;
    for (int i = 0; i < l->operands; i++)
        if (l->operand[i].form == GPU_INDEX && !l->operand[i].output)
            asked->index_dtype[record] = (int32_t)l->operand[i].dtype;
    return record;
}

static double value_of(const gpu_record *r, vjp_dtype dtype) {
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

static vjp_status tell(const gpu_findings_asked *asked, vjp_device *device, int i, const gpu_record *r) {
    const vjp_op_info *info = vjp_op_describe(vjp_op_at((size_t)(i / VJP_PASS_COUNT)));
    const char *pass = vjp_pass_name((vjp_pass)(i % VJP_PASS_COUNT)),
               *name = index_name(&info->pass[i % VJP_PASS_COUNT]);
    double value = value_of(r, (vjp_dtype)asked->index_dtype[i]);
    if (value == (double)(int64_t)value && !(value >= 0 && value < (double)asked->limit[i]))
        return vjp_fail(device, VJP_INVALID, "%s.%s: %s[%u] is %.0f, outside [0, %lld); it was left out", info->name,
                        pass, name, (unsigned)r->position, value, (long long)asked->limit[i]);
    return vjp_fail(device, VJP_INVALID,
                    "%s.%s: %s[%u] is %.9g, which is not an integer that f32 holds exactly; it was left out",
                    info->name, pass, name, (unsigned)r->position, value);
}

vjp_status gpu_findings_tell(const gpu_findings_asked *asked, vjp_device *device, const gpu_record *record) {
    for (int i = 0; i < GPU_RECORDS; i++)
        if (record[i].position != UINT32_MAX) return tell(asked, device, i, &record[i]);
    return VJP_OK;
}
