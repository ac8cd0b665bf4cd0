/* What layer_norm and rms_norm share: rows of the last axes, each normalised by itself. */
#ifndef VJP_OP_NORM_H
#define VJP_OP_NORM_H

#include "op/op.h"

/* Refuses bad axes and eps, and sets "[..., dim]", "[dim]" and "[...]" from slot x. */
vjp_status vjp_norm_infer(vjp_work *work, int x, int64_t axes, double eps);
vjp_norm_sizes vjp_norm_sizes_of(const vjp_work *work, int x, int64_t axes);

/* Refuses an eps that is negative, infinite or NaN. */
vjp_status vjp_norm_check_eps(const vjp_work *work, double eps);

#endif
