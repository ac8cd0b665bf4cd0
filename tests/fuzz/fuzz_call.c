/* SPDX-License-Identifier: MIT */
/*
 * Random calls through vjp_call(), on cpu and ref: ops, passes, shapes, attributes, dtypes, NULLs, overlaps, flags,
 * offsets, strange numbers, rows that lie apart. Bytes choose shapes that make sense first, and then up to four things
 * that may not.
 *
 * What must hold: nothing crashes; a refused call changes no byte; an accepted one changes its outputs only; cpu and
 * ref give the same status; and the same numbers, loosely (`vjp check` tests accuracy), where nothing strange was put
 * in. A tensor is the caller's claim that this memory exists, so a call is made only when every tensor is inside the
 * block, or when its sizes overflow and it must be refused before any access.
 *
 * Under the address sanitizer the gaps between tensors are poisoned while a call that makes sense runs, so that a read
 * a few bytes out of bounds is found as well.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "choices.h"
#include "core/core.h"
#include "sample.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define HAVE_POISON 1
#endif
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- Choices ----------------------------------------------------------------------------------------- */

/* Mostly small; now and then a size around the width of a vector. */
static int64_t take_size(choices *in) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 0, 7, 15, 16, 17, 33, 64, 65};
    return sizes[choose(in, sizeof sizes / sizeof sizes[0])];
}

static int64_t take_strange(choices *in) {
    static const int64_t values[] = {
        0,         -1,           1,       2,       3,         4,         5,         7,          8,
        -2,        100,          65536,   1 << 30, INT64_MAX, INT64_MIN, INT32_MAX, 4294967296, 1LL << 40,
        1LL << 62, -(1LL << 40), 16777217};
    return values[choose(in, sizeof values / sizeof values[0])];
}

static double take_number(choices *in) {
    static const double values[] = {0, -1, 1, 0.5, 3, 1e30, -1e30, 1e-30, 16777216, 16777218, 65504, 4294967296.0};
    uint32_t which = choose(in, sizeof values / sizeof values[0] + 3);
    if (which == 0) return (double)NAN;
    if (which == 1) return (double)INFINITY;
    if (which == 2) return -(double)INFINITY;
    return values[which - 3];
}

/* ---- A call that makes sense ------------------------------------------------------------------------- */

static void add(sample *s, const char *name, int ndim, const int64_t *shape) {
    int i = 0;
    while (s->input[i].name)
        i++;
    s->input[i].name = name;
    s->input[i].ndim = ndim;
    memcpy(s->input[i].shape, shape, (size_t)ndim * sizeof shape[0]);
}

/* The maximum number of elements: a call should take milliseconds, also on ref under a sanitizer. */
static void take_shape(choices *in, int ndim, int64_t *shape, int64_t most) {
    for (int i = 0; i < ndim; i++) {
        shape[i] = take_size(in);
        if (shape[i] > most) shape[i] = 1;
        most /= shape[i] ? shape[i] : 1;
    }
}

static char attribute_text[256];

/* The tests' sample of an op with up to three of its sizes changed, on all axes of that size: most calls stay valid. */
static sample resized(choices *in, const sample *from) {
    sample s = *from;
    for (uint32_t n = choose(in, 4); n > 0; n--) {
        int which = (int)choose(in, SAMPLE_INPUTS);
        if (!s.input[which].name || !s.input[which].ndim) continue;
        int64_t old = s.input[which].shape[choose(in, (uint32_t)s.input[which].ndim)], size = take_size(in);
        for (int i = 0; i < SAMPLE_INPUTS && s.input[i].name; i++)
            for (int k = 0; k < s.input[i].ndim; k++)
                if (s.input[i].shape[k] == old) s.input[i].shape[k] = size;
    }
    return s;
}

/* Shapes for an op; shapes that are refused (a group without elements) are allowed too. */
static sample take_sample(choices *in, const char *op) {
    sample s = {.op = op, .attributes = attribute_text, .index_limit = 1};
    int64_t shape[VJP_MAX_DIMS] = {0}, other[VJP_MAX_DIMS] = {0};
    attribute_text[0] = 0;
    int ndim = 1 + (int)choose(in, 4);
    if (strcmp(op, "layer_norm") == 0 || strcmp(op, "rms_norm") == 0) {
        int axes = 1 + (int)choose(in, (uint32_t)ndim);
        take_shape(in, ndim, shape, 4096);
        snprintf(attribute_text, sizeof attribute_text, "axes=%d", axes);
        add(&s, "x", ndim, shape);
    } else if (strcmp(op, "group_norm") == 0) {
        ndim += 1;
        int groups = 1 + (int)choose(in, 4), last = (int)choose(in, 2);
        take_shape(in, ndim, shape, 4096);
        shape[last ? ndim - 1 : 1] = groups * (int64_t)(1 + choose(in, 17));
        snprintf(attribute_text, sizeof attribute_text, "groups=%d layout=%d", groups, last);
        add(&s, "x", ndim, shape);
    } else if (strcmp(op, "rope") == 0) {
        ndim += 2;
        take_shape(in, ndim, shape, 4096);
        int64_t n_rot = 2 * (int64_t)choose(in, (uint32_t)(shape[ndim - 1] / 2 + 1));
        int64_t rotated = n_rot ? n_rot : shape[ndim - 1];
        other[0] = shape[ndim - 3] + choose(in, 4), other[1] = rotated / 2;
        snprintf(attribute_text, sizeof attribute_text, "n_rot=%lld pairing=%u", (long long)n_rot, choose(in, 2));
        add(&s, "x", ndim, shape);
        add(&s, "cosine", 2, other);
        s.index_limit = other[0];
        if (choose(in, 2)) {
            bool each = ndim > 3 && choose(in, 2);
            add(&s, "positions", each ? ndim - 2 : 1, each ? shape : &shape[ndim - 3]);
        }
    } else if (strcmp(op, "cumsum") == 0) {
        take_shape(in, ndim, shape, 4096);
        snprintf(attribute_text, sizeof attribute_text, "axis=%d exclusive=%u reverse=%u",
                 (int)choose(in, (uint32_t)(2 * ndim)) - ndim, choose(in, 2), choose(in, 2));
        add(&s, "x", ndim, shape);
    } else if (strcmp(op, "gather") == 0) {
        take_shape(in, ndim, shape, 1024);
        int axis = (int)choose(in, (uint32_t)ndim), index_rank = (int)choose(in, 4);
        take_shape(in, index_rank, other, 64);
        snprintf(attribute_text, sizeof attribute_text, "axis=%d", axis);
        add(&s, "table", ndim, shape);
        add(&s, "index", index_rank, other);
        s.index_limit = shape[axis];
    } else if (strcmp(op, "maxpool2d") == 0) {
        int last = (int)choose(in, 2);
        take_shape(in, 4, shape, 4096);
        snprintf(
            attribute_text, sizeof attribute_text,
            "kernel_h=%u kernel_w=%u stride_h=%u stride_w=%u padding_h=%u padding_w=%u dilation_h=%u dilation_w=%u "
            "ceil_mode=%u layout=%d",
            1 + choose(in, 4), 1 + choose(in, 4), choose(in, 4), choose(in, 4), choose(in, 3), choose(in, 3),
            1 + choose(in, 3), 1 + choose(in, 3), choose(in, 2), last);
        add(&s, "x", 4, shape);
        int height = last ? 1 : 2;
        s.index_limit = shape[height] * shape[height + 1];
    } else if (strcmp(op, "sum_squares") == 0) {
        take_shape(in, ndim - 1, shape, 4096);
        add(&s, "x", ndim - 1, shape);
    } else if (strcmp(op, "adamw") == 0 || strcmp(op, "sgd") == 0) {
        take_shape(in, ndim - 1, shape, 4096);
        add(&s, "w", ndim - 1, shape);
        s.index_limit = 1 + (int64_t)choose(in, 2000);
    } else if (strcmp(op, "clip") == 0) {
        snprintf(attribute_text, sizeof attribute_text, "max_norm=%g", choose(in, 5) / 2.0);
    } else if (strcmp(op, "cross_entropy") == 0) {
        take_shape(in, ndim, shape, 4096);
        snprintf(attribute_text, sizeof attribute_text, "ignore_index=%d reduction=%u label_smoothing=%g",
                 (int)choose(in, 4) - 1, choose(in, 2), choose(in, 5) * 0.25);
        add(&s, "logits", ndim, shape);
        add(&s, "target", ndim - 1, shape);
        s.index_limit = shape[ndim - 1];
    } else if (strcmp(op, "linear_cross_entropy") == 0) {
        take_shape(in, ndim, shape, 1024);
        take_shape(in, 1, other, 64);
        other[1] = shape[ndim - 1];
        snprintf(attribute_text, sizeof attribute_text, "ignore_index=%d reduction=%u label_smoothing=%g",
                 (int)choose(in, 4) - 1, choose(in, 2), choose(in, 5) * 0.25);
        add(&s, "x", ndim, shape);
        add(&s, "weight", 2, other);
        add(&s, "target", ndim - 1, shape);
        s.index_limit = other[0];
    } else if (strcmp(op, "swiglu") == 0) {
        take_shape(in, ndim, shape, 4096);
        add(&s, "gate", ndim, shape);
        add(&s, "up", ndim, shape);
    } else if (strcmp(op, "add") == 0 || strcmp(op, "mul") == 0) {
        take_shape(in, ndim, shape, 4096);
        int axes = (int)choose(in, (uint32_t)ndim + 1);
        add(&s, "a", ndim, shape);
        add(&s, "b", axes, shape + (ndim - axes));
    } else if (strcmp(op, "scale") == 0 || strcmp(op, "cast") == 0) {
        take_shape(in, ndim, shape, 4096);
        if (op[0] == 's') snprintf(attribute_text, sizeof attribute_text, "factor=%g", take_number(in));
        add(&s, "x", ndim, shape);
    } else if (strcmp(op, "mean") == 0) {
        take_shape(in, ndim, shape, 4096);
        int axis = (int)choose(in, (uint32_t)(2 * ndim)) - ndim;
        snprintf(attribute_text, sizeof attribute_text, "axis=%d axes=%u", axis, choose(in, 3));
        add(&s, "x", ndim, shape);
    } else if (strcmp(op, "dropout") == 0) {
        take_shape(in, ndim, shape, 4096);
        other[0] = 2;
        snprintf(attribute_text, sizeof attribute_text, "p=%g stream=%u", 0.25 * (double)choose(in, 5), choose(in, 3));
        add(&s, "x", ndim, shape);
        add(&s, "counter", 1, other);
        s.index_limit = 1 << 24;
    } else if (strcmp(op, "attention") == 0) {
        take_shape(in, 4, shape, 1024);
        memcpy(other, shape, sizeof other);
        other[1] += choose(in, 5);
        shape[2] *= 1 + choose(in, 3);
        snprintf(attribute_text, sizeof attribute_text, "causal=%u scale=%g", choose(in, 2), 0.25 * choose(in, 3));
        add(&s, "q", 4, shape);
        add(&s, "k", 4, other);
        add(&s, "v", 4, other);
    } else if (strcmp(op, "linear") == 0) {
        ndim += 1;
        bool batched = choose(in, 2), transposed = choose(in, 2);
        take_shape(in, ndim, shape, 1024); /* the result is up to 65 times as large */
        int64_t n = take_size(in), k = shape[ndim - 1];
        int rank = batched ? ndim : 2;
        memcpy(other, shape, sizeof other);
        other[rank - 2] = transposed ? n : k, other[rank - 1] = transposed ? k : n;
        snprintf(attribute_text, sizeof attribute_text, "activation=%u transpose_b=%d zero_nan=%u", choose(in, 7),
                 transposed, choose(in, 2));
        add(&s, "a", ndim, shape);
        add(&s, "b", rank, other);
    } else {
        s = resized(in, sample_find(op));
    }
    return s;
}

/* ---- May this call be made? ------------------------------------------------------------------------ */

enum { OVERFLOWS = -1 };

/* Elements of a row and from one to the next: of a tensor whose rows do not lie apart, all of it. */
typedef struct row_layout {
    int64_t row, step;
} row_layout;

static row_layout rows_of(const vjp_tensor *t, int64_t count) {
    if (t->ndim < 3 || !count) return (row_layout){count, count};
    int64_t row = t->shape[t->ndim - 2] * t->shape[t->ndim - 1], step = vjp_row_step(t);
    return step > row ? (row_layout){row, step} : (row_layout){count, count};
}

static int64_t elements_of(const vjp_tensor *t) {
    return (int64_t)(call_bytes(t) / vjp_dtype_size((vjp_dtype)t->dtype));
}

/* Bytes from a tensor's beginning to its end; OVERFLOWS when its form alone must be refused. */
static int64_t claimed_bytes(const vjp_tensor *t) {
    int64_t size = (int64_t)vjp_dtype_size((vjp_dtype)t->dtype), count = 1;
    if (!size || t->ndim < 0 || t->ndim > VJP_MAX_DIMS || !vjp_sizes_fit(t->ndim, t->shape)) return OVERFLOWS;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) return OVERFLOWS;
        count *= t->shape[i];
    }
    row_layout rows = rows_of(t, count);
    int64_t bytes = 0;
    if (count && __builtin_mul_overflow(count / rows.row - 1, rows.step, &bytes)) return OVERFLOWS;
    if (__builtin_add_overflow(bytes, rows.row, &bytes) || __builtin_mul_overflow(bytes, size, &bytes))
        return OVERFLOWS;
    return bytes;
}

static bool lies_inside(const call *made, const vjp_tensor *t, int64_t bytes) {
    uintptr_t data = (uintptr_t)t->data, block = (uintptr_t)made->block;
    if (data < block || data - block > made->block_bytes) return false;
    size_t room = made->block_bytes - (data - block);
    return t->offset <= room && (uint64_t)bytes <= room - t->offset;
}

static bool is_fair(const call *made) {
    bool refused = false, inside = true;
    for (size_t i = 0; i < made->count; i++) {
        const vjp_tensor *t = made->pointer[i];
        if (!t) continue;
        int64_t bytes = claimed_bytes(t);
        if (bytes == OVERFLOWS)
            refused = true;
        else if (bytes > 0 && t->data)
            inside = inside && lies_inside(made, t, bytes);
    }
    return inside || refused;
}

/* ---- What may not make sense ------------------------------------------------------------------------- */

static bool same_memory(const call *made, size_t i, size_t j) {
    return claimed_bytes(&made->tensor[i]) == claimed_bytes(&made->tensor[j]);
}

/* True if the numbers that come out can no longer be compared. */
static bool make_strange(call *made, choices *in) {
    size_t slot = choose(in, (uint32_t)made->count);
    vjp_tensor *t = &made->tensor[slot];
    switch (choose(in, 14)) {
    case 0: t->dtype = (int32_t)choose(in, 9) - 1; return true;
    case 1: t->ndim = (int32_t)choose(in, 11) - 1; return true;
    case 2: t->shape[choose(in, VJP_MAX_DIMS)] = take_strange(in); return true;
    case 3: t->stride[choose(in, VJP_MAX_DIMS)] = take_strange(in); return true;
    case 4: {
        int64_t expected = 1;
        for (int i = t->ndim - 1; i >= 0 && i < VJP_MAX_DIMS; i--) {
            t->stride[i] = expected;
            if (__builtin_mul_overflow(expected, t->shape[i], &expected)) break;
        }
        return false;
    }
    case 5: t->flags = choose(in, 4); return t->flags > 1;
    case 6: t->offset = choose(in, 2) ? choose(in, 64) : (uint64_t)take_strange(in); return true;
    case 7: t->data = NULL; return true;
    case 8: made->pointer[slot] = NULL; return false;
    case 9: { /* overlapping another tensor, partly or wholly */
        size_t other = choose(in, (uint32_t)made->count);
        uintptr_t begin = (uintptr_t)made->tensor[other].data; /* which may be NULL by now */
        t->data = (void *)(begin + (choose(in, 2) ? 4 * choose(in, 32) : 0));
        return true;
    }
    case 10: { /* in place, where the table allows it */
        for (size_t j = 0; j < made->count; j++)
            if (made->info->pass[made->pass].slots[slot].aliases >> j & 1 && same_memory(made, slot, j))
                t->data = made->tensor[j].data;
        return true;
    }
    case 11: {
        int64_t bytes = claimed_bytes(t);
        bool inside = bytes > 0 && lies_inside(made, t, bytes) && (uintptr_t)t->data % 8 == 0 && t->offset == 0;
        double value = take_number(in);
        bool whole = t->dtype == VJP_I32 || t->dtype == VJP_I64;
        if (whole) value = (double)(int32_t)take_strange(in);
        if (inside) call_put(t, choose(in, 256) % elements_of(t), value);
        return true;
    }
    case 12: { /* an attribute */
        const vjp_op_info *info = made->info;
        if (!info->attribute_count) return false;
        const vjp_attribute *a = &info->attributes[choose(in, (uint32_t)info->attribute_count)];
        double real = take_number(in);
        int64_t integer = take_strange(in);
        memcpy((char *)made->attributes + a->offset, a->type == VJP_REAL ? (void *)&real : (void *)&integer, 8);
        return true;
    }
    default:
        for (size_t i = 0; i < made->info->pass[made->pass].outputs; i++)
            if (made->info->pass[made->pass].slots[i].flags & VJP_SLOT_ACCUMULATES)
                made->tensor[i].flags = VJP_ACCUMULATE;
        return false;
    }
}

/*
 * Rows that lie apart; and perhaps those of another slot at the same distance, begun somewhere between or upon them.
 * Returns as make_strange().
 */
static bool spread(call *made, choices *in) {
    size_t slot = choose(in, (uint32_t)made->count), other = choose(in, (uint32_t)made->count);
    int64_t gap = 1 + (int64_t)choose(in, 40);
    if (!call_spread(made, slot, gap) || !choose(in, 2) || other == slot) return false;
    vjp_tensor *t = &made->tensor[slot], *u = &made->tensor[other];
    if (u->ndim != t->ndim || u->dtype != t->dtype) return false;
    call_set_step(u, vjp_row_step(t));
    size_t size = vjp_dtype_size((vjp_dtype)t->dtype);
    u->data = (unsigned char *)t->data + choose(in, (uint32_t)vjp_row_step(t)) * size;
    return true;
}

/* ---- The checks -------------------------------------------------------------------------------------- */

static void fail(const call *made, const char *what, const char *device) {
    fprintf(stderr, "%s.%s on %s: %s\n", made->info->name, made->pass == VJP_FORWARD ? "forward" : "backward", device,
            what);
    for (size_t i = 0; i < made->count; i++) {
        const vjp_tensor *t = made->pointer[i];
        fprintf(stderr, "  %-10s", made->info->pass[made->pass].slots[i].name);
        if (!t) {
            fprintf(stderr, "absent\n");
            continue;
        }
        fprintf(stderr, "%s [", vjp_dtype_name((vjp_dtype)t->dtype));
        for (int k = 0; k < t->ndim && k < VJP_MAX_DIMS; k++)
            fprintf(stderr, "%s%lld", k ? ", " : "", (long long)t->shape[k]);
        fprintf(stderr, "] at %lld + %llu flags %u\n",
                t->data ? (long long)((unsigned char *)t->data - made->block) : -1LL, (unsigned long long)t->offset,
                t->flags);
    }
    for (size_t i = 0; i < made->info->attribute_count; i++) {
        const vjp_attribute *a = &made->info->attributes[i];
        if (a->type == VJP_REAL)
            fprintf(stderr, "  %s=%g\n", a->name, *(const double *)(const void *)&made->attributes[a->offset / 8]);
        else
            fprintf(stderr, "  %s=%lld\n", a->name, (long long)made->attributes[a->offset / 8]);
    }
    abort();
}

static void poison(const call *made, bool on) {
#ifdef HAVE_POISON
    if (!on) {
        __asan_unpoison_memory_region(made->block, made->block_bytes);
        return;
    }
    __asan_poison_memory_region(made->block, made->block_bytes);
    for (size_t i = 0; i < made->count; i++)
        __asan_unpoison_memory_region(made->tensor[i].data, (size_t)claimed_bytes(&made->tensor[i]));
#else
    (void)made, (void)on;
#endif
}

/* Whether a byte of the block belongs to an element of the tensor. */
static bool covers(const call *made, const vjp_tensor *t, size_t at) {
    size_t begin = (size_t)((unsigned char *)t->data - made->block) + t->offset;
    if (at < begin || at - begin >= (size_t)claimed_bytes(t)) return false;
    size_t size = vjp_dtype_size((vjp_dtype)t->dtype);
    row_layout rows = rows_of(t, elements_of(t));
    return (at - begin) % ((size_t)rows.step * size) < (size_t)rows.row * size;
}

/* Every byte that no output covers is as it was. */
static bool only_outputs_changed(const call *made, const unsigned char *before) {
    size_t outputs = made->info->pass[made->pass].outputs;
    for (size_t at = 0; at < made->block_bytes; at++) {
        if (made->block[at] == before[at]) continue;
        bool covered = false;
        for (size_t i = 0; i < outputs; i++) {
            const vjp_tensor *t = made->pointer[i];
            if (t && t->data) covered = covered || covers(made, t, at);
        }
        if (!covered) return false;
    }
    return true;
}

static vjp_status run_and_check(vjp_device *device, const call *made, const unsigned char *before, bool strange) {
    if (!strange) poison(made, true);
    vjp_status status = call_run(device, made);
    if (!strange) poison(made, false);
    if (status != VJP_OK) {
        if (memcmp(before, made->block, made->block_bytes) != 0)
            fail(made, "refused, but memory was changed", vjp_device_name(device));
        if (!*vjp_error(device)) fail(made, "refused without a sentence", vjp_device_name(device));
    } else if (!only_outputs_changed(made, before)) {
        fail(made, "memory outside the outputs was changed", vjp_device_name(device));
    }
    return status;
}

/* Gross errors only: a wrong element, a column left out. `other` is the block as ref left it. */
static void compare(const call *made, const unsigned char *other) {
    for (size_t i = 0; i < made->info->pass[made->pass].outputs; i++) {
        const vjp_tensor *t = made->pointer[i];
        if (!t || !t->data) continue;
        vjp_tensor twin = *t;
        twin.data = (void *)(other + ((unsigned char *)t->data - made->block));
        int64_t count = elements_of(t);
        row_layout rows = rows_of(t, count);
        double largest = 0;
        for (int64_t k = 0; k < count; k++)
            largest = fmax(largest, fabs(call_get(&twin, k / rows.row * rows.step + k % rows.row)));
        for (int64_t k = 0; k < count; k++) {
            int64_t at = k / rows.row * rows.step + k % rows.row;
            double have = call_get(t, at), want = call_get(&twin, at);
            if (!(fabs(have - want) <= 0.03 * (0.1 + largest)) && !(isnan(have) && isnan(want)) && have != want) {
                fprintf(stderr, "%s[%lld] is %g, ref has %g\n", made->info->pass[made->pass].slots[i].name,
                        (long long)k, have, want);
                fail(made, "cpu and ref disagree", "cpu");
            }
        }
    }
}

/* ---- The target -------------------------------------------------------------------------------------- */

static vjp_device *cpus[4], *ref;
static uint32_t cpu_count;

/* The processor's best instruction set with its product engine, the built-in one, and the other sets that were built.
 */
static void open_all(void) {
    static const vjp_options options[] = {{.threads = 1},
                                          {.threads = 2, .matrix_products = "builtin"},
                                          {.threads = 1, .instruction_set = "plain"},
                                          {.threads = 1, .instruction_set = "avx2"}};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        vjp_options one = options[i];
        one.struct_size = sizeof one;
        if (vjp_open("cpu", &one, &cpus[cpu_count]) == VJP_OK)
            cpu_count++;
        else if (one.instruction_set)
            vjp_close(cpus[cpu_count]);
        else
            abort();
    }
    if (vjp_open("ref", NULL, &ref) != VJP_OK) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!ref) open_all();
    choices in = choices_of(data, size);
    const char *op = vjp_op_describe(vjp_op_at(choose(&in, (uint32_t)vjp_op_count())))->name;
    vjp_pass pass = (vjp_pass)choose(&in, (uint32_t)vjp_passes(vjp_op_describe(vjp_op_find(op))));
    vjp_device *cpu = cpus[choose(&in, cpu_count)];
    static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16, VJP_F64}, indices[] = {VJP_I32, VJP_I64, VJP_F32};
    vjp_dtype storage = storages[choose(&in, 4)];
    sample_types types = {storage, choose(&in, 2) ? storage : VJP_F32, indices[choose(&in, 3)]};
    sample from = take_sample(&in, op);

    call made;
    if (!call_make(&made, ref, &from, pass, types, 1)) {
        call_free(&made);
        return 0; /* vjp_infer() refused the shapes, which is an answer */
    }
    bool strange = false;
    /* The saved values are random: for an argmax outside its window the devices need not agree. */
    if (strcmp(op, "maxpool2d") == 0 && pass == VJP_BACKWARD) strange = true;
    bool limited = from.index_limit > 0; /* no index fits an empty table */
    for (uint32_t n = choose(&in, 5); n > 0; n--)
        strange = make_strange(&made, &in) || strange;
    if (!strange && choose(&in, 3)) strange = spread(&made, &in);
    if (is_fair(&made)) {
        unsigned char *before = malloc(made.block_bytes), *after = malloc(made.block_bytes);
        memcpy(before, made.block, made.block_bytes);
        vjp_status truth = run_and_check(ref, &made, before, strange);
        memcpy(after, made.block, made.block_bytes);
        memcpy(made.block, before, made.block_bytes);
        vjp_status status = run_and_check(cpu, &made, before, strange);
        if (status != truth && status != VJP_UNSUPPORTED) fail(&made, vjp_error(cpu), vjp_error(ref));
        if (status == VJP_UNSUPPORTED && truth == VJP_OK && storage != VJP_F64 && !strange)
            fail(&made, vjp_error(cpu), "cpu");
        if (status == VJP_OK && !strange && limited) compare(&made, after);
        free(before);
        free(after);
    }
    call_free(&made);
    return 0;
}
