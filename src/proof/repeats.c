/* SPDX-License-Identifier: MIT */
/*
 * The same bits run after run, on a GPU: each pass several times from fresh buffers, and once more recorded and
 * replayed, compared with its first run. Repetition gives a rare race several chances to appear.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/core.h"
#include "proof/error.h"
#include "proof/values.h"

enum { RUNS = 20 };

typedef struct repeated {
    const proof_plan *plan;
    vjp_device *device;
    const proof_problem *p;
    const char *variant;
} repeated;

static void report(const repeated *r, vjp_pass pass, int slot, double error, const char *why) {
    char text[320];
    snprintf(text, sizeof text, "%s; %s", r->p->setup.text, r->variant);
    const char *output = slot < 0 ? "-" : r->p->info->pass[pass].slots[slot].name;
    r->plan->row(r->plan->context,
                 &(proof_row){r->p->info->name, text_pass_name(pass), output, vjp_dtype_name(r->p->storage),
                              vjp_device_name(r->device), text, error, 0, error == 0, why});
}

/* How many elements of each output differ from the first run's, over all runs. */
static void repeat(repeated *r, proof_call call) {
    const vjp_pass_info *info = &r->p->info->pass[call.pass];
    bool records = r->device->backend->measure;
    void *first[VJP_MAX_SLOTS] = {0};
    int64_t different[VJP_MAX_SLOTS] = {0};
    char fault[PROOF_FAULT];
    bool good = true;
    for (int run = 0; run <= RUNS + records && good; run++) {
        void *result[VJP_MAX_SLOTS] = {0};
        call.recorded = run > RUNS;
        good = proof_run(r->p, r->device, &call, run ? result : first, fault) == VJP_OK && !fault[0];
        for (size_t i = 0; run && good && i < info->outputs; i++) {
            const proof_values *v = &r->p->slot[call.pass][i];
            if (result[i]) different[i] += proof_different(result[i], first[i], (vjp_dtype)v->tensor.dtype, v->count);
        }
        for (int i = 0; i < VJP_MAX_SLOTS; i++)
            free(result[i]);
    }
    if (!good) report(r, call.pass, -1, INFINITY, fault);
    for (size_t i = 0; good && i < info->outputs; i++)
        if (first[i]) report(r, call.pass, (int)i, (double)different[i], different[i] ? "runs differ in bits" : "");
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        free(first[i]);
}

static void repeat_case(const proof_plan *plan, vjp_device *device, vjp_device *ref, const proof_setup *setup,
                        vjp_dtype storage) {
    proof_problem p;
    char error[TEXT_ERROR];
    if (!proof_problem_make(&p, ref, setup, storage, plan->seed, error)) return; /* proof_compare() reports it */
    repeated r = {plan, device, &p, "repeated"};
    for (int pass = 0; pass < vjp_passes(p.info); pass++) {
        proof_call call = {.pass = (vjp_pass)pass, .present = proof_present(&p, (vjp_pass)pass)};
        repeat(&r, call);
    }
    proof_problem_free(&p);
}

void proof_repeats(const proof_plan *plan, vjp_device *device) {
    vjp_device *ref = proof_open_ref();
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        if (!proof_plan_takes(plan, device, &proof_cases[i], &setup) || !(proof_cases[i].marks & PROOF_BITS)) continue;
        for (int dtype = 0; dtype < VJP_DTYPE_COUNT; dtype++)
            if ((plan->dtype < 0 || plan->dtype == dtype) && (setup.only >> dtype & 1))
                if (proof_supports(device, setup.op, (vjp_dtype)dtype))
                    repeat_case(plan, device, ref, &setup, (vjp_dtype)dtype);
    }
    vjp_close(ref);
}
