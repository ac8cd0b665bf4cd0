/* What add and mul share: b has a's last axes (all of them, some, or none) and is used again for each of the rest. */
#ifndef VJP_OP_BROADCAST_H
#define VJP_OP_BROADCAST_H

#include "op/op.h"

/* Sets every shape of either pass. `source` is the backward's slot that tells b's axes before db does; -1: none. */
vjp_status vjp_broadcast_infer(vjp_work *work, int64_t b_axes, int source);

#endif
