/* SPDX-License-Identifier: MIT */
/*
 * The Metal backend without a Mac: its kernels run in tests/metal/emulate.cpp, its device talks to the stand-in of
 * tests/metal/stand_in.c, and both together are compared with `ref` as any device is. First the emulator itself: it
 * must report faulty kernels.
 */
#include "attributes.h"
#include "gpu/metal/device.h"
#include "metal/emulate.h"
#include "metal/stand_in.h"
#include "proof/problem.h"
#include "proof_sink.h"

/* After them: it names a variable `device`. */
#include "device_tests.h"
#include "gpu_tests.h"
#include "rows_apart.h"

static size_t pipelines_of(const vjp_device *of) {
    (void)of;
    return (size_t)stand_in.pipelines;
}

static int launches_of(const vjp_device *of) {
    return ((const metal_state *)of->state)->launches;
}

/* ---- The emulator ------------------------------------------------------------------------------------ */

static const emulate_shader *shader_named(const char *name) {
    const emulate_shader *s = emulate_shaders;
    while (s && strcmp(s->name, name) != 0)
        s = s->next;
    assert_non_null(s);
    return s;
}

enum { UNIFORM_WORDS = 24, FIRST_PARAM = 16, MAX_FLOATS = 1024, F32_THERE = 1 };

/* Runs a kernel of a test's shader on buffers of floats, all of them f32; false and the message: something was seen. */
static bool run_kernel(const char *shader, const char *kernel, unsigned threads, unsigned param,
                       float buffer[][MAX_FLOATS], char message[EMULATE_MESSAGE]) {
    const emulate_shader *s = shader_named(shader);
    unsigned constant[64] = {0}, uniforms[UNIFORM_WORDS] = {[0] = 1, [3] = 1, [FIRST_PARAM] = param};
    emulate_launch l = {.shader = s, .constant = constant, .grid = {1, 1, 1}, .threads = threads};
    for (size_t i = 0; i < s->kernels; i++)
        if (strcmp(s->kernel[i].name, kernel) == 0) l.kernel = &s->kernel[i];
    assert_non_null(l.kernel);
    for (size_t i = 0; i < s->operands; i++) {
        constant[i] = F32_THERE;
        l.buffer[i] = (emulate_buffer){(char *)buffer[i], sizeof buffer[i], 0};
    }
    l.buffer[EMULATE_MAX_BUFFERS - 1] = (emulate_buffer){(char *)uniforms, sizeof uniforms, 0};
    return emulate_run(&l, message);
}

static const struct {
    const char *kernel, *words[3];
} faults[] = {
    {"read_too_early", {"a race: thread ", " reads at faults.metal:33", " writes at faults.metal:52"}},
    {"overwritten", {"a race: thread ", " reads at faults.metal:33", " writes at faults.metal:60"}},
    {"both_write", {"a race: thread ", "writes at faults.metal:", "no barrier between"}},
    {"atomic_and_plain", {"a race: thread ", "faults.metal:", ""}},
    {"other_barrier", {"threads diverge: thread ", " waits at common.metal:", "at faults.metal:"}},
    {"ended", {"threads diverge: thread ", " waits at common.metal:", "thread 5 has ended"}},
    {"simd_parts", {"threads diverge: thread ", "common.metal:", "faults.metal:"}},
    {"unwritten", {"reads at faults.metal:", "that no thread has written", ""}},
    {"outside", {"reads at common.metal:", "outside of every buffer", ""}},
    {"matrix_too_early",
     {"a race: ", "the matrix of a simdgroup reads at faults.metal:139", " writes at faults.metal:"}},
    {"matrix_overwritten",
     {"a race: ", " writes at faults.metal:148", "the matrix of a simdgroup reads at faults.metal:147"}},
    {"matrix_unread",
     {"a race: ", "the matrix of a simdgroup writes at faults.metal:155", " reads at faults.metal:156"}},
    {"matrix_twice", {"a race: the matrix of a simdgroup writes", "what the matrix of a simdgroup writes", ""}},
    {"matrix_parts", {"threads diverge: thread ", " waits at ", ""}},
    {"matrix_ended", {"the simdgroup of thread ", "has fewer than 32 threads for the matrix at faults.metal:", ""}},
};

/* y = a b^T + 2 and its transpose, of a and b in the first numbers of x. */
static void check_matrices(float buffer[2][MAX_FLOATS]) {
    char message[EMULATE_MESSAGE];
    if (!run_kernel("faults", "matrix_good", 64, 0, buffer, message)) fail_msg("%s", message);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            double sum = 2;
            for (int k = 0; k < 8; k++)
                sum += (double)(buffer[0][8 * i + k] * buffer[0][64 + 8 * j + k]);
            if ((double)buffer[1][8 * i + j] != sum || (double)buffer[1][64 + 8 * j + i] != sum)
                fail_msg("element %d, %d of the product is %g and %g, not %g", i, j, (double)buffer[1][8 * i + j],
                         (double)buffer[1][64 + 8 * j + i], sum);
        }
    emulate_with.width = 24;
    if (run_kernel("faults", "matrix_good", 64, 0, buffer, message)) fail_msg("a matrix of 24 threads passed");
    emulate_with.width = 32;
}

static void what_is_wrong_with_a_kernel_is_seen(void **state) {
    (void)state;
    float(*buffer)[MAX_FLOATS] = malloc(2 * sizeof buffer[0]); /* not among the program's own data, which is allowed */
    char message[EMULATE_MESSAGE];
    for (int i = 0; i < MAX_FLOATS; i++)
        buffer[0][i] = (float)i;
    for (emulate_order order = EMULATE_FORWARD; order <= EMULATE_SHUFFLED; order++) {
        emulate_with = (emulate_settings){order, 32};
        if (!run_kernel("faults", "good", 64, 0, buffer, message)) fail_msg("%s", message);
        assert_true(buffer[1][0] == 2 && buffer[1][63] == 1);
        check_matrices(buffer);
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
            if (run_kernel("faults", faults[i].kernel, 64, 0, buffer, message))
                fail_msg("%s() passed in order %d", faults[i].kernel, (int)order);
            for (int w = 0; w < 3; w++)
                if (!strstr(message, faults[i].words[w]))
                    fail_msg("\"%s\" does not say \"%s\"", message, faults[i].words[w]);
        }
    }
    free(buffer);
}

/* Any number of threads in teams of any size, of which some leave threads over; simdgroups of any width. */
static const unsigned sizes[][2] = {{48, 48},   {48, 16},  {48, 3},  {47, 47},   {50, 48},  {256, 256},
                                    {256, 32},  {256, 64}, {256, 1}, {256, 129}, {192, 96}, {96, 96},
                                    {224, 224}, {1, 1},    {33, 32}, {64, 64},   {255, 5},  {7, 2}};
static const unsigned widths[] = {1, 32, 64, 8, 24, 7, 20};

static void sums_are_right_for_any_team_and_the_same_for_any_width(void **state) {
    (void)state;
    static float buffer[4][MAX_FLOATS], first[4][MAX_FLOATS], again[4][MAX_FLOATS];
    char message[EMULATE_MESSAGE];
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++)
            for (emulate_order order = EMULATE_FORWARD; order <= EMULATE_SHUFFLED; order++) {
                unsigned threads = sizes[s][0], lanes = sizes[s][1], teams = threads / lanes;
                emulate_with = (emulate_settings){order, widths[w]};
                memset(buffer, 0, sizeof buffer);
                for (unsigned i = 0; i < threads; i++) /* positive, so that a sum's relative error is small */
                    buffer[0][i] = 1 + (float)(i * 2654435761u % 1000) / 999;
                memcpy(again, buffer, sizeof again);
                if (!run_kernel("trees", "sums", threads, lanes, buffer, message) ||
                    !run_kernel("trees", "twice", threads, lanes, again, message))
                    fail_msg("%u threads, teams of %u, simdgroups of %u: %s", threads, lanes, widths[w], message);
                if (w == 0 && order == EMULATE_FORWARD) memcpy(first, buffer, sizeof first);
                if (memcmp(first, buffer, sizeof first) != 0)
                    fail_msg("%u threads, teams of %u: a width of %u gives other bits", threads, lanes, widths[w]);
                for (unsigned i = 0; i < teams * lanes; i++) {
                    double sum = 0, most = 0, column = 0;
                    for (unsigned k = i / lanes * lanes; k < (i / lanes + 1) * lanes; k++) {
                        sum += (double)buffer[0][k];
                        most = fmax(most, (double)buffer[0][k]);
                    }
                    for (unsigned k = i; i < lanes && k < teams * lanes; k += lanes)
                        column += (double)buffer[0][k];
                    if (fabs((double)buffer[1][i] - sum) > 1e-6 * sum || (double)buffer[2][i] != most ||
                        fabs((double)buffer[3][i] - column) > 1e-6 * column ||
                        fabs((double)again[1][i] - sum) > 1e-6 * sum || again[2][i] != 2 * again[1][i])
                        fail_msg("%u threads, teams of %u, simdgroups of %u: thread %u has %g, %g, %g for %g, %g, %g",
                                 threads, lanes, widths[w], i, (double)buffer[1][i], (double)buffer[2][i],
                                 (double)buffer[3][i], sum, most, column);
                }
            }
}

/* ---- The device and its stand-ins -------------------------------------------------------------------- */

/* A device of the backend's files that are linked here. */
static vjp_status open_here(vjp_device **opened) {
    objc_use(&stand_in_system);
    assert_int_equal(vjp_device_create("metal", opened), VJP_OK);
    return vjp_device_start(*opened, backend_here(), NULL);
}

static void start(void) {
    stand_in_reset();
    emulate_with = (emulate_settings){EMULATE_IN_TURN, 32};
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
}

/* Everything was released, and nothing done that would be a fault on a real system. */
static void all_is_gone(void) {
    assert_string_equal(stand_in.misuse, "");
    assert_int_equal(stand_in.objects, 0);
    assert_int_equal(stand_in.pools, 0);
}

static void stop(void) {
    vjp_close(device);
    device = NULL;
    all_is_gone();
}

static void the_library_has_one_entry_and_knows_its_version(void **state) {
    (void)state;
    check_library(VJP_METAL_LIBRARY, "metal");
}

static void where_there_is_no_macos_it_is_said(void **state) {
    (void)state;
    vjp_device *none;
    objc_use(NULL);
    assert_int_equal(vjp_device_create("metal", &none), VJP_OK);
    assert_int_equal(vjp_device_start(none, backend_here(), NULL), VJP_NO_DEVICE);
    if (!strstr(vjp_error(none), "metal: Metal needs macOS")) fail_msg("%s", vjp_error(none));
    assert_int_equal(vjp_synchronize(none), VJP_NO_DEVICE);
    vjp_close(none);
    assert_int_equal(vjp_open("metal:1", NULL, &none), VJP_NO_DEVICE);
    assert_non_null(strstr(vjp_error(none), "unknown device \"metal:1\""));
    vjp_close(none);
}

static void opening_that_fails_says_why_and_keeps_nothing(void **state) {
    (void)state;
    static const char compiler[] = "program_source:3:1: error: unknown type name 'floot'";
    const struct {
        stand_in_state with;
        vjp_status status;
        const char *words;
    } rows[] = {
        {{.no_device = true}, VJP_NO_DEVICE, "no GPU for Metal"},
        {{.fail_queue = true}, VJP_OUT_OF_MEMORY, "no memory for the device"},
        {{.fail_buffer = true}, VJP_OUT_OF_MEMORY, "no memory for the device"},
        {{.fail_library = compiler}, VJP_DEVICE_FAILED, "tools.metal: program_source:3:1: error: unknown type"},
        {{.fail_function = "no such constant"}, VJP_DEVICE_FAILED, "tools.metal, words(): no such constant"},
        {{.fail_pipeline = "too many registers"}, VJP_DEVICE_FAILED, "words(): too many registers"},
        {{.max_threads = 0}, VJP_NO_DEVICE, "runs no threads"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        vjp_device *none;
        stand_in_reset();
        stand_in_state usual = stand_in;
        stand_in = rows[i].with;
        stand_in.max_bytes = usual.max_bytes;
        assert_int_equal(open_here(&none), rows[i].status);
        if (!strstr(vjp_error(none), rows[i].words)) fail_msg("\"%s\" is no \"%s\"", vjp_error(none), rows[i].words);
        vjp_close(none);
        all_is_gone();
    }
}

static void any_bytes_go_up_and_come_down(void **state) {
    (void)state;
    start();
    unsigned char host[64], back[64];
    void *data, *other;
    assert_int_equal(vjp_alloc(device, 64, &data), VJP_OK);
    assert_int_equal(vjp_alloc(device, 0, &other), VJP_OK);
    for (unsigned i = 0; i < 64; i++)
        host[i] = (unsigned char)(i + 1);
    assert_int_equal(vjp_upload(device, data, 3, host, 61), VJP_OK);
    assert_memory_equal((char *)data + 3, host, 61); /* the host sees the device's memory */
    assert_int_equal(vjp_download(device, back, data, 4, 7), VJP_OK);
    assert_memory_equal(back, host + 1, 7);
    assert_int_equal(vjp_upload(device, data, 0, host, 0), VJP_OK);
    assert_int_equal(vjp_upload(device, host, 0, host, 4), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "is not memory of this device"));
    assert_int_equal(vjp_download(device, back, data, 250, 16), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "16 bytes at 250 run past a buffer of 256"));
    vjp_free(device, data);
    vjp_free(device, other);
    vjp_free(device, host);
    stop();
}

/* Whole words and single bytes; done when waited for, not before. */
static void copies_within_the_device(void **state) {
    (void)state;
    start();
    char host[2048], back[2048], expected[2048];
    void *data;
    for (size_t i = 0; i < sizeof host; i++)
        host[i] = (char)(i * 7 % 251);
    assert_int_equal(vjp_alloc(device, sizeof host, &data), VJP_OK);
    assert_int_equal(vjp_upload(device, data, 0, host, sizeof host), VJP_OK);
    memcpy(expected, host, sizeof host);
    char *to = data;
    assert_int_equal(device->backend->copy(device, to + 1024, to, 1000), VJP_OK);
    assert_int_equal(device->backend->copy(device, to + 1, to + 1027, 301), VJP_OK);
    assert_memory_equal(data, host, sizeof host);
    memcpy(expected + 1024, host, 1000);
    memcpy(expected + 1, expected + 1027, 301);
    assert_int_equal(vjp_download(device, back, data, 0, sizeof back), VJP_OK);
    assert_memory_equal(back, expected, sizeof back);
    vjp_free(device, data);
    stop();
}

static vjp_status norm(vjp_tensor *y, const vjp_tensor *x) {
    return vjp_rms_norm_forward(device, y, NULL, x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5));
}

static const float numbers[8] = {1, 2, 3, 4, 5, 6, 7, 9};

static void calls_share_a_command_buffer_and_no_pipeline_is_made_twice(void **state) {
    (void)state;
    start();
    const metal_state *inside = device->state;
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    assert_int_equal(norm(&y, &x), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    int libraries = stand_in.libraries, pipelines = stand_in.pipelines, committed = stand_in.committed;
    for (int i = 0; i < 40; i++)
        assert_int_equal(norm(&y, &x), VJP_OK);
    assert_int_equal(inside->launches, 40);
    assert_int_equal(stand_in.committed, committed);
    for (int i = 40; i < METAL_LAUNCHES * (METAL_COMMITTED + 2); i++) /* more than may run at once */
        assert_int_equal(norm(&y, &x), VJP_OK);
    assert_true(stand_in.committed - committed >= METAL_COMMITTED);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(stand_in.committed - committed, METAL_COMMITTED + 2);
    assert_int_equal(inside->launches, 0);
    assert_int_equal(stand_in.libraries, libraries);
    assert_int_equal(stand_in.pipelines, pipelines);
    /* Freed while it is in use, and the device closed with unfinished work. */
    assert_int_equal(norm(&y, &x), VJP_OK);
    vjp_free(device, y.data);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(norm(&x, &x), VJP_OK);
    vjp_free(device, x.data);
    stop();
}

/* A pipeline for each dtype, presence and constant, and none for what does not matter. */
static void pipelines_are_made_for_what_differs(void **state) {
    (void)state;
    start();
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers), other = x, y = x;
    vjp_tensor gamma = on_device(VJP_F32, 1, (int64_t[]){4}, numbers, 16);
    assert_int_equal(norm(&y, &x), VJP_OK);
    int before = stand_in.pipelines;
    other.shape[0] = 1; /* fewer rows, elsewhere, another eps: the same */
    y.shape[0] = 1;
    other.offset = y.offset = 16;
    assert_int_equal(vjp_rms_norm_forward(device, &y, NULL, &other, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)),
                     VJP_OK);
    assert_int_equal(stand_in.pipelines, before);
    assert_int_equal(
        vjp_rms_norm_forward(device, &y, NULL, &other, &gamma, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)), VJP_OK);
    assert_int_equal(stand_in.pipelines, before + 1);
    other.dtype = y.dtype = VJP_BF16;
    assert_int_equal(
        vjp_rms_norm_forward(device, &y, NULL, &other, &gamma, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)), VJP_OK);
    assert_int_equal(stand_in.pipelines, before + 2);
    vjp_free(device, x.data);
    vjp_free(device, gamma.data);
    stop();
}

static void failures_of_compiler_and_device_are_a_status(void **state) {
    (void)state;
    start();
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    stand_in.fail_library = "program_source:9:3: error: no member named 'z'\n  in 'Stats'";
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(
        strstr(vjp_error(device), "rms_norm.metal: program_source:9:3: error: no member named 'z' in 'Stats'"));
    stand_in.fail_library = NULL;
    stand_in.fail_pipeline = "Compiler encountered an internal error";
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "rms_norm.metal, forward(): Compiler encountered"));
    stand_in.fail_pipeline = NULL;
    stand_in.fail_commands = true;
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    stand_in.fail_commands = false;
    stand_in.fail_encoder = true;
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "gives no command buffer"));
    stand_in.fail_encoder = false;
    assert_int_equal(norm(&x, &x), VJP_OK); /* and the device still works */

    stand_in.fail_run = "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)";
    assert_int_equal(vjp_synchronize(device), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "metal: running: Caused GPU Timeout Error"));
    stand_in.fail_run = NULL;
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(norm(&x, &x), VJP_OK);
    stand_in.fail_run = "Lost";
    float back[8];
    assert_int_equal(vjp_download(device, back, x.data, 0, sizeof back), VJP_DEVICE_FAILED);
    stand_in.fail_run = NULL;

    /* A pipeline that gives fewer threads than the others, or less than asked. */
    stand_in.max_threads = 100;
    vjp_tensor y = x;
    y.dtype = VJP_F16;
    assert_int_equal(norm(&y, &y), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(device), "forward needs more threads than this device gives it"));
    vjp_free(device, x.data);
    stop();
}

static void memory_that_is_not_the_devices_is_refused(void **state) {
    (void)state;
    start();
    float host[8] = {0};
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers), y = x, far = x;
    y.data = host;
    assert_int_equal(norm(&y, &x), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "y does not lie in memory of this device"));
    far.shape[0] = 1000;
    assert_int_equal(norm(&far, &far), VJP_INVALID);
    stand_in.fail_buffer = true;
    void *data;
    assert_int_equal(vjp_alloc(device, 64, &data), VJP_OUT_OF_MEMORY);
    assert_non_null(strstr(vjp_error(device), "64 bytes: the device has none"));
    stand_in.fail_buffer = false;
    assert_int_equal(vjp_alloc(device, (size_t)1 << 50, &data), VJP_OUT_OF_MEMORY);
    assert_non_null(
        strstr(vjp_error(device), "1125899906842624 bytes: a buffer of this device holds at most 4294967296"));
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_free(device, x.data);
    stop();
}

static void an_old_system_has_fast_mathematics_off_too(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.old_system = true;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    stop();
}

/* ---- Proof ------------------------------------------------------------------------------------------- */

static bool has(const char *op) {
    return vjp_supports(device, vjp_op_find(op), VJP_FORWARD, VJP_F32) == VJP_OK;
}

static void compare_setup(const char *op, const char *text, int dtype) {
    proof_tally tally = {0};
    proof_plan plan = {.dtype = dtype, .row = proof_sink, .context = &tally};
    proof_setup setup;
    char error[TEXT_ERROR];
    if (!proof_setup_read(&setup, vjp_op_find(op), text, error)) fail_msg("%s", error);
    proof_compare_setup(&plan, device, &setup);
    assert_true(tally.rows > 0);
    assert_int_equal(tally.failed, 0);
}

/* Threads of a threadgroup as most devices give them, and few or odd ones; simdgroups as Apple's, and others. */
static const struct {
    unsigned long threads;
    unsigned width;
    int64_t most; /* elements of a case: every thread of 256 is switched to at every barrier, which takes its time */
} setups[] = {{1024, 32, 1100}, {1024, 24, 300}, {48, 32, 150}, {100, 8, 150}};

static int64_t elements_of(const proof_setup *setup) {
    int64_t most = 0;
    for (int i = 0; i < setup->choices; i++) {
        int64_t count = setup->choice[i].shaped;
        for (int d = 0; d < setup->choice[i].ndim; d++)
            count *= setup->choice[i].shape[d];
        most = count > most ? count : most;
    }
    return most;
}

/* A sanitized build is after the host's code, and several times slower. */
enum { SANITIZED = sizeof VJP_SANITIZE > 1, PARTS = SANITIZED ? 8 : 4 };

/* Every case of the table, or of one op, that is not too large and in this part, in a dtype or in every one. */
static void compare_all(int64_t most, const char *only, int dtype) {
    proof_tally tally = {0};
    proof_plan plan = {.dtype = dtype, .row = proof_sink, .context = &tally};
    size_t fitting = 0;
    for (size_t i = 0; i < proof_case_count; i++) {
        proof_setup setup;
        char error[TEXT_ERROR];
        if (!has(proof_cases[i].op) || (proof_cases[i].marks & (PROOF_ON_HOST | PROOF_ON_CUDA))) continue;
        if (only && strcmp(proof_cases[i].op, only) != 0) continue;
        if (!proof_setup_read(&setup, vjp_op_find(proof_cases[i].op), proof_cases[i].text, error))
            fail_msg("%s", error);
        if (elements_of(&setup) <= most && in_part(fitting++, PARTS)) proof_compare_setup(&plan, device, &setup);
    }
    printf("%d results; %zu cases fit\n", tally.rows, fitting);
    assert_true(fitting > PARTS && tally.rows > (only_a_part() ? 0 : 100));
    assert_int_equal(tally.failed, 0);
}

static void every_op_is_right(void **state) {
    (void)state;
    for (size_t w = 0; w < sizeof setups / sizeof setups[0]; w++) {
        start();
        stop();
        stand_in_reset();
        stand_in.max_threads = setups[w].threads;
        emulate_with.width = setups[w].width;
        if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
        assert_true(gpu_has_matrices(device) == (setups[w].threads >= GPU_THREADS && setups[w].width == 32));
        compare_all(SANITIZED ? setups[w].most / 8 : setups[w].most, NULL, -1);
        stop();
    }
}

/* Rows past a grid dimension, and columns past a threadgroup: what has broken others. */
static const struct {
    const char *op, *text;
    int dtype;
} shapes[] = {
    {"layer_norm", "x=[3001,3]", VJP_BF16},
    {"layer_norm", "x=[3,4097]", VJP_F32},
    {"layer_norm", "x=[5,9001]", VJP_BF16},
    {"layer_norm", "x=[9,65] data=nan", VJP_F32},
    {"layer_norm", "x=[1,70000] data=offset param=f32", VJP_F32},
    {"rms_norm", "x=[7001,2]", VJP_F32},
    {"rms_norm", "x=[2,257] gamma=f32", VJP_F16},
    {"rms_norm", "x=[33,65] data=mixed eps=0", VJP_F32},
    {"group_norm", "x=[2,12,65] groups=3", VJP_BF16},
    {"group_norm", "x=[1,4,4097] groups=2", VJP_F32},
    {"group_norm", "x=[3,257,10] groups=1 layout=channels_last", VJP_F32},
    {"group_norm", "x=[1,2,1025] groups=1 data=offset", VJP_F32},
    {"group_norm", "x=[1,1400,6] groups=2 data=offset layout=channels_last", VJP_F32},
    {"rope", "x=[7001,1,2] cosine=[7001,1]", VJP_F32},
    {"rope", "x=[65,3,130] cosine=[65,65]", VJP_BF16},
    {"cumsum", "x=[6553,3]", VJP_F32},
    {"cumsum", "x=[3,4097]", VJP_BF16},
    {"cumsum", "x=[2,1000,65] axis=1", VJP_F32},
    {"cumsum", "x=[9001] exclusive=1", VJP_BF16},
    {"sum_squares", "x=[9001]", VJP_F32},
    {"add", "a=[40,300] b=[300] param=f32", VJP_F32},
    {"mul", "a=[2500,5] b=[5]", VJP_BF16},
    {"mean", "x=[2,9001] axis=1", VJP_F32},
    {"gather", "table=[11,257] index=[1000]", VJP_F32},
    {"gather", "table=[7001,2] index=[6553]", VJP_BF16},
    {"maxpool2d", "x=[1,65,17,33] kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1", VJP_BF16},
    {"maxpool2d", "x=[1,3,65,257]", VJP_F32},
    {"linear", "a=[65,257] b=[257,130] activation=gelu_erf", VJP_F32},
    {"linear", "a=[7001,3] b=[3,2]", VJP_BF16},
    {"linear", "a=[3,66,9] b=[3,9,66]", VJP_F32},
    {"linear", "a=[64,66,9] b=[64,66,9] transpose_b=1", VJP_BF16},
    {"conv2d", "x=[1,12,9,8] weight=[264,3,1,1] groups=4", VJP_BF16},
    {"conv2d", "x=[1,9,8,192] weight=[4224,1,1,3] groups=64 layout=channels_last", VJP_F32},
    {"conv2d", "x=[1,70,4,5] weight=[66,70,3,3] padding_h=1 padding_w=1", VJP_BF16},
    {"conv2d", "x=[1,4,5,70] weight=[66,3,3,70] padding_h=1 padding_w=1 layout=channels_last", VJP_F32},
    {"conv2d", "x=[2,18,7,8] weight=[20,9,3,2] groups=2 stride_h=3 stride_w=2 padding_h=2 dilation_h=2", VJP_F32},
    {"conv2d", "x=[2,7,8,18] weight=[20,3,2,9] groups=2 stride_h=3 stride_w=2 padding_h=2 layout=channels_last",
     VJP_BF16},
    {"conv2d", "x=[3,8,21,20] weight=[9,8,1,1]", VJP_F32},
    {"conv2d", "x=[3,40,41,2] weight=[2,2,2,1] groups=2 stride_w=2 layout=channels_last", VJP_BF16},
    {"attention", "q=[1,3,1,7] k=[1,2100,1,7] causal=0", VJP_F32},
    {"attention", "q=[1,35,4,24] k=[1,70,2,24]", VJP_F32},
    {"attention", "q=[1,6,1,300] k=[1,7,1,300]", VJP_BF16},
    {"attention", "q=[1,70,1,4] k=[1,70,1,4] data=nan", VJP_F32},
    {"attention", "q=[1,40,2,8] k=[1,40,1,8] data=huge -lse", VJP_F32},
    {"attention", "q=[2,40,4,8] k=[2,140,2,8] window=37", VJP_F32},
    {"attention", "q=[1,140,1,4] k=[1,140,1,4] window=20 data=nan", VJP_F32},
    {"attention", "q=[1,5,2,3] k=[1,90,1,3] window=1", VJP_F16},
    {"attention", "q=[3,70,4,8] k=[3,90,2,8] first=i32", VJP_F32},
    {"attention", "q=[2,70,2,5] k=[2,70,1,5] first=i64 window=30", VJP_BF16},
    {"attention", "q=[1,140,1,4] k=[1,140,1,4] first=f32 data=nan", VJP_F32},
    {"attention", "q=[1,18,2,130] k=[1,34,1,130] causal=0", VJP_BF16},
    {"attention", "q=[1,68,1,68] k=[1,33,1,68] causal=0", VJP_F32},
    {"cross_entropy", "logits=[3001,2] target=[3001] data=ignored label_smoothing=0.1", VJP_BF16},
    {"cross_entropy", "logits=[3,4097] target=[3] label_smoothing=0.1", VJP_F32},
    {"cross_entropy", "logits=[5,1025] target=[5] data=minus_inf reduction=sum", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] data=minus_inf label_smoothing=0.1", VJP_BF16},
    {"cross_entropy", "logits=[9,65] target=[9] data=nan", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] data=inf", VJP_F16},
    {"cross_entropy", "logits=[9,65] target=[9] data=offset", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] top=logits label_smoothing=0.1", VJP_F32},
    {"cross_entropy", "logits=[9,65] target=[9] top=dloss", VJP_F32},
    {"linear_cross_entropy", "x=[70,17] weight=[130,17] target=[70] data=ignored label_smoothing=0.1", VJP_BF16},
};

/* The shaders of these, linear's of two, multiply matrices of simdgroups where they can. */
static bool has_products(const char *op) {
    return strcmp(op, "linear") == 0 || strcmp(op, "linear_cross_entropy") == 0 || strcmp(op, "conv2d") == 0 ||
           strcmp(op, "attention") == 0;
}

static void compare_shapes(bool only_products) {
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (has(shapes[i].op) && in_part(i / 2, 4) && (!only_products || (i % 2 == 0 && has_products(shapes[i].op))))
            compare_setup(shapes[i].op, shapes[i].text, shapes[i].dtype);
}

static void shapes_that_have_broken_others(void **state) {
    (void)state;
    start();
    compare_shapes(false);
    stop();
}

/*
 * A GPU whose simdgroups of 32 threads multiply no matrices. In the other setups above, none did. In f32, because
 * storage is widened before either multiplies; of the large shapes every second, for the time they take.
 */
static void products_in_registers_are_right_too(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.no_matrices = true;
    emulate_with = (emulate_settings){EMULATE_IN_TURN, 32};
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_false(gpu_has_matrices(device));
    raw_products_are_right(state);
    compare_all(SANITIZED ? 130 : 1100, "linear", VJP_F32);
    compare_all(SANITIZED ? 130 : 1100, "attention", VJP_F32);
    compare_shapes(true);
    stop();
}

/* Fewer threads have smaller tiles, and load several fours of each. */
static void tiles_of_conv2d_are_right_with_few_threads(void **state) {
    (void)state;
    static const unsigned long threads[] = {48, 100};
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        stand_in_reset();
        stand_in.max_threads = threads[i];
        if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
        refuse_raw_product(RAW_ROWS, "needs 256 threads");
        compare_setup("conv2d", "x=[2,9,5,6] weight=[17,9,2,3] stride_h=2 padding_w=1", VJP_F32);
        compare_setup("conv2d", "x=[2,5,6,9] weight=[17,2,3,9] stride_h=2 padding_w=1 layout=channels_last", VJP_BF16);
        stop();
    }
}

/* One thread a group, so that a few rows are more groups than a row of the grid holds. */
static void more_groups_than_a_row_of_the_grid_holds(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.max_threads = 1;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    compare_setup("rms_norm", "x=[70001,1] eps=0.5", VJP_F32);
    stop();
    stand_in_reset();
    stand_in.max_threads = 1;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    static float zero[70001 * 3];
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){70001, 3}, zero, sizeof zero);
    assert_int_equal(norm(&x, &x), VJP_OK);
    assert_int_equal(stand_in.grid[1], 2);
    assert_int_equal(stand_in.grid[0], 35001); /* one group too many, which does nothing */
    vjp_free(device, x.data);
    stop();
}

/* Sizes are integers all the way: as floats, 2^24 + 1 columns would be 2^24, and the last one lost. */
static void a_row_past_2_to_24_keeps_its_last_column(void **state) {
    (void)state;
    start();
    enum { DIM = (1 << 24) + 1 };
    uint16_t *host = malloc(DIM * sizeof *host);
    for (int i = 0; i < DIM; i++)
        host[i] = 0x3f80;   /* 1 */
    host[DIM - 1] = 0x4580; /* 4096: half of the sum of squares */
    float rstd = 0;
    vjp_tensor x = on_device(VJP_BF16, 2, (int64_t[]){1, DIM}, host, DIM * sizeof *host);
    vjp_tensor r = on_device(VJP_F32, 1, (int64_t[]){1}, &rstd, sizeof rstd);
    if (vjp_rms_norm_forward(device, NULL, &r, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 0)) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, &rstd, r.data, 0, sizeof rstd), VJP_OK);
    assert_true(fabs((double)rstd - sqrt(0.5)) < 1e-6);
    vjp_free(device, x.data);
    vjp_free(device, r.data);
    free(host);
    stop();
}

/* Orders of threads and groups change from launch to launch, and here the width of a simdgroup too: the same bits. */
static void results_do_not_depend_on_how_threads_run(void **state) {
    (void)state;
    static const int64_t dims[] = {65, 1025, 4097};
    for (size_t t = 0; t < sizeof dims / sizeof dims[0]; t++) {
        enum { ROWS_HERE = 5, MAX_DIM = 4097 };
        static float x[ROWS_HERE * MAX_DIM], first[ROWS_HERE * MAX_DIM + MAX_DIM], again[ROWS_HERE * MAX_DIM + MAX_DIM];
        size_t count = (size_t)(ROWS_HERE * dims[t]);
        for (size_t i = 0; i < count; i++)
            x[i] = (float)(i * 2654435761u % 1999) / 1000 - 1;
        for (size_t run = 0; run < 6; run++) {
            start();
            emulate_with = (emulate_settings){EMULATE_IN_TURN, widths[run]};
            vjp_tensor tx = on_device(VJP_F32, 2, (int64_t[]){ROWS_HERE, dims[t]}, x, count * sizeof *x);
            vjp_tensor dy = on_device(VJP_F32, 2, (int64_t[]){ROWS_HERE, dims[t]}, x, count * sizeof *x);
            vjp_tensor dgamma = on_device(VJP_F32, 1, (int64_t[]){dims[t]}, x, (size_t)dims[t] * sizeof *x);
            assert_int_equal(vjp_layer_norm_backward(device, &dy, &dgamma, NULL, &dy, &tx, NULL, NULL, NULL, NULL),
                             VJP_OK);
            assert_int_equal(vjp_download(device, again, dy.data, 0, count * sizeof *again), VJP_OK);
            assert_int_equal(vjp_download(device, again + count, dgamma.data, 0, (size_t)dims[t] * sizeof *again),
                             VJP_OK);
            if (run == 0) memcpy(first, again, sizeof first);
            if (memcmp(first, again, (count + (size_t)dims[t]) * sizeof *again) != 0)
                fail_msg("%d columns: simdgroups of %u give other bits", (int)dims[t], widths[run]);
            vjp_free(device, tx.data), vjp_free(device, dy.data), vjp_free(device, dgamma.data);
            stop();
        }
    }
}

/* More parameters than a merged launch has rows: two launches for the optimizer's step, and the weights of one by one.
 */
static void more_calls_than_a_table_holds_are_several_launches(void **state) {
    (void)state;
    enum { COUNT = METAL_ROWS + 8 };
    float result[2][COUNT];
    long launches[2];
    start();
    vjp_graph *g = vjp_graph_create();
    vjp_value weight[COUNT], sum = 0;
    for (int i = 0; i < COUNT; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        weight[i] = vjp_graph_parameter(g, name, VJP_F32, 1, (const int64_t[]){1});
        vjp_value square = vjp_graph_mul(g, weight[i], weight[i], NULL);
        sum = i ? vjp_graph_add(g, sum, square, NULL) : square;
    }
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_graph_minimize(g, vjp_graph_mean(g, sum, WITH(mean, .axis = 0, .axes = 1)), &options, &made);
    for (int unplanned = 0; unplanned < 2; unplanned++) {
        vjp_program *program;
        double loss;
        const vjp_program_options with = {.struct_size = sizeof with, .unplanned = unplanned};
        if (vjp_compile(device, g, made.results, made.count, &with, &program) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(vjp_program_write(program, weight[i], &(float){(float)i - 7.5f}, sizeof(float)), VJP_OK);
        long before = dispatches_so_far();
        if (vjp_program_step(program, &made, 0.01, 1, &loss) != VJP_OK) fail_msg("%s", vjp_error(device));
        launches[unplanned] = dispatches_so_far() - before;
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(vjp_program_read(program, weight[i], &result[unplanned][i], sizeof(float)), VJP_OK);
        vjp_program_destroy(program);
    }
    assert_memory_equal(result[0], result[1], sizeof result[0]);
    assert_true((double)result[0][0] != -7.5);
    if (launches[0] != launches[1] - COUNT + 2) fail_msg("%ld launches, %ld one by one", launches[0], launches[1]);
    vjp_graph_destroy(g);
    stop();
}

/* ---- What every device must do ------------------------------------------------------------------------ */

static void every_pass_has_kernels_with_or_without_a_gpu(void **state) {
    (void)state;
    if (!device) skip();
    every_pass_has_kernels("metal");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_wrong_with_a_kernel_is_seen),
        cmocka_unit_test(sums_are_right_for_any_team_and_the_same_for_any_width),
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(where_there_is_no_macos_it_is_said),
        cmocka_unit_test(opening_that_fails_says_why_and_keeps_nothing),
        cmocka_unit_test(any_bytes_go_up_and_come_down),
        cmocka_unit_test(copies_within_the_device),
        cmocka_unit_test(calls_share_a_command_buffer_and_no_pipeline_is_made_twice),
        cmocka_unit_test(pipelines_are_made_for_what_differs),
        cmocka_unit_test(failures_of_compiler_and_device_are_a_status),
        cmocka_unit_test(memory_that_is_not_the_devices_is_refused),
        cmocka_unit_test(an_old_system_has_fast_mathematics_off_too),
        cmocka_unit_test(every_op_is_right),
        cmocka_unit_test(shapes_that_have_broken_others),
        cmocka_unit_test(products_in_registers_are_right_too),
        cmocka_unit_test(tiles_of_conv2d_are_right_with_few_threads),
        cmocka_unit_test(more_groups_than_a_row_of_the_grid_holds),
        cmocka_unit_test(a_row_past_2_to_24_keeps_its_last_column),
        cmocka_unit_test(results_do_not_depend_on_how_threads_run),
        cmocka_unit_test(more_calls_than_a_table_holds_are_several_launches),
    };
    const struct CMUnitTest of_any_device[] = {
        cmocka_unit_test(a_warmed_call_makes_no_pipeline),
        cmocka_unit_test(the_first_run_of_a_program_makes_no_pipeline),
        cmocka_unit_test(norms_are_right_near_the_largest_number),
        cmocka_unit_test(a_bad_counter_of_dropout_is_reported_and_writes_nothing),
        cmocka_unit_test(clip_takes_the_root_of_a_square_below_1e_38),
        cmocka_unit_test(a_bad_target_is_reported_and_its_row_ignored),
        cmocka_unit_test(the_loss_of_a_certain_target_keeps_its_digits),
        cmocka_unit_test(gradients_of_improbable_classes_are_not_lost),
        cmocka_unit_test(a_smoothed_loss_with_an_impossible_class_is_infinite),
        cmocka_unit_test(slices_of_one_tensor_give_the_bits_of_packed_ones),
        cmocka_unit_test(raw_products_are_right),
        cmocka_unit_test(a_gate_gives_the_bits_of_swiglu),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        DEVICE_TESTS,
    };
    int failed = cmocka_run_group_tests_name("metal", tests, NULL, NULL);
    start();
    failed += cmocka_run_group_tests_name("metal as any device", of_any_device, NULL, NULL);
    vjp_close(device);
    return failed;
}
