#include "ref/ref.h"
const vjp_kernel ref_cumsum[VJP_PASS_COUNT] = {{0}};
