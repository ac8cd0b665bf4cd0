#include "ref/ref.h"
const vjp_kernel ref_gather[VJP_PASS_COUNT] = {{0}};
