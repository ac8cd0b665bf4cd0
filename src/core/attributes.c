/* An op's attribute struct by its description: defaults, and the checks that hold for every op. */
#include <string.h>

#include "core/core.h"

void vjp_op_defaults(const vjp_op *op, void *attributes) {
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
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        if (a->type == VJP_REAL || a->type == VJP_INTEGER) continue; /* their ranges are the op's own affair */
        int64_t value;
        memcpy(&value, (const char *)work->attributes + a->offset, 8);
        int64_t count = a->type == VJP_BOOLEAN ? 2 : choice_count(a);
        if (value < 0 || value >= count)
            return vjp_refuse(work, VJP_INVALID, "%s is %lld; it must be 0 to %lld", a->name, (long long)value,
                              (long long)count - 1);
    }
    return VJP_OK;
}
