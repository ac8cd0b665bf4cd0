/* SPDX-License-Identifier: MIT */
/*
 * Compares a device with `ref`: for every case and storage type both passes, and every variant of the call that must
 * give the same result. Separate computations (all outputs; statistics computed again; += twice) are compared with
 * ref's f64 result. Variants of the same computation (one output alone, at another alignment, in place, without inputs
 * that are not needed, with rows that lie apart) must give the same bits.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "proof/error.h"
#include "proof/values.h"

typedef struct comparison {
    const proof_plan *plan;
    vjp_device *device, *ref;
    const proof_problem *p;
    vjp_pass pass;
    uint32_t present;
    void *base[VJP_MAX_SLOTS]; /* the results of the plain call with everything given */
} comparison;

/*
 * Over this many elements a case runs plainly and with statistics computed again only: the smaller cases cover the
 * other variants on the same path of the kernel.
 */
enum { TEXT = 320, LARGE = 700000 };

static bool is_large(const proof_problem *p) {
    return p->slot[VJP_FORWARD][p->info->pass[VJP_FORWARD].outputs].count > LARGE;
}

static void report(const comparison *c, int slot, const char *variant, double error, double bound, const char *why) {
    char text[TEXT];
    snprintf(text, sizeof text, "%s%s%s", c->p->setup.text, variant[0] ? "; " : "", variant);
    proof_row row = {.op = c->p->info->name,
                     .pass = text_pass_name(c->pass),
                     .output = slot < 0 ? "-" : c->p->info->pass[c->pass].slots[slot].name,
                     .dtype = vjp_dtype_name(c->p->storage),
                     .device = vjp_device_name(c->device),
                     .text = text,
                     .error = error,
                     .bound = bound,
                     .ok = error <= bound && !why[0],
                     .why = why};
    c->plan->row(c->plan->context, &row);
}

static void free_all(void **results) {
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        free(results[i]);
}

/* Runs; false after a failure or a fault has been reported. */
static bool run(const comparison *c, const proof_call *call, const char *variant, void *result[VJP_MAX_SLOTS]) {
    char fault[PROOF_FAULT];
    vjp_status status = proof_run(c->p, c->device, call, result, fault);
    if (status == VJP_OK && !fault[0]) return true;
    report(c, -1, variant, INFINITY, 0, fault[0] ? fault : vjp_status_name(status));
    return status == VJP_OK;
}

static uint32_t outputs_of(const comparison *c) {
    return (1u << c->p->info->pass[c->pass].outputs) - 1;
}

static double norm(const double *values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        if (isfinite(values[i])) sum += values[i] * values[i];
    return sqrt(sum);
}

/* Compares each output with ref's. */
static void measure(const comparison *c, void **result, double *const *expected, const char *variant) {
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++) {
        if (!result[i] || !expected[i]) continue;
        proof_error e = proof_measure(c->p, c->pass, (int)i, result[i], expected[i]);
        report(c, (int)i, variant, e.relative, proof_bound(c->p, c->pass, (int)i), e.why);
    }
}

/* Compares the bits of each present output. */
static void same_bits(const comparison *c, void **result, void *const *expected, const char *variant) {
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++) {
        if (!result[i]) continue;
        const proof_values *v = &c->p->slot[c->pass][i];
        int64_t different = proof_different(result[i], expected[i], (vjp_dtype)v->tensor.dtype, v->count);
        char why[PROOF_WHY] = "";
        if (different)
            snprintf(why, sizeof why, "%lld of %lld elements differ from the plain call's", (long long)different,
                     (long long)v->count);
        report(c, (int)i, variant, (double)different, 0, why);
    }
}

static void run_same_bits(const comparison *c, const proof_call *call, void *const *expected, const char *variant) {
    void *result[VJP_MAX_SLOTS] = {0};
    if (run(c, call, variant, result)) same_bits(c, result, expected, variant);
    free_all(result);
}

/* ---- The variants ------------------------------------------------------------------------------------ */

static void run_measured(const comparison *c, const proof_call *call, double *const *expected, const char *variant) {
    void *result[VJP_MAX_SLOTS] = {0};
    if (run(c, call, variant, result)) measure(c, result, expected, variant);
    free_all(result);
}

/* The inputs that the op does not need for one output of the backward alone, as bits. */
static uint32_t unneeded(const comparison *c, size_t output) {
    const vjp_pass_info *info = &c->p->info->pass[c->pass];
    const vjp_op_rules *rules = c->p->setup.op->rules;
    if (c->pass == VJP_FORWARD || !rules->keeps) return 0;
    uint32_t kept = rules->keeps(&c->p->setup.attributes, 1u << output), dropped = 0;
    /* What it keeps may be absent in this case, and computed again from what it does not keep. */
    if (kept & ~c->present) return 0;
    for (size_t i = info->outputs; i < info->count; i++)
        if (info->slots[i].flags & VJP_SLOT_OPTIONAL && !(kept >> i & 1)) dropped |= 1u << i;
    return dropped;
}

/*
 * One output and no other, from what it needs and no more, every tensor one element off its alignment. On the host: the
 * same bits. A GPU may have another kernel for that, equally accurate.
 */
static void alone(const comparison *c, double *const *expected) {
    bool host = vjp_device_is_host(c->device);
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++) {
        proof_call call = {.pass = c->pass, .present = (c->present & ~outputs_of(c) & ~unneeded(c, i)) | 1u << i};
        if (!(c->present >> i & 1)) continue;
        if (!host) run_measured(c, &call, expected, "alone");
        call.shift = 1;
        if (host)
            run_same_bits(c, &call, c->base, "alone, unaligned");
        else
            run_measured(c, &call, expected, "alone, unaligned");
    }
}

/* Whether every row of the slots that have rows begins at a multiple of 16 bytes where the call is packed. */
static bool has_aligned_rows(const comparison *c) {
    const vjp_pass_info *info = &c->p->info->pass[c->pass];
    for (size_t i = 0; i < info->count; i++) {
        const vjp_tensor *tensor = &c->p->slot[c->pass][i].tensor;
        if (!(info->slots[i].flags & VJP_SLOT_ROWS) || tensor->ndim < 3) continue;
        int64_t row = tensor->shape[tensor->ndim - 2] * tensor->shape[tensor->ndim - 1];
        if (row * (int64_t)vjp_dtype_size((vjp_dtype)tensor->dtype) % 16) return false;
    }
    return true;
}

/*
 * A call with rows that lie apart: the same bits as `packed`, the results of the same call of packed tensors. A GPU may
 * have another kernel, equally accurate, where the rows are aligned to 16 bytes in one of the two and not in the other.
 */
static void rows(const comparison *c, proof_call call, proof_rows form, void *const *packed, double *const *expected,
                 const char *variant) {
    static const char *const names[] = {[PROOF_ROWS_APART] = "rows apart",
                                        [PROOF_ROWS_ODD] = "rows oddly apart",
                                        [PROOF_ROWS_TOGETHER] = "rows together"};
    if (!proof_takes_rows(c->device, c->p->setup.op, c->pass)) return;
    char text[TEXT];
    snprintf(text, sizeof text, "%s%s%s", variant, variant[0] ? ", " : "", names[form]);
    call.rows = form;
    bool aligned = has_aligned_rows(c);
    bool same_path = form == PROOF_ROWS_APART || aligned == (form == PROOF_ROWS_TOGETHER);
    if (same_path || vjp_device_is_host(c->device))
        run_same_bits(c, &call, packed, text);
    else
        run_measured(c, &call, expected, text);
}

/* A GPU may compile a shader for each form of rows: a quick check of one tries fewer. */
static bool tries_few(const comparison *c) {
    return c->plan->quick && !vjp_device_is_host(c->device);
}

/*
 * Cases of more than ROWS_ALL elements, and quick ones on a GPU, try one form, which depends on the pass and the
 * storage type: with all three forms in every case, checking attention takes a third longer.
 */
static void all_rows(const comparison *c, double *const *expected) {
    static const proof_rows forms[] = {PROOF_ROWS_APART, PROOF_ROWS_ODD, PROOF_ROWS_TOGETHER};
    enum { ROWS_ALL = 5000, FORMS = 3 };
    bool all = c->p->slot[VJP_FORWARD][c->p->info->pass[VJP_FORWARD].outputs].count <= ROWS_ALL && !tries_few(c);
    for (int i = 0; i < FORMS; i++)
        if (all || ((int)c->p->storage + (int)c->pass) % FORMS == i)
            rows(c, (proof_call){.pass = c->pass, .present = c->present}, forms[i], c->base, expected, "");
}

/* The outputs of the backward that repeat a result of the forward, as bits. */
static uint32_t repeated_by(const comparison *c) {
    const vjp_pass_info *forward = &c->p->info->pass[VJP_FORWARD], *back = &c->p->info->pass[VJP_BACKWARD];
    uint32_t repeated = 0;
    for (size_t i = 0; i < back->outputs; i++)
        if (proof_find_slot(forward, back->slots[i].name) >= 0) repeated |= 1u << i;
    return repeated & c->present;
}

/*
 * A result of the forward that the backward repeats has the forward's bits, from what the device's own forward saves;
 * and without it the other outputs have the same bits.
 */
static void repeats_forward(const comparison *c) {
    const vjp_pass_info *forward = &c->p->info->pass[VJP_FORWARD], *back = &c->p->info->pass[VJP_BACKWARD];
    uint32_t repeated = repeated_by(c);
    if (!repeated) return;
    void *made[VJP_MAX_SLOTS] = {0}, *expected[VJP_MAX_SLOTS] = {0}, *result[VJP_MAX_SLOTS] = {0};
    proof_problem own = *c->p;
    comparison changed = *c;
    changed.p = &own;
    proof_call call = {.pass = VJP_FORWARD, .present = proof_present(c->p, VJP_FORWARD)};
    if (run(c, &call, "the forward's bits", made)) {
        for (size_t i = 0; i < back->count; i++) {
            int same = proof_find_slot(forward, back->slots[i].name);
            if (repeated >> i & 1) expected[i] = made[same];
            if (c->p->saved & c->present & 1u << i) own.slot[VJP_BACKWARD][i].stored = made[same];
        }
        call = (proof_call){.pass = VJP_BACKWARD, .present = (c->present & ~outputs_of(c)) | repeated};
        run_same_bits(&changed, &call, expected, "the forward's bits, alone");
        call.present = c->present;
        if (run(&changed, &call, "the forward's bits", result)) {
            for (size_t i = 0; i < back->outputs; i++)
                if (!(repeated >> i & 1)) expected[i] = result[i];
            same_bits(&changed, result, expected, "the forward's bits");
            call.present = c->present & ~repeated;
            run_same_bits(&changed, &call, expected, "without what it repeats");
        }
    }
    free_all(result);
    free_all(made);
}

/* One += onto what is stored in `before`: the sum of that and ref's result, rounded once. `again`: with rows apart too.
 */
static bool accumulate_onto(const comparison *c, void *const *before, void **result, const char *variant, bool again) {
    double *expected[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++) {
        const proof_values *v = &c->p->slot[c->pass][i];
        if (!(v->slot->flags & VJP_SLOT_ACCUMULATES) || !before[i]) continue;
        expected[i] = proof_memory((size_t)v->count * sizeof(double));
        for (int64_t k = 0; k < v->count; k++)
            expected[i][k] = proof_get(before[i], (vjp_dtype)v->tensor.dtype, k) + v->exact[k];
    }
    proof_call call = {.pass = c->pass, .present = c->present, .initial = before};
    bool ran = run(c, &call, variant, result);
    if (ran) {
        measure(c, result, expected, variant);
        if (again) rows(c, call, PROOF_ROWS_TOGETHER, result, expected, variant);
    }
    free_all((void **)expected);
    return ran;
}

/* += onto numbers of the result's own size, and again onto the stored sum: each step is measured separately. */
static void accumulate(const comparison *c) {
    void *initial[VJP_MAX_SLOTS] = {0}, *once[VJP_MAX_SLOTS] = {0}, *twice[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++) {
        const proof_values *v = &c->p->slot[c->pass][i];
        if (!(v->slot->flags & VJP_SLOT_ACCUMULATES) || !v->present) continue;
        vjp_dtype dtype = (vjp_dtype)v->tensor.dtype;
        proof_random random = proof_random_of(c->plan->seed, c->p->info->name, c->p->setup.text, "initial");
        double size = norm(v->exact, v->count), scale = size > 0 ? size / sqrt((double)v->count) : 1;
        initial[i] = proof_memory((size_t)v->count * vjp_dtype_size(dtype));
        for (int64_t k = 0; k < v->count; k++) {
            double start = scale * fabs(proof_random_normal(&random));
            proof_put(initial[i], dtype, k, copysign(start, v->exact[k])); /* a sum that cancels would prove nothing */
        }
    }
    if (accumulate_onto(c, initial, once, "accumulated", !c->plan->brief && !tries_few(c)))
        accumulate_onto(c, once, twice, "accumulated twice", false);
    free_all(initial);
    free_all(once);
    free_all(twice);
}

static void in_place(const comparison *c, double *const *expected) {
    const vjp_pass_info *info = &c->p->info->pass[c->pass];
    for (size_t i = 0; i < info->outputs; i++)
        for (size_t j = info->outputs; j < info->count; j++) {
            if (!(info->slots[i].aliases >> j & 1) || !(c->present >> i & c->present >> j & 1)) continue;
            char variant[64];
            snprintf(variant, sizeof variant, "%s in place of %s", info->slots[i].name, info->slots[j].name);
            proof_call call = {.pass = c->pass, .present = c->present, .alias_output = (int)i, .alias_input = (int)j};
            run_same_bits(c, &call, c->base, variant);
            rows(c, call, PROOF_ROWS_ODD, c->base, expected, variant);
        }
}

/* The backward without what the forward saved, and without inputs that are needed only to compute that again. */
static void without_saved(const comparison *c) {
    uint32_t saved = c->p->saved & c->present;
    if (!saved) return;
    proof_call call = {.pass = c->pass, .present = c->present & ~saved};
    double *expected[VJP_MAX_SLOTS] = {0};
    void *result[VJP_MAX_SLOTS] = {0};
    if (proof_reference(c->p, c->ref, c->pass, call.present, expected) != VJP_OK) {
        report(c, -1, "recomputed", INFINITY, 0, vjp_error(c->ref));
    } else if (run(c, &call, "recomputed", result)) {
        measure(c, result, expected, "recomputed");
        if (!is_large(c->p) && !tries_few(c)) rows(c, call, PROOF_ROWS_TOGETHER, result, expected, "recomputed");
        /* With half of the statistics saved, all are computed again. */
        uint32_t first = saved & -saved;
        call.present |= first;
        if (saved != first && !is_large(c->p)) run_same_bits(c, &call, result, "only the first statistic saved");
        comparison recomputed = *c;
        recomputed.present &= ~saved;
        memcpy(recomputed.base, result, sizeof result);
        if (!is_large(c->p)) alone(&recomputed, expected);
    }
    free_all(result);
    free_all((void **)expected);
    for (int i = 0; i < VJP_MAX_SLOTS && !is_large(c->p); i++)
        if (c->p->without & c->present & 1u << i) {
            char variant[64];
            snprintf(variant, sizeof variant, "saved, without %s", c->p->info->pass[c->pass].slots[i].name);
            run_same_bits(c, &(proof_call){.pass = c->pass, .present = c->present & ~(1u << i)}, c->base, variant);
        }
}

/*
 * Statistics that are an eighth too large, for ref and the device alike: this detects a backward that computes its own
 * instead of using those given. (Not argmax: an element outside the window has no meaning.)
 */
static void with_other_saved(const comparison *c) {
    proof_problem other = *c->p;
    comparison changed = *c;
    double *expected[VJP_MAX_SLOTS] = {0};
    void *result[VJP_MAX_SLOTS] = {0};
    uint32_t kept = c->p->saved & c->present;
    for (int i = 0; i < VJP_MAX_SLOTS; i++) {
        proof_values *v = &other.slot[c->pass][i];
        if (!(kept >> i & 1)) continue;
        if (v->slot->kind == VJP_KIND_ARGMAX) return;
        v->stored = proof_memory((size_t)v->count * vjp_dtype_size((vjp_dtype)v->tensor.dtype));
        for (int64_t k = 0; k < v->count; k++)
            proof_put(v->stored, (vjp_dtype)v->tensor.dtype, k, v->exact[k] * 1.125);
        v->exact = proof_to_double(v->stored, (vjp_dtype)v->tensor.dtype, v->count);
    }
    changed.p = &other;
    if (proof_reference(&other, c->ref, c->pass, c->present, expected) != VJP_OK)
        report(&changed, -1, "other saved", INFINITY, 0, vjp_error(c->ref));
    else if (run(&changed, &(proof_call){.pass = c->pass, .present = c->present}, "other saved", result))
        measure(&changed, result, expected, "other saved");
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        if (kept >> i & 1) {
            free(other.slot[c->pass][i].stored);
            free(other.slot[c->pass][i].exact);
        }
    free_all(result);
    free_all((void **)expected);
}

static void compare_pass(comparison *c) {
    if (vjp_supports(c->device, c->p->setup.op, c->pass, c->p->storage) != VJP_OK) return;
    double *expected[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < c->p->info->pass[c->pass].outputs; i++)
        expected[i] = c->p->slot[c->pass][i].exact;
    c->present = proof_present(c->p, c->pass);
    if (run(c, &(proof_call){.pass = c->pass, .present = c->present}, "", c->base)) {
        measure(c, c->base, expected, "");
        bool brief = c->plan->brief;
        if (!is_large(c->p)) {
            if (!brief) alone(c, expected);
            if (c->pass == VJP_BACKWARD && !brief) repeats_forward(c);
            accumulate(c);
            if (!brief) in_place(c, expected);
            if (!brief) all_rows(c, expected);
        }
        if (c->pass == VJP_BACKWARD && !brief) without_saved(c);
        if (c->pass == VJP_BACKWARD && !is_large(c->p) && (c->p->saved & c->present)) with_other_saved(c);
    }
    free_all(c->base);
}

/* WGSL and Metal let a device do so; the others keep every number. */
static bool may_flush(const vjp_device *device) {
    return strcmp(device->backend->name, "webgpu") == 0 || strcmp(device->backend->name, "metal") == 0;
}

static void compare_case(const proof_plan *plan, vjp_device *device, vjp_device *ref, const proof_setup *setup,
                         vjp_dtype storage) {
    proof_problem problem;
    char error[TEXT_ERROR];
    comparison c = {.plan = plan, .device = device, .ref = ref, .p = &problem};
    if (!proof_problem_make(&problem, ref, setup, storage, plan->seed, error)) {
        problem.setup = *setup;
        problem.info = vjp_op_describe(setup->op);
        problem.storage = storage;
        report(&c, -1, "", INFINITY, 0, error);
        return;
    }
    problem.narrow_operands = !vjp_device_is_host(device);
    problem.flushes = may_flush(device);
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++) {
        c = (comparison){.plan = plan, .device = device, .ref = ref, .p = &problem, .pass = (vjp_pass)pass};
        compare_pass(&c);
    }
    proof_problem_free(&problem);
}

/* In every storage type that the plan, the case and the device have in common. */
static void compare_dtypes(const proof_plan *plan, vjp_device *device, vjp_device *ref, const proof_setup *setup) {
    for (int dtype = 0; dtype < VJP_DTYPE_COUNT; dtype++) {
        bool wanted = (plan->dtype < 0 || plan->dtype == dtype) && (setup->only >> dtype & 1);
        bool supported = vjp_supports(device, setup->op, VJP_FORWARD, (vjp_dtype)dtype) == VJP_OK ||
                         vjp_supports(device, setup->op, VJP_BACKWARD, (vjp_dtype)dtype) == VJP_OK;
        if (wanted && supported) compare_case(plan, device, ref, setup, (vjp_dtype)dtype);
    }
}

void proof_compare(const proof_plan *plan, vjp_device *device) {
    vjp_device *ref = proof_open_ref();
    const vjp_op *before = NULL;
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        if (!proof_plan_takes(plan, device, &proof_cases[i], &setup) || (plan->brief && setup.op == before)) continue;
        compare_dtypes(plan, device, ref, &setup);
        before = setup.op;
    }
    vjp_close(ref);
}

void proof_compare_setup(const proof_plan *plan, vjp_device *device, const proof_setup *setup) {
    vjp_device *ref = proof_open_ref();
    compare_dtypes(plan, device, ref, setup);
    vjp_close(ref);
}
