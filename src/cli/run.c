/* SPDX-License-Identifier: MIT */
/*
 * `vjp run`: one pass of one op on tensors from a file. Tensors are matched to the op's slots by name, nothing is
 * converted, and nothing is silently ignored: this is how people compare vjp with their own code.
 *
 * Steps: match the file's tensors to slots, get the outputs' shapes from vjp_infer(), allocate and upload, call,
 * download, write, report. Tensors are in the device's memory, so that any device works.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "core/half.h"
#include "core/system.h"
#include "files/safetensors.h"
#include "proof/text.h"

typedef struct run_options {
    cli_device_options on;
    const char *output;
    cli_list outputs, output_dtypes, accumulate;
    bool ignore_extra, json;
} run_options;

typedef struct slot_state {
    const safetensors_tensor *source; /* from the file: an input, or an output to add to; NULL: none */
    bool wanted;                      /* an output that is computed */
    int dtype;                        /* an output's dtype from --output-dtype; -1: from vjp_infer() */
    vjp_tensor tensor;
    size_t bytes;
    void *host; /* an output after the call */
} slot_state;

typedef struct run {
    const vjp_op *op;
    vjp_pass pass;
    const vjp_pass_info *info;
    text_values attributes;
    vjp_device *device;
    slot_state slot[VJP_MAX_SLOTS];
} run;

/* ---- The command line -------------------------------------------------------------------------------- */

static const char *slot_names(const run *r, bool outputs, char *text, size_t bytes) {
    text[0] = 0;
    for (size_t i = 0; i < r->info->count; i++)
        if ((i < r->info->outputs) == outputs) {
            size_t used = strlen(text);
            snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", r->info->slots[i].name);
        }
    return text;
}

/* The number of the output of that name. -1: the error has been printed. */
static int find_output(const run *r, const char *option, const char *name) {
    char names[256];
    for (size_t i = 0; i < r->info->outputs; i++)
        if (strcmp(r->info->slots[i].name, name) == 0) return (int)i;
    cli_misuse("run", "--%s: %s.%s has no output \"%s\"; it has %s", option, vjp_op_describe(r->op)->name,
               text_pass_name(r->pass), name, slot_names(r, true, names, sizeof names));
    return -1;
}

static int read_operands(run *r, const cli_operands *operands) {
    char error[TEXT_ERROR], op[64];
    snprintf(op, sizeof op, "%.*s", (int)strcspn(operands->item[0], "."), operands->item[0]);
    if (!cli_find_op("run", op)) return CLI_MISUSE;
    if (!text_parse_pass(operands->item[0], &r->op, &r->pass, error)) return cli_misuse("run", "%s", error);
    r->info = &vjp_op_describe(r->op)->pass[r->pass];
    vjp_op_defaults(r->op, r->attributes.bytes);
    for (int i = 2; i < operands->count; i++)
        if (!text_set_attribute(r->op, r->attributes.bytes, operands->item[i], error))
            return cli_misuse("run", "%s", error);
    return CLI_CONTINUE;
}

static int choose_outputs(run *r, const run_options *options) {
    for (size_t i = 0; i < r->info->outputs; i++) {
        r->slot[i].wanted = options->outputs.count == 0;
        r->slot[i].dtype = -1;
    }
    for (int i = 0; i < options->outputs.count; i++) {
        int slot = find_output(r, "outputs", options->outputs.item[i]);
        if (slot < 0) return CLI_MISUSE;
        r->slot[slot].wanted = true;
    }
    for (int i = 0; i < options->accumulate.count; i++) {
        int slot = find_output(r, "accumulate", options->accumulate.item[i]);
        if (slot < 0) return CLI_MISUSE;
        r->slot[slot].wanted = true;
        r->slot[slot].tensor.flags = VJP_ACCUMULATE;
    }
    for (int i = 0; i < options->output_dtypes.count; i++) {
        char *item = options->output_dtypes.item[i], *equals = strchr(item, '=');
        if (!equals) return cli_misuse("run", "--output-dtype is \"%s\"; write OUTPUT=DTYPE, as in dgamma=f32", item);
        *equals = 0;
        int slot = find_output(r, "output-dtype", item);
        if (slot < 0) return CLI_MISUSE;
        r->slot[slot].dtype = vjp_dtype_find(equals + 1);
        if (r->slot[slot].dtype < 0)
            return cli_misuse("run", "--output-dtype: unknown dtype \"%s\"; dtypes are f32, bf16, f16, f64, i32, i64",
                              equals + 1);
        if (r->slot[slot].tensor.flags & VJP_ACCUMULATE)
            return cli_misuse("run", "--output-dtype: %s accumulates, so it has the dtype of the file's tensor", item);
    }
    return CLI_CONTINUE;
}

/* ---- The file's tensors ------------------------------------------------------------------------------ */

static int take_tensor(run *r, const char *path, const safetensors_tensor *source, bool ignore_extra) {
    char inputs[256];
    for (size_t i = 0; i < r->info->count; i++) {
        if (strcmp(r->info->slots[i].name, source->name) != 0) continue;
        slot_state *slot = &r->slot[i];
        bool is_output = i < r->info->outputs, accumulates = slot->tensor.flags & VJP_ACCUMULATE;
        if (is_output && !accumulates) {
            if (ignore_extra) return CLI_OK;
            return cli_fail("run",
                            "%s has a tensor \"%s\", which is an output: add to it with --accumulate %s, or ignore it "
                            "with --ignore-extra",
                            path, source->name, source->name);
        }
        if (source->dtype < 0)
            return cli_fail("run", "%s: tensor \"%s\" is %s; vjp computes with F64, F32, F16, BF16, I64 and I32", path,
                            source->name, source->type);
        if (source->ndim > VJP_MAX_DIMS)
            return cli_fail("run", "%s: tensor \"%s\" has rank %d; ranks go to %d", path, source->name, source->ndim,
                            VJP_MAX_DIMS);
        uint32_t flags = slot->tensor.flags;
        slot->source = source;
        slot->tensor = vjp_tensor_of(NULL, (vjp_dtype)source->dtype, source->ndim, source->shape);
        slot->tensor.flags = flags;
        slot->bytes = source->bytes;
        return CLI_OK;
    }
    if (ignore_extra) return CLI_OK;
    return cli_fail("run",
                    "%s has a tensor \"%.64s\", which %s.%s does not take; it takes %s (--ignore-extra ignores others)",
                    path, source->name, vjp_op_describe(r->op)->name, text_pass_name(r->pass),
                    slot_names(r, false, inputs, sizeof inputs));
}

static int take_tensors(run *r, const char *path, const safetensors_file *file, bool ignore_extra) {
    for (size_t i = 0; i < file->count; i++)
        if (take_tensor(r, path, &file->tensors[i], ignore_extra) != CLI_OK) return CLI_FAILURE;
    for (size_t i = 0; i < r->info->outputs; i++)
        if ((r->slot[i].tensor.flags & VJP_ACCUMULATE) && !r->slot[i].source)
            return cli_fail("run", "%s has no tensor \"%s\" for --accumulate to start from", path,
                            r->info->slots[i].name);
    return CLI_OK;
}

/* ---- The call ---------------------------------------------------------------------------------------- */

/* Whether a file's tensor is f64, which only ref computes with. */
static bool has_f64(const run *r) {
    for (size_t i = 0; i < r->info->count; i++)
        if (r->slot[i].source && r->slot[i].source->dtype == VJP_F64) return true;
    return false;
}

/* Prints the library's sentence; for a dtype without a kernel, also which dtypes have one, or which device. */
static int library_failed(const run *r, vjp_status status) {
    char sentence[600], dtypes[64] = "";
    snprintf(sentence, sizeof sentence, "%s", vjp_error(r->device));
    for (int d = 0; status == VJP_UNSUPPORTED && d < VJP_DTYPE_COUNT; d++)
        if (vjp_supports(r->device, r->op, r->pass, (vjp_dtype)d) == VJP_OK) {
            size_t used = strlen(dtypes);
            snprintf(dtypes + used, sizeof dtypes - used, "%s%s", used ? ", " : "", vjp_dtype_name((vjp_dtype)d));
        }
    bool elsewhere = status == VJP_UNSUPPORTED && has_f64(r) && strcmp(vjp_device_name(r->device), "ref") != 0;
    if (dtypes[0])
        return cli_fail("run", "%s; it has %s%s", sentence, dtypes, elsewhere ? "; use --device ref for f64" : "");
    return cli_fail("run", "%s", sentence);
}

static size_t tensor_bytes(const vjp_tensor *tensor) {
    size_t bytes = vjp_dtype_size((vjp_dtype)tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    return bytes;
}

static void list_tensors(const run *r, bool with_outputs, const vjp_tensor *list[VJP_MAX_SLOTS]) {
    for (size_t i = 0; i < r->info->count; i++) {
        bool present = r->slot[i].source || (with_outputs && r->slot[i].wanted);
        list[i] = present ? &r->slot[i].tensor : NULL;
    }
}

static int describe_outputs(run *r) {
    const vjp_tensor *list[VJP_MAX_SLOTS];
    vjp_tensor described[VJP_MAX_SLOTS];
    list_tensors(r, false, list);
    vjp_status status = vjp_infer(r->device, r->op, r->pass, list, r->info->count, r->attributes.bytes, described);
    if (status != VJP_OK) return library_failed(r, status);
    for (size_t i = 0; i < r->info->outputs; i++) {
        slot_state *slot = &r->slot[i];
        if (!slot->wanted || slot->source) continue;
        slot->tensor = described[i];
        if (slot->dtype >= 0) slot->tensor.dtype = slot->dtype;
        slot->bytes = tensor_bytes(&slot->tensor);
    }
    return CLI_OK;
}

/* Reserves the workspace before any tensor is allocated, so that a refusal comes early. */
static int prepare_workspace(const run *r) {
    const vjp_tensor *list[VJP_MAX_SLOTS];
    size_t bytes;
    list_tensors(r, true, list);
    vjp_status status =
        vjp_workspace_size(r->device, r->op, r->pass, list, r->info->count, r->attributes.bytes, &bytes);
    if (status == VJP_OK) status = vjp_reserve(r->device, bytes);
    return status == VJP_OK ? CLI_OK : library_failed(r, status);
}

static int upload(run *r) {
    for (size_t i = 0; i < r->info->count; i++) {
        slot_state *slot = &r->slot[i];
        if (!slot->bytes || !(slot->source || slot->wanted)) continue;
        vjp_status status = vjp_alloc(r->device, slot->bytes, &slot->tensor.data);
        if (status == VJP_OK && slot->source)
            status = vjp_upload(r->device, slot->tensor.data, 0, slot->source->data, slot->bytes);
        if (status != VJP_OK) return library_failed(r, status);
    }
    return CLI_OK;
}

static int download(run *r) {
    for (size_t i = 0; i < r->info->outputs; i++) {
        slot_state *slot = &r->slot[i];
        if (!slot->wanted) continue;
        slot->host = malloc(slot->bytes ? slot->bytes : 1);
        if (!slot->host) return cli_fail("run", "there is no memory for %s", r->info->slots[i].name);
        vjp_status status =
            slot->bytes ? vjp_download(r->device, slot->host, slot->tensor.data, 0, slot->bytes) : VJP_OK;
        if (status != VJP_OK) return library_failed(r, status);
    }
    return CLI_OK;
}

static int compute(run *r) {
    int status = describe_outputs(r);
    if (status == CLI_OK) status = prepare_workspace(r);
    if (status == CLI_OK) status = upload(r);
    if (status != CLI_OK) return status;
    const vjp_tensor *list[VJP_MAX_SLOTS];
    list_tensors(r, true, list);
    vjp_status called = vjp_call(r->device, r->op, r->pass, list, r->info->count, r->attributes.bytes);
    if (called == VJP_OK) called = vjp_synchronize(r->device);
    return called == VJP_OK ? download(r) : library_failed(r, called);
}

/* ---- The result -------------------------------------------------------------------------------------- */

static int write_outputs(const run *r, const char *path) {
    safetensors_tensor tensors[VJP_MAX_SLOTS];
    size_t count = 0;
    for (size_t i = 0; i < r->info->outputs; i++) {
        const slot_state *slot = &r->slot[i];
        if (!slot->wanted) continue;
        safetensors_tensor t = {.name = r->info->slots[i].name, .dtype = slot->tensor.dtype, .ndim = slot->tensor.ndim};
        memcpy(t.shape, slot->tensor.shape, sizeof t.shape);
        t.data = slot->host;
        tensors[count++] = t;
    }
    char op[80], attributes[512], version[48], error[SAFETENSORS_ERROR];
    snprintf(op, sizeof op, "%s.%s", vjp_op_describe(r->op)->name, text_pass_name(r->pass));
    snprintf(version, sizeof version, "vjp %s", vjp_version());
    text_attributes(r->op, r->attributes.bytes, false, attributes, sizeof attributes);
    const safetensors_pair metadata[] = {
        {"op", op}, {"attributes", attributes}, {"device", vjp_device_name(r->device)}, {"producer", version}};
    if (!safetensors_write(path, tensors, count, metadata, sizeof metadata / sizeof metadata[0], error))
        return cli_fail("run", "%s", error);
    return CLI_OK;
}

static double element(const void *data, int dtype, size_t i) {
    switch ((vjp_dtype)dtype) {
    case VJP_F32: return (double)((const float *)data)[i];
    case VJP_BF16: return (double)vjp_bf16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F16: return (double)vjp_f16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F64: return ((const double *)data)[i];
    case VJP_I32: return (double)((const int32_t *)data)[i];
    case VJP_I64: return (double)((const int64_t *)data)[i];
    }
    return NAN;
}

typedef struct summary {
    double norm, min, max; /* min and max ignore NaN */
    size_t count, not_finite;
} summary;

static summary summarise(const slot_state *slot) {
    summary s = {.min = INFINITY, .max = -INFINITY};
    s.count = slot->bytes / vjp_dtype_size((vjp_dtype)slot->tensor.dtype);
    double largest = 0, sum = 0;
    for (size_t i = 0; i < s.count; i++) {
        double v = element(slot->host, slot->tensor.dtype, i);
        if (!isfinite(v)) s.not_finite++;
        if (v < s.min) s.min = v;
        if (v > s.max) s.max = v;
        if (fabs(v) > largest) largest = fabs(v);
    }
    /* Scaled by the largest, no square overflows or underflows to zero. */
    for (size_t i = 0; i < s.count; i++) {
        double v = element(slot->host, slot->tensor.dtype, i);
        double scaled = largest > 0 && isfinite(largest) ? v / largest : v;
        sum += scaled * scaled;
    }
    s.norm = largest > 0 && isfinite(largest) ? largest * sqrt(sum) : sqrt(sum);
    return s;
}

static void report_json(const run *r, const char *path) {
    for (size_t i = 0; i < r->info->outputs; i++) {
        const slot_state *slot = &r->slot[i];
        if (!slot->wanted) continue;
        summary s = summarise(slot);
        bool ordered = s.min <= s.max; /* false if there are no numbers */
        cli_json_begin();
        cli_json_text("op", vjp_op_describe(r->op)->name);
        cli_json_text("pass", text_pass_name(r->pass));
        cli_json_text("device", vjp_device_name(r->device));
        cli_json_text("output", r->info->slots[i].name);
        cli_json_text("dtype", vjp_dtype_name((vjp_dtype)slot->tensor.dtype));
        cli_json_shape("shape", slot->tensor.ndim, slot->tensor.shape);
        cli_json_boolean("accumulated", slot->tensor.flags & VJP_ACCUMULATE);
        cli_json_real("norm", s.norm);
        ordered ? cli_json_real("min", s.min) : cli_json_null("min");
        ordered ? cli_json_real("max", s.max) : cli_json_null("max");
        cli_json_integer("not_finite", (int64_t)s.not_finite);
        cli_json_text("file", path);
        cli_json_end();
    }
}

static void report_table(const run *r, const char *path) {
    char attributes[512];
    text_attributes(r->op, r->attributes.bytes, false, attributes, sizeof attributes);
    printf("%s%s.%s%s on %s (%s)%s%s\n\n", cli_paint(CLI_BOLD), vjp_op_describe(r->op)->name, text_pass_name(r->pass),
           cli_paint(CLI_PLAIN), vjp_device_name(r->device), vjp_device_summary(r->device), attributes[0] ? "\n" : "",
           attributes);
    cli_column columns[] = {{"output", 0, false}, {"shape", 0, false}, {"dtype", 0, false},    {"norm", 12, true},
                            {"min", 12, true},    {"max", 12, true},   {"not finite", 0, true}};
    enum { COUNT = sizeof columns / sizeof columns[0] };
    size_t computed = 0;
    for (int printing = 0; printing < 2; printing++) {
        if (printing) cli_head(columns, COUNT);
        for (size_t i = 0; i < r->info->outputs; i++) {
            const slot_state *slot = &r->slot[i];
            if (!slot->wanted) continue;
            char shape[TEXT_SHAPE], bad[32] = "", name[80];
            char norm[CLI_NUMBER_TEXT] = "", min[CLI_NUMBER_TEXT] = "-", max[CLI_NUMBER_TEXT] = "-";
            snprintf(name, sizeof name, "%s%s", r->info->slots[i].name,
                     slot->tensor.flags & VJP_ACCUMULATE ? " (+=)" : "");
            if (printing) {
                summary s = summarise(slot);
                cli_number(s.norm, 6, norm);
                if (s.min <= s.max) {
                    cli_number(s.min, 6, min);
                    cli_number(s.max, 6, max);
                }
                snprintf(bad, sizeof bad, "%zu", s.not_finite);
                computed++;
            }
            cli_cell cells[] = {
                {name, CLI_BOLD},
                {slot->tensor.ndim ? text_shape(slot->tensor.ndim, slot->tensor.shape, shape) : "scalar", CLI_PLAIN},
                {vjp_dtype_name((vjp_dtype)slot->tensor.dtype), CLI_PLAIN},
                {norm, CLI_PLAIN},
                {min, CLI_PLAIN},
                {max, CLI_PLAIN},
                {bad, strcmp(bad, "0") == 0 ? CLI_PLAIN : CLI_RED}};
            if (printing)
                cli_row(columns, COUNT, cells);
            else
                cli_fit(columns, COUNT, cells);
        }
    }
    printf("\n%zu tensor%s written to %s\n", computed, computed == 1 ? "" : "s", path);
}

/* ---- The command ------------------------------------------------------------------------------------- */

static bool same_file(const char *one, const char *other) {
    system_status a, b;
    return system_status_of(one, &a) && system_status_of(other, &b) && a.kind == SYSTEM_FILE && a.volume == b.volume &&
           a.number == b.number;
}

static int run_on_file(run *r, const run_options *options, const char *path) {
    char error[SAFETENSORS_ERROR];
    safetensors_file file;
    if (!safetensors_read(path, &file, error)) return cli_fail("run", "%s", error);
    int status = take_tensors(r, path, &file, options->ignore_extra);
    if (status == CLI_OK) {
        r->device = cli_open("run", &options->on);
        status = r->device ? compute(r) : CLI_FAILURE;
    }
    if (status == CLI_OK) status = write_outputs(r, options->output);
    if (status == CLI_OK) options->json ? report_json(r, options->output) : report_table(r, options->output);
    for (size_t i = 0; i < r->info->count; i++) {
        if (r->slot[i].tensor.data) vjp_free(r->device, r->slot[i].tensor.data);
        free(r->slot[i].host);
    }
    vjp_close(r->device);
    safetensors_free(&file);
    return status;
}

int cli_run(int argc, char **argv) {
    run_options options = {.on = CLI_DEVICE_DEFAULTS};
    const cli_option table[] = {
        {"output", 'o', "FILE", "file to write the outputs to; required", CLI_TEXT, &options.output, 0, 0},
        CLI_OPTION_DEVICE(options.on),
        CLI_OPTION_THREADS(options.on),
        CLI_OPTION_PRODUCTS(options.on),
        {"outputs", 0, "NAME,...", "compute only these outputs; default: all of the pass", CLI_LIST, &options.outputs,
         0, 0},
        {"output-dtype", 0, "NAME=T,...", "dtype of an output, where the op leaves a choice: dgamma=f32", CLI_LIST,
         &options.output_dtypes, 0, 0},
        {"accumulate", 0, "NAME,...", "add to the file's tensor of that name instead of starting from zero", CLI_LIST,
         &options.accumulate, 0, 0},
        {"ignore-extra", 0, NULL, "ignore tensors of the file that the op does not take", CLI_FLAG,
         &options.ignore_extra, 0, 0},
    };
    const cli_command command = {
        .name = "run",
        .usage = "run OP.PASS IN.safetensors -o OUT.safetensors [name=value ...]",
        .about =
            "Computes one pass of an op. The tensors of IN are matched to the op's inputs by name (`vjp ops OP`\n"
            "lists them) and keep the dtype they are stored in; name=value sets an attribute. The outputs are written\n"
            "to OUT, which is replaced only when all of it is on the disk.",
        .more = "Example:\n"
                "  vjp run layer_norm.backward in.safetensors -o out.safetensors eps=1e-6 --output-dtype dgamma=f32",
        .options = table,
        .option_count = sizeof table / sizeof table[0],
        .json = &options.json,
        .min_operands = 2,
        .max_operands = -1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (!options.output) return cli_misuse("run", "-o is missing: name the file to write the outputs to");
    if (same_file(operands.item[1], options.output))
        return cli_misuse("run", "-o names the input, %s, which would be overwritten; choose another file",
                          options.output);
    run r = {0};
    status = read_operands(&r, &operands);
    if (status == CLI_CONTINUE) status = choose_outputs(&r, &options);
    return status == CLI_CONTINUE ? run_on_file(&r, &options, operands.item[1]) : status;
}
