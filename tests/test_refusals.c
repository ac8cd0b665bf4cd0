/* SPDX-License-Identifier: MIT */
/*
 * What is refused, as the table of refusals.h: a valid call (sample.h), one edit that makes it invalid, the status, and
 * words that the sentence must have. Every row runs on cpu and ref; the valid call must pass there, so that the edit
 * alone is refused, and after the refusal every byte of every tensor and of the guards between them must be unchanged.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "refusals.h"
#include "sample.h"

/* ---- Edits ------------------------------------------------------------------------------------------- */

static bool edit_list(const char *text, int64_t *list, int *count) {
    *count = 0;
    if (*text != '[') return false;
    for (text++; *text && *text != ']';) {
        char *end;
        if (*count == VJP_MAX_DIMS) return false;
        list[(*count)++] = strtoll(text, &end, 10);
        if (end == text) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return *text == ']';
}

static bool edit_member(call *made, int slot, const char *member, const char *value) {
    vjp_tensor *tensor = &made->tensor[slot];
    int count;
    if (strcmp(member, "shape") == 0) {
        int64_t shape[VJP_MAX_DIMS];
        if (!edit_list(value, shape, &count)) return false;
        vjp_tensor packed = vjp_tensor_of(tensor->data, (vjp_dtype)tensor->dtype, count, shape);
        packed.offset = tensor->offset;
        packed.flags = tensor->flags;
        *tensor = packed;
    } else if (strcmp(member, "stride") == 0) {
        return edit_list(value, tensor->stride, &count) && count == tensor->ndim;
    } else if (strcmp(member, "ndim") == 0) {
        tensor->ndim = atoi(value);
    } else if (strcmp(member, "dtype") == 0) {
        int dtype = vjp_dtype_find(value);
        if (dtype == VJP_F32 && tensor->dtype == VJP_I32) /* the same indices as floats */
            for (size_t i = 0; i < call_bytes(tensor) / 4; i++)
                ((float *)tensor->data)[i] = (float)((int32_t *)tensor->data)[i];
        if (dtype == VJP_I64 && tensor->dtype == VJP_I32) /* half as many indices, widened from the back */
            for (size_t i = call_bytes(tensor) / 8; i-- > 0;)
                ((int64_t *)tensor->data)[i] = ((int32_t *)tensor->data)[i];
        tensor->dtype = dtype >= 0 ? dtype : atoi(value);
    } else if (strcmp(member, "data") == 0) {
        tensor->data = NULL;
    } else if (strcmp(member, "offset") == 0) {
        tensor->offset = strtoull(value, NULL, 10);
    } else if (strcmp(member, "flags") == 0) {
        tensor->flags = (uint32_t)atoi(value);
    } else if (strcmp(member, "reserved") == 0) {
        tensor->reserved = (uint32_t)atoi(value);
    } else if (strcmp(member, "at") == 0) {
        char other[32];
        const char *plus = strchr(value, '+');
        snprintf(other, sizeof other, "%.*s", plus ? (int)(plus - value) : (int)strlen(value), value);
        int source = call_slot(made, other);
        if (source < 0) return false;
        tensor->data = (char *)made->tensor[source].data + (plus ? atoi(plus + 1) : 0);
    } else {
        return false;
    }
    return true;
}

static bool edit_one(call *made, char *text) {
    char *equals = strchr(text, '=');
    if (!equals) return false;
    *equals = 0;
    const char *value = equals + 1;
    if (text[0] == '@') return call_set_attribute(made, text + 1, value);
    char *dot = strchr(text, '.'), *bracket = strchr(text, '[');
    if (dot) *dot = 0;
    if (bracket) *bracket = 0;
    int slot = call_slot(made, text);
    if (slot < 0) return false;
    if (bracket) {
        /* Through a double every i32, f32 and smaller i64 is exact. */
        call_put(&made->tensor[slot], atoi(bracket + 1), strtod(value, NULL));
        return true;
    }
    if (dot) return edit_member(made, slot, dot + 1, value);
    made->pointer[slot] = NULL;
    return strcmp(value, "absent") == 0;
}

static bool edit_call(call *made, const char *text) {
    char copy[256];
    assert_true(strlen(text) < sizeof copy);
    snprintf(copy, sizeof copy, "%s", text);
    char *rest = copy;
    for (char *word; (word = strtok_r(rest, " ", &rest));)
        if (!edit_one(made, word)) return false;
    return true;
}

/* ---- Tests ------------------------------------------------------------------------------------------- */

static vjp_device *open_device(const char *name) {
    vjp_device *device;
    vjp_options options = {.struct_size = sizeof(vjp_options), .threads = 2, .workspace_bytes = 4 << 20};
    assert_int_equal(vjp_open(name, &options, &device), VJP_OK);
    return device;
}

/* Returns what went wrong, or NULL. */
static const char *try_row(vjp_device *device, const refusal *row) {
    static char text[1024];
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    if (!call_make(&made, device, sample_find(row->op), row->pass, types, 7)) return "no sample";
    const char *wrong = NULL;
    if (call_run(device, &made) != VJP_OK) {
        snprintf(text, sizeof text, "the valid call was refused: %s", vjp_error(device));
        wrong = text;
    } else if (!edit_call(&made, row->edit)) {
        wrong = "the edit makes no sense";
    } else {
        unsigned char *before = malloc(made.block_bytes);
        memcpy(before, made.block, made.block_bytes);
        vjp_status status = call_run(device, &made);
        const char *sentence = vjp_error(device);
        char prefix[64];
        snprintf(prefix, sizeof prefix, "%s.%s: ", row->op, row->pass == VJP_FORWARD ? "forward" : "backward");
        if (status != row->status) {
            snprintf(text, sizeof text, "%s instead of %s: %s", vjp_status_name(status), vjp_status_name(row->status),
                     sentence);
            wrong = text;
        } else if (memcmp(before, made.block, made.block_bytes) != 0) {
            wrong = "memory was changed";
        } else if (strncmp(sentence, prefix, strlen(prefix)) != 0) {
            snprintf(text, sizeof text, "the sentence does not begin with \"%s\": %s", prefix, sentence);
            wrong = text;
        }
        for (int i = 0; !wrong && i < MAX_WORDS && row->words[i]; i++)
            if (!strstr(sentence + strlen(prefix), row->words[i])) {
                snprintf(text, sizeof text, "\"%s\" is not in: %s", row->words[i], sentence);
                wrong = text;
            }
        free(before);
    }
    call_free(&made);
    return wrong;
}

static void every_row(const char *name) {
    vjp_device *device = open_device(name);
    int failed = 0;
    for (int i = 0; i < ROWS; i++) {
        const char *wrong = try_row(device, &rows[i]);
        if (!wrong) continue;
        failed++;
        print_error("%s %s.%s %s\n    %s\n", name, rows[i].op, rows[i].pass == VJP_FORWARD ? "forward" : "backward",
                    rows[i].edit, wrong);
    }
    vjp_close(device);
    assert_int_equal(failed, 0);
}

static void cpu_refuses(void **state) {
    (void)state;
    every_row("cpu");
}

static void ref_refuses(void **state) {
    (void)state;
    every_row("ref");
}

/* Every op and pass must have rows here: a new op cannot forget its refusals. */
static void every_pass_has_rows(void **state) {
    (void)state;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++) {
            const char *name = vjp_op_describe(vjp_op_at(op))->name;
            int found = 0;
            for (int i = 0; i < ROWS; i++)
                found += strcmp(rows[i].op, name) == 0 && (int)rows[i].pass == pass;
            if (found < 3) print_error("%s has %d rows for pass %d\n", name, found, pass);
            assert_true(found >= 3);
        }
}

static void cpu_has_no_f64(void **state) {
    (void)state;
    vjp_device *cpu = open_device("cpu"), *ref = open_device("ref");
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++) {
            call made;
            sample_types types = {VJP_F64, VJP_F64, VJP_I64};
            const char *name = vjp_op_describe(vjp_op_at(op))->name;
            assert_true(call_make(&made, cpu, sample_find(name), (vjp_pass)pass, types, 3));
            unsigned char *before = malloc(made.block_bytes);
            memcpy(before, made.block, made.block_bytes);
            if (vjp_supports(cpu, made.op, (vjp_pass)pass, VJP_F64) != VJP_OK) {
                assert_int_equal(call_run(cpu, &made), VJP_UNSUPPORTED);
                assert_non_null(strstr(vjp_error(cpu), "f64"));
                assert_non_null(strstr(vjp_error(cpu), name));
                assert_memory_equal(before, made.block, made.block_bytes);
            }
            assert_int_equal(call_run(ref, &made), VJP_OK);
            free(before);
            call_free(&made);
        }
    vjp_close(cpu);
    vjp_close(ref);
}

/* What is wrong with the call itself rather than with a tensor. */
/* The kernel must support the dtype of a slot of any float type, as it must T. */
static void cpu_casts_to_no_f64(void **state) {
    (void)state;
    vjp_device *cpu = open_device("cpu"), *ref = open_device("ref");
    float x[3] = {1, -2, 1.0f / 3};
    double y[3] = {9, 9, 9};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 1, (int64_t[]){3}), ty = vjp_tensor_of(y, VJP_F64, 1, (int64_t[]){3});
    assert_int_equal(vjp_cast_forward(cpu, &ty, &tx), VJP_UNSUPPORTED);
    assert_string_equal(vjp_error(cpu), "cast.forward: cpu has no kernel for f64");
    assert_true(y[0] == 9);
    assert_int_equal(vjp_cast_forward(ref, &ty, &tx), VJP_OK);
    assert_true(y[1] == -2 && y[2] == (double)x[2]);
    vjp_close(cpu);
    vjp_close(ref);
}

static void misuse_of_call(void **state) {
    (void)state;
    vjp_device *device = open_device("cpu");
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    assert_true(call_make(&made, device, sample_find("cumsum"), VJP_FORWARD, types, 3));
    assert_int_equal(vjp_call(device, NULL, VJP_FORWARD, made.pointer, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "op is NULL"));
    assert_int_equal(vjp_call(device, made.op, (vjp_pass)2, made.pointer, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "unknown pass"));
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, made.pointer, 3, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "3 tensors"));
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, NULL, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "NULL"));
    assert_int_equal(vjp_call(NULL, made.op, VJP_FORWARD, made.pointer, 2, NULL), VJP_NO_DEVICE);
    const vjp_tensor *none[2] = {0};
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, none, 2, NULL), VJP_INVALID);
    /* A later success leaves no sentence of an earlier failure. */
    assert_int_equal(call_run(device, &made), VJP_OK);
    assert_string_equal(vjp_error(device), "");
    call_free(&made);
    vjp_close(device);
}

/* No tensor may overlap the workspace that the call uses. */
static void workspace_overlap(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        call made;
        sample_types types = {VJP_F32, VJP_F32, VJP_I32};
        assert_true(call_make(&made, device, sample_find_large("layer_norm"), VJP_BACKWARD, types, 3));
        size_t bytes;
        assert_int_equal(
            vjp_workspace_size(device, made.op, made.pass, made.pointer, made.count, made.attributes, &bytes), VJP_OK);
        assert_true(bytes > 0);
        size_t room = bytes + made.block_bytes + 256;
        unsigned char *workspace = aligned_alloc(64, room / 64 * 64);
        memset(workspace, 0, room / 64 * 64);
        assert_int_equal(vjp_set_workspace(device, workspace, room / 64 * 64), VJP_OK);
        assert_int_equal(call_run(device, &made), VJP_OK);
        for (size_t slot = 0; slot < made.count; slot++) {
            void *own = made.tensor[slot].data;
            made.tensor[slot].data = workspace + (bytes - 1) / 64 * 64; /* the last line that is needed */
            assert_int_equal(call_run(device, &made), VJP_INVALID);
            assert_non_null(strstr(vjp_error(device), "workspace"));
            assert_non_null(strstr(vjp_error(device), made.info->pass[made.pass].slots[slot].name));
            made.tensor[slot].data = own;
        }
        call_free(&made);
        vjp_close(device);
        free(workspace);
    }
}

/* The rows of a tensor may lie apart so far that only the last one is in the workspace. */
static void last_row_in_workspace(void **state) {
    (void)state;
    vjp_device *device = open_device("cpu");
    enum { TIMES = 3, HEADS = 2, DIM = 8, STEP = 64 };
    const int64_t shape[] = {1, TIMES, HEADS, DIM};
    static _Alignas(64) float memory[TIMES * STEP + (1 << 20)];
    float y[TIMES * HEADS * DIM] = {0}, k[TIMES * HEADS * DIM] = {0};
    vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 4, shape), tk = vjp_tensor_of(k, VJP_F32, 4, shape);
    vjp_tensor tq = vjp_tensor_of(memory, VJP_F32, 4, shape);
    tq.stride[1] = STEP;
    assert_int_equal(vjp_set_workspace(device, memory + TIMES * STEP, 4 << 20), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &ty, NULL, &tq, &tk, &tk, NULL, NULL), VJP_OK);
    assert_int_equal(vjp_set_workspace(device, memory + (TIMES - 1) * STEP, 4 << 20), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &ty, NULL, &tq, &tk, &tk, NULL, NULL), VJP_INVALID);
    assert_string_equal(vjp_error(device), "attention.forward: q overlaps the device's workspace");
    vjp_close(device);
}

/* Several threads check indices in chunks; the sentence still names the first bad one. */
static void first_bad_index(void **state) {
    (void)state;
    enum { COUNT = 1 << 20, ROWS_OF_TABLE = 5 };
    static const char *const names[] = {"cpu", "ref"};
    static const vjp_dtype types[] = {VJP_I32, VJP_I64, VJP_F32};
    float table[ROWS_OF_TABLE] = {1, 2, 3, 4, 5};
    float *y = malloc(COUNT * sizeof *y);
    void *data = malloc(COUNT * sizeof(int64_t));
    vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 1, (int64_t[]){COUNT});
    vjp_tensor tt = vjp_tensor_of(table, VJP_F32, 1, (int64_t[]){ROWS_OF_TABLE});
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        for (int t = 0; t < 3; t++) {
            vjp_tensor index = vjp_tensor_of(data, types[t], 1, (int64_t[]){COUNT});
            for (int64_t k = 0; k < COUNT; k++) {
                call_put(&index, k, (double)(k % ROWS_OF_TABLE));
                y[k] = -1;
            }
            assert_int_equal(vjp_gather_forward(device, &ty, &tt, &index, NULL), VJP_OK);
            assert_true(y[COUNT - 1] == table[(COUNT - 1) % ROWS_OF_TABLE]);
            y[0] = -1;
            static const int64_t bad[] = {COUNT - 1, COUNT / 2 + 3, 70001, 0};
            for (int b = 0; b < 4; b++) { /* each is before the ones that are already bad */
                char position[64];
                call_put(&index, bad[b], b % 2 ? -7 : ROWS_OF_TABLE);
                snprintf(position, sizeof position, "index[%lld] is %d", (long long)bad[b], b % 2 ? -7 : ROWS_OF_TABLE);
                assert_int_equal(vjp_gather_forward(device, &ty, &tt, &index, NULL), VJP_INVALID);
                if (!strstr(vjp_error(device), position)) print_error("%s: %s\n", position, vjp_error(device));
                assert_non_null(strstr(vjp_error(device), position));
                assert_true(y[0] == -1);
            }
        }
        vjp_close(device);
    }
    free(y);
    free(data);
}

/* ---- What is not refused: nothing to do -------------------------------------------------------------- */

typedef struct nothing {
    const char *op;
    vjp_pass pass;
    const char *edit;
    const char *zero; /* an output that must become zero, or stay as it is when accumulating */
} nothing;

static const nothing empties[] = {
    {"layer_norm", F, "x.shape=[0,65] y.shape=[0,65] mean.shape=[0] rstd.shape=[0]", NULL},
    {"layer_norm", F, "x.shape=[0,65] y.shape=[0,65] mean.shape=[0] rstd.shape=[0] x.data=NULL y.data=NULL", NULL},
    {"layer_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] mean.shape=[0] rstd.shape=[0]", "dgamma"},
    {"layer_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] mean.shape=[0] rstd.shape=[0]", "dbeta"},
    {"rms_norm", F, "x.shape=[2,0,65] y.shape=[2,0,65] rstd.shape=[2,0]", NULL},
    {"rms_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] rstd.shape=[0] x.data=NULL", "dgamma"},
    {"rms_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] rstd=absent", "dbeta"},
    {"group_norm", F, "x.shape=[0,6,3,5] y.shape=[0,6,3,5] mean.shape=[0,2] rstd.shape=[0,2]", NULL},
    {"group_norm", B, "x.shape=[0,6,3] dy.shape=[0,6,3] dx.shape=[0,6,3] mean.shape=[0,2] rstd.shape=[0,2]", "dgamma"},
    {"group_norm", B, "x.shape=[0,6,3] dy.shape=[0,6,3] dx.shape=[0,6,3] mean.shape=[0,2] rstd.shape=[0,2]", "dbeta"},
    {"rope", F, "x.shape=[0,5,3,8] y.shape=[0,5,3,8]", NULL},
    {"rope", B, "dx.shape=[2,0,3,8] dy.shape=[2,0,3,8] positions.shape=[0]", NULL},
    {"rope", F, "x.shape=[2,5,0,8] y.shape=[2,5,0,8]", NULL},
    {"rope", F, "x.shape=[2,5,3,0] y.shape=[2,5,3,0] @n_rot=0 cosine.shape=[7,0] sine.shape=[7,0]", NULL},
    {"cumsum", F, "x.shape=[2,0,3] y.shape=[2,0,3]", NULL},
    {"cumsum", B, "dx.shape=[0,17,3] dy.shape=[0,17,3] dx.data=NULL dy.data=NULL", NULL},
    {"gather", F, "index.shape=[0] y.shape=[2,0,5]", NULL},
    {"gather", F, "index.shape=[0] y.shape=[2,0,5] table.shape=[2,0,5] index.data=NULL", NULL},
    {"gather", B, "index.shape=[0] dy.shape=[2,0,5]", "dtable"},
    {"maxpool2d", F, "x.shape=[0,3,7,9] y.shape=[0,3,4,5] argmax.shape=[0,3,4,5]", NULL},
    {"maxpool2d", B, "x.shape=[2,0,7,9] dx.shape=[2,0,7,9] dy.shape=[2,0,4,5] argmax.shape=[2,0,4,5]", NULL},
    {"linear", F, "a.shape=[0,7] y.shape=[0,9] pre.shape=[0,9] residual.shape=[0,9]", NULL},
    {"linear", B, "a.shape=[0,7] dy.shape=[0,9] pre.shape=[0,9] da.shape=[0,7] dresidual.shape=[0,9]", "db"},
    {"linear", B, "a.shape=[0,7] dy.shape=[0,9] pre.shape=[0,9] da.shape=[0,7] dresidual.shape=[0,9]", "dbias"},
    {"sum_squares", F, "x.shape=[0,65] x.data=NULL", "y"},
    {"adamw", F,
     "w_out.shape=[0] m_out.shape=[0] v_out.shape=[0] w.shape=[0] m.shape=[0] v.shape=[0] g.shape=[0] g.data=NULL",
     NULL},
    {"sgd", F, "w_out.shape=[0] momentum_out.shape=[0] w.shape=[0] momentum.shape=[0] g.shape=[0] w.data=NULL", NULL},
    {"linear", B,
     "b.shape=[7,0] db.shape=[7,0] dy.shape=[2,5,0] pre.shape=[2,5,0] bias.shape=[0] dbias.shape=[0] "
     "dresidual.shape=[2,5,0]",
     "da"},
    {"cross_entropy", F, "logits.shape=[0,65] target.shape=[0] lse.shape=[0] logits.data=NULL target.data=NULL",
     "loss"},
    {"cross_entropy", F, "logits.shape=[2,0,65] target.shape=[2,0] lse=absent @reduction=sum", "loss"},
    {"cross_entropy", B, "logits.shape=[0,65] target.shape=[0] lse.shape=[0] dlogits.shape=[0,65]", NULL},
    {"cross_entropy", B, "target[0]=7 target[1]=7 target[2]=7 target[3]=7 target[4]=7 target[5]=7 @ignore_index=7",
     "dlogits"},
    {"linear_cross_entropy", F, "x.shape=[0,17] target.shape=[0] lse.shape=[0] x.data=NULL target.data=NULL", "loss"},
    {"linear_cross_entropy", B, "x.shape=[0,17] dx.shape=[0,17] target.shape=[0] lse.shape=[0] loss=absent", "dweight"},
    {"swiglu", F, "gate.shape=[0,65] up.shape=[0,65] y.shape=[0,65] gate.data=NULL up.data=NULL", NULL},
    {"swiglu", B, "gate.shape=[0] up.shape=[0] dy.shape=[0] dgate.shape=[0] dup.shape=[0]", NULL},
    {"conv2d", F, "x.shape=[0,4,7,9] y.shape=[0,6,4,5]", NULL},
    {"conv2d", B, "x.shape=[0,4,7,9] dx.shape=[0,4,7,9] dy.shape=[0,6,4,5]", "dweight"},
    {"conv2d", B, "x.shape=[0,4,7,9] dx.shape=[0,4,7,9] dy.shape=[0,6,4,5]", "dbias"},
    {"conv2d", B, "weight.shape=[0,2,3,3] dweight.shape=[0,2,3,3] dbias.shape=[0] dy.shape=[2,0,4,5]", "dx"},
    {"add", F, "a.shape=[0,3,65] y.shape=[0,3,65]", NULL},
    {"add", B, "da.shape=[0,3,65] dy.shape=[0,3,65]", "db"},
    {"mul", F, "a.shape=[0,3,65] y.shape=[0,3,65] a.data=NULL", NULL},
    {"mul", B, "da.shape=[0,3,65] dy.shape=[0,3,65] a.shape=[0,3,65]", "db"},
    {"scale", F, "x.shape=[0,65] y.shape=[0,65] x.data=NULL y.data=NULL", NULL},
    {"mean", F, "x.shape=[0,17,3] y.shape=[0,3]", NULL},
    {"mean", B, "x.shape=[2,17,0] dx.shape=[2,17,0] dy.shape=[2,0]", NULL},
    {"dropout", F, "x.shape=[0,65] y.shape=[0,65]", NULL},
    {"cast", F, "x.shape=[0,65] y.shape=[0,65]", NULL},
    {"attention", F, "q.shape=[0,5,4,3] k.shape=[0,7,2,3] v.shape=[0,7,2,3] y.shape=[0,5,4,3] lse.shape=[0,4,5]", NULL},
    {"attention", F, "q.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]", NULL},
    {"attention", F, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3]", "y"},
    {"attention", B, "q.shape=[2,0,4,3] dq.shape=[2,0,4,3] dy.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]",
     "dk"},
    {"attention", B, "q.shape=[2,0,4,3] dq.shape=[2,0,4,3] dy.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]",
     "dv"},
    {"attention", B, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3] dk.shape=[2,0,2,3] dv.shape=[2,0,2,3]", "dq"},
    {"attention", B, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3] dk.shape=[2,0,2,3] dv.shape=[2,0,2,3] y=absent",
     "dq"},
};

enum { EMPTIES = sizeof empties / sizeof empties[0] };

static const char *try_empty(vjp_device *device, const nothing *row, bool accumulate) {
    static char text[1024];
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    const char *wrong = NULL;
    if (!call_make(&made, device, sample_find(row->op), row->pass, types, 7)) return "no sample";
    if (!edit_call(&made, row->edit)) return "the edit makes no sense";
    int slot = row->zero ? call_slot(&made, row->zero) : -1;
    if (accumulate && slot >= 0) made.tensor[slot].flags = VJP_ACCUMULATE;
    unsigned char *expected = malloc(made.block_bytes);
    memcpy(expected, made.block, made.block_bytes);
    /* Other outputs that are not empty are not checked here. */
    for (size_t i = 0; i < made.info->pass[made.pass].outputs; i++)
        if ((int)i != slot && call_bytes(&made.tensor[i])) made.pointer[i] = NULL;
    if (slot >= 0 && !accumulate)
        memset(expected + ((unsigned char *)made.tensor[slot].data - made.block), 0, call_bytes(&made.tensor[slot]));
    vjp_status status = call_run(device, &made);
    if (status != VJP_OK) {
        snprintf(text, sizeof text, "%s: %s", vjp_status_name(status), vjp_error(device));
        wrong = text;
    } else if (memcmp(expected, made.block, made.block_bytes) != 0) {
        wrong = accumulate ? "something was changed" : "not zero, or something else was changed";
    }
    free(expected);
    call_free(&made);
    return wrong;
}

static void empty_is_fine(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    int failed = 0;
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        for (int i = 0; i < EMPTIES; i++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                const char *wrong = try_empty(device, &empties[i], accumulate);
                if (!wrong) continue;
                failed++;
                print_error("%s %s.%s %s%s\n    %s\n", names[d], empties[i].op,
                            empties[i].pass == VJP_FORWARD ? "forward" : "backward", empties[i].edit,
                            accumulate ? " (accumulating)" : "", wrong);
            }
        vjp_close(device);
    }
    assert_int_equal(failed, 0);
}

/* An inner product over nothing is zero, so y is the activation of the bias. */
static void no_inner_dimension(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        float y[6] = {9, 9, 9, 9, 9, 9}, bias[3] = {1, -2, 3};
        vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 2, (int64_t[]){2, 3}),
                   tb = vjp_tensor_of(bias, VJP_F32, 1, (int64_t[]){3});
        vjp_tensor a = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){2, 0}),
                   b = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){0, 3});
        assert_int_equal(vjp_linear_forward(device, &ty, NULL, &a, &b, &tb, NULL, NULL,
                                            WITH(linear, .activation = VJP_ACTIVATION_RELU, .transpose_b = 0)),
                         VJP_OK);
        const float expected[6] = {1, 0, 3, 1, 0, 3};
        assert_memory_equal(y, expected, sizeof y);
        vjp_close(device);
    }
}

static void refused(const vjp_device *device, const char *why, vjp_status status) {
    assert_int_equal(status, VJP_INVALID);
    if (!strstr(vjp_error(device), why)) fail_msg("%s", vjp_error(device));
}

/* linear's gate is in no sample, because it excludes an activation and a residual. */
static void gates_of_linear(void **state) {
    (void)state;
    enum { A, B_, Y, PRE, OTHER, GATE, TENSORS, DOWN = 2, SIDE = 3 };
    vjp_device *device = open_device("cpu");
    float data[TENSORS][SIDE * SIDE] = {{0}};
    vjp_tensor t[TENSORS];
    for (int i = 0; i < TENSORS; i++)
        t[i] = vjp_tensor_of(data[i], VJP_F32, 2, (int64_t[]){i == B_ ? SIDE : DOWN, SIDE});
    vjp_tensor narrow = t[GATE], narrow_a = t[A], narrow_b = t[B_], narrow_y = t[Y];
    narrow.dtype = narrow_a.dtype = narrow_b.dtype = narrow_y.dtype = VJP_BF16;
    vjp_tensor flat = vjp_tensor_of(data[GATE], VJP_F32, 1, (int64_t[]){DOWN * SIDE});
    refused(device, "gate and activation are both given",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, NULL, &t[GATE],
                               WITH(linear, .activation = VJP_ACTIVATION_RELU)));
    refused(device, "gate and residual are both given",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, &t[OTHER], &t[GATE], NULL));
    refused(device, "pre is f32 and gate is bf16",
            vjp_linear_forward(device, &narrow_y, &t[PRE], &narrow_a, &narrow_b, NULL, NULL, &narrow, NULL));
    refused(device, "gate has shape [6]; expected [2, 3]",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, NULL, &flat, NULL));
    refused(device, "gate and dresidual are both given",
            vjp_linear_backward(device, &t[A], NULL, NULL, &t[OTHER], NULL, &t[Y], NULL, &t[B_], NULL, NULL, &t[GATE],
                                NULL));
    refused(
        device, "gate is missing: dgate needs it",
        vjp_linear_backward(device, NULL, NULL, NULL, NULL, &t[OTHER], &t[Y], &t[A], &t[B_], NULL, NULL, NULL, NULL));
    refused(device, "a and pre are both missing: dgate needs one",
            vjp_linear_backward(device, NULL, NULL, NULL, NULL, &t[OTHER], &t[Y], NULL, &t[B_], NULL, NULL, &t[GATE],
                                NULL));
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_refuses),         cmocka_unit_test(ref_refuses),
        cmocka_unit_test(every_pass_has_rows), cmocka_unit_test(cpu_has_no_f64),
        cmocka_unit_test(misuse_of_call),      cmocka_unit_test(workspace_overlap),
        cmocka_unit_test(empty_is_fine),       cmocka_unit_test(no_inner_dimension),
        cmocka_unit_test(gates_of_linear),     cmocka_unit_test(last_row_in_workspace),
        cmocka_unit_test(first_bad_index),     cmocka_unit_test(cpu_casts_to_no_f64),
    };
    return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
