/* SPDX-License-Identifier: MIT */
/*
 * `vjp info`: this machine, this build, and which devices open here. A device that does not open is listed with the
 * reason, and is not a failure.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "core/system.h"

static const char *const device_names[] = {"ref", "cpu", "cuda:0", "webgpu", "metal"};
static const char *const set_names[] = {"avx512", "avx2", "neon", "plain"};

enum {
    DEVICE_COUNT = sizeof device_names / sizeof device_names[0],
    SET_COUNT = sizeof set_names / sizeof set_names[0],
    CACHE_COUNT = 3
};

typedef struct machine {
    char processor[128];
    double cache[CACHE_COUNT]; /* bytes of L1d, L2, L3; 0: unknown */
    long cores;
    double memory, memory_free;
    const char *runs[SET_COUNT]; /* instruction sets, best first */
    int run_count;
} machine;

static void find_sets(machine *m) {
    for (int i = 0; i < SET_COUNT; i++) {
        vjp_options options = {.struct_size = sizeof(vjp_options),
                               .threads = 1,
                               .instruction_set = set_names[i],
                               .matrix_products = "builtin"};
        options.workspace_bytes = 64;
        vjp_device *device = NULL;
        if (vjp_open("cpu", &options, &device) == VJP_OK) m->runs[m->run_count++] = set_names[i];
        vjp_close(device);
    }
}

/* The device's sentence without its name, which is printed beside it. */
static const char *reason(const vjp_device *device, const char *name) {
    const char *error = vjp_error(device);
    size_t length = strlen(name);
    bool named = strncmp(error, name, length) == 0 && strncmp(error + length, ": ", 2) == 0;
    return named ? error + length + 2 : error;
}

/* A property of the cpu; "" where it did not open or has no such thing. */
typedef struct property {
    char text[64];
} property;

static property property_of(vjp_device *cpu, const char *name) {
    property p = {""};
    if (vjp_device_property(cpu, name, p.text, sizeof p.text) != VJP_OK) p.text[0] = 0;
    return p;
}

static const char *or_null(const property *p) {
    return p->text[0] ? p->text : NULL;
}

static void print_json(const machine *m, vjp_device *const *devices, const vjp_status *opened) {
    const property set = property_of(devices[1], "instruction_set"), threads = property_of(devices[1], "threads");
    const property pool = property_of(devices[1], "pool"), blas = property_of(devices[1], "blas");
    const property products = property_of(devices[1], "matrix_products");
    cli_json_begin();
    cli_json_text("version", vjp_version());
    cli_json_text("processor", m->processor);
    cli_json_text("instruction_set", or_null(&set));
    cli_json_array("instruction_sets");
    for (int i = 0; i < m->run_count; i++)
        cli_json_text(NULL, m->runs[i]);
    cli_json_array_end();
    cli_json_integer("cores", m->cores);
    if (threads.text[0])
        cli_json_integer("threads", atoi(threads.text));
    else
        cli_json_null("threads");
    cli_json_text("pool", or_null(&pool));
    cli_json_object("cache_bytes");
    static const char *const levels[] = {"l1d", "l2", "l3"};
    for (int i = 0; i < CACHE_COUNT; i++)
        cli_json_integer(levels[i], (int64_t)m->cache[i]);
    cli_json_object_end();
    cli_json_integer("memory_bytes", (int64_t)m->memory);
    cli_json_integer("memory_free_bytes", (int64_t)m->memory_free);
    cli_json_text("blas", or_null(&blas));
    cli_json_text("matrix_products", strcmp(products.text, "blas") == 0 ? or_null(&blas) : or_null(&products));
    cli_json_array("devices");
    for (int i = 0; i < DEVICE_COUNT; i++) {
        bool found = opened[i] == VJP_OK;
        cli_json_object(NULL);
        cli_json_text("name", device_names[i]);
        cli_json_boolean("found", found);
        cli_json_text("summary", found ? vjp_device_summary(devices[i]) : NULL);
        cli_json_text("reason", found ? NULL : reason(devices[i], device_names[i]));
        cli_json_object_end();
    }
    cli_json_array_end();
    cli_json_end();
}

static void print_fact(const char *name, const char *value) {
    printf("%-16s  %s\n", name, value);
}

static void print_machine(const machine *m, vjp_device *cpu) {
    const property set = property_of(cpu, "instruction_set"), threads = property_of(cpu, "threads");
    const property pool = property_of(cpu, "pool"), blas = property_of(cpu, "blas");
    const property products = property_of(cpu, "matrix_products");
    char text[256], one[CLI_BYTES_TEXT], two[CLI_BYTES_TEXT];
    print_fact("processor", m->processor);
    size_t used =
        (size_t)snprintf(text, sizeof text, "%s; this processor runs", set.text[0] ? set.text : "none chosen");
    for (int i = 0; i < m->run_count && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s %s", i ? "," : "", m->runs[i]);
    print_fact("instruction set", text);
    if (threads.text[0])
        snprintf(text, sizeof text, "%s on %ld core%s, pool: %s", threads.text, m->cores, m->cores == 1 ? "" : "s",
                 pool.text);
    else
        snprintf(text, sizeof text, "%ld core%s", m->cores, m->cores == 1 ? "" : "s");
    print_fact("threads", text);
    used = 0;
    text[0] = 0;
    static const char *const levels[] = {"L1d", "L2", "L3"};
    for (int i = 0; i < CACHE_COUNT; i++)
        if (m->cache[i] > 0)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s %s", used ? ", " : "", levels[i],
                                     cli_bytes(m->cache[i], one));
    print_fact("caches", used ? text : "unknown");
    snprintf(text, sizeof text, "%s, of which %s free", cli_bytes(m->memory, one), cli_bytes(m->memory_free, two));
    print_fact("memory", m->memory_free > 0 ? text : cli_bytes(m->memory, one));
    if (strcmp(products.text, "blas") == 0)
        used = (size_t)snprintf(text, sizeof text, "%s", blas.text);
    else if (strcmp(products.text, "amx") == 0)
        used = (size_t)snprintf(text, sizeof text, "vjp's own, with AMX for 16 bits; VJP_GEMM=builtin without");
    else
        used = (size_t)snprintf(text, sizeof text, "vjp's own");
    if (!blas.text[0])
        snprintf(text + used, sizeof text - used, "; built without BLAS");
    else if (strcmp(products.text, "blas") != 0)
        snprintf(text + used, sizeof text - used, "; VJP_GEMM=blas chooses %s", blas.text);
    print_fact("matrix products", text);
}

static void print_devices(vjp_device *const *devices, const vjp_status *opened) {
    cli_column columns[] = {{"device", 0, false}, {"found", 0, false}, {"", 0, false}};
    for (int pass = 0; pass < 2; pass++) {
        if (pass) cli_head(columns, 3);
        for (int i = 0; i < DEVICE_COUNT; i++) {
            bool found = opened[i] == VJP_OK;
            cli_cell cells[] = {{device_names[i], CLI_BOLD},
                                {found ? "yes" : "no", found ? CLI_GREEN : CLI_DIM},
                                {found ? vjp_device_summary(devices[i]) : reason(devices[i], device_names[i]),
                                 found ? CLI_PLAIN : CLI_DIM}};
            if (pass)
                cli_row(columns, 3, cells);
            else
                cli_fit(columns, 3, cells);
        }
    }
}

int cli_info(int argc, char **argv) {
    bool json = false;
    const cli_command command = {
        .name = "info",
        .usage = "info [--json]",
        .about = "Shows what vjp runs on: the processor and the instruction set chosen for it, threads, caches, "
                 "memory, the\n"
                 "engine of matrix products, and which devices open here, or why they do not.",
        .more = "Environment variables: VJP_ISA=avx512|avx2|neon|plain, VJP_THREADS=N, VJP_GEMM=builtin|amx|blas.",
        .json = &json,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;

    machine m = {
        .cores = (long)system_processors(), .memory = system_memory_bytes(), .memory_free = system_available_bytes()};
    if (!system_processor_name(m.processor, sizeof m.processor)) snprintf(m.processor, sizeof m.processor, "unknown");
    for (int level = 1; level <= CACHE_COUNT; level++)
        m.cache[level - 1] = system_cache_bytes(level);
    find_sets(&m);
    vjp_device *devices[DEVICE_COUNT];
    vjp_status opened[DEVICE_COUNT];
    bool handles = true;
    for (int i = 0; i < DEVICE_COUNT; i++) {
        opened[i] = vjp_open(device_names[i], NULL, &devices[i]);
        handles = handles && devices[i];
    }
    if (!handles) {
        status = cli_fail("info", "there is no memory for the devices");
    } else if (json) {
        print_json(&m, devices, opened);
        status = CLI_OK;
    } else {
        printf("%svjp %s%s\n\n", cli_paint(CLI_BOLD), vjp_version(), cli_paint(CLI_PLAIN));
        print_machine(&m, devices[1]);
        putchar('\n');
        print_devices(devices, opened);
        status = CLI_OK;
    }
    for (int i = 0; i < DEVICE_COUNT; i++)
        vjp_close(devices[i]);
    return status;
}
