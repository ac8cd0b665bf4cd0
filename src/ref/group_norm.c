#include "ref/ref.h"
const vjp_kernel ref_group_norm[VJP_PASS_COUNT] = {{0}};
