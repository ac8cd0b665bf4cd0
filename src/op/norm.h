/* SPDX-License-Identifier: MIT */
/* What the norms share. */
#ifndef VJP_OP_NORM_H
#define VJP_OP_NORM_H

#include "op/op.h"

/* Refuses an eps that is negative, infinite or NaN. */
vjp_status vjp_norm_check_eps(const vjp_work *work, double eps);

#endif
