/* SPDX-License-Identifier: MIT */
/* An op's attribute struct, from its description: defaults, and the checks that hold for every op. */
#include <string.h>

#include "core/core.h"

void vjp_op_defaults(const vjp_op *op, void *attributes) {
    if (!op || !attributes || !op->info.attribute_bytes) return;
    uint64_t struct_size = op->info.attribute_bytes;
    memcpy(attributes, &struct_size, sizeof struct_size);
    for (size_t i = 0; i < op->info.attribute_count; i++) {
        const vjp_attribute *a = &op->info.attributes[i];
        const void *value = a->type == VJP_REAL ? (const void *)&a->real : (const void *)&a->integer;
        memcpy((char *)attributes + a->offset, value, 8);
    }
}

static int64_t choice_count(const vjp_attribute *a) {
    int64_t count = 0;
    while (a->choices[count])
        count++;
    return count;
}

vjp_status vjp_check_attributes(const vjp_work *work) {
    const vjp_op_info *info = &work->op->info;
    if (!info->attribute_bytes) return VJP_OK;
    uint64_t struct_size;
    memcpy(&struct_size, work->attributes, sizeof struct_size);
    if (struct_size != info->attribute_bytes)
        return vjp_refuse(work, VJP_INVALID,
                          "attributes.struct_size is %llu; it must be %zu: start from the struct's _DEFAULTS or from "
                          "vjp_op_defaults()",
                          (unsigned long long)struct_size, info->attribute_bytes);
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        if (a->type == VJP_REAL || a->type == VJP_INTEGER) continue; /* their ranges: the op's infer() */
        int64_t value;
        memcpy(&value, (const char *)work->attributes + a->offset, 8);
        int64_t count = a->type == VJP_BOOLEAN ? 2 : choice_count(a);
        if (value < 0 || value >= count)
            return vjp_refuse(work, VJP_INVALID, "%s is %lld; it must be 0 to %lld", a->name, (long long)value,
                              (long long)count - 1);
    }
    return VJP_OK;
}
