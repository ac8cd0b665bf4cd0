#include "ref/ref.h"
const vjp_kernel ref_rope[VJP_PASS_COUNT] = {{0}};
