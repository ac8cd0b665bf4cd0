/* SPDX-License-Identifier: MIT */
/*
 * The proofs of `vjp check` in a page, each row passed on as it is made, and the same with a kernel that is broken on
 * purpose: one element of one output is damaged, which the proofs must find.
 */
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "module.h"
#include "proof/proof.h"

/* The page's: gets one row as JSON. */
__attribute__((import_module("vjp"), import_name("row"))) void vjp_web_row(const char *text);

typedef struct tally {
    const char *proof; /* that is running */
    int rows, failed;
} tally;

static void take_row(void *context, const proof_row *row) {
    tally *t = context;
    t->rows++;
    t->failed += !row->ok;
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    json_put_text(&w, "proof", t->proof);
    json_put_text(&w, "op", row->op);
    json_put_text(&w, "pass", row->pass);
    json_put_text(&w, "output", row->output);
    json_put_text(&w, "dtype", row->dtype);
    json_put_text(&w, "device", row->device);
    json_put_text(&w, "case", row->text);
    json_put_real(&w, "error", row->error);
    json_put_real(&w, "bound", row->bound);
    json_put_boolean(&w, "ok", row->ok);
    json_put_text(&w, "why", row->why);
    json_put_object_end(&w);
    char *text = web_take(&w);
    if (text) vjp_web_row(text);
    free(text);
}

static void begin(void *context, const char *proof, const char *about) {
    (void)about;
    ((tally *)context)->proof = proof;
}

static void end(void *context) {
    (void)context;
}

/* ---- A broken kernel --------------------------------------------------------------------------------- */

static const vjp_backend *whole;
static vjp_backend damaged;
static const vjp_op *broken_op;
static vjp_kernel broken_kernel[VJP_PASS_COUNT];

static void damage_number(char *element, vjp_dtype dtype) {
    switch (dtype) {
    case VJP_F32: *(float *)element = *(float *)element * 1.25f + 0.01f; break;
    case VJP_F64: *(double *)element = *(double *)element * 1.25 + 0.01; break;
    case VJP_BF16: *(uint16_t *)element ^= 0x40; break;
    case VJP_F16: *(uint16_t *)element ^= 0x200; break;
    default: *element ^= 1; break;
    }
}

/* The middle element of the first output that has elements. */
static vjp_status damage(const vjp_work *work) {
    const vjp_op_info *info = vjp_op_describe(work->op);
    for (int i = 0; i < (int)info->pass[work->pass].outputs; i++) {
        const vjp_tensor *t = work->tensor[i];
        int64_t count = t ? vjp_shape_product(&work->shape[i], 0, work->shape[i].ndim) : 0;
        if (!count) continue;
        vjp_dtype dtype = (vjp_dtype)t->dtype;
        size_t bytes = vjp_dtype_size(dtype);
        uint64_t offset = t->offset + (uint64_t)(count / 2) * bytes;
        _Alignas(8) char element[8];
        vjp_status status = vjp_download(work->device, element, t->data, offset, bytes);
        damage_number(element, dtype);
        return status == VJP_OK ? vjp_upload(work->device, t->data, offset, element, bytes) : status;
    }
    return VJP_OK;
}

static vjp_status run_broken(const vjp_work *work) {
    vjp_status status = whole->kernel(work->device, work->op, work->pass)->run(work);
    return status == VJP_OK ? damage(work) : status;
}

static const vjp_kernel *find_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    const vjp_kernel *kernel = whole->kernel(device, op, pass);
    if (op != broken_op || !kernel || !kernel->run) return kernel;
    broken_kernel[pass] = *kernel;
    broken_kernel[pass].run = run_broken;
    return &broken_kernel[pass];
}

/* ---- Running ----------------------------------------------------------------------------------------- */

/*
 * Of one op, or of all (NULL), for one dtype or for all (-1); `quick` and `brief` as in proof_plan. Returns
 * {rows, failed}. With `broken`, the op's kernels are.
 */
char *vjp_web_check(vjp_device *device, const char *op, int dtype, bool quick, bool brief, int seed, bool broken);
WEB_EXPORT(vjp_web_check)
char *vjp_web_check(vjp_device *device, const char *op, int dtype, bool quick, bool brief, int seed, bool broken) {
    tally t = {0};
    proof_plan plan = {
        .dtype = dtype, .seed = (uint64_t)seed, .quick = quick, .brief = brief, .row = take_row, .context = &t};
    if (op && !(plan.op = vjp_op_find(op))) {
        web_fail("there is no op \"%s\"", op);
        return NULL;
    }
    if (broken) {
        if (!plan.op) {
            web_fail("one op is broken at a time; name it");
            return NULL;
        }
        whole = device->backend;
        broken_op = plan.op;
        damaged = *whole;
        damaged.kernel = find_kernel;
        device->backend = device->found = &damaged;
    }
    t.proof = "compare";
    if (brief)
        proof_compare(&plan, device);
    else
        proof_all(&plan, device, begin, end);
    if (broken) device->backend = device->found = whole;
    if (!t.rows) {
        web_fail("%s has no kernel for that; nothing was checked", vjp_device_name(device));
        return NULL;
    }
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    json_put_integer(&w, "rows", t.rows);
    json_put_integer(&w, "failed", t.failed);
    json_put_object_end(&w);
    return web_take(&w);
}
