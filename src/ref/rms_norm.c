#include "ref/ref.h"
const vjp_kernel ref_rms_norm[VJP_PASS_COUNT] = {{0}};
