/* SPDX-License-Identifier: MIT */
/*
 * `vjp ops`: the op table for readers, for programs (--json) and for the docs (--markdown). No op is named here. The
 * markdown is the same on every machine: it lists the built-in devices unless others are named, so that the check that
 * the docs are up to date can run anywhere.
 */
#include <stdarg.h>
#include <string.h>

#include "cli/cli.h"
#include "core/core.h"
#include "proof/text.h"

enum { MAX_DEVICES = 8, CELL = 512 };

typedef struct opened_devices {
    vjp_device *device[MAX_DEVICES];
    int count;
} opened_devices;

static void append(char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void append(char *text, size_t bytes, const char *format, ...) {
    size_t used = strlen(text);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, bytes - used, format, list);
    va_end(list);
}

/* ---- Facts of the table as text ---------------------------------------------------------------------- */

static const char *kind_text(vjp_kind kind) {
    switch (kind) {
    case VJP_KIND_STORAGE: return "T";
    case VJP_KIND_PARAMETER: return "T or f32";
    case VJP_KIND_STATISTIC: return "f32 (f64 where T is f64)";
    case VJP_KIND_INDEX: return "i32, i64 or f32";
    case VJP_KIND_ARGMAX: return "i32 or i64";
    case VJP_KIND_FLOAT: return "any float";
    case VJP_KIND_GRADIENT: return "T, f32 or bf16";
    case VJP_KIND_MOMENT: return "f32 or bf16 (f64 where T is f64)";
    }
    return "?";
}

static const char *type_text(vjp_attribute_type type) {
    switch (type) {
    case VJP_INTEGER: return "integer";
    case VJP_REAL: return "real";
    case VJP_BOOLEAN: return "boolean";
    case VJP_CHOICE: return "choice";
    }
    return "?";
}

static bool is_output(const vjp_slot *slot) {
    return slot->flags & VJP_SLOT_OUTPUT;
}

/* "output, rows, accumulates, in place of dy or x": how a slot may be used. */
static const char *role_text(const vjp_pass_info *pass, const vjp_slot *slot, char text[CELL]) {
    snprintf(text, CELL, "%s%s%s%s", is_output(slot) ? "output" : "input",
             slot->flags & VJP_SLOT_OPTIONAL ? ", optional" : "", slot->flags & VJP_SLOT_ROWS ? ", rows" : "",
             slot->flags & VJP_SLOT_ACCUMULATES ? ", accumulates" : "");
    const char *before = ", in place of ";
    for (size_t i = 0; i < pass->count; i++)
        if (slot->aliases >> i & 1) {
            append(text, CELL, "%s%s", before, pass->slots[i].name);
            before = " or ";
        }
    return text;
}

static const char *choices_text(const vjp_attribute *a, const char *between, char text[CELL]) {
    text[0] = 0;
    for (size_t i = 0; a->choices && a->choices[i]; i++)
        append(text, CELL, "%s%s", i ? between : "", a->choices[i]);
    return text;
}

/* The names of a pass's outputs or inputs; an input that may be absent is in brackets. */
static const char *names_text(const vjp_pass_info *pass, bool outputs, const char *quote, char text[CELL]) {
    text[0] = 0;
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_slot *slot = &pass->slots[i];
        if (is_output(slot) != outputs) continue;
        bool optional = slot->flags & VJP_SLOT_OPTIONAL;
        append(text, CELL, "%s%s%s%s%s%s", text[0] ? " " : "", quote, optional ? "[" : "", slot->name,
               optional ? "]" : "", quote);
    }
    return text;
}

static const char *defaults_text(const vjp_op_info *info, const char *quote, char text[CELL]) {
    text[0] = 0;
    for (size_t i = 0; i < info->attribute_count; i++) {
        char value[TEXT_VALUE];
        append(text, CELL, "%s%s%s=%s%s", i ? " " : "", quote, info->attributes[i].name,
               text_default(&info->attributes[i], value), quote);
    }
    return text;
}

static const char *support_text(vjp_device *device, const vjp_op *op, vjp_pass pass, char text[CELL]) {
    text[0] = 0;
    for (int d = 0; d < VJP_DTYPE_COUNT; d++)
        if (vjp_supports(device, op, pass, (vjp_dtype)d) == VJP_OK)
            append(text, CELL, "%s%s", text[0] ? " " : "", vjp_dtype_name((vjp_dtype)d));
    if (!text[0]) snprintf(text, CELL, "-");
    return text;
}

/* A remark on a device; NULL: none. */
static const char *note_of(const vjp_device *device) {
    return device->found ? device->found->note : NULL;
}

/* One paragraph per device. */
static void put_notes(const opened_devices *on, const char *quote) {
    for (int i = 0; i < on->count; i++)
        if (note_of(on->device[i]))
            printf("\n%s%s%s: %s.\n", quote, vjp_device_name(on->device[i]), quote, note_of(on->device[i]));
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

static void json_slot(const vjp_pass_info *pass, const vjp_slot *slot) {
    cli_json_object(NULL);
    cli_json_text("name", slot->name);
    cli_json_text("shape", slot->shape);
    cli_json_text("dtype", kind_text(slot->kind));
    cli_json_boolean("optional", slot->flags & (VJP_SLOT_OPTIONAL | VJP_SLOT_OUTPUT));
    cli_json_boolean("rows", slot->flags & VJP_SLOT_ROWS);
    if (is_output(slot)) {
        cli_json_boolean("accumulates", slot->flags & VJP_SLOT_ACCUMULATES);
        cli_json_array("in_place_of");
        for (size_t i = 0; i < pass->count; i++)
            if (slot->aliases >> i & 1) cli_json_text(NULL, pass->slots[i].name);
        cli_json_array_end();
    }
    cli_json_text("about", slot->about);
    cli_json_object_end();
}

static void json_attribute(const vjp_attribute *a) {
    cli_json_object(NULL);
    cli_json_text("name", a->name);
    cli_json_text("type", type_text(a->type));
    switch (a->type) {
    case VJP_INTEGER: cli_json_integer("default", a->integer); break;
    case VJP_REAL: cli_json_real("default", a->real); break;
    case VJP_BOOLEAN: cli_json_boolean("default", a->integer); break;
    case VJP_CHOICE:
        cli_json_text("default", a->choices[a->integer]);
        cli_json_array("choices");
        for (size_t i = 0; a->choices[i]; i++)
            cli_json_text(NULL, a->choices[i]);
        cli_json_array_end();
        break;
    }
    cli_json_text("about", a->about);
    cli_json_object_end();
}

static void json_pass(const vjp_op *op, vjp_pass p, const opened_devices *on) {
    const vjp_op_info *info = vjp_op_describe(op);
    const vjp_pass_info *pass = &info->pass[p];
    cli_json_begin();
    cli_json_text("op", info->name);
    cli_json_text("pass", text_pass_name(p));
    cli_json_text("about", info->about);
    for (int outputs = 0; outputs < 2; outputs++) {
        cli_json_array(outputs ? "outputs" : "inputs");
        for (size_t i = 0; i < pass->count; i++)
            if (is_output(&pass->slots[i]) == (bool)outputs) json_slot(pass, &pass->slots[i]);
        cli_json_array_end();
    }
    cli_json_array("attributes");
    for (size_t i = 0; i < info->attribute_count; i++)
        json_attribute(&info->attributes[i]);
    cli_json_array_end();
    cli_json_object("devices");
    for (int i = 0; i < on->count; i++) {
        cli_json_array(vjp_device_name(on->device[i]));
        for (int d = 0; d < VJP_DTYPE_COUNT; d++)
            if (vjp_supports(on->device[i], op, p, (vjp_dtype)d) == VJP_OK)
                cli_json_text(NULL, vjp_dtype_name((vjp_dtype)d));
        cli_json_array_end();
    }
    cli_json_object_end();
    cli_json_end();
}

/* ---- Markdown ---------------------------------------------------------------------------------------- */

/* A cell's text with the sign that would end the cell escaped. */
static void put_cell(const char *text) {
    fputs(" ", stdout);
    for (; *text; text++) {
        if (*text == '|') putchar('\\');
        putchar(*text);
    }
    fputs(" |", stdout);
}

static void markdown_all(const opened_devices *on) {
    printf("| op | pass | inputs | outputs | attributes |");
    for (int i = 0; i < on->count; i++)
        printf(" %s |", vjp_device_name(on->device[i]));
    printf("\n|---|---|---|---|---|");
    for (int i = 0; i < on->count; i++)
        printf("---|");
    putchar('\n');
    for (size_t o = 0; o < vjp_op_count(); o++)
        for (int p = 0; p < vjp_passes(vjp_op_describe(vjp_op_at(o))); p++) {
            const vjp_op *op = vjp_op_at(o);
            const vjp_op_info *info = vjp_op_describe(op);
            char text[CELL];
            putchar('|');
            snprintf(text, sizeof text, "**%s**", info->name);
            put_cell(p ? "" : text);
            put_cell(text_pass_name((vjp_pass)p));
            put_cell(names_text(&info->pass[p], false, "`", text));
            put_cell(names_text(&info->pass[p], true, "`", text));
            put_cell(p ? "the same" : defaults_text(info, "`", text));
            for (int i = 0; i < on->count; i++)
                put_cell(support_text(on->device[i], op, (vjp_pass)p, text));
            putchar('\n');
        }
    printf("\nInputs in brackets may be absent, and every output may be left out. Attributes are shown with their "
           "defaults.\n");
    put_notes(on, "`");
}

/* Which of the devices have both passes of an op, one bit per device. */
static unsigned devices_of(const vjp_op *op, const opened_devices *on) {
    unsigned devices = 0;
    for (int i = 0; i < on->count; i++) {
        bool all = true;
        for (int p = 0; p < vjp_passes(vjp_op_describe(op)); p++)
            all = all && vjp_supports(on->device[i], op, (vjp_pass)p, VJP_F32) == VJP_OK;
        devices |= (unsigned)all << i;
    }
    return devices;
}

/* One row per family and set of devices, for a page that is skimmed. */
static void markdown_families(const opened_devices *on) {
    printf("| | ops |");
    for (int i = 0; i < on->count; i++)
        printf(" %s |", vjp_device_name(on->device[i]));
    printf("\n|---|---|");
    for (int i = 0; i < on->count; i++)
        printf(":-:|");
    putchar('\n');
    for (size_t first = 0; first < vjp_op_count(); first++) {
        const char *family = vjp_op_describe(vjp_op_at(first))->family;
        unsigned devices = devices_of(vjp_op_at(first), on);
        bool begun = false;
        for (size_t o = 0; o < vjp_op_count(); o++) {
            const vjp_op_info *info = vjp_op_describe(vjp_op_at(o));
            bool same = strcmp(info->family, family) == 0 && devices_of(vjp_op_at(o), on) == devices;
            if (same && o < first) break;
            if (!same) continue;
            if (!begun) printf("| %s |", family);
            printf(" [%s](docs/ops/%s.md)", info->name, info->name);
            begun = true;
        }
        for (int i = 0; begun && i < on->count; i++)
            printf("%s%s |", i ? "" : " |", devices >> i & 1 ? " yes" : " -");
        if (begun) putchar('\n');
    }
    put_notes(on, "`");
}

static void markdown_op(const vjp_op *op, const opened_devices *on) {
    const vjp_op_info *info = vjp_op_describe(op);
    char text[CELL];
    for (int p = 0; p < vjp_passes(info); p++) {
        const vjp_pass_info *pass = &info->pass[p];
        printf("**%s**\n\n| tensor | role | shape | dtype | |\n|---|---|---|---|---|\n", p ? "Backward" : "Forward");
        for (size_t i = 0; i < pass->count; i++) {
            const vjp_slot *slot = &pass->slots[i];
            printf("| `%s` |", slot->name);
            put_cell(role_text(pass, slot, text));
            printf(" `%s` |", slot->shape);
            put_cell(kind_text(slot->kind));
            put_cell(slot->about);
            putchar('\n');
        }
        putchar('\n');
    }
    if (info->attribute_count) printf("**Attributes**\n\n| name | type | default | |\n|---|---|---|---|\n");
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        char value[TEXT_VALUE], about[CELL];
        printf("| `%s` |", a->name);
        put_cell(a->choices ? choices_text(a, ", ", text) : type_text(a->type));
        printf(" `%s` |", text_default(a, value));
        snprintf(about, sizeof about, "%s", a->about);
        put_cell(about);
        putchar('\n');
    }
    bool both = vjp_passes(info) == VJP_PASS_COUNT;
    printf("\n**Dtypes (T)**\n\n| device | forward |%s\n|---|---|%s\n", both ? " backward |" : "", both ? "---|" : "");
    for (int i = 0; i < on->count; i++) {
        printf("| `%s` |", vjp_device_name(on->device[i]));
        for (int p = 0; p < vjp_passes(info); p++)
            put_cell(support_text(on->device[i], op, (vjp_pass)p, text));
        putchar('\n');
    }
}

/* ---- For people -------------------------------------------------------------------------------------- */

static void print_all(const opened_devices *on) {
    enum { FIXED = 3 };
    cli_column columns[FIXED + MAX_DEVICES] = {{"op.pass", 0, false}, {"inputs", 0, false}, {"outputs", 0, false}};
    int count = FIXED + on->count;
    for (int i = 0; i < on->count; i++)
        columns[FIXED + i].title = vjp_device_name(on->device[i]);
    char text[FIXED + MAX_DEVICES][CELL];
    for (int printing = 0; printing < 2; printing++) {
        if (printing) cli_head(columns, count);
        for (size_t o = 0; o < vjp_op_count(); o++)
            for (int p = 0; p < vjp_passes(vjp_op_describe(vjp_op_at(o))); p++) {
                const vjp_op *op = vjp_op_at(o);
                const vjp_op_info *info = vjp_op_describe(op);
                cli_cell cells[FIXED + MAX_DEVICES] = {{0}};
                snprintf(text[0], CELL, "%s.%s", info->name, text_pass_name((vjp_pass)p));
                names_text(&info->pass[p], false, "", text[1]);
                names_text(&info->pass[p], true, "", text[2]);
                for (int i = 0; i < on->count; i++)
                    support_text(on->device[i], op, (vjp_pass)p, text[FIXED + i]);
                for (int i = 0; i < count; i++)
                    cells[i].text = text[i];
                cells[0].colour = CLI_BOLD;
                if (printing)
                    cli_row(columns, count, cells);
                else
                    cli_fit(columns, count, cells);
            }
    }
    printf("\n%sattributes, with their defaults%s\n", cli_paint(CLI_BOLD), cli_paint(CLI_PLAIN));
    for (size_t o = 0; o < vjp_op_count(); o++) {
        const vjp_op_info *info = vjp_op_describe(vjp_op_at(o));
        printf("%-12s", info->name);
        int column = 12;
        for (size_t i = 0; i < info->attribute_count; i++) {
            char value[TEXT_VALUE], word[CELL];
            snprintf(word, sizeof word, "%s=%s", info->attributes[i].name, text_default(&info->attributes[i], value));
            if (column + 1 + cli_width(word) > 100) column = printf("\n%-12s", "") - 1;
            column += printf(" %s", word);
        }
        putchar('\n');
    }
    printf("\nInputs in [brackets] may be absent; every output may be left out. `vjp ops OP` shows everything about "
           "one.\n");
    put_notes(on, "");
}

static void print_slots(const vjp_pass_info *pass) {
    cli_column columns[] = {
        {"tensor", 0, false}, {"role", 0, false}, {"shape", 0, false}, {"dtype", 0, false}, {"", 0, false}};
    enum { COUNT = sizeof columns / sizeof columns[0] };
    for (int printing = 0; printing < 2; printing++) {
        if (printing) cli_head(columns, COUNT);
        for (size_t i = 0; i < pass->count; i++) {
            const vjp_slot *slot = &pass->slots[i];
            char role[CELL];
            cli_cell cells[] = {{slot->name, CLI_PLAIN},
                                {role_text(pass, slot, role), CLI_DIM},
                                {slot->shape, CLI_PLAIN},
                                {kind_text(slot->kind), CLI_PLAIN}};
            if (printing)
                cli_row(columns, COUNT - 1, cells);
            else
                cli_fit(columns, COUNT - 1, cells);
            if (printing) printf("        %s%s%s\n", cli_paint(CLI_DIM), slot->about, cli_paint(CLI_PLAIN));
        }
    }
}

static void print_attributes(const vjp_op_info *info) {
    cli_column columns[] = {{"attribute", 0, false}, {"default", 0, false}, {"", 0, false}};
    enum { COUNT = sizeof columns / sizeof columns[0] };
    for (int printing = 0; printing < 2; printing++) {
        if (printing) cli_head(columns, COUNT);
        for (size_t i = 0; i < info->attribute_count; i++) {
            const vjp_attribute *a = &info->attributes[i];
            char value[TEXT_VALUE], choices[CELL], about[2 * CELL];
            snprintf(about, sizeof about, "%s%s%s%s", a->about, a->choices ? " (" : "", choices_text(a, ", ", choices),
                     a->choices ? ")" : "");
            cli_cell cells[] = {{a->name, CLI_PLAIN}, {text_default(a, value), CLI_PLAIN}, {about, CLI_DIM}};
            if (printing)
                cli_row(columns, COUNT, cells);
            else
                cli_fit(columns, COUNT, cells);
        }
    }
}

static void print_op(const vjp_op *op, const opened_devices *on) {
    const vjp_op_info *info = vjp_op_describe(op);
    const char *bold = cli_paint(CLI_BOLD), *plain = cli_paint(CLI_PLAIN);
    printf("%s%s%s: %s\n%s\n", bold, info->name, plain, info->about, info->formula);
    for (int p = 0; p < vjp_passes(info); p++) {
        printf("\n%s%s.%s%s\n", bold, info->name, text_pass_name((vjp_pass)p), plain);
        print_slots(&info->pass[p]);
    }
    putchar('\n');
    if (info->attribute_count) print_attributes(info);
    printf("\nT is one of:\n");
    for (int i = 0; i < on->count; i++) {
        char forward[CELL], backward[CELL];
        support_text(on->device[i], op, VJP_FORWARD, forward);
        support_text(on->device[i], op, VJP_BACKWARD, backward);
        if (strcmp(forward, backward) == 0 || vjp_passes(info) < VJP_PASS_COUNT)
            printf("  %-7s %s\n", vjp_device_name(on->device[i]), forward);
        else
            printf("  %-7s forward %s, backward %s\n", vjp_device_name(on->device[i]), forward, backward);
    }
    put_notes(on, "");
}

/* ---- The command ------------------------------------------------------------------------------------- */

static void close_devices(opened_devices *on) {
    while (on->count)
        vjp_close(on->device[--on->count]);
}

/* Whether its backend is installed: its kernels are then known, even without such a device. */
static bool is_known(vjp_device *device) {
    return vjp_supports(device, vjp_op_at(0), VJP_FORWARD, VJP_F32) != VJP_NO_DEVICE;
}

/* The named devices, whose backends must be installed; or the default ones that are. */
static int open_devices(const cli_list *asked, bool markdown, opened_devices *on) {
    static const char *const usual[] = {"ref", "cpu", "cuda", "webgpu", "metal"};
    int count = asked->count ? asked->count : markdown ? 2 : 5;
    if (count > MAX_DEVICES)
        return cli_misuse("ops", "--device names %d devices; the maximum is %d", count, MAX_DEVICES);
    for (int i = 0; i < count; i++) {
        const vjp_options options = {
            .struct_size = sizeof(vjp_options), .threads = 1, .workspace_bytes = 64}; /* nothing will be computed */
        vjp_device *device = NULL;
        vjp_status status = vjp_open(asked->count ? asked->item[i] : usual[i], &options, &device);
        if (status == VJP_OK || is_known(device)) {
            on->device[on->count++] = device;
            continue;
        }
        bool needed = asked->count || i < 2;
        if (needed) cli_fail("ops", "%s", vjp_error(device));
        vjp_close(device);
        if (needed) return CLI_FAILURE;
    }
    return CLI_OK;
}

int cli_ops(int argc, char **argv) {
    bool json = false, markdown = false, families = false;
    cli_list asked = {.count = 0};
    const cli_option options[] = {
        {"markdown", 0, NULL, "print tables for the docs; ref and cpu unless --device says otherwise", CLI_FLAG,
         &markdown, 0, 0},
        {"families", 0, NULL, "with --markdown: one row per family of ops", CLI_FLAG, &families, 0, 0},
        {"device", 0, "D,...", "show the support of these devices; default: all whose backend is installed", CLI_LIST,
         &asked, 0, 0},
    };
    const cli_command command = {
        .name = "ops",
        .usage = "ops [OP] [--json | --markdown]",
        .about =
            "Lists the ops with their tensors, attributes and defaults, and the dtypes that each device supports.\n"
            "With OP: everything about that one, with shapes, and which outputs accumulate or may be computed\n"
            "in place of an input.",
        .more = "Examples:\n  vjp ops\n  vjp ops layer_norm\n  vjp ops --json | jq -r 'select(.pass == \"backward\") | "
                ".op'",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &json,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (families && (!markdown || operands.count)) return cli_misuse("ops", "--families goes with --markdown alone");
    if (json && markdown) return cli_misuse("ops", "--json and --markdown exclude each other");
    const vjp_op *only = NULL;
    if (operands.count && !(only = cli_find_op("ops", operands.item[0]))) return CLI_MISUSE;

    opened_devices on = {.count = 0};
    status = open_devices(&asked, markdown, &on);
    if (status == CLI_OK) {
        for (size_t o = 0; json && o < vjp_op_count(); o++)
            for (int p = 0; p < vjp_passes(vjp_op_describe(vjp_op_at(o))) && (!only || only == vjp_op_at(o)); p++)
                json_pass(vjp_op_at(o), (vjp_pass)p, &on);
        if (markdown && only) markdown_op(only, &on);
        if (markdown && !only) (families ? markdown_families : markdown_all)(&on);
        if (!json && !markdown && only) print_op(only, &on);
        if (!json && !markdown && !only) print_all(&on);
    }
    close_devices(&on);
    return status;
}
