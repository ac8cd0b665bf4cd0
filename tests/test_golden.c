/* SPDX-License-Identifier: MIT */
/*
 * Compares the reference backend with the golden files, which PyTorch made in double (tests/golden/make.py): each
 * output of each case to a relative error of 1e-12. The oracle that all backends are compared with must itself be
 * compared with independent code.
 *
 * The same cases test what else the kernels of `ref` promise: results in f32, bf16 and f16 storage are those of f64
 * rounded once; calls may run in place where the op table allows it; += adds to what is there.
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "core/core.h"
#include "files/safetensors.h"
#include "proof/text.h"
#include "proof/values.h"

static const double GOLDEN_BOUND = 1e-12;

/* One pass of a case in a given storage type: the tensors in the op's order, and the file's numbers. */
typedef struct golden_call {
    const vjp_slot *slot[VJP_MAX_SLOTS];
    size_t count;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    double *value[VJP_MAX_SLOTS]; /* as the file has them; NULL: not in the file, absent from the call */
} golden_call;

typedef struct golden_case {
    const char *name;
    const vjp_op *op;
    text_values attributes;
    bool by_element; /* the bound holds for each element, not for the whole output */
    safetensors_file file;
} golden_case;

/* What to do with each pass of each case. Returns how many outputs it has compared. */
typedef int (*golden_check)(vjp_device *device, const golden_case *golden, vjp_pass pass);

static bool is_output(const golden_call *call, size_t i) {
    return call->slot[i]->flags & VJP_SLOT_OUTPUT;
}

/* ---- Making and running a call ----------------------------------------------------------------------- */

/*
 * The dtype of a slot when the storage is `storage`. Where a slot allows several types, each is used with some storage
 * type: parameters are T with f32 and bf16 and f32 with f16; indices i64, i32, f32; any float is bf16 with f32, f16
 * with bf16.
 */
static vjp_dtype dtype_of(const vjp_slot *slot, vjp_dtype storage) {
    switch (slot->kind) {
    case VJP_KIND_STORAGE: return storage;
    case VJP_KIND_PARAMETER: return storage == VJP_F16 ? VJP_F32 : storage;
    case VJP_KIND_STATISTIC: return storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_INDEX: return storage == VJP_BF16 ? VJP_I32 : storage == VJP_F16 ? VJP_F32 : VJP_I64;
    case VJP_KIND_ARGMAX: return storage == VJP_BF16 ? VJP_I32 : VJP_I64;
    case VJP_KIND_GRADIENT: return storage == VJP_F16 ? VJP_F32 : storage;
    case VJP_KIND_MOMENT: return storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_FLOAT: return storage == VJP_F32 ? VJP_BF16 : storage == VJP_BF16 ? VJP_F16 : storage;
    }
    return storage;
}

static golden_call make_call(const golden_case *golden, vjp_pass pass, vjp_dtype storage) {
    const vjp_pass_info *info = &vjp_op_describe(golden->op)->pass[pass];
    golden_call call = {.count = info->count};
    for (size_t i = 0; i < info->count; i++) {
        call.slot[i] = &info->slots[i];
        char name[64];
        snprintf(name, sizeof name, "%s.%s", text_pass_name(pass), info->slots[i].name);
        const safetensors_tensor *stored = safetensors_find(&golden->file, name);
        if (!stored) continue;
        vjp_dtype dtype = dtype_of(call.slot[i], storage);
        call.tensor[i] = vjp_tensor_of(NULL, dtype, stored->ndim, stored->shape);
        int64_t count = proof_count(&call.tensor[i]);
        call.value[i] = proof_to_double(stored->data, (vjp_dtype)stored->dtype, count);
        call.tensor[i].data = proof_to_stored(call.value[i], dtype, count);
        /* All ones is a NaN in every floating type: an unwritten element shows. */
        if (is_output(&call, i)) memset(call.tensor[i].data, 0xff, (size_t)count * vjp_dtype_size(dtype));
    }
    return call;
}

static void free_call(golden_call *call) {
    for (size_t i = 0; i < call->count; i++) {
        free(call->tensor[i].data);
        free(call->value[i]);
    }
}

static void run_call(vjp_device *device, const golden_case *golden, vjp_pass pass, const golden_call *call) {
    const vjp_tensor *tensors[VJP_MAX_SLOTS];
    for (size_t i = 0; i < call->count; i++)
        tensors[i] = call->value[i] ? &call->tensor[i] : NULL;
    if (vjp_call(device, golden->op, pass, tensors, call->count, golden->attributes.bytes) != VJP_OK)
        fail_msg("%s: %s", golden->name, vjp_error(device));
}

static double result_at(const golden_call *call, size_t slot, int64_t i) {
    return proof_get(call->tensor[slot].data, (vjp_dtype)call->tensor[slot].dtype, i);
}

static bool same(double a, double b) {
    return a == b || (isnan(a) && isnan(b));
}

/* ---- Against PyTorch --------------------------------------------------------------------------------- */

/* Relative error of an output: of its L2 norm, or of its worst element. Infinite where NaN or Inf do not match. */
static double relative_error(const golden_case *golden, const golden_call *call, size_t slot) {
    double worst = 0, difference = 0, norm = 0;
    for (int64_t i = 0; i < proof_count(&call->tensor[slot]); i++) {
        double want = call->value[slot][i], got = result_at(call, slot, i);
        if (isfinite(want)) norm = hypot(norm, want);
        if (same(got, want)) continue;
        if (!isfinite(got) || !isfinite(want)) return INFINITY;
        difference = hypot(difference, got - want);
        worst = fmax(worst, fabs(got - want) / fabs(want));
    }
    if (golden->by_element || difference == 0) return worst;
    return difference / norm;
}

static int compare_outputs(const golden_case *golden, vjp_pass pass, const golden_call *call, const char *how) {
    int compared = 0;
    for (size_t i = 0; i < call->count; i++) {
        if (!call->value[i] || !is_output(call, i)) continue;
        double error = relative_error(golden, call, i);
        double bound = call->slot[i]->kind == VJP_KIND_ARGMAX ? 0 : GOLDEN_BOUND;
        if (!(error <= bound))
            fail_msg("%s: %s.%s%s: relative error %g, bound %g", golden->name, text_pass_name(pass),
                     call->slot[i]->name, how, error, bound);
        compared++;
    }
    return compared;
}

static int check_against_pytorch(vjp_device *device, const golden_case *golden, vjp_pass pass) {
    golden_call call = make_call(golden, pass, VJP_F64);
    run_call(device, golden, pass, &call);
    int compared = compare_outputs(golden, pass, &call, "");
    free_call(&call);
    return compared;
}

/* ---- In place ---------------------------------------------------------------------------------------- */

static int check_in_place(vjp_device *device, const golden_case *golden, vjp_pass pass) {
    int compared = 0;
    const vjp_pass_info *info = &vjp_op_describe(golden->op)->pass[pass];
    for (size_t output = 0; output < info->outputs; output++)
        for (size_t input = info->outputs; input < info->count; input++) {
            if (!(info->slots[output].aliases >> input & 1)) continue;
            golden_call call = make_call(golden, pass, VJP_F64);
            if (call.value[output] && call.value[input]) {
                void *own = call.tensor[output].data;
                call.tensor[output].data = call.tensor[input].data;
                run_call(device, golden, pass, &call);
                compared += compare_outputs(golden, pass, &call, " in place");
                call.tensor[output].data = own;
            }
            free_call(&call);
        }
    return compared;
}

/* ---- Accumulating ------------------------------------------------------------------------------------ */

static int check_accumulate(vjp_device *device, const golden_case *golden, vjp_pass pass) {
    static const double OLD = 0.75;
    int compared = 0;
    golden_call plain = make_call(golden, pass, VJP_F64), added = make_call(golden, pass, VJP_F64);
    for (size_t i = 0; i < added.count; i++) {
        if (!added.value[i] || !(added.slot[i]->flags & VJP_SLOT_ACCUMULATES)) continue;
        added.tensor[i].flags |= VJP_ACCUMULATE;
        for (int64_t k = 0; k < proof_count(&added.tensor[i]); k++)
            proof_put(added.tensor[i].data, VJP_F64, k, OLD);
    }
    run_call(device, golden, pass, &plain);
    run_call(device, golden, pass, &added);
    for (size_t i = 0; i < added.count; i++) {
        if (!(added.tensor[i].flags & VJP_ACCUMULATE)) continue;
        for (int64_t k = 0; k < proof_count(&added.tensor[i]); k++)
            if (!same(result_at(&added, i, k), result_at(&plain, i, k) + OLD))
                fail_msg("%s: %s.%s[%lld]: %.17g += %.17g gave %.17g", golden->name, text_pass_name(pass),
                         added.slot[i]->name, (long long)k, OLD, result_at(&plain, i, k), result_at(&added, i, k));
        compared++;
    }
    free_call(&plain);
    free_call(&added);
    return compared;
}

/* ---- Storage ----------------------------------------------------------------------------------------- */

/* A floating type: how many binary digits it holds, and the exponents between which it holds that many. */
typedef struct storage_format {
    int digits, lowest, highest; /* numbers in [2^lowest, 2^highest) */
} storage_format;

static storage_format format_of(vjp_dtype dtype) {
    switch (dtype) {
    case VJP_F32: return (storage_format){24, -126, 128};
    case VJP_BF16: return (storage_format){8, -126, 128};
    case VJP_F16: return (storage_format){11, -14, 16};
    default: return (storage_format){53, -1022, 1024};
    }
}

/* Half a unit of the last place that `value` has in a format. */
static double half_unit(double value, storage_format format) {
    int exponent;
    frexp(value, &exponent);
    int leading = exponent - 1 > format.lowest ? exponent - 1 : format.lowest;
    return ldexp(0.5, leading - format.digits + 1);
}

/* `got` is `want` rounded to nearest in the dtype. A 16-bit result may be rounded to f32 first. */
static bool is_rounded(double got, double want, vjp_dtype dtype) {
    if (same(got, want)) return true;
    if (!isfinite(want) || isnan(got)) return false;
    storage_format format = format_of(dtype), single = format_of(VJP_F32);
    double largest = ldexp(1, format.highest), margin = half_unit(want, format);
    if (format.digits < single.digits) margin += half_unit(want, single);
    if (isinf(got)) return signbit(got) == signbit(want) && fabs(want) + margin >= largest;
    return fabs(got - want) <= margin;
}

/* The inputs rounded to the storage's types and computed in them, against the same rounded inputs computed in f64. */
static int check_one_storage(vjp_device *device, const golden_case *golden, vjp_pass pass, vjp_dtype storage) {
    golden_call exact = make_call(golden, pass, VJP_F64), stored = make_call(golden, pass, storage);
    for (size_t i = 0; i < exact.count; i++) {
        if (!exact.value[i] || is_output(&exact, i)) continue;
        for (int64_t k = 0; k < proof_count(&exact.tensor[i]); k++)
            proof_put(exact.tensor[i].data, (vjp_dtype)exact.tensor[i].dtype, k, result_at(&stored, i, k));
    }
    run_call(device, golden, pass, &exact);
    run_call(device, golden, pass, &stored);
    int compared = 0;
    for (size_t i = 0; i < exact.count; i++) {
        if (!exact.value[i] || !is_output(&exact, i)) continue;
        for (int64_t k = 0; k < proof_count(&exact.tensor[i]); k++)
            if (!is_rounded(result_at(&stored, i, k), result_at(&exact, i, k), (vjp_dtype)stored.tensor[i].dtype))
                fail_msg("%s: %s.%s[%lld] in %s storage is %.17g, in f64 %.17g", golden->name, text_pass_name(pass),
                         exact.slot[i]->name, (long long)k, vjp_dtype_name(storage), result_at(&stored, i, k),
                         result_at(&exact, i, k));
        compared++;
    }
    free_call(&exact);
    free_call(&stored);
    return compared;
}

static int check_storage(vjp_device *device, const golden_case *golden, vjp_pass pass) {
    static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16};
    int compared = 0;
    for (size_t i = 0; i < sizeof storages / sizeof *storages; i++)
        compared += check_one_storage(device, golden, pass, storages[i]);
    return compared;
}

/* ---- All files --------------------------------------------------------------------------------------- */

/* Every tensor of the file must be a slot of the op: a misspelt output would never be compared. */
static void check_names(const golden_case *golden) {
    const vjp_op_info *info = vjp_op_describe(golden->op);
    for (size_t t = 0; t < golden->file.count; t++) {
        bool found = false;
        for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
            for (size_t i = 0; i < info->pass[pass].count; i++) {
                char name[64];
                snprintf(name, sizeof name, "%s.%s", text_pass_name((vjp_pass)pass), info->pass[pass].slots[i].name);
                found = found || strcmp(name, golden->file.tensors[t].name) == 0;
            }
        if (!found) fail_msg("%s: %s has no slot \"%s\"", golden->name, info->name, golden->file.tensors[t].name);
    }
}

static void read_case(const char *path, const char *name, golden_case *golden) {
    char error[SAFETENSORS_ERROR], wrong[TEXT_ERROR];
    *golden = (golden_case){.name = name};
    if (!safetensors_read(path, &golden->file, error)) fail_msg("%s", error);
    const char *op = safetensors_metadata(&golden->file, "op");
    const char *attributes = safetensors_metadata(&golden->file, "attributes");
    const char *compare = safetensors_metadata(&golden->file, "compare");
    if (!op || !attributes || !compare) fail_msg("%s: its metadata lacks op, attributes or compare", name);
    golden->op = vjp_op_find(op);
    if (!golden->op) fail_msg("%s: there is no op \"%s\"", name, op);
    vjp_op_defaults(golden->op, golden->attributes.bytes);
    if (!text_set_attributes(golden->op, golden->attributes.bytes, attributes, wrong)) fail_msg("%s: %s", name, wrong);
    golden->by_element = strcmp(compare, "element") == 0;
    check_names(golden);
}

static bool is_golden_file(const char *name) {
    static const char ending[] = ".safetensors";
    size_t length = strlen(name), tail = sizeof ending - 1;
    return length > tail && strcmp(name + length - tail, ending) == 0;
}

/* Whether a check of outputs with these flags applies to the pass. */
static bool concerns(uint32_t flags, const vjp_pass_info *pass) {
    for (size_t i = 0; flags && i < pass->outputs; i++)
        if (pass->slots[i].flags & flags) return true;
    return false;
}

enum { MAX_OPS = 64 };

/* Fails when there is no folder, or when no file has a pass that the check applies to. */
static void for_all(golden_check check, uint32_t flags) {
    vjp_device *device;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    DIR *folder = opendir(VJP_GOLDEN_DIR);
    if (!folder) fail_msg("there is no folder %s", VJP_GOLDEN_DIR);
    int files = 0, compared = 0;
    int of_pass[MAX_OPS][VJP_PASS_COUNT] = {{0}};
    assert_true(vjp_op_count() <= MAX_OPS);
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (!is_golden_file(entry->d_name)) continue;
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", VJP_GOLDEN_DIR, entry->d_name);
        golden_case golden;
        read_case(path, entry->d_name, &golden);
        for (size_t op = 0; op < vjp_op_count(); op++)
            for (int pass = 0; vjp_op_at(op) == golden.op && pass < vjp_passes(vjp_op_describe(golden.op)); pass++) {
                int outputs = check(device, &golden, (vjp_pass)pass);
                of_pass[op][pass] += outputs;
                compared += outputs;
            }
        safetensors_free(&golden.file);
        files++;
    }
    closedir(folder);
    vjp_close(device);
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
            if (concerns(flags, &vjp_op_describe(vjp_op_at(op))->pass[pass]) && of_pass[op][pass] == 0)
                fail_msg("no file in %s has an output of %s.%s", VJP_GOLDEN_DIR, vjp_op_describe(vjp_op_at(op))->name,
                         text_pass_name((vjp_pass)pass));
    print_message("%d files, %d outputs compared\n", files, compared);
    assert_true(files > 0 && compared > 0);
}

/* ---- A run of training ------------------------------------------------------------------------------- */

/* The numbers of a tensor of step k's file of a run, in newly allocated memory. */
static double *run_values(const char *op, int k, const char *slot, vjp_tensor *tensor, text_values *attributes) {
    char name[64], path[4096], label[64];
    snprintf(name, sizeof name, "%s_run_%d.safetensors", op, k);
    snprintf(path, sizeof path, "%s/%s", VJP_GOLDEN_DIR, name);
    snprintf(label, sizeof label, "forward.%s", slot);
    golden_case golden;
    read_case(path, name, &golden);
    const safetensors_tensor *stored = safetensors_find(&golden.file, label);
    if (!stored) fail_msg("%s has no %s", name, label);
    *tensor = vjp_tensor_of(NULL, (vjp_dtype)stored->dtype, stored->ndim, stored->shape);
    size_t bytes = (size_t)proof_count(tensor) * vjp_dtype_size((vjp_dtype)stored->dtype);
    double *values = proof_memory(bytes);
    memcpy(values, stored->data, bytes);
    tensor->data = values;
    if (attributes) *attributes = golden.attributes;
    safetensors_free(&golden.file);
    return values;
}

/*
 * Four steps as a trainer runs them, norm, clip and update, with all state updated in place: after each step the
 * weights and averages equal PyTorch's.
 */
static void check_run(const char *op, const char *const *state, double max_norm) {
    enum { STEPS = 4, MAX_STATE = 3 };
    vjp_device *device;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    const vjp_op *found = vjp_op_find(op);
    const vjp_pass_info *info = &vjp_op_describe(found)->pass[VJP_FORWARD];
    vjp_tensor kept[MAX_STATE];
    text_values attributes;
    for (int s = 0; state[s]; s++)
        run_values(op, 1, state[s], &kept[s], &attributes);
    for (int k = 1; k <= STEPS; k++) {
        double squares, scale, norm;
        vjp_tensor g, lr, step = {0}, t_squares = vjp_tensor_of(&squares, VJP_F64, 0, NULL);
        vjp_tensor t_scale = vjp_tensor_of(&scale, VJP_F64, 0, NULL), t_norm = vjp_tensor_of(&norm, VJP_F64, 0, NULL);
        int64_t number = k;
        run_values(op, k, "g", &g, NULL);
        run_values(op, k, "lr", &lr, NULL);
        step = vjp_tensor_of(&number, VJP_I64, 0, NULL);
        assert_int_equal(vjp_sum_squares_forward(device, &t_squares, &g), VJP_OK);
        assert_int_equal(vjp_clip_forward(device, &t_scale, &t_norm, &t_squares, WITH(clip, .max_norm = max_norm)),
                         VJP_OK);
        const vjp_tensor *tensors[VJP_MAX_SLOTS] = {0};
        for (size_t i = 0; i < info->count; i++) {
            const char *name = info->slots[i].name;
            for (int s = 0; state[s]; s++)
                if (strncmp(name, state[s], strlen(state[s])) == 0) tensors[i] = &kept[s];
            if (strcmp(name, "g") == 0) tensors[i] = &g;
            if (strcmp(name, "lr") == 0) tensors[i] = &lr;
            if (strcmp(name, "step") == 0) tensors[i] = &step;
            if (strcmp(name, "scale") == 0) tensors[i] = &t_scale;
        }
        assert_int_equal(vjp_call(device, found, VJP_FORWARD, tensors, info->count, attributes.bytes), VJP_OK);
        for (int s = 0; state[s]; s++) {
            char name[64];
            vjp_tensor expected;
            snprintf(name, sizeof name, "%s_out", state[s]);
            double *want = run_values(op, k, name, &expected, NULL), *have = kept[s].data;
            for (int64_t i = 0; i < proof_count(&expected); i++)
                if (!(fabs(have[i] - want[i]) <= GOLDEN_BOUND * fmax(1, fabs(want[i]))))
                    fail_msg("%s, step %d: %s[%lld] is %.17g, PyTorch's %.17g", op, k, name, (long long)i, have[i],
                             want[i]);
            free(want);
        }
        free(g.data);
        free(lr.data);
    }
    for (int s = 0; state[s]; s++)
        free(kept[s].data);
    vjp_close(device);
}

static void test_runs_of_training(void **state) {
    (void)state;
    static const double MAX_NORM = 4; /* as make.py has it: some of the steps are clipped, some are not */
    check_run("adamw", (const char *const[]){"w", "m", "v", NULL}, MAX_NORM);
    check_run("sgd", (const char *const[]){"w", "momentum", NULL}, MAX_NORM);
}

static void test_reference_agrees_with_pytorch(void **state) {
    (void)state;
    for_all(check_against_pytorch, VJP_SLOT_OUTPUT);
}

static void test_reference_works_in_place(void **state) {
    (void)state;
    for_all(check_in_place, 0);
}

static void test_reference_accumulates(void **state) {
    (void)state;
    for_all(check_accumulate, VJP_SLOT_ACCUMULATES);
}

static void test_reference_rounds_once(void **state) {
    (void)state;
    for_all(check_storage, VJP_SLOT_OUTPUT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference_agrees_with_pytorch),
        cmocka_unit_test(test_reference_works_in_place),
        cmocka_unit_test(test_reference_accumulates),
        cmocka_unit_test(test_reference_rounds_once),
        cmocka_unit_test(test_runs_of_training),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
