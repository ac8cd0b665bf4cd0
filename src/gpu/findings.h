/* What kernels found wrong with indices, as it lies on a device, and the sentence for it. */
#ifndef VJP_GPU_FINDINGS_H
#define VJP_GPU_FINDINGS_H

#include "gpu/gpu.h"

enum { GPU_RECORDS = VJP_OP_COUNT * VJP_PASS_COUNT };

/* Of an op and pass; all ones: nothing. */
typedef struct gpu_record {
    uint32_t position, explained, low, high;
} gpu_record;

/* What the sentence needs besides. */
typedef struct gpu_findings_asked {
    int64_t limit[GPU_RECORDS];
    int32_t index_dtype[GPU_RECORDS];
} gpu_findings_asked;

/* The record that a launch reports to, whose limit and dtype are noted; -1: it reports nothing. */
int gpu_findings_of(gpu_findings_asked *asked, const gpu_launch *l);

/* VJP_OK, or the first finding as a status with its sentence. */
vjp_status gpu_findings_tell(const gpu_findings_asked *asked, vjp_device *device, const gpu_record *record);

#endif
