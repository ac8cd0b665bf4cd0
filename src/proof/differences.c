/* SPDX-License-Identifier: MIT */
/*
 * Compares `ref` with central differences, both in double. For L = <y, dy> and a direction v in one input's space the
 * derivative of L along v is <dinput, v>; the difference quotient of fourth order
 *     (8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h
 * errs by h^4 L''''' / 30 and by rounding of about 1e-16 |y| / h. At h = 2e-4 both stay below 1e-9 for the
 * curvatures here (a norm's grow with the fifth power of 1/sigma), so that 1e-8 leaves no room for a wrong formula.
 *
 * The cases are the small ones of the table with ordinary numbers, moved off the kinks: maxpool2d's inputs are well
 * separated, relu's pre-activations are away from 0.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "proof/problem.h"
#include "proof/values.h"

static const double STEP = 2e-4, BOUND = 1e-8;
static const double KINK_DISTANCE = 0.02; /* over ten times as far as a step moves a pre-activation */

enum { DIRECTIONS = 5, COORDINATES = 4, MAX_ELEMENTS = 2048, MAX_SEEDS = 200 };

/* The forward's output whose gradient comes in: y, or a loss. */
static int output_of(const vjp_op_info *info) {
    for (size_t i = 0; i < info->pass[VJP_FORWARD].outputs; i++) {
        char name[64];
        snprintf(name, sizeof name, "d%s", info->pass[VJP_FORWARD].slots[i].name);
        if (proof_find_slot(&info->pass[VJP_BACKWARD], name) >= 0) return (int)i;
    }
    return -1;
}

static int gradient_of(const vjp_op_info *info) {
    char name[64];
    snprintf(name, sizeof name, "d%s", info->pass[VJP_FORWARD].slots[output_of(info)].name);
    return proof_find_slot(&info->pass[VJP_BACKWARD], name);
}

/* The difference quotient of <y, dy> when `input` of the forward moves along `direction`. NaN: the call failed. */
static double quotient(proof_problem *p, vjp_device *ref, int input, const double *direction, const double *dy) {
    int y = output_of(p->info);
    proof_values *v = &p->slot[VJP_FORWARD][input];
    uint32_t outputs = (1u << p->info->pass[VJP_FORWARD].outputs) - 1;
    uint32_t present = (proof_present(p, VJP_FORWARD) & ~outputs) | 1u << y | 1u << input;
    double *centre = v->exact, *moved = proof_memory((size_t)v->count * sizeof(double));
    double *result[2][VJP_MAX_SLOTS] = {{0}}, sum = 0;
    static const double weights[2] = {8, -1};
    v->exact = moved;
    for (int k = 1; k <= 2; k++) {
        for (int side = 0; side < 2; side++) {
            for (int64_t i = 0; i < v->count; i++)
                moved[i] = centre[i] + (side ? -k : k) * STEP * direction[i];
            if (proof_reference(p, ref, VJP_FORWARD, present, result[side]) != VJP_OK) sum = NAN;
        }
        /* Differences are taken per element first: rounding L itself would lose what the step changes. */
        for (int64_t i = 0; result[0][y] && result[1][y] && i < p->slot[VJP_FORWARD][y].count; i++)
            sum += weights[k - 1] * dy[i] * (result[0][y][i] - result[1][y][i]);
        free(result[0][y]), result[0][y] = NULL;
        free(result[1][y]), result[1][y] = NULL;
    }
    v->exact = centre;
    free(moved);
    return sum / (12 * STEP);
}

static double norm(const double *values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += values[i] * values[i];
    return sqrt(sum);
}

/* The worst relative error over random directions and single coordinates. */
static double worst_error(proof_problem *p, vjp_device *ref, int input, const double *gradient, proof_random *random) {
    int64_t count = p->slot[VJP_FORWARD][input].count;
    const double *dy = p->slot[VJP_BACKWARD][gradient_of(p->info)].exact;
    double *direction = proof_memory((size_t)count * sizeof(double)), worst = 0;
    double size = norm(gradient, count);
    for (int t = 0; t < DIRECTIONS + COORDINATES && count; t++) {
        bool single = t >= DIRECTIONS;
        int64_t at = proof_random_below(random, count);
        double predicted = 0;
        for (int64_t i = 0; i < count; i++) {
            direction[i] = single ? i == at : proof_random_normal(random);
            predicted += gradient[i] * direction[i];
        }
        double measured = quotient(p, ref, input, direction, dy);
        /* The usual size of <gradient, v>; an absolute error of 1e-9 is rounding even where that is 0. */
        double scale = single ? size / sqrt((double)count) : size;
        double error = fabs(predicted - measured) / fmax(fmax(fabs(predicted), scale), 1e-2);
        if (!(error <= worst)) worst = error;
    }
    free(direction);
    return worst;
}

/* An absent gamma counts as 1 and an absent beta or bias as 0: their gradients are defined all the same. */
static void give_absent(proof_values *v) {
    double value = strcmp(v->slot->name, "gamma") == 0 ? 1 : 0;
    for (int64_t i = 0; !v->present && i < v->count; i++)
        v->exact[i] = value;
}

static void check_outputs(const proof_plan *plan, proof_problem *p, vjp_device *ref, double *const *gradient,
                          const char *variant) {
    const vjp_pass_info *info = &p->info->pass[VJP_BACKWARD];
    for (size_t i = 0; i < info->outputs; i++) {
        const char *name = info->slots[i].name;
        int input = proof_find_slot(&p->info->pass[VJP_FORWARD], name + 1);
        if (input < 0 || !gradient[i]) continue; /* a loss that the backward computes on its way; an absent residual */
        proof_random random = proof_random_of(plan->seed, p->info->name, p->setup.text, name);
        give_absent(&p->slot[VJP_FORWARD][input]);
        double error = worst_error(p, ref, input, gradient[i], &random);
        char text[320];
        snprintf(text, sizeof text, "%s; differences%s", p->setup.text, variant);
        proof_row row = {
            p->info->name, "backward", name,  "f64",          vjp_device_name(ref),
            text,          error,      BOUND, error <= BOUND, error <= BOUND ? "" : "the gradient is not the slope"};
        plan->row(plan->context, &row);
    }
}

static bool near_kink(const proof_problem *p) {
    int pre = proof_find_slot(&p->info->pass[VJP_FORWARD], "pre");
    if (pre < 0) return false;
    const proof_values *v = &p->slot[VJP_FORWARD][pre];
    for (int64_t i = 0; i < v->count; i++)
        if (fabs(v->exact[i]) < KINK_DISTANCE) return true;
    return false;
}

static void fail(const proof_plan *plan, const proof_setup *setup, const char *why) {
    plan->row(plan->context, &(proof_row){vjp_op_describe(setup->op)->name, "backward", "-", "f64", "ref", setup->text,
                                          INFINITY, 0, false, why});
}

static bool is_index(const proof_setup *setup, const char *name) {
    const vjp_pass_info *pass = &vjp_op_describe(setup->op)->pass[VJP_FORWARD];
    int slot = proof_find_slot(pass, name);
    return slot >= 0 && (pass->slots[slot].kind == VJP_KIND_INDEX || pass->slots[slot].kind == VJP_KIND_ARGMAX);
}

static void check_case(const proof_plan *plan, vjp_device *ref, proof_setup *setup) {
    const char *name = vjp_op_describe(setup->op)->name;
    bool relu = strcmp(name, "linear") == 0 &&
                ((const vjp_linear_attributes *)setup->attributes.bytes)->activation == VJP_ACTIVATION_RELU;
    if (strcmp(name, "maxpool2d") == 0) setup->data = PROOF_DISTINCT;
    for (int i = 0; i < setup->choices; i++) /* what is saved in f32 would be wrong in the eighth digit */
        if (!is_index(setup, setup->choice[i].name)) setup->choice[i].dtype = -1;
    proof_problem p;
    char error[TEXT_ERROR];
    for (uint64_t attempt = 0;; attempt++) {
        if (attempt == MAX_SEEDS) {
            fail(plan, setup, "no numbers found that are away from relu's kink");
            return;
        }
        if (!proof_problem_make(&p, ref, setup, VJP_F64, plan->seed + attempt, error)) {
            fail(plan, setup, error);
            return;
        }
        if (!relu || !near_kink(&p)) break;
        proof_problem_free(&p);
    }
    double *saved[VJP_MAX_SLOTS] = {0}, *again[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < p.info->pass[VJP_BACKWARD].outputs; i++)
        saved[i] = p.slot[VJP_BACKWARD][i].exact;
    check_outputs(plan, &p, ref, saved, "");
    uint32_t present = proof_present(&p, VJP_BACKWARD);
    if (p.saved & present) {
        if (proof_reference(&p, ref, VJP_BACKWARD, present & ~p.saved, again) == VJP_OK)
            check_outputs(plan, &p, ref, again, ", recomputed");
        else
            fail(plan, setup, vjp_error(ref));
    }
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        free(again[i]);
    proof_problem_free(&p);
}

/* Small, with ordinary numbers. Any indices will do: only floats move. */
static bool suits(const proof_setup *setup) {
    int64_t largest = 0;
    if (vjp_passes(vjp_op_describe(setup->op)) < VJP_PASS_COUNT) return false;
    for (int i = 0; i < setup->choices; i++) {
        int64_t count = 1;
        for (int k = 0; k < setup->choice[i].ndim; k++)
            count *= setup->choice[i].shape[k];
        largest = count > largest ? count : largest;
    }
    bool ordinary = setup->data == PROOF_NORMAL || setup->data == PROOF_IGNORED || setup->data == PROOF_ALL_IGNORED;
    return ordinary && !setup->extremes && largest <= MAX_ELEMENTS;
}

void proof_differences(const proof_plan *plan) {
    vjp_device *ref = proof_open_ref();
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        if (proof_plan_takes(plan, ref, &proof_cases[i], &setup) && suits(&setup)) check_case(plan, ref, &setup);
    }
    vjp_close(ref);
}
