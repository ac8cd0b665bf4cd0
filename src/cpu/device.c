/* SPDX-License-Identifier: MIT */
/*
 * Opening a CPU: which instruction set, how many threads, whose pool, which matrix products. All of it is chosen here,
 * from the options, then the environment, then the machine.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/system.h"
#include "cpu/cpu.h"
#include "cpu/features.h"
#include "cpu/gemm/blas.h"
#include "cpu/threads/threads.h"

enum { MAX_THREADS = 1024, ASSUMED_CACHE = 32 << 20 };

static const char own_pool[] = "built-in pool"; /* its name for people */

#ifdef VJP_HAVE_AVX512
extern const vjp_kernel *const vjp_cpu_kernels_avx512[];
#endif
#ifdef VJP_HAVE_AVX2
extern const vjp_kernel *const vjp_cpu_kernels_avx2[];
#endif
#ifdef VJP_HAVE_NEON
extern const vjp_kernel *const vjp_cpu_kernels_neon[];
#endif
#ifdef VJP_HAVE_WASM
extern const vjp_kernel *const vjp_cpu_kernels_wasm[];
#endif
#ifdef VJP_HAVE_PLAIN
extern const vjp_kernel *const vjp_cpu_kernels_plain[];
#endif

#if defined VJP_HAVE_NEON || defined VJP_HAVE_WASM || defined VJP_HAVE_PLAIN
static bool always(void) {
    return true;
}
#endif

/* Best first. */
static const struct {
    const char *name;
    bool (*runs)(void);
    const vjp_kernel *const *kernels;
} sets[] = {
#ifdef VJP_HAVE_AVX512
    {"avx512", vjp_cpu_has_avx512, vjp_cpu_kernels_avx512},
#endif
#ifdef VJP_HAVE_AVX2
    {"avx2", vjp_cpu_has_avx2, vjp_cpu_kernels_avx2},
#endif
#ifdef VJP_HAVE_NEON
    {"neon", always, vjp_cpu_kernels_neon},
#endif
#ifdef VJP_HAVE_WASM
    {"wasm", always, vjp_cpu_kernels_wasm},
#endif
#ifdef VJP_HAVE_PLAIN
    {"plain", always, vjp_cpu_kernels_plain},
#endif
};

/* An option, else the environment, else NULL. An empty string counts as absent. */
static const char *setting(const char *option, const char *variable) {
    const char *value = option ? option : getenv(variable);
    return value && *value ? value : NULL;
}

static vjp_status choose_set(vjp_device *device, cpu_state *state, const char *wanted) {
    char known[64] = "";
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", sets[i].name);
        if (wanted ? strcmp(wanted, sets[i].name) != 0 : !sets[i].runs()) continue;
        if (!sets[i].runs()) return vjp_fail(device, VJP_UNSUPPORTED, "cpu: this processor does not run %s", wanted);
        state->isa = sets[i].name;
        state->kernels = sets[i].kernels;
        return VJP_OK;
    }
    if (!wanted)
        return vjp_fail(device, VJP_NO_DEVICE, "cpu: this processor runs none of %s, all that was built", known);
    return vjp_fail(device, VJP_INVALID, "cpu: unknown instruction set \"%s\"; it must be one of %s", wanted, known);
}

static vjp_status choose_threads(vjp_device *device, cpu_state *state, const vjp_options *options) {
    long threads = options->threads;
    const char *variable = threads ? NULL : setting(NULL, "VJP_THREADS");
    if (variable) {
        char *end;
        threads = strtol(variable, &end, 10);
        if (*end || threads < 1)
            return vjp_fail(device, VJP_INVALID, "cpu: VJP_THREADS is \"%s\"; it must be 1 to %d", variable,
                            MAX_THREADS);
    }
    if (threads == 0) threads = (long)vjp_min(vjp_cpu_processors(), MAX_THREADS);
    if (threads < 0 || threads > MAX_THREADS)
        return vjp_fail(device, VJP_INVALID, "cpu: %ld threads asked for; it must be 1 to %d", threads, MAX_THREADS);
    state->threads = state->threads_wanted = (int)threads;
    state->parallel_for = options->parallel_for;
    state->parallel_context = options->parallel_context;
    if (threads == 1 || options->parallel_for) return VJP_OK;
    state->pool = vjp_cpu_pool_create((int)threads);
    if (!state->pool) return vjp_fail(device, VJP_OUT_OF_MEMORY, "cpu: no memory for a pool of %ld threads", threads);
    state->threads = vjp_cpu_pool_threads(state->pool);
    return VJP_OK;
}

/*
 * AMX for bf16: in the processor, in what the system saves of it, and with the leave to use it, which Linux gives to
 * the whole process when it is asked.
 */
static bool has_tiles(const cpu_state *state) {
#ifdef VJP_HAVE_AMX
    return strcmp(state->isa, "avx512") == 0 && vjp_cpu_has_amx() && system_allow_amx();
#else
    (void)state;
    return false;
#endif
}

/*
 * The built-in products are the default: they never allocate, while BLIS 0.9 calls malloc in every product, and were
 * measured ahead of BLIS and OpenBLAS on AVX-512. Those of 16-bit operands are made by AMX where it is there, unless
 * "builtin" asks for the bits that every instruction set gives, and for the instructions that all processors of a set
 * have.
 */
static vjp_status choose_products(vjp_device *device, cpu_state *state, const char *wanted) {
    if (!wanted) {
        state->tiles = has_tiles(state);
        state->bf16 = vjp_cpu_has_bf16();
        return VJP_OK;
    }
    if (strcmp(wanted, "builtin") == 0) return VJP_OK;
    if (strcmp(wanted, "amx") == 0) {
        state->tiles = has_tiles(state);
        if (state->tiles) return VJP_OK;
        return vjp_fail(device, VJP_UNSUPPORTED, "cpu: this processor, system or build has no AMX with %s", state->isa);
    }
    if (strcmp(wanted, "blas") != 0)
        return vjp_fail(device, VJP_INVALID,
                        "cpu: unknown matrix products \"%s\"; they must be one of builtin, amx, blas", wanted);
    if (!vjp_blas_name()) return vjp_fail(device, VJP_UNSUPPORTED, "cpu: this library was built without BLAS");
    state->blas = true;
    return VJP_OK;
}

static size_t last_level_cache(void) {
    int64_t bytes = system_last_cache_bytes();
    return bytes > 0 ? (size_t)bytes : ASSUMED_CACHE;
}

static void cpu_close(vjp_device *device) {
    cpu_state *state = device->state;
    if (!state) return;
    if (state->pool) vjp_cpu_pool_destroy(state->pool);
    free(state);
    device->state = NULL;
}

static vjp_status cpu_open(vjp_device *device, const vjp_options *options) {
    cpu_state *state = calloc(1, sizeof *state);
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "cpu: no memory for a device");
    device->state = state;
    vjp_status status = choose_set(device, state, setting(options->instruction_set, "VJP_ISA"));
    if (status == VJP_OK) status = choose_products(device, state, setting(options->matrix_products, "VJP_GEMM"));
    if (status == VJP_OK) status = choose_threads(device, state, options);
    if (status != VJP_OK) {
        cpu_close(device);
        return status;
    }
    if (state->blas) vjp_blas_prepare();
    state->fixed_rows = options->fixed_rows;
    state->cache_bytes = last_level_cache();
    const char *pool = state->parallel_for ? "the caller's pool" : state->pool ? own_pool : "no pool";
    char of[16] = "";
    if (state->threads < state->threads_wanted) snprintf(of, sizeof of, " of %d", state->threads_wanted);
    snprintf(device->summary, sizeof device->summary, "%s, %d%s thread%s (%s), matrix products by %s%s", state->isa,
             state->threads, of, state->threads_wanted == 1 ? "" : "s", pool,
             state->blas ? vjp_blas_name() : "vjp itself", state->tiles ? ", of 16 bits with AMX" : "");
    return VJP_OK;
}

/* Which there are is known without a device too; every set has the same. */
static const vjp_kernel *cpu_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    const cpu_state *state = device->state;
    const vjp_kernel *const *kernels = state ? state->kernels : sets[0].kernels;
    return &kernels[op->id][pass];
}

cpu_split vjp_cpu_split_items(int64_t items, int64_t bytes_each, int64_t max) {
    int64_t size = bytes_each > 0 ? vjp_divide_up(CPU_GRAIN_BYTES, bytes_each) : items;
    if (items > max) size = vjp_max(size, vjp_divide_up(items, max)); /* small calls need few divisions */
    size = vjp_max(1, size);
    return (cpu_split){.count = items <= size ? items > 0 : vjp_divide_up(items, size), .size = size, .items = items};
}

static void cpu_parallel(const vjp_device *device, size_t count, vjp_task task, void *argument) {
    const cpu_state *state = device->state;
    if (count > 1 && state->parallel_for)
        state->parallel_for(state->parallel_context, count, task, argument);
    else if (count > 1 && state->pool)
        vjp_cpu_pool_run(state->pool, count, task, argument);
    else
        for (size_t i = 0; i < count; i++)
            task(argument, i);
}

void vjp_cpu_for(const vjp_work *work, int64_t count, vjp_task task, void *argument) {
    cpu_parallel(work->device, (size_t)count, task, argument);
}

static const char *cpu_property(const vjp_device *device, const char *name, char *text, size_t bytes) {
    const cpu_state *state = device->state;
    const char *value = NULL;
    char number[16];
    if (strcmp(name, "instruction_set") == 0) value = state->isa;
    if (strcmp(name, "matrix_products") == 0) value = state->blas ? "blas" : state->tiles ? "amx" : "builtin";
    if (strcmp(name, "blas") == 0) value = vjp_blas_name();
    if (strcmp(name, "pool") == 0) value = state->parallel_for ? "the caller's" : state->pool ? own_pool : "none";
    if (strcmp(name, "threads") == 0) {
        snprintf(number, sizeof number, "%d", state->threads);
        value = number;
    }
    if (value) snprintf(text, bytes, "%s", value);
    return value ? text : NULL;
}

const vjp_backend vjp_backend_cpu = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .name = "cpu",
    .takes_allocator = 1,
    .host_memory = 1,
    .open = cpu_open,
    .close = cpu_close,
    .kernel = cpu_kernel,
    .alloc = vjp_host_alloc,
    .free = vjp_host_free,
    .upload = vjp_host_upload,
    .download = vjp_host_download,
    .synchronize = vjp_host_synchronize,
    .parallel = cpu_parallel,
    .property = cpu_property,
};
