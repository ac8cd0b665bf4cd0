/* SPDX-License-Identifier: MIT */
/*
 * Groups: sums, ranges, copies and shared memory of 1 to 8 ranks, which are threads here (thread_engine.c), bit for bit
 * against a tree that is added by hand; devices whose memory the host cannot read; what is refused; and what a rank
 * says of another that does not answer. And the sum over the shards of a batch, and whole steps of training, which must
 * have the same bits however the shards are spread over ranks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <math.h>

#include "comm/group.h"
#include "core/core.h"
#include "graph/program.h"
#include "train/model/llama.h"
#include "train/trainer/shards.h"
#include "train/trainer/trainer.h"
#include "vjp_engine.h"

_Static_assert(sizeof(void *) != 8 || sizeof(vjp_engine) == 64, "vjp_engine");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_carrier) == 64, "vjp_carrier");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_message) == 48, "vjp_message");
_Static_assert(sizeof(vjp_group_options) == 16, "vjp_group_options");

enum { MAX_RANKS = 8, LONGEST = 3 * 262144 + 7 /* elements: several blocks, none of them even */ };

/* ---- Ranks as threads -------------------------------------------------------------------------------- */

/* cmocka's checks may only fail in its own thread, so that a rank reports what is wrong. */
typedef struct rank_work {
    vjp_device *device;
    vjp_group *group;
    bool far;         /* the device's memory is not the host's */
    int64_t elements; /* of the case */
    char wrong[256];
} rank_work;

typedef void rank_task(rank_work *w);

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition) && !w->wrong[0])                                                                              \
            snprintf(w->wrong, sizeof w->wrong, "%s:%d: %.150s", __FILE__, __LINE__, #condition);                      \
    } while (0)

typedef struct started {
    rank_work work;
    rank_task *task;
    double timeout;
} started;

/* Whether the memory of a device of its own travels by a carrier, not through the host's, and whether it has streams.
 */
static bool carried, streams;
static atomic_int events, events_made;

static vjp_status set_stream(vjp_device *device, void *stream) {
    (void)device, (void)stream;
    return VJP_OK;
}

static vjp_status make_event(vjp_device *device, void **event) {
    (void)device;
    *event = malloc(1);
    events++;
    events_made++;
    return *event ? VJP_OK : VJP_OUT_OF_MEMORY;
}

static vjp_status wait_for_event(vjp_device *device, void *event) {
    (void)device;
    *(char *)event = 1;
    return VJP_OK;
}

/* A recording runs a program as a whole: nothing happens between its calls. */
typedef struct recorded {
    vjp_status (*enqueue)(void *argument);
    vjp_program *program;
} recorded;

static vjp_status make_recording(vjp_device *device, vjp_status (*enqueue)(void *), void *argument, void **recording) {
    (void)device;
    recorded *made = malloc(sizeof *made);
    if (made) *made = (recorded){enqueue, argument};
    *recording = made;
    return made ? VJP_OK : VJP_OUT_OF_MEMORY;
}

static vjp_status replay(vjp_device *device, void *recording) {
    (void)device;
    const recorded *r = recording;
    void (*after)(void *, int32_t) = r->program->after;
    r->program->after = NULL;
    vjp_status status = r->enqueue(r->program);
    r->program->after = after;
    return status;
}

static void free_recording(vjp_device *device, void *recording) {
    (void)device;
    free(recording);
}

static void free_event(vjp_device *device, void *event) {
    (void)device;
    free(event);
    events--;
}

static void *run_rank(void *argument) {
    started *s = argument;
    rank_work *w = &s->work;
    vjp_backend backend;
    const vjp_group_options options = {sizeof options, s->timeout};
    vjp_options one = VJP_OPTIONS_DEFAULTS;
    one.threads = 1;
    one.workspace_bytes = 64;
    REQUIRE(vjp_open("cpu", &one, &w->device) == VJP_OK);
    const vjp_backend *own = w->device->backend;
    if (w->far) {
        backend = *own;
        backend.host_memory = 0;
        if (streams) {
            backend.set_stream = set_stream;
            backend.event_create = make_event;
            backend.event_wait = wait_for_event;
            backend.event_destroy = free_event;
            backend.record = make_recording;
            backend.replay = replay;
            backend.forget = free_recording;
        }
        w->device->backend = &backend;
    }
    REQUIRE(vjp_group_open(w->device, carried ? "threads+threads" : "threads", &options, &w->group) == VJP_OK);
    if (w->group) s->task(w);
    vjp_group_close(w->group);
    w->device->backend = own;
    vjp_close(w->device);
    return NULL;
}

/* `far`: the devices have memory of their own; once without and once with a carrier. */
static void run_ranks(int size, rank_task *task, int64_t elements, bool far) {
    if (far && !carried) {
        carried = true;
        run_ranks(size, task, elements, far);
        carried = false;
    }
    started ranks[MAX_RANKS] = {0};
    pthread_t thread[MAX_RANKS];
    char text[16];
    snprintf(text, sizeof text, "%d", size);
    setenv("VJP_TEST_RANKS", text, 1);
    for (int i = 0; i < size; i++) {
        ranks[i] = (started){.work = {.elements = elements, .far = far}, .task = task, .timeout = 20};
        assert_int_equal(pthread_create(&thread[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < size; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < size; i++)
        if (ranks[i].work.wrong[0])
            fail_msg("%d ranks, %lld elements: %s", size, (long long)elements, ranks[i].work.wrong);
}

/* ---- Numbers whose sum depends on the order ---------------------------------------------------------- */

static float number_of(int64_t shard, int64_t element) {
    uint32_t x = (uint32_t)(shard * 2654435761u + element * 40503u + 12345u);
    x ^= x >> 13, x *= 0x5bd1e995u, x ^= x >> 15;
    return ((float)(x >> 8) / 0x1p24f - 0.5f) * (float)(1 << (x % 20));
}

/* The tree over shards [first, first + count). */
static float tree(int64_t first, int64_t count, int64_t element) {
    if (count == 1) return number_of(first, element);
    return tree(first, count / 2, element) + tree(first + count / 2, count / 2, element);
}

static bool holds(const float *x, int64_t first, int64_t count, int64_t leaves) {
    for (int64_t i = first; i < first + count; i++) {
        float wanted = tree(0, leaves, i);
        if (memcmp(&x[i], &wanted, sizeof wanted) != 0) return false;
    }
    return true;
}

static float *new_numbers(const rank_work *w) {
    float *x = malloc(((size_t)w->elements + 1) * sizeof *x);
    for (int64_t i = 0; i < w->elements; i++)
        x[i] = number_of(vjp_group_rank(w->group), i);
    x[w->elements] = -1;
    return x;
}

/* ---- Sums and copies --------------------------------------------------------------------------------- */

static void sum(rank_work *w) {
    int64_t size = vjp_group_size(w->group), first, count;
    float *x = new_numbers(w);
    const vjp_tensor whole = vjp_tensor_of(x, VJP_F32, 1, &w->elements);
    REQUIRE(vjp_group_sum(w->group, &whole) == VJP_OK);
    REQUIRE(holds(x, 0, w->elements, size));
    REQUIRE(x[w->elements] == -1);
    free(x);

    x = new_numbers(w);
    const vjp_tensor again = vjp_tensor_of(x, VJP_F32, 1, &w->elements);
    vjp_group_range(w->group, w->elements, &first, &count);
    REQUIRE(count == w->elements / size || count == w->elements / size + 1);
    REQUIRE(vjp_group_reduce_scatter(w->group, &again) == VJP_OK);
    REQUIRE(holds(x, first, count, size));
    for (int64_t i = 0; i < w->elements; i++)
        if (i < first || i >= first + count) x[i] = -2;
    REQUIRE(vjp_group_all_gather(w->group, &again) == VJP_OK);
    REQUIRE(holds(x, 0, w->elements, size));
    REQUIRE(x[w->elements] == -1);
    free(x);
}

static void copies(rank_work *w) {
    int32_t size = vjp_group_size(w->group), rank = vjp_group_rank(w->group);
    int32_t all[MAX_RANKS] = {0};
    int64_t *x = calloc((size_t)w->elements + 1, sizeof *x);
    const vjp_tensor tensor = vjp_tensor_of(x, VJP_I64, 1, &w->elements);
    for (int32_t root = 0; root < size; root++) {
        for (int64_t i = 0; i < w->elements; i++)
            x[i] = rank == root ? root * 1000 + i : -1;
        REQUIRE(vjp_group_broadcast(w->group, &tensor, root) == VJP_OK);
        for (int64_t i = 0; i < w->elements; i++)
            REQUIRE(x[i] == root * 1000 + i);
    }
    free(x);
    all[rank] = 100 + rank;
    REQUIRE(vjp_group_share(w->group, all, sizeof all[0]) == VJP_OK);
    for (int32_t i = 0; i < size; i++)
        REQUIRE(all[i] == 100 + i);
    REQUIRE(vjp_group_barrier(w->group) == VJP_OK);
}

static void ranks_sum_as_a_tree(void **unused) {
    (void)unused;
    static const int64_t lengths[] = {0, 1, 2, 3, 5, 8, 1000, 65536, LONGEST};
    for (int size = 1; size <= MAX_RANKS; size *= 2)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            for (int far = 0; far < 2; far++) {
                run_ranks(size, sum, lengths[i], far);
                if (lengths[i] < 2000 || size == 4) run_ranks(size, copies, lengths[i], far);
            }
}

/* ---- Shards ------------------------------------------------------------------------------------------ */

enum { SHARDS = 8, GRADIENTS = 3 };

/* Every rank computes its own shards, as the trainer does: the gradients are overwritten by each. */
static void sum_shards(rank_work *w) {
    static const int64_t lengths[GRADIENTS] = {5, 1, 70};
    float memory[76], *at = memory;
    vjp_tensor gradient[GRADIENTS];
    shards s;
    char error[TRAIN_ERROR];
    for (int i = 0; i < GRADIENTS; at += lengths[i], i++)
        gradient[i] = vjp_tensor_of(at, VJP_F32, 1, &lengths[i]);
    REQUIRE(shards_split(&s, w->device, w->group, SHARDS, error));
    REQUIRE(shards_create(&s, gradient, GRADIENTS) == VJP_OK);
    for (int step = 0; step < 2; step++) {
        for (int64_t i = 0; i < s.own; i++) {
            for (int64_t k = 0; k < 76; k++)
                memory[k] = number_of(s.first + i, k);
            REQUIRE(shards_add(&s, i) == VJP_OK);
        }
        REQUIRE(shards_sum(&s, false) == VJP_OK);
        REQUIRE(holds(memory, 0, 76, SHARDS));
    }
    shards_free(&s);
}

static void shards_sum_as_a_tree(void **unused) {
    (void)unused;
    for (int size = 1; size <= MAX_RANKS; size *= 2)
        run_ranks(size, sum_shards, 0, false);
}

static void wrong_shards(rank_work *w) {
    shards s;
    char error[TRAIN_ERROR];
    REQUIRE(!shards_split(&s, w->device, w->group, 2, error));
    REQUIRE(strstr(error, "4 processes cannot share 2 shards") != NULL);
    REQUIRE(!shards_split(&s, w->device, w->group, 12, error));
    REQUIRE(strstr(error, "must be a power of two") != NULL);
    REQUIRE(!shards_split(&s, w->device, w->group, 0, error));
}

/* ---- What is refused --------------------------------------------------------------------------------- */

static void wrong_tensors(rank_work *w) {
    float x[6] = {0, 1, 2, 3, 4, 5};
    const int64_t shape[] = {2, 3};
    vjp_tensor tensor = vjp_tensor_of(x, VJP_F32, 2, shape), wrong = tensor;
    REQUIRE(vjp_group_sum(w->group, NULL) == VJP_INVALID);
    wrong.stride[0] = 4;
    REQUIRE(vjp_group_sum(w->group, &wrong) == VJP_UNSUPPORTED);
    REQUIRE(strstr(vjp_error(w->device), "group.sum: the tensor is not packed") != NULL);
    wrong = tensor;
    wrong.dtype = VJP_BF16;
    REQUIRE(vjp_group_reduce_scatter(w->group, &wrong) == VJP_UNSUPPORTED);
    REQUIRE(strstr(vjp_error(w->device), "sums are of f32") != NULL);
    wrong = tensor;
    wrong.data = NULL;
    REQUIRE(vjp_group_all_gather(w->group, &wrong) == VJP_INVALID);
    REQUIRE(vjp_group_broadcast(w->group, &tensor, 4) == VJP_INVALID);
    REQUIRE(vjp_group_broadcast(w->group, &tensor, -1) == VJP_INVALID);
    REQUIRE(vjp_group_share(w->group, x, SIZE_MAX / 2) == VJP_INVALID);
    for (int i = 0; i < 6; i++)
        REQUIRE(x[i] == (float)i);
    REQUIRE(vjp_group_sum(w->group, &tensor) == VJP_OK); /* none of that was a failure of the communication */
    REQUIRE(x[5] == 20);
}

/* Rank 1 has another size than rank 0; from then on the group has failed. */
static void other_sizes(rank_work *w) {
    float x[8] = {0};
    int64_t count = vjp_group_rank(w->group) ? 8 : 6;
    const vjp_tensor tensor = vjp_tensor_of(x, VJP_F32, 1, &count);
    REQUIRE(vjp_group_sum(w->group, &tensor) == VJP_GROUP_FAILED);
    REQUIRE(strstr(vjp_error(w->device), "sent another size") != NULL);
    REQUIRE(vjp_group_has_failed(w->group));
    REQUIRE(vjp_group_barrier(w->group) == VJP_GROUP_FAILED);
    REQUIRE(strstr(vjp_error(w->device), "sent another size") != NULL);
    REQUIRE(vjp_group_reporter(w->group) == vjp_group_rank(w->group));
}

static void wrong_calls_are_refused(void **unused) {
    (void)unused;
    run_ranks(4, wrong_tensors, 0, false);
    run_ranks(4, wrong_shards, 0, false);
    run_ranks(2, other_sizes, 0, false);
}

static void expect_refused(const char *name, const vjp_group_options *options, vjp_status status, const char *text) {
    vjp_device *device;
    vjp_group *group;
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    assert_int_equal(vjp_group_open(device, name, options, &group), status);
    assert_null(group);
    if (!strstr(vjp_error(device), text)) fail_msg("%s", vjp_error(device));
    vjp_close(device);
}

static void wrong_groups_are_refused(void **unused) {
    (void)unused;
    const vjp_group_options none = {0}, negative = {sizeof negative, -1};
    setenv("VJP_TEST_RANKS", "3", 1);
    expect_refused("threads", NULL, VJP_INVALID, "there are 3 processes; it must be a power of two");
    setenv("VJP_TEST_RANKS", "0", 1);
    expect_refused("threads", NULL, VJP_NO_DEVICE, "VJP_TEST_RANKS is not");
    expect_refused("nothing", NULL, VJP_NO_DEVICE, "group nothing: its engine is not installed");
    expect_refused("outside", NULL, VJP_NO_DEVICE, "has no vjp_engine_entry()");
    expect_refused("../self", NULL, VJP_NO_DEVICE, "unknown; there are self, mpi");
    setenv("SLURM_STEP_NUM_TASKS", "2", 1); /* by srun, without PMIx and PMI2: each would train by itself */
    expect_refused("auto", NULL, VJP_NO_DEVICE, "srun has started 2 processes without an MPI: it needs --mpi=pmix");
    expect_refused("mpi", NULL, VJP_NO_DEVICE, "srun has started 2 processes without an MPI");
    unsetenv("SLURM_STEP_NUM_TASKS");
    expect_refused("self", &none, VJP_INVALID, "options.struct_size is 0");
    expect_refused("self", &negative, VJP_INVALID, "options.timeout is -1");
}

static void one_process_is_a_group(void **unused) {
    (void)unused;
    vjp_device *device;
    vjp_group *group;
    float x = 3;
    const vjp_tensor tensor = vjp_tensor_of(&x, VJP_F32, 0, NULL);
    unsetenv("OMPI_COMM_WORLD_SIZE"), unsetenv("PMIX_RANK"), unsetenv("PMI_RANK");
    setenv("SLURM_STEP_NUM_TASKS", "1", 1);
    assert_int_equal(vjp_open("ref", NULL, &device), VJP_OK);
    assert_int_equal(vjp_group_open(device, "auto", NULL, &group), VJP_OK);
    assert_int_equal(vjp_group_size(group), 1);
    assert_int_equal(vjp_group_rank(group), 0);
    assert_int_equal(vjp_group_sum(group, &tensor), VJP_OK);
    assert_true(x == 3);
    assert_int_equal(vjp_group_barrier(group), VJP_OK);
    vjp_group_close(group);
    vjp_close(device);
    assert_int_equal(vjp_group_size(NULL), 1);
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    assert_int_equal(vjp_group_unconnected(), 4);
    setenv("PMI_RANK", "0", 1);
    assert_string_equal(vjp_group_launcher(), "mpich");
    assert_int_equal(vjp_group_unconnected(), 0);
    unsetenv("SLURM_STEP_NUM_TASKS");
    setenv("MPI_LOCALNRANKS", "6", 1);
    assert_int_equal(vjp_group_local_size(), 6);
    unsetenv("MPI_LOCALNRANKS"), unsetenv("PMI_RANK");
    assert_null(vjp_group_launcher());
    setenv("SLURM_TASKS_PER_NODE", "4(x2)", 1); /* of a batch script: no launcher */
    assert_int_equal(vjp_group_local_size(), 1);
    unsetenv("SLURM_TASKS_PER_NODE");
}

/* ---- Steps of training ------------------------------------------------------------------------------- */

enum { STEPS = 3, CONTEXT = 5, VOCABULARY = 11, ROWS = 1, WEIGHTS = 4000 };
enum { STEP_EVENTS = 2 * (2 + 4 + 4) * STEPS }; /* at most: 2, 4 and 4 ranks, each with a carrier and without */

/* The data of a part depend on its number alone. */
static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    (void)context;
    for (int64_t t = 0; t < ROWS * CONTEXT; t++) {
        uint64_t at = part * 7 + (uint64_t)t * (part + 3) + (validation ? 5 : 0);
        ((int32_t *)input)[t] = (int32_t)(at % VOCABULARY);
        target[t] = (int32_t)((at * at + 1) % VOCABULARY);
    }
}

static const train_source source = {.fill = fill, .validation_parts = 16};

/* What a run gives: losses, norms, the validation loss, and the first weights and moments. */
typedef struct run_result {
    double numbers[2 * STEPS + 1];
    float weights[WEIGHTS];
} run_result;

/* How a run trains; the bits of each are those of one process. */
static const struct variant {
    trainer_optimiser optimiser;
    double average;
    bool zero, overlap;
} variants[] = {
    {TRAINER_ADAMW, 0, false, false}, {TRAINER_ADAMW, 0, true, false}, {TRAINER_ADAMW, 0, false, true},
    {TRAINER_ADAMW, 0.9, true, true}, {TRAINER_SGD, 0, true, true},    {TRAINER_MUON, 0, false, false},
    {TRAINER_MUON, 0, true, false},   {TRAINER_MUON, 0.9, true, true},
};
static const struct variant *trains; /* the current one */

static run_result alone; /* of one process with all shards */

static trainer *new_trainer(rank_work *w, train_model *model, char error[TRAIN_ERROR]) {
    const llama_config config = {.vocab_size = VOCABULARY,
                                 .hidden_size = 8,
                                 .intermediate_size = 12,
                                 .layers = 1,
                                 .heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 4,
                                 .max_positions = CONTEXT,
                                 .rope_theta = 10000,
                                 .norm_eps = 1e-5,
                                 .tied = true, /* two calls add to its gradient */
                                 .dtype = VJP_F32};
    const llama_options options = {.batch = ROWS, .context = CONTEXT, .dtype = VJP_F32};
    const trainer_options how = {.steps = 10,
                                 .warmup = 1,
                                 .accumulate = 2,
                                 .rate = 1e-2,
                                 .max_norm = 0.5,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95,
                                 .eps = 1e-8,
                                 .seed = 5,
                                 .optimiser = trains->optimiser,
                                 .momentum = 0.9,
                                 .average = trains->average,
                                 .shards = SHARDS,
                                 .group = w->group,
                                 .zero = trains->zero,
                                 .overlap = trains->overlap};
    llama_build(model, &config, &options);
    return trainer_create(w->device, model, &how, error);
}

/* The floats of a list of tensors, those that another process writes left as they are. */
static void add_weights(float *weights, size_t *at, const safetensors_tensor *tensor, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t elements = 1;
        for (int axis = 0; axis < tensor[i].ndim; axis++)
            elements *= (size_t)tensor[i].shape[axis];
        for (size_t k = 0; k < elements && *at < WEIGHTS; k++, (*at)++)
            if (tensor[i].data) weights[*at] = ((const float *)tensor[i].data)[k];
    }
}

/* Every tensor has one writer. */
static bool is_written_once(rank_work *w, const safetensors_tensor *tensor, size_t count) {
    int32_t size = vjp_group_size(w->group), rank = vjp_group_rank(w->group);
    char *writes = calloc((size_t)size, count);
    for (size_t i = 0; i < count; i++)
        writes[(size_t)rank * count + i] = tensor[i].data != NULL;
    bool once = vjp_group_share(w->group, writes, count) == VJP_OK;
    for (size_t i = 0; i < count; i++) {
        int writers = 0;
        for (int32_t r = 0; r < size; r++)
            writers += writes[(size_t)r * count + i];
        once = once && writers == 1;
    }
    free(writes);
    return once;
}

static void train_steps(rank_work *w) {
    train_model model;
    char error[TRAIN_ERROR] = "";
    trainer *t = new_trainer(w, &model, error);
    REQUIRE(t != NULL);
    run_result *r = calloc(1, sizeof *r);
    for (int step = 1; step <= STEPS && t; step++) {
        trainer_step_result result = {0};
        REQUIRE(trainer_step(t, &source, step, &result, error));
        r->numbers[2 * step - 2] = result.loss;
        r->numbers[2 * step - 1] = result.norm;
    }
    if (trains->overlap && vjp_group_size(w->group) > 1)
        REQUIRE((trainer_no_overlap(t) == NULL) == (!w->far || streams));
    REQUIRE(trainer_evaluate(t, &source, 2, &r->numbers[2 * STEPS], error));
    const safetensors_tensor *weights, *moments;
    size_t count, more, at = 0;
    REQUIRE(trainer_tensors(t, &weights, &count, &moments, &more, error));
    REQUIRE(is_written_once(w, weights, count) && is_written_once(w, moments, more));
    if (vjp_group_size(w->group) > 1) memcpy(r->weights, alone.weights, sizeof r->weights);
    add_weights(r->weights, &at, weights, count);
    add_weights(r->weights, &at, moments, more);
    REQUIRE(at > 1000 && at < WEIGHTS);
    if (vjp_group_size(w->group) == 1) alone = *r;
    REQUIRE(memcmp(r->weights, alone.weights, sizeof r->weights) == 0);
    REQUIRE(memcmp(r->numbers, alone.numbers, sizeof r->numbers) == 0);
    if (w->wrong[0] && error[0]) snprintf(w->wrong, sizeof w->wrong, "%.200s", error);
    free(r);
    trainer_destroy(t);
    model_free(&model);
}

/* One rank has a weight that is no number: all ranks stop at the same step, and that rank says where it is. */
static void one_has_a_nan(rank_work *w) {
    bool last = vjp_group_rank(w->group) == vjp_group_size(w->group) - 1;
    train_model model;
    char error[TRAIN_ERROR] = "";
    float norm[8] = {1, 1, 1, NAN, 1, 1, 1, 1};
    const safetensors_tensor bad = {
        .name = "model.norm.weight", .dtype = VJP_F32, .ndim = 1, .shape = {8}, .data = norm};
    trainer *t = new_trainer(w, &model, error);
    trainer_step_result result;
    REQUIRE(trainer_step(t, &source, 1, &result, error));
    if (last) REQUIRE(trainer_load(t, &bad, error));
    REQUIRE(!trainer_step(t, &source, 2, &result, error));
    REQUIRE(trainer_failed_together(t));
    if (last)
        REQUIRE(strstr(error, "step 2: the loss is nan; where it first appears: model.norm.weight holds nan") != NULL);
    else
        REQUIRE(!error[0]);
    trainer_destroy(t);
    model_free(&model);
}

static void training_has_the_same_bits(void **unused) {
    (void)unused;
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        trains = &variants[i];
        for (int size = 1; size <= MAX_RANKS; size *= 2)
            run_ranks(size, train_steps, (int64_t)i, false);
        run_ranks(4, train_steps, (int64_t)i, true);
        streams = true;
        events_made = 0;
        run_ranks(2, train_steps, (int64_t)i, true);
        run_ranks(4, train_steps, (int64_t)i, true);
        run_ranks(4, one_has_a_nan, (int64_t)i, true);
        streams = false;
        assert_int_equal(events, 0);
        assert_true(trains->overlap == (events_made > STEP_EVENTS)); /* more: those of buckets */
        run_ranks(4, one_has_a_nan, (int64_t)i, false);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_sum_as_a_tree),     cmocka_unit_test(shards_sum_as_a_tree),
        cmocka_unit_test(wrong_calls_are_refused), cmocka_unit_test(wrong_groups_are_refused),
        cmocka_unit_test(one_process_is_a_group),  cmocka_unit_test(training_has_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
