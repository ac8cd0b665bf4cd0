/* SPDX-License-Identifier: MIT */
/*
 * vjp graph: the training step of a model as a table, as text, as dot, or as a picture of its calls and of the arena,
 * in which each intermediate is a rectangle: as high as its lifetime, as wide as its bytes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "core/system.h"
#include "graph/program.h"
#include "train/job/job.h"

/* ---- The picture ------------------------------------------------------------------------------------- */

enum { ROW = 26, BOX = 250, BOX_HEIGHT = 20, LEFT = 190, TOP = 96, ARENA_LEFT = 620, ARENA_WIDTH = 760 };

static const char *const FORWARD_FILL = "#dbe9f6", *const BACKWARD_FILL = "#fde3cf";

static void put_escaped(FILE *file, const char *text) {
    for (; *text; text++) {
        if (*text == '&')
            fputs("&amp;", file);
        else if (*text == '<')
            fputs("&lt;", file);
        else
            fputc(*text, file);
    }
}

static int y_of(int32_t call) {
    return TOP + ROW * call + BOX_HEIGHT / 2;
}

/* The last call before `before` that wrote the tensor; -1: none. */
static int32_t writer_of(const vjp_program *p, const vjp_tensor *read, int32_t before) {
    for (int32_t k = before - 1; k >= 0; k--) {
        const vjp_pass_info *pass = &p->call[k].work.op->info.pass[p->call[k].work.pass];
        for (size_t i = 0; i < pass->outputs; i++) {
            const vjp_tensor *written = p->call[k].work.tensor[i];
            if (written && written->data == read->data && written->offset == read->offset) return k;
        }
    }
    return -1;
}

static void draw_edges(FILE *file, const vjp_program *p) {
    for (int32_t k = 0; k < p->calls; k++) {
        const vjp_pass_info *pass = &p->call[k].work.op->info.pass[p->call[k].work.pass];
        for (size_t i = pass->outputs; i < pass->count; i++) {
            const vjp_tensor *read = p->call[k].work.tensor[i];
            int32_t from = read ? writer_of(p, read, k) : -1;
            if (from < 0 || from == k - 1) continue;
            double reach = 14 + 9 * (k - from) / 4.0;
            if (reach > LEFT - 20) reach = LEFT - 20;
            fprintf(file, "<path d=\"M%d,%d C%.0f,%d %.0f,%d %d,%d\" class=\"edge\"/>\n", LEFT, y_of(from),
                    LEFT - reach, y_of(from), LEFT - reach, y_of(k), LEFT, y_of(k));
        }
    }
}

static void draw_nodes(FILE *file, const vjp_program *p) {
    for (int32_t k = 0; k < p->calls; k++) {
        const program_call *call = &p->call[k];
        fprintf(file, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"5\" fill=\"%s\" stroke=\"#8a94a0\"/>\n",
                LEFT, TOP + ROW * k, BOX, BOX_HEIGHT, call->work.pass == VJP_FORWARD ? FORWARD_FILL : BACKWARD_FILL);
        fprintf(file, "<text x=\"%d\" y=\"%d\">", LEFT + 8, y_of(k) + 4);
        size_t length = strlen(call->name);
        put_escaped(file, length > 40 ? call->name + length - 40 : call->name);
        fprintf(file, "</text>\n");
        if (k)
            fprintf(file, "<path d=\"M%d,%d V%d\" class=\"edge\"/>\n", LEFT + BOX / 2, TOP + ROW * k - ROW + BOX_HEIGHT,
                    TOP + ROW * k);
    }
}

/* Time runs downwards beside the calls, addresses to the right. */
static void draw_arena(FILE *file, const vjp_program *p) {
    double bytes = p->report.arena_bytes ? (double)p->report.arena_bytes : 1;
    char total[CLI_BYTES_TEXT];
    fprintf(file, "<text x=\"%d\" y=\"%d\" class=\"head\">the arena: %s, addresses to the right</text>\n", ARENA_LEFT,
            TOP - 24, cli_bytes(bytes, total));
    for (int32_t i = 0; i < p->ranges; i++) {
        const plan_range *r = &p->range[i];
        double x = (double)r->offset / bytes * ARENA_WIDTH, width = (double)r->bytes / bytes * ARENA_WIDTH;
        if (width < 0.3) continue;
        int last = r->last < p->calls ? r->last : p->calls - 1;
        fprintf(file,
                "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"hsl(%d,55%%,72%%)\" stroke=\"#fff\" "
                "stroke-width=\"0.5\"><title>%zu bytes, calls %d to %d</title></rect>\n",
                ARENA_LEFT + x, TOP + ROW * r->first, width, ROW * (last - r->first) + BOX_HEIGHT, (i * 47) % 360,
                r->bytes, r->first, last);
    }
    fprintf(file, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#8a94a0\"/>\n", ARENA_LEFT,
            TOP, ARENA_WIDTH, ROW * p->calls);
}

static int draw(const char *path, const char *title, const vjp_program *p) {
    FILE *file = system_stream(path, "w");
    if (!file) return cli_fail("graph", "%s: it cannot be written: %s", path, strerror(errno));
    int height = TOP + ROW * p->calls + 30, width = ARENA_LEFT + ARENA_WIDTH + 30;
    fprintf(
        file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"11\">\n"
        "<style>.edge{fill:none;stroke:#8a94a0;stroke-width:1}.head{font-size:14px;font-weight:bold}</style>\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
        "<text x=\"%d\" y=\"34\" font-size=\"20\" font-weight=\"bold\">",
        width, height, LEFT);
    put_escaped(file, title);
    fprintf(
        file,
        "</text>\n<text x=\"%d\" y=\"%d\" class=\"head\">calls, in their order: forward blue, backward orange</text>\n",
        LEFT, TOP - 24);
    draw_edges(file, p);
    draw_nodes(file, p);
    draw_arena(file, p);
    fprintf(file, "</svg>\n");
    bool bad = ferror(file) != 0;
    if (fclose(file) == 0 && !bad) return CLI_OK;
    return cli_fail("graph", "%s: it cannot be written: %s", path, strerror(errno));
}

/* ---- The table --------------------------------------------------------------------------------------- */

static void print_json(const train_model *model, const vjp_program_report *r, const fit_result *fit) {
    cli_json_begin();
    cli_json_integer("parameters", model_size(model));
    cli_json_integer("calls", (int64_t)r->calls);
    cli_json_integer("arena_bytes", (int64_t)r->arena_bytes);
    cli_json_integer("live_bytes", (int64_t)r->live_bytes);
    cli_json_integer("intermediate_bytes", (int64_t)r->intermediate_bytes);
    cli_json_integer("persistent_bytes", (int64_t)r->persistent_bytes);
    cli_json_real("min_bytes", r->cost.bytes);
    cli_json_real("flops", r->cost.flops);
    cli_json_integer("recomputed_blocks", fit->recompute);
    cli_json_integer("recomputed_mlps", fit->recompute_mlp);
    cli_json_integer("offloaded_bytes", (int64_t)fit->needs.host_bytes);
    cli_json_real("recomputed_flops", fit->needs.cost.flops - fit->before.cost.flops);
    cli_json_integer("training_bytes", (int64_t)fit->needs.bytes);
    cli_json_integer("training_kept_bytes", (int64_t)fit->needs.kept_bytes);
    cli_json_integer("training_arena_bytes", (int64_t)fit->needs.arena_bytes);
    cli_json_end();
}

static void print_markdown(const train_model *model, const vjp_program_report *r) {
    char arena[CLI_BYTES_TEXT], live[CLI_BYTES_TEXT], whole[CLI_BYTES_TEXT], kept[CLI_BYTES_TEXT];
    printf("| parameters | calls per step | arena | live at the peak | without reuse | kept between steps | GFLOP |\n"
           "|---:|---:|---:|---:|---:|---:|---:|\n| %lld | %zu | %s | %s | %s | %s | %.4g |\n",
           (long long)model_size(model), r->calls, cli_bytes((double)r->arena_bytes, arena),
           cli_bytes((double)r->live_bytes, live), cli_bytes((double)r->intermediate_bytes, whole),
           cli_bytes((double)r->persistent_bytes, kept), r->cost.flops * 1e-9);
}

static void print_text(const train_model *model, const vjp_program_report *r, const fit_result *fit) {
    char text[CLI_BYTES_TEXT], more[CLI_BYTES_TEXT], what[FIT_TEXT];
    printf("parameters          %lld", (long long)model_size(model));
    if (model_trained_size(model) < model_size(model))
        printf(", of which %lld are trained", (long long)model_trained_size(model));
    putchar('\n');
    printf("calls per step      %zu\n", r->calls);
    printf("arena               %s\n", cli_bytes((double)r->arena_bytes, text));
    printf("  live at the peak  %s; the arena is %.3f times that\n", cli_bytes((double)r->live_bytes, text),
           (double)r->arena_bytes / (r->live_bytes ? (double)r->live_bytes : 1));
    printf("  without reuse     %s\n", cli_bytes((double)r->intermediate_bytes, text));
    if (r->host_bytes) printf("in host memory      %s\n", cli_bytes((double)r->host_bytes, text));
    printf("kept between steps  %s\n", cli_bytes((double)r->persistent_bytes, text));
    printf("min. memory traffic %s per step\n", cli_bytes(r->cost.bytes, text));
    printf("operations          %.4g GFLOP per step\n", r->cost.flops * 1e-9);
    if (fit_text(fit, what)) printf("for the limit       %s\n", what);
    printf("to train it         %s:", cli_bytes((double)fit->needs.bytes, text));
    printf(" %s of parameters and moments,", cli_bytes((double)fit->needs.kept_bytes, more));
    printf(" %s of arena\n", cli_bytes((double)fit->needs.arena_bytes, more));
}

/* ---- The command ------------------------------------------------------------------------------------- */

typedef struct arguments {
    cli_device_options on;
    const char *model, *preset, *svg, *memory;
    int64_t batch, context, lora;
    int dtype, residual;
    bool text, dot, markdown, recompute, json;
} arguments;

/* Plans how a model is trained, unless the graph alone is shown. */
static bool fit_model_of(const arguments *a, const fit_run *run, const fit_model *model, const fit_limit *limit,
                         fit_result *fit, char error[TRAIN_ERROR]) {
    if (a->memory) return fit_choose(run, model, limit, fit, error);
    return a->text || a->dot || fit_check(run, model, limit, fit, error);
}

/* Builds the model, and plans how it is trained; *fit stays empty where neither is asked for. */
static int build(const arguments *a, vjp_device *device, train_model *model, fit_result *fit) {
    char error[TRAIN_ERROR];
    vjp_dtype dtype = a->dtype < 0 ? VJP_F32 : (vjp_dtype)a->dtype;
    const job_settings usual = job_defaults();
    const fit_run run = {device, &usual.trainer, usual.validate_every > 0};
    fit_limit limit = {0};
    int64_t asked = 0;
    int status = a->memory ? cli_memory("graph", a->memory, device, &asked) : CLI_CONTINUE;
    if (status != CLI_CONTINUE) return status;
    limit.asked = (size_t)asked;
    if (strcmp(a->model, "convnet") == 0) {
        const convnet_config convnet = {
            .height = 28, .width = 28, .channels = 1, .classes = 10, .features = 16, .stages = 3};
        const convnet_options pictures = {.batch = a->batch ? a->batch : 64, .dtype = dtype};
        const fit_model fits = {.convnet = &convnet, .convnet_options = &pictures};
        if (!fit_model_of(a, &run, &fits, &limit, fit, error)) return cli_fail("graph", "%s", error);
        convnet_build(model, &convnet, &pictures);
    } else {
        const llama_preset *preset = llama_preset_find(a->preset, error);
        if (!preset) return cli_misuse("graph", "%s", error);
        llama_config config = preset->config;
        if (a->context) config.max_positions = a->context;
        llama_options options = {.batch = a->batch ? a->batch : preset->batch,
                                 .context = config.max_positions,
                                 .dtype = dtype,
                                 .wide_residual = a->residual == VJP_F32 && dtype != VJP_F32,
                                 .recompute = a->recompute ? LLAMA_ALL_BLOCKS : 0};
        options.lora = (lora_config){.rank = a->lora, .alpha = 1};
        if (!lora_read_targets("all", &options.lora.adapts, error)) return cli_fail("graph", "%s", error);
        const fit_model fits = {.llama = &config, .llama_options = &options};
        if (!fit_model_of(a, &run, &fits, &limit, fit, error)) return cli_fail("graph", "%s", error);
        if (a->memory) options.recompute = fit->recompute, options.recompute_mlp = fit->recompute_mlp;
        llama_build(model, &config, &options);
    }
    if (vjp_graph_status(model->graph) == VJP_OK) return CLI_CONTINUE;
    return cli_fail("graph", "%s", vjp_graph_error(model->graph));
}

static int print_report(const arguments *a, vjp_device *device, const train_model *model, const vjp_value *results,
                        size_t count, const fit_result *fit) {
    vjp_program_report report = {.struct_size = sizeof report};
    /* As vjp train has it. */
    const vjp_program_options options = {
        .struct_size = sizeof options, .halves = 1, .arena_limit = (size_t)fit->arena_limit};
    if (vjp_plan(device, model->graph, results, count, &options, &report) != VJP_OK)
        return cli_fail("graph", "%s", vjp_error(device));
    if (a->json)
        print_json(model, &report, fit);
    else if (a->markdown)
        print_markdown(model, &report);
    else
        print_text(model, &report, fit);
    if (!a->svg) return CLI_OK;
    /* The picture shows the calls of a program, whose memory is allocated. */
    vjp_program *program = NULL;
    if (vjp_compile(device, model->graph, results, count, &options, &program) != VJP_OK)
        return cli_fail("graph", "%s", vjp_error(device));
    char title[96];
    snprintf(title, sizeof title, "%s %s: a training step", a->model, a->preset);
    int status = draw(a->svg, title, program);
    vjp_program_destroy(program);
    return status;
}

static int show(const arguments *a, vjp_device *device, train_model *model, const fit_result *fit) {
    int status = CLI_OK;
    size_t all = (size_t)model->parameters, count = 0;
    vjp_value *values = calloc(2 * all + 1, sizeof *values);
    if (!values) return cli_fail("graph", "there is no memory for %zu gradients", all);
    vjp_value *trained = values + all + 1;
    for (size_t i = 0; i < all; i++)
        if (!model->parameter[i].frozen) trained[count++] = model->parameter[i].value;
    vjp_graph_grad(model->graph, model->loss, trained, count, NULL, 0, values);
    values[count] = model->loss;
    if (a->text || a->dot) {
        char *text = a->text ? vjp_graph_text(model->graph) : vjp_graph_dot(model->graph);
        if (text)
            fputs(text, stdout);
        else
            status = cli_fail("graph", "there is no memory for the text");
        free(text);
    } else {
        status = print_report(a, device, model, values, count + 1, fit);
    }
    free(values);
    return status;
}

/* The model is an operand or --model, once; what no option's limits can check. */
static int check_arguments(arguments *a, const cli_operands *operands) {
    if (operands->count && a->model) return cli_misuse("graph", "MODEL is given twice");
    if (operands->count) a->model = operands->item[0];
    if (!a->model) return cli_misuse("graph", "MODEL is missing: llama or convnet");
    if (strcmp(a->model, "convnet") != 0 && strcmp(a->model, "llama") != 0)
        return cli_misuse("graph", "unknown model \"%s\"; models are llama and convnet", a->model);
    if (a->text + a->dot + a->markdown + a->json > 1 || ((a->text || a->dot) && a->svg))
        return cli_misuse("graph", "--text, --dot, --json and --markdown exclude each other; --svg goes with a report");
    if (a->lora && strcmp(a->model, "llama") != 0) return cli_misuse("graph", "--lora is for the llama");
    if (cli_residual("graph", a->dtype, a->residual) != CLI_CONTINUE) return CLI_MISUSE;
    if (a->memory && a->recompute)
        return cli_misuse("graph", "--memory chooses the blocks to recompute; --recompute recomputes all of them");
    return a->memory ? cli_memory("graph", a->memory, NULL, NULL) : CLI_CONTINUE;
}

int cli_graph(int argc, char **argv) {
    arguments a = {.on = CLI_DEVICE_DEFAULTS, .preset = "tiny", .dtype = -1, .residual = -1};
    const cli_option options[] = {
        CLI_OPTION_DEVICE(a.on),
        {"model", 0, "M", "llama or convnet, in place of MODEL", CLI_TEXT, &a.model, 0, 0},
        {"preset", 0, "P", "size of the llama: " LLAMA_PRESETS "; default tiny", CLI_TEXT, &a.preset, 0, 0},
        {"batch", 0, "B", "rows per batch; default: the preset's", CLI_INTEGER, &a.batch, 1, 1000000},
        {"context", 0, "T", "bytes per row; default: the preset's", CLI_INTEGER, &a.context, 1, 1000000},
        {"dtype", 0, "D", "f32, bf16 or f16; default f32", CLI_DTYPE, &a.dtype, 0, 0},
        CLI_OPTION_RESIDUAL(a.residual),
        {"lora", 0, "R", "train adapters of rank R on all projections, and freeze the weights", CLI_INTEGER, &a.lora, 1,
         LORA_MAX_RANK},
        CLI_OPTION_MEMORY(a.memory),
        {"recompute", 0, NULL, "recompute all blocks in the backward pass", CLI_FLAG, &a.recompute, 0, 0},
        {"text", 0, NULL, "print the graph, one line per node", CLI_FLAG, &a.text, 0, 0},
        {"dot", 0, NULL, "print the graph for Graphviz", CLI_FLAG, &a.dot, 0, 0},
        {"markdown", 0, NULL, "print the report as a markdown table", CLI_FLAG, &a.markdown, 0, 0},
        {"svg", 0, "FILE", "draw the step and its arena, besides the report", CLI_TEXT, &a.svg, 0, 0},
    };
    const cli_command command = {
        .name = "graph",
        .usage = "graph MODEL [--preset P] [--memory M] [--text | --dot | --json | --markdown] [--svg FILE]",
        .about =
            "Builds a training step of llama or convnet, loss and gradients, and reports its calls, memory and FLOP.\n"
            "Only --svg allocates the memory of the step: models of any size can be planned.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 0,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    status = check_arguments(&a, &operands);
    if (status != CLI_CONTINUE) return status;
    vjp_device *device = cli_open("graph", &a.on);
    if (!device) return CLI_FAILURE;
    train_model model = {0};
    fit_result fit = {0};
    status = build(&a, device, &model, &fit);
    if (status == CLI_CONTINUE) status = show(&a, device, &model, &fit);
    model_free(&model);
    vjp_close(device);
    return status;
}
