/* SPDX-License-Identifier: MIT */
/*
 * The same bits, whatever the machine: every op, pass and storage type on one thread, and again on 2, 3, 5 and 8
 * threads, in a caller's pool that runs tasks in random order, and with every instruction set with FMA that this
 * processor runs. Matrix products likewise for each of the engines; across instruction sets only the built-in one,
 * since AMX belongs to one set and a BLAS chooses its own kernels.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "proof/error.h"
#include "proof/problem.h"
#include "proof/values.h"

/* The caller's pool: one thread, a new order each time. */
typedef struct shuffler {
    proof_random random;
    size_t *order;
    size_t room;
} shuffler;

static void shuffled_for(void *context, size_t count, vjp_task task, void *argument) {
    shuffler *s = context;
    if (count > s->room) {
        free(s->order);
        s->order = proof_memory(count * sizeof *s->order);
        s->room = count;
    }
    for (size_t i = 0; i < count; i++) {
        size_t j = (size_t)proof_random_below(&s->random, (int64_t)i + 1);
        s->order[i] = s->order[j];
        s->order[j] = i;
    }
    for (size_t i = 0; i < count; i++)
        task(argument, s->order[i]);
}

typedef struct setting {
    const char *name;
    int threads;
    const char *set; /* NULL: the best */
    bool shuffled;
} setting;

/* The others are compared with the first. */
static const setting settings[] = {
    {"1 thread", 1, NULL, false},   {"2 threads", 2, NULL, false}, {"3 threads", 3, NULL, false},
    {"5 threads", 5, NULL, false},  {"8 threads", 8, NULL, false}, {"caller's pool", 2, NULL, true},
    {"avx512", 2, "avx512", false}, {"avx2", 2, "avx2", false},    {"neon", 2, "neon", false},
};

enum { SETTINGS = sizeof settings / sizeof settings[0] };

typedef struct engine {
    const char *name;
    vjp_device *device[SETTINGS]; /* NULL: not on this machine, or nothing to compare */
    shuffler shuffle;
} engine;

/* VJP_ISA selects plain, which may lack FMA: other sets then have other bits. */
static bool is_plain(vjp_device *device) {
    char set[16];
    return vjp_device_property(device, "instruction_set", set, sizeof set) == VJP_OK && strcmp(set, "plain") == 0;
}

static void engine_open(engine *e, const char *name) {
    bool any_set = strcmp(name, "builtin") == 0;
    *e = (engine){.name = name, .shuffle = {.random = {1}}};
    for (int i = 0; i < SETTINGS; i++) {
        if (settings[i].set && (!any_set || is_plain(e->device[0]))) continue;
        vjp_options options = {.struct_size = sizeof(vjp_options),
                               .threads = settings[i].threads,
                               .instruction_set = settings[i].set,
                               .matrix_products = name};
        if (settings[i].shuffled) {
            options.parallel_for = shuffled_for;
            options.parallel_context = &e->shuffle;
        }
        vjp_status status = vjp_open("cpu", &options, &e->device[i]);
        if (status == VJP_OK) continue;
        /* A set or a BLAS that is not here leaves nothing to compare; being out of memory must not pass for that. */
        if (status == VJP_OUT_OF_MEMORY) proof_give_up(e->device[i]);
        vjp_close(e->device[i]);
        e->device[i] = NULL;
    }
}

static void engine_close(engine *e) {
    for (int i = 0; i < SETTINGS; i++)
        vjp_close(e->device[i]);
    free(e->shuffle.order);
}

static void report(const proof_plan *plan, const proof_problem *p, const proof_call *call, int slot,
                   const char *variant, double error, const char *why) {
    char text[320];
    snprintf(text, sizeof text, "%s; %s", p->setup.text, variant);
    const vjp_pass_info *info = &p->info->pass[call->pass];
    plan->row(plan->context,
              &(proof_row){p->info->name, text_pass_name(call->pass), slot < 0 ? "-" : info->slots[slot].name,
                           vjp_dtype_name(p->storage), "cpu", text, error, 0, error == 0, why});
}

static void compare_settings(const proof_plan *plan, const proof_problem *p, const proof_call *call, const engine *e,
                             const char *variant) {
    void *base[VJP_MAX_SLOTS] = {0};
    bool have_base = false;
    for (int i = 0; i < SETTINGS; i++) {
        if (!e->device[i]) continue;
        void *result[VJP_MAX_SLOTS] = {0};
        char fault[PROOF_FAULT], text[96];
        snprintf(text, sizeof text, "%s%s, %s", variant, settings[i].name, e->name);
        if (proof_run(p, e->device[i], call, i ? result : base, fault) != VJP_OK || fault[0])
            report(plan, p, call, -1, text, INFINITY, fault);
        else if (i == 0)
            have_base = true;
        for (size_t k = 0; i && have_base && k < p->info->pass[call->pass].outputs; k++) {
            const proof_values *v = &p->slot[call->pass][k];
            if (!result[k]) continue;
            int64_t different = proof_different(result[k], base[k], (vjp_dtype)v->tensor.dtype, v->count);
            report(plan, p, call, (int)k, text, (double)different, different ? "other bits than on one thread" : "");
        }
        for (int k = 0; k < VJP_MAX_SLOTS; k++)
            free(result[k]);
    }
    for (int k = 0; k < VJP_MAX_SLOTS; k++)
        free(base[k]);
}

static void compare_case(const proof_plan *plan, vjp_device *ref, const engine *e, const proof_setup *setup,
                         vjp_dtype storage) {
    proof_problem p;
    char error[TEXT_ERROR];
    if (!proof_problem_make(&p, ref, setup, storage, plan->seed, error)) return; /* proof_compare() reports it */
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++) {
        if (vjp_supports(e->device[0], setup->op, (vjp_pass)pass, storage) != VJP_OK) continue;
        proof_call call = {.pass = (vjp_pass)pass, .present = proof_present(&p, (vjp_pass)pass)};
        compare_settings(plan, &p, &call, e, "");
        if (proof_takes_rows(e->device[0], setup->op, (vjp_pass)pass)) {
            call.rows = PROOF_ROWS_TOGETHER;
            compare_settings(plan, &p, &call, e, "rows together, ");
            call.rows = PROOF_PACKED;
        }
        if (pass == VJP_FORWARD || !(call.present & p.saved)) continue;
        call.present &= ~p.saved;
        compare_settings(plan, &p, &call, e, "recomputed, ");
    }
    proof_problem_free(&p);
}

void proof_bits(const proof_plan *plan) {
    static const char *const names[] = {"builtin", "amx", "blas"};
    vjp_device *ref = proof_open_ref();
    for (int n = 0; n < 3; n++) {
        engine e;
        engine_open(&e, names[n]);
        for (size_t i = 0; e.device[0] && i < proof_case_count; i++) {
            proof_setup setup;
            bool products = strcmp(proof_cases[i].op, "linear") == 0 || strcmp(proof_cases[i].op, "conv2d") == 0;
            if (!proof_plan_takes(plan, ref, &proof_cases[i], &setup) || !(proof_cases[i].marks & PROOF_BITS)) continue;
            for (int dtype = 0; (products || n == 0) && dtype < VJP_DTYPE_COUNT; dtype++)
                if ((plan->dtype < 0 || plan->dtype == dtype) && (setup.only >> dtype & 1))
                    if (proof_supports(e.device[0], setup.op, (vjp_dtype)dtype))
                        compare_case(plan, ref, &e, &setup, (vjp_dtype)dtype);
        }
        engine_close(&e);
    }
    vjp_close(ref);
}
