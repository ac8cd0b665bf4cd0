/* SPDX-License-Identifier: MIT */
/*
 * Rewrites of graphs: programs with and without them give the same bits, need no more memory with them, and what must
 * not be rewritten stays. Here values that are computed again, and calls that are combined; test_rewrite_products.c and
 * test_qkv.c have what products take over.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "graph/program.h"
#include "parts.h"
#include "random_graph.h"
#include "rewrites.h"
#include "train/model/llama.h"

/* ---- Random graphs ----------------------------------------------------------------------------------- */

/* random_graph_check() holds a program with rewrites against one without a plan, which has none. */
static void rewritten_is_not_rewritten(void **unused) {
    (void)unused;
    enum { SEEDS = 300 };
    static const random_kind kinds[] = {
        {.dtype = VJP_F32}, {.dtype = VJP_BF16}, {.dtype = VJP_F16}, {.dtype = VJP_F32, .recompute = true}};
    vjp_device *device = open_cpu();
    int changed = 0, tested = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        char why[RANDOM_WHY];
        choices from = {.seed = 1000 + seed};
        if (!in_sanitized_part(seed)) continue;
        tested++;
        setenv("VJP_REWRITES", "+all", 1);
        if (!random_graph_check(device, from, kinds[seed % 4], why)) fail_msg("seed %d: %s", (int)from.seed, why);
        random_graph r = random_graph_make(from, kinds[seed % 4]);
        vjp_program *off = compile_with(device, r.graph, r.result, (size_t)r.results, "-all");
        vjp_program *on = compile_with(device, r.graph, r.result, (size_t)r.results, "+all");
        changed += on->calls > off->calls;
        if (on->report.live_bytes > off->report.live_bytes)
            fail_msg("seed %d: %zu bytes are alive at once, %zu without rewrites", (int)from.seed,
                     on->report.live_bytes, off->report.live_bytes);
        vjp_program_destroy(on);
        vjp_program_destroy(off);
        vjp_graph_destroy(r.graph);
    }
    if (changed < tested / 4) fail_msg("only %d of %d graphs were rewritten", changed, tested);
    vjp_close(device);
}

/* ---- A model ----------------------------------------------------------------------------------------- */

/* A small Llama with the gradients of its parameters, as a training step has them. */
enum { LAYERS = 3 };

typedef struct small_llama {
    train_model model;
    size_t parameters, results;
    vjp_value *result; /* the gradients, and the loss */
} small_llama;

static small_llama small_llama_make(void) {
    const llama_config config = {.vocab_size = 64,
                                 .hidden_size = 64,
                                 .intermediate_size = 160,
                                 .layers = LAYERS,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 16,
                                 .max_positions = 64,
                                 .rope_theta = 10000,
                                 .norm_eps = 1e-5,
                                 .tied = true};
    const llama_options options = {.batch = 16, .context = 64, .dtype = VJP_BF16};
    small_llama l;
    llama_build(&l.model, &config, &options);
    l.parameters = (size_t)l.model.parameters;
    l.results = l.parameters + 1;
    l.result = calloc(l.results, sizeof *l.result);
    vjp_value *parameters = calloc(l.parameters, sizeof *parameters);
    for (size_t i = 0; i < l.parameters; i++)
        parameters[i] = l.model.parameter[i].value;
    if (vjp_graph_grad(l.model.graph, l.model.loss, parameters, l.parameters, NULL, 0, l.result) != VJP_OK)
        fail_msg("%s", vjp_graph_error(l.model.graph));
    l.result[l.parameters] = l.model.loss;
    free(parameters);
    return l;
}

static void small_llama_free(small_llama *l) {
    free(l->result);
    model_free(&l->model);
}

/* From the same weights, and whatever lies in the arena. */
static void run_llama(vjp_device *device, const small_llama *l, vjp_program *program, int poison) {
    for (size_t i = 0; i < l->parameters; i++)
        assert_int_equal(vjp_program_init_normal(program, l->model.parameter[i].value, 0.1, 0.3, 7), VJP_OK);
    memset(program->arena, poison, program->report.arena_bytes);
    run(device, program);
}

/*
 * Norms, swiglu and the casts of weights are computed again, and nothing that multiplies matrices; norms and swiglu by
 * their backward where calls are combined. Of a layer, one product waits for its first norm, gate and up for the
 * second, and one for swiglu.
 */
static void a_llama_keeps_less(void **unused) {
    (void)unused;
    vjp_device *device = open_cpu();
    small_llama l = small_llama_make();
    enum { PROGRAMS = 3 };
    static const char *const rewrites[PROGRAMS] = {"-all,+residual,+qkv", "-all,+residual,+qkv,+recompute",
                                                   "-all,+residual,+qkv,+recompute,+combine"};
    vjp_program *program[PROGRAMS];
    for (int on = 0; on < PROGRAMS; on++) {
        program[on] = compile_with(device, l.model.graph, l.result, l.results, rewrites[on]);
        run_llama(device, &l, program[on], on ? 0x55 : 0xaa);
    }
    for (size_t i = 0; i < l.results; i++)
        for (int on = 1; on < PROGRAMS; on++)
            same_bits(program[0], program[on], l.result[i]);
    int norms = count_calls(program[1], "rms_norm.again") + count_calls(program[1], "rms_norm.2.again");
    int gates = count_calls(program[1], "swiglu.again");
    assert_int_equal(count_calls(program[0], ".again"), 0);
    if (norms < 2 * LAYERS - 1 || gates < LAYERS - 1) fail_msg("%d norms and %d swiglus are repeated", norms, gates);
    for (int32_t k = 0; k < program[1]->calls; k++) {
        const program_call *call = &program[1]->call[k];
        if (strstr(call->name, ".again") && call->cost.flops != 0) fail_msg("%s is repeated", call->name);
    }
    /* A fifth of the 7.5 MiB on a processor with a matrix unit; others have more scratch in either program. */
    assert_true(program[1]->report.arena_bytes + 1541 * 1024 <= program[0]->report.arena_bytes);
    assert_int_equal(norms, 2 * LAYERS);
    assert_int_equal(count_calls(program[2], "swiglu.again"), 0);
    assert_int_equal(count_calls(program[2], "rms_norm.again") + count_calls(program[2], "rms_norm.2.again"), 0);
    assert_int_equal(count_calls(program[2], ".db"), gates + 3 * LAYERS);
    assert_int_equal(program[2]->calls, program[1]->calls + LAYERS);
    assert_true(program[2]->report.live_bytes <= program[1]->report.live_bytes);
    assert_true(program[2]->report.arena_bytes <= program[1]->report.arena_bytes);
    for (int on = 0; on < PROGRAMS; on++)
        vjp_program_destroy(program[on]);
    small_llama_free(&l);
    vjp_close(device);
}

/*
 * With a limit, also on the CPU, no more is computed again than that asks for, the largest values first. Programs whose
 * limit is below what they can do have the least arena that they have without one.
 */
static void a_limit_is_met_with_few_repeats(void **unused) {
    (void)unused;
    enum { LIMITS = 8 };
    vjp_device *device = open_cpu();
    small_llama l = small_llama_make();
    static const char *const all[] = {"-all,+recompute", "-all,+recompute,+combine"};
    for (int combined = 0; combined < 2; combined++) {
        vjp_program *most = compile_with(device, l.model.graph, l.result, l.results, "-all");
        vjp_program *least = compile_with(device, l.model.graph, l.result, l.results, all[combined]);
        const size_t above = most->report.arena_bytes, below = least->report.arena_bytes;
        int repeats = -1, some_gates = 0, some_norms = 0;
        run_llama(device, &l, most, 0xaa);
        for (int i = -1; i <= LIMITS; i++) {
            const vjp_program_options options = {
                .struct_size = sizeof options, .arena_limit = i < 0 ? 1 : below + (above - below) * (size_t)i / LIMITS};
            vjp_program_report planned = {.struct_size = sizeof planned}, compiled = planned;
            if (!combined) setenv("VJP_REWRITES", "-combine", 1);
            vjp_program *limited = compile(device, l.model.graph, l.result, l.results, &options);
            assert_int_equal(vjp_plan(device, l.model.graph, l.result, l.results, &options, &planned), VJP_OK);
            unsetenv("VJP_REWRITES");
            assert_int_equal(vjp_program_describe(limited, &compiled), VJP_OK);
            assert_memory_equal(&planned, &compiled, sizeof planned);
            int norms = count_calls(limited, "rms_norm.again") + count_calls(limited, "rms_norm.2.again");
            int gates = count_calls(limited, "swiglu.again"), again = count_calls(limited, ".again");
            if (combined) again = (int)limited->calls - (int)most->calls + count_calls(limited, ".again");
            if (i < 0) {
                assert_int_equal(limited->report.arena_bytes, below);
                repeats = again;
            } else if (limited->report.arena_bytes > options.arena_limit || again > repeats) {
                fail_msg("%d: %zu bytes with a limit of %zu, and %d repeats after %d", i, limited->report.arena_bytes,
                         options.arena_limit, again, repeats);
            }
            /* swiglu's y is larger than a norm's, and the casts of weights are smaller. */
            if (!combined && norms) assert_int_equal(gates, count_calls(least, "swiglu.again"));
            if (!combined && again > norms + gates) assert_int_equal(norms, 2 * LAYERS);
            some_gates += gates > 0 && gates < count_calls(least, "swiglu.again");
            some_norms += norms > 0 && norms < 2 * LAYERS;
            if (i >= 0) repeats = again;
            bool runs = in_sanitized_part((size_t)(4 * (i + 1)));
            if (runs) run_llama(device, &l, limited, 0x55);
            for (size_t r = 0; r < l.results && runs; r++)
                same_bits(most, limited, l.result[r]);
            vjp_program_destroy(limited);
        }
        assert_int_equal(repeats, 0);
        assert_true(combined || (some_gates && some_norms));
        vjp_program_destroy(most);
        vjp_program_destroy(least);
    }
    small_llama_free(&l);
    vjp_close(device);
}

/* ---- Combined calls ---------------------------------------------------------------------------------- */

/* Every combination of choices, in two dtypes. */
static void y_comes_from_the_backward(void **unused) {
    (void)unused;
    vjp_device *device = open_cpu();
    for (unsigned choice = 0; choice <= GATED_ALL; choice++) {
        if (!in_sanitized_part(choice)) continue;
        gated_graph r = gated_make(choice, choice % 3 ? VJP_F32 : VJP_BF16);
        vjp_program *off = gated_run(device, &r, choice & GATED_MARKED ? "-all" : "+all,-combine");
        vjp_program *on = gated_run(device, &r, choice & GATED_MARKED ? "-all,+combine" : "+all");
        for (size_t i = 0; i < r.results; i++)
            same_bits(off, on, r.result[i]);
        if (on->report.live_bytes > off->report.live_bytes)
            fail_msg("%u: %zu bytes are alive at once, and %zu before", choice, on->report.live_bytes,
                     off->report.live_bytes);
        /* In a block the product is computed again, too, for its activation's derivative. */
        bool activates = choice & GATED_ACTIVATION && (choice & GATED_MARKED || !(choice & GATED_FROZEN));
        bool stays = activates || choice & (GATED_OTHER | GATED_KEPT | GATED_SQUARE);
        /* Without the weight's gradient y is not computed again at all, unless the second product needs it. */
        bool needed = choice & GATED_TWICE || !(choice & GATED_FROZEN);
        int again = count_calls(on, "swiglu.again"), db = count_calls(on, ".db");
        int readers = (choice & GATED_TWICE ? 1 : 0) + (choice & GATED_FROZEN ? 0 : 1);
        if (!stays && needed && (again != 0 || db != readers))
            fail_msg("%u: swiglu is repeated %d times, and %d products wait", choice, again, db);
        if (stays && db) fail_msg("%u: %d products wait", choice, db);
        if (stays && needed && !again) fail_msg("%u: swiglu is not repeated, so nothing is tested", choice);
        bool used = choice & GATED_OTHER || (choice & GATED_ACTIVATION && choice & GATED_MARKED);
        if (!needed && !used && count_calls(off, "swiglu.again"))
            fail_msg("%u: swiglu is repeated for a gradient that does not need it", choice);
        vjp_program_destroy(on);
        vjp_program_destroy(off);
        vjp_graph_destroy(r.graph);
    }
    vjp_close(device);
}

/* A norm whose y is computed again for the gradients of products, and what may keep its backward from giving y. */
typedef enum normed_choice {
    NORMED_ACTIVATION = 1, /* of the product that reads y */
    NORMED_TWICE = 2,      /* a second product reads y and adds to its gradient, as up does beside gate */
    NORMED_OTHER = 4,      /* something that is no product reads y again */
    NORMED_ADDED = 8,      /* x is added behind the products: the norm's dx is added to a gradient */
    NORMED_KEPT = 16,      /* x is a result: unless dx is added, y has no memory to take over */
    NORMED_BETA = 32,
    NORMED_FROZEN = 64, /* the product's weight has no gradient */
    NORMED_LARGE = 128, /* large gradients are computed between those of the products and of the norm */
    NORMED_ALL = 255,
    NORMED_HEAVY = 256 /* with NORMED_LARGE: a weight's, which are kept */
} normed_choice;

/* Gradients of so many rows are larger than the scratch of the products, on every instruction set. */
enum { NORMED_LARGE_ROWS = 2048, NORMED_MOST = 1 << 18 };

/* With `rows` of those large gradients; recompute chooses y, which is not used while `most` floats are alive. */
static gated_graph normed_make(unsigned choice, vjp_dtype dtype, int64_t rows, int64_t most) {
    gated_graph r = {.graph = vjp_graph_create()};
    vjp_graph *g = r.graph;
    const vjp_linear_attributes *plain = WITH(linear, .transpose_b = 1);
    vjp_linear_attributes first = *plain;
    if (choice & NORMED_ACTIVATION) first.activation = VJP_ACTIVATION_TANH;
    r.x = vjp_graph_input(g, "x", dtype, 2, (int64_t[]){GATED_ROWS, GATED_DIM});
    vjp_value in = gated_weight(&r, "in", dtype, GATED_DIM, GATED_DIM);
    vjp_value gamma = gated_weight(&r, "gamma", VJP_F32, GATED_DIM, 0);
    vjp_value beta = choice & NORMED_BETA ? gated_weight(&r, "beta", dtype, GATED_DIM, 0) : 0;
    vjp_value second = choice & NORMED_TWICE ? gated_weight(&r, "second", dtype, GATED_WIDE, GATED_DIM) : 0;
    int64_t wide_rows = choice & NORMED_HEAVY ? 1 : rows, columns = choice & NORMED_HEAVY ? rows : GATED_DIM;
    vjp_value between = choice & NORMED_LARGE ? gated_weight(&r, "between", dtype, columns, GATED_DIM) : 0;
    vjp_value out = gated_weight(&r, "out", dtype, GATED_DIM, GATED_WIDE);
    vjp_value weight = gated_weight(&r, "weight", dtype, GATED_WIDE, GATED_DIM);
    vjp_value x = vjp_graph_linear(g, r.x, in, 0, 0, 0, plain);
    vjp_value y = vjp_graph_rms_norm(g, x, gamma, beta, NULL), loss = 0;
    if (between) {
        vjp_value wide = vjp_graph_input(g, "wide", dtype, 2, (int64_t[]){wide_rows, GATED_DIM});
        loss = vjp_graph_mean(g, vjp_graph_linear(g, wide, between, 0, 0, 0, plain), WITH(mean, .axes = 0));
    }
    vjp_value z = vjp_graph_linear(g, y, weight, 0, 0, 0, &first);
    if (second) z = vjp_graph_mul(g, z, vjp_graph_linear(g, y, second, 0, 0, 0, plain), NULL);
    z = vjp_graph_linear(g, z, out, 0, 0, 0, plain);
    if (choice & NORMED_OTHER) z = vjp_graph_mul(g, z, y, NULL);
    vjp_value large = vjp_graph_input(g, "large", VJP_F32, 1, &most);
    large = vjp_graph_mean(g, vjp_graph_scale(g, large, NULL), WITH(mean, .axes = 0));
    if (choice & NORMED_ADDED) z = vjp_graph_add(g, z, x, NULL);
    vjp_value mean = vjp_graph_mean(g, vjp_graph_mul(g, z, z, NULL), WITH(mean, .axes = 0));
    loss = vjp_graph_cast(g, loss ? vjp_graph_add(g, mean, loss, NULL) : mean, VJP_F32);
    size_t wanted = (size_t)r.weights - (choice & NORMED_FROZEN ? 1 : 0); /* the product's is the last */
    vjp_graph_grad(g, loss, r.weight, wanted, NULL, 0, r.result);
    r.results = wanted;
    r.result[r.results++] = loss;
    r.result[r.results++] = large;
    if (choice & NORMED_KEPT) r.result[r.results++] = x;
    if (vjp_graph_status(g) != VJP_OK) fail_msg("%u: %s", choice, vjp_graph_error(g));
    return r;
}

/* Every combination of choices, in each dtype. */
static void a_norms_y_comes_from_the_backward(void **unused) {
    (void)unused;
    static const vjp_dtype dtypes[] = {VJP_F32, VJP_BF16, VJP_F16};
    vjp_device *device = open_cpu();
    for (unsigned choice = 0; choice <= NORMED_ALL; choice++)
        for (int d = 0; d < 3 && in_sanitized_part(choice); d++) {
            gated_graph r = normed_make(choice, dtypes[d], NORMED_LARGE_ROWS, NORMED_MOST);
            vjp_program *off = gated_run(device, &r, "-all,+recompute");
            vjp_program *on = gated_run(device, &r, "-all,+recompute,+combine");
            for (size_t i = 0; i < r.results; i++)
                same_bits(off, on, r.result[i]);
            if (on->report.live_bytes > off->report.live_bytes)
                fail_msg("%u: %zu bytes are alive at once, and %zu before", choice, on->report.live_bytes,
                         off->report.live_bytes);
            bool trained = !(choice & NORMED_FROZEN);
            bool stays = choice & (NORMED_OTHER | NORMED_LARGE) || (choice & NORMED_ACTIVATION && trained) ||
                         (choice & NORMED_KEPT && !(choice & NORMED_ADDED));
            int before = count_calls(off, "rms_norm.again"), again = count_calls(on, "rms_norm.again");
            int db = count_calls(on, ".db"), readers = trained + (choice & NORMED_TWICE ? 1 : 0);
            if (!stays && readers && (before != 1 || again != 0 || db != readers))
                fail_msg("%u: the norm is repeated %d times, before %d, and %d products wait", choice, again, before,
                         db);
            if (stays && db) fail_msg("%u: %d products wait", choice, db);
            if (stays && readers && !again) fail_msg("%u: the norm is not repeated, so nothing is tested", choice);
            vjp_program_destroy(on);
            vjp_program_destroy(off);
            vjp_graph_destroy(r.graph);
        }
    vjp_close(device);
}

/*
 * Larger and larger gradients between those of the products and of the norm, beside which the products' at last do not
 * fit. `most` is as small as it may be for y to be computed again, so that a gradient that waits where it does not fit
 * shows in the bytes alive at once.
 */
static void gradients_wait_where_they_fit(void **unused) {
    (void)unused;
    enum { STEP = GATED_ROWS * GATED_DIM / 2, ROWS_STEP = 8, MOST_ROWS = 512, KINDS = 4 };
    static const unsigned kinds[KINDS] = {NORMED_LARGE, NORMED_LARGE | NORMED_ADDED | NORMED_TWICE,
                                          NORMED_LARGE | NORMED_HEAVY,
                                          NORMED_LARGE | NORMED_HEAVY | NORMED_ADDED | NORMED_TWICE};
    vjp_device *device = open_cpu();
    for (int kind = 0; kind < KINDS; kind++) {
        int waiting = 0, staying = 0;
        int64_t most = STEP;
        for (int64_t rows = ROWS_STEP; rows <= MOST_ROWS; rows += ROWS_STEP) {
            gated_graph r = normed_make(kinds[kind], VJP_F32, rows, most);
            vjp_program *off = gated_run(device, &r, "-all,+recompute");
            while (!count_calls(off, "rms_norm.again")) {
                vjp_program_destroy(off);
                vjp_graph_destroy(r.graph);
                most += STEP;
                r = normed_make(kinds[kind], VJP_F32, rows, most);
                off = gated_run(device, &r, "-all,+recompute");
            }
            vjp_program *on = gated_run(device, &r, "-all,+recompute,+combine");
            if (on->report.live_bytes > off->report.live_bytes)
                fail_msg("%d rows: %zu bytes are alive at once, and %zu before", (int)rows, on->report.live_bytes,
                         off->report.live_bytes);
            *(count_calls(on, ".db") ? &waiting : &staying) += 1;
            for (size_t k = 0; k < r.results; k++)
                same_bits(off, on, r.result[k]);
            vjp_program_destroy(on);
            vjp_program_destroy(off);
            vjp_graph_destroy(r.graph);
        }
        if (!waiting || !staying) fail_msg("%d: gradients wait %d times, and %d times not", kind, waiting, staying);
    }
    vjp_close(device);
}

/* ---- What stays -------------------------------------------------------------------------------------- */

typedef struct held {
    bool writes;   /* the source is a state that a call changes before y is read again */
    bool returns;  /* y is a result */
    bool extends;  /* y's source would have to be kept for it */
    bool repeated; /* what is expected */
} held;

/* y is made early, not used while much larger values are alive, and read at the end. */
static void what_changes_is_not_computed_again(void **unused) {
    (void)unused;
    static const held cases[] = {
        {.repeated = true}, {.writes = true}, {.returns = true}, {.extends = true}, {.writes = true, .returns = true}};
    const int64_t small[] = {64}, large[] = {1024};
    vjp_device *device = open_cpu();
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        vjp_graph *g = vjp_graph_create();
        vjp_value s = vjp_graph_state(g, "s", VJP_F32, 1, small), x = vjp_graph_input(g, "x", VJP_F32, 1, large);
        vjp_value from = cases[c].extends ? vjp_graph_mul(g, s, s, NULL) : s;
        vjp_value y = vjp_graph_scale(g, from, WITH(scale, .factor = 2));
        vjp_value results[5] = {vjp_graph_mean(g, y, WITH(mean, .axes = 0))};
        size_t count = 1;
        if (cases[c].writes) results[count++] = vjp_graph_assign(g, s, vjp_graph_scale(g, s, WITH(scale, .factor = 3)));
        vjp_value most = vjp_graph_mul(g, vjp_graph_scale(g, x, WITH(scale, .factor = 5)),
                                       vjp_graph_scale(g, x, WITH(scale, .factor = 7)), NULL);
        results[count++] = vjp_graph_mean(g, most, WITH(mean, .axes = 0));
        results[count++] = vjp_graph_mean(g, vjp_graph_mul(g, y, y, NULL), WITH(mean, .axes = 0));
        if (cases[c].returns) results[count++] = y;
        if (vjp_graph_status(g) != VJP_OK) fail_msg("%s", vjp_graph_error(g));
        vjp_program *program[2];
        for (int on = 0; on < 2; on++) {
            program[on] = compile_with(device, g, results, count, on ? "+recompute" : "-recompute");
            vjp_tensor state;
            assert_int_equal(vjp_program_tensor(program[on], s, &state), VJP_OK);
            for (int64_t i = 0; i < small[0]; i++)
                put(&state, i, random_of(3, c, (uint64_t)i));
            run(device, program[on]);
        }
        for (size_t i = 0; i < count; i++)
            same_bits(program[0], program[1], results[i]);
        assert_int_equal(count_calls(program[1], ".again"), cases[c].repeated ? 1 : 0);
        for (int on = 0; on < 2; on++)
            vjp_program_destroy(program[on]);
        vjp_graph_destroy(g);
    }
    vjp_close(device);
}

/* The place of the call of that name among the calls. */
static int32_t find_call(const vjp_program *program, const char *name) {
    for (int32_t k = 0; k < program->calls; k++)
        if (strcmp(program->call[k].name, name) == 0) return k;
    fail_msg("there is no call %s", name);
    return -1;
}

/* v is computed again from u, which is read later than v: u comes first, or it would be kept for v. */
static void inputs_come_first(void **unused) {
    (void)unused;
    const int64_t small[] = {64}, large[] = {1024};
    vjp_device *device = open_cpu();
    vjp_graph *g = vjp_graph_create();
    vjp_value s = vjp_graph_state(g, "s", VJP_F32, 1, small), x = vjp_graph_input(g, "x", VJP_F32, 1, large);
    vjp_graph_push(g, "u");
    vjp_value u = vjp_graph_scale(g, s, WITH(scale, .factor = 2));
    vjp_graph_pop(g);
    vjp_graph_push(g, "v");
    vjp_value v = vjp_graph_mul(g, u, u, NULL);
    vjp_graph_pop(g);
    const vjp_value results[] = {
        vjp_graph_mean(g, v, WITH(mean, .axes = 0)),
        vjp_graph_mean(g, vjp_graph_scale(g, x, WITH(scale, .factor = 5)), WITH(mean, .axes = 0)),
        vjp_graph_mean(g, vjp_graph_mul(g, v, v, NULL), WITH(mean, .axes = 0)),
        vjp_graph_mean(g, vjp_graph_mul(g, u, u, NULL), WITH(mean, .axes = 0)),
    };
    vjp_program *program = compile_with(device, g, results, 4, "+all");
    assert_int_equal(count_calls(program, ".again"), 2);
    assert_true(find_call(program, "u.scale.again") < find_call(program, "v.mul.again"));
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* The repeated call needs scratch, for which there is room below the peak, or nearly all of it is taken. */
static void scratch_does_not_raise_the_peak(void **unused) {
    (void)unused;
    static const int64_t beside[] = {512, 952}; /* floats that are alive then; 1024 at the peak */
    const int64_t rows[] = {8, 16}, large[] = {1024};
    vjp_device *device = open_cpu();
    for (int full = 0; full < 2; full++) {
        vjp_graph *g = vjp_graph_create();
        vjp_value s = vjp_graph_state(g, "s", VJP_BF16, 2, rows), x = vjp_graph_input(g, "x", VJP_F32, 1, large);
        vjp_value gamma = vjp_graph_parameter(g, "gamma", VJP_BF16, 1, rows + 1); /* scratch holds it as f32 */
        vjp_value z = vjp_graph_input(g, "z", VJP_F32, 1, &beside[full]);
        vjp_value y = vjp_graph_rms_norm(g, s, gamma, 0, NULL), early = vjp_graph_mean(g, y, WITH(mean, .axes = 0));
        vjp_value most = vjp_graph_mean(g, vjp_graph_scale(g, x, WITH(scale, .factor = 5)), WITH(mean, .axes = 0));
        vjp_value much = vjp_graph_scale(g, z, WITH(scale, .factor = 7));
        vjp_value late = vjp_graph_mul(g, y, y, NULL);
        const vjp_value results[] = {early, most, vjp_graph_mean(g, much, WITH(mean, .axes = 0)),
                                     vjp_graph_mean(g, late, WITH(mean, .axes = 0))};
        vjp_program *program = compile_with(device, g, results, 4, "+all");
        assert_true(program->call[find_call(program, "rms_norm")].work.workspace_bytes >= 64);
        assert_int_equal(count_calls(program, ".again"), full ? 0 : 1);
        vjp_program_destroy(program);
        vjp_graph_destroy(g);
    }
    vjp_close(device);
}

/* Programs that share what they keep, of which only one was rewritten, and a graph that grew between them. */
static void rewritten_programs_share(void **unused) {
    (void)unused;
    const int64_t small[] = {64}, large[] = {1024};
    vjp_device *device = open_cpu();
    vjp_graph *g = vjp_graph_create();
    vjp_value s = vjp_graph_state(g, "s", VJP_F32, 1, small), x = vjp_graph_input(g, "x", VJP_F32, 1, large);
    vjp_value y = vjp_graph_scale(g, s, WITH(scale, .factor = 2));
    vjp_value results[] = {
        vjp_graph_mean(g, y, WITH(mean, .axes = 0)),
        vjp_graph_mean(g, vjp_graph_scale(g, x, WITH(scale, .factor = 5)), WITH(mean, .axes = 0)),
        vjp_graph_mean(g, vjp_graph_mul(g, y, y, NULL), WITH(mean, .axes = 0)),
    };
    vjp_program *first = compile_with(device, g, results, 3, "+all"), *second;
    assert_int_equal(count_calls(first, ".again"), 1);
    vjp_value later = vjp_graph_scale(g, s, WITH(scale, .factor = 3));
    vjp_tensor tensor;
    for (int grown = 0; grown < 2; grown++) {
        const vjp_program_options share = {.struct_size = sizeof share, .share = first};
        if (vjp_compile(device, g, grown ? &later : results, 1, &share, &second) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        vjp_tensor own;
        assert_int_equal(vjp_program_tensor(first, s, &tensor), VJP_OK);
        assert_int_equal(vjp_program_tensor(second, s, &own), VJP_OK);
        assert_ptr_equal((char *)tensor.data + tensor.offset, (char *)own.data + own.offset);
        vjp_program_destroy(second);
    }
    /* A number that the rewrite used for its own values, and that the graph gave to another value since. */
    assert_int_equal(vjp_program_tensor(first, later, &tensor), VJP_INVALID);
    vjp_program_destroy(first);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* ---- Switches ---------------------------------------------------------------------------------------- */

static void unknown_rewrites_are_refused(void **unused) {
    (void)unused;
    static const char *const bad[] = {"recompute", "+", "-", "+recomput", "+recompute,,", "+all,x", "*all"};
    static const char *const good[] = {"",         "+all", "-all", "+recompute", "-recompute", "-all,+recompute",
                                       "+combine", "+all,"};
    const int64_t shape[] = {4};
    vjp_device *device = open_cpu();
    vjp_graph *g = vjp_graph_create();
    vjp_value y = vjp_graph_scale(g, vjp_graph_input(g, "x", VJP_F32, 1, shape), NULL);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        vjp_program *program;
        setenv("VJP_REWRITES", bad[i], 1);
        assert_int_equal(vjp_compile(device, g, &y, 1, NULL, &program), VJP_INVALID);
        unsetenv("VJP_REWRITES");
        assert_null(program);
        if (!strstr(vjp_error(device),
                    "an item is + or - and one of all, residual, qkv, halves, recompute, combine, swiglu"))
            fail_msg("\"%s\": %s", bad[i], vjp_error(device));
    }
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        vjp_program_destroy(compile_with(device, g, &y, 1, good[i]));
    vjp_graph_destroy(g);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rewritten_is_not_rewritten),         cmocka_unit_test(a_llama_keeps_less),
        cmocka_unit_test(a_limit_is_met_with_few_repeats),    cmocka_unit_test(y_comes_from_the_backward),
        cmocka_unit_test(a_norms_y_comes_from_the_backward),  cmocka_unit_test(gradients_wait_where_they_fit),
        cmocka_unit_test(what_changes_is_not_computed_again), cmocka_unit_test(inputs_come_first),
        cmocka_unit_test(scratch_does_not_raise_the_peak),    cmocka_unit_test(rewritten_programs_share),
        cmocka_unit_test(unknown_rewrites_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
