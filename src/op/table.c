/* The list of all ops, and how to find one. */
#include <string.h>

#include "op/op.h"

static const vjp_op *const table[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) &vjp_op_##name,
#include "op/ops.def"
};

size_t vjp_op_count(void) {
    return VJP_OP_COUNT;
}

const vjp_op *vjp_op_at(size_t index) {
    return index < VJP_OP_COUNT ? table[index] : NULL;
}

const vjp_op *vjp_op_find(const char *name) {
    for (size_t i = 0; name && i < VJP_OP_COUNT; i++)
        if (strcmp(table[i]->info.name, name) == 0) return table[i];
    return NULL;
}

const vjp_op_info *vjp_op_describe(const vjp_op *op) {
    return op ? &op->info : NULL;
}
