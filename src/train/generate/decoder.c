/* SPDX-License-Identifier: MIT */
/*
 * See decoder.h. Opening decides, for each value of the graph, where it is:
 *
 *     place        values                                    memory
 *     fixed        parameters, constants, and what is        loaded or computed once, one allocation each
 *                  computed from these alone
 *     rows         what depends on the tokens                an arena, planned by lifetime, for `rows` rows
 *     last rows    what is computed after the last           the same arena, for the rows whose logits are wanted
 *                  attention                                 (one per text): most of a prompt never sees the head
 *
 * A cast of a parameter, as models with 16-bit products have for every weight, is loaded in the type of its result:
 * the weights are held once, in the type in which they are read.
 */
#include "train/generate/decoder.h"

#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/half.h"
#include "graph/graph.h"
#include "op/op.h"
#include "train/job/fit.h"

typedef enum place_kind { PLACE_NONE, PLACE_FIXED, PLACE_ROWS, PLACE_LAST_ROWS } place_kind;

typedef struct place {
    place_kind kind;
    void *data;
    size_t offset, row_bytes;
    bool owned;        /* `data` is an allocation of its own */
    const char *loads; /* the parameter whose numbers it holds; NULL: it is computed */
} place;

/* Rows of a call that belong to one text. */
typedef struct segment {
    int64_t text, first, count;
} segment;

/* The keys and values of one attention, [texts, context, kv_heads, dim] each. */
typedef struct cache_layer {
    void *keys, *values;
    size_t row_bytes;
} cache_layer;

struct decoder {
    vjp_device *device;
    const vjp_graph *graph;
    vjp_value input, logits;
    int64_t texts, context, rows, vocabulary;
    bool all_logits;
    bool *needed;       /* [values] */
    int32_t *node_list; /* [nodes], in the order of the graph */
    int32_t nodes;
    int32_t after;      /* the first of them after the last attention */
    place *place;       /* [values]; of a view, its origin's counts */
    cache_layer *layer; /* [nodes]: of those that are attention */
    void *arena, *positions;
    int32_t *host_positions; /* [rows] */
    void *host_logits;       /* [rows or texts, vocabulary] in the dtype of the logits */
    int64_t *length;         /* [texts] */
    size_t weight_bytes, cache_bytes, arena_bytes;
};

static bool fail_device(const decoder *d, char error[TRAIN_ERROR]) {
    return train_fail(error, "%.*s", TRAIN_ERROR - 1, vjp_error(d->device));
}

static bool fail_memory(char error[TRAIN_ERROR]) {
    return train_fail(error, "there is no memory to run the model");
}

static const graph_node *node_at(const decoder *d, int32_t index) {
    return &d->graph->node[d->node_list[index]];
}

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static bool is_attention(const graph_node *node) {
    return node->op->id == OP_ID(attention);
}

static place *place_of(const decoder *d, vjp_value value) {
    return &d->place[d->graph->value[value].origin];
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* Rows [first, first + count) of a value; all of it where it has no rows. */
static vjp_tensor rows_of(const decoder *d, vjp_value value, int64_t first, int64_t count) {
    const graph_value *v = &d->graph->value[value];
    const place *p = place_of(d, value);
    vjp_shape shape = v->shape;
    bool has_rows = p->kind == PLACE_ROWS || p->kind == PLACE_LAST_ROWS;
    if (has_rows) shape.size[1] = count;
    vjp_tensor t = vjp_tensor_of(p->data, v->dtype, shape.ndim, shape.size);
    t.offset = p->offset + (has_rows ? (size_t)first * p->row_bytes : 0);
    return t;
}

static bool call(const decoder *d, const graph_node *node, const vjp_tensor *tensors, const bool *present,
                 char error[TRAIN_ERROR]) {
    const vjp_tensor *slots[VJP_MAX_SLOTS];
    size_t count = pass_of(node)->count, bytes = 0;
    for (size_t i = 0; i < count; i++)
        slots[i] = present[i] ? &tensors[i] : NULL;
    vjp_status status = vjp_call(d->device, node->op, node->pass, slots, count, node->attributes);
    if (status == VJP_WORKSPACE &&
        vjp_workspace_size(d->device, node->op, node->pass, slots, count, node->attributes, &bytes) == VJP_OK &&
        vjp_reserve(d->device, bytes) == VJP_OK)
        status = vjp_call(d->device, node->op, node->pass, slots, count, node->attributes);
    return status == VJP_OK || fail_device(d, error);
}

static bool run_attention(const decoder *d, int32_t index, const segment *s, char error[TRAIN_ERROR]) {
    const graph_node *node = node_at(d, index);
    const cache_layer *layer = &d->layer[index];
    int64_t length = d->length[s->text], keys = length + s->count;
    vjp_tensor tensors[VJP_MAX_SLOTS];
    bool present[VJP_MAX_SLOTS] = {
        [ATTENTION_Y] = true, [ATTENTION_Q] = true, [ATTENTION_K] = true, [ATTENTION_V] = true};
    tensors[ATTENTION_Y] = rows_of(d, node->value[ATTENTION_Y], s->first, s->count);
    tensors[ATTENTION_Q] = rows_of(d, node->value[ATTENTION_Q], s->first, s->count);
    for (int slot = ATTENTION_K; slot <= ATTENTION_V; slot++) {
        vjp_tensor from = rows_of(d, node->value[slot], s->first, s->count);
        void *cache = slot == ATTENTION_K ? layer->keys : layer->values;
        size_t at = (size_t)(s->text * d->context) * layer->row_bytes;
        if (vjp_copy(d->device, cache, at + (size_t)length * layer->row_bytes, from.data, from.offset,
                     (size_t)s->count * layer->row_bytes) != VJP_OK)
            return fail_device(d, error);
        from.shape[1] = keys;
        tensors[slot] = vjp_tensor_of(cache, (vjp_dtype)from.dtype, from.ndim, from.shape);
        tensors[slot].offset = at;
    }
    return call(d, node, tensors, present, error);
}

/* Every other node: rows [first, first + count) of the call; fixed values as they are. */
static bool run_rows(const decoder *d, int32_t index, int64_t first, int64_t count, char error[TRAIN_ERROR]) {
    const graph_node *node = node_at(d, index);
    const vjp_pass_info *pass = pass_of(node);
    vjp_tensor tensors[VJP_MAX_SLOTS];
    bool present[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < pass->count; i++) {
        vjp_value value = node->value[i];
        present[i] = value && d->needed[d->graph->value[value].origin];
        if (!present[i]) continue;
        tensors[i] = rows_of(d, value, place_of(d, value)->kind == PLACE_LAST_ROWS ? 0 : first, count);
    }
    if (node->op->id == OP_ID(rope)) {
        tensors[ROPE_POSITIONS] = vjp_tensor_of(d->positions, VJP_I32, 1, &count);
        tensors[ROPE_POSITIONS].offset = (size_t)first * sizeof(int32_t);
        present[ROPE_POSITIONS] = true;
    }
    return call(d, node, tensors, present, error);
}

static bool is_fixed_node(const decoder *d, int32_t index) {
    return place_of(d, node_at(d, index)->value[0])->kind == PLACE_FIXED;
}

/*
 * Runs the graph on the rows of some segments and lengthens their texts. `last`: the rows, from the end, whose logits
 * are wanted.
 */
static bool run(decoder *d, const int32_t *tokens, int64_t rows, const segment *segments, int64_t count, int64_t last,
                char error[TRAIN_ERROR]) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < segments[i].count; r++)
            d->host_positions[segments[i].first + r] = (int32_t)(d->length[segments[i].text] + r);
    const place *input = place_of(d, d->input);
    size_t bytes = (size_t)rows * sizeof *tokens;
    if (vjp_upload(d->device, input->data, input->offset, tokens, bytes) != VJP_OK ||
        vjp_upload(d->device, d->positions, 0, d->host_positions, bytes) != VJP_OK)
        return fail_device(d, error);
    for (int32_t n = 0; n < d->nodes; n++) {
        bool ok = true;
        if (is_fixed_node(d, n) || (n >= d->after && !last)) continue;
        if (is_attention(node_at(d, n)))
            for (int64_t i = 0; i < count && ok; i++)
                ok = run_attention(d, n, &segments[i], error);
        else
            ok = n < d->after ? run_rows(d, n, 0, rows, error) : run_rows(d, n, rows - last, last, error);
        if (!ok) return false;
    }
    return true;
}

/* Copies the last call's logits to the caller, as f32. */
static bool read_logits(decoder *d, int64_t rows, float *logits, char error[TRAIN_ERROR]) {
    const place *p = place_of(d, d->logits);
    vjp_dtype dtype = d->graph->value[d->logits].dtype;
    int64_t count = rows * d->vocabulary;
    void *to = dtype == VJP_F32 ? (void *)logits : d->host_logits;
    if (vjp_synchronize(d->device) != VJP_OK ||
        vjp_download(d->device, to, p->data, p->offset, (size_t)rows * p->row_bytes) != VJP_OK)
        return fail_device(d, error);
    const uint16_t *half = d->host_logits;
    for (int64_t i = 0; i < count && dtype != VJP_F32; i++)
        logits[i] = dtype == VJP_BF16 ? vjp_bf16_to_f32(half[i]) : vjp_f16_to_f32(half[i]);
    return true;
}

bool decoder_append(decoder *d, int64_t text, const int32_t *tokens, int64_t count, float *logits,
                    char error[TRAIN_ERROR]) {
    int64_t before = d->length[text];
    if (count < 1 || count > d->context - before)
        return train_fail(error, "%lld tokens are to follow %lld, and the context has %lld", (long long)count,
                          (long long)before, (long long)d->context);
    bool ok = true;
    for (int64_t done = 0, rows; done < count && ok; done += rows) {
        rows = vjp_min(d->rows, count - done);
        int64_t last = d->all_logits ? rows : done + rows == count;
        ok = run(d, tokens + done, rows, &(segment){text, 0, rows}, 1, last, error);
        d->length[text] += rows;
        if (ok && last) ok = read_logits(d, last, logits + (d->all_logits ? done * d->vocabulary : 0), error);
    }
    if (!ok) d->length[text] = before;
    return ok;
}

bool decoder_step(decoder *d, const int64_t *texts, const int32_t *tokens, int64_t count, float *logits,
                  char error[TRAIN_ERROR]) {
    segment segments[DECODER_MAX_TEXTS];
    if (count < 1 || count > d->texts || count > d->rows)
        return train_fail(error, "%lld texts at once; this decoder has room for %lld", (long long)count,
                          (long long)vjp_min(d->texts, d->rows));
    for (int64_t i = 0; i < count; i++) {
        if (d->length[texts[i]] == d->context)
            return train_fail(error, "the context of %lld tokens is full", (long long)d->context);
        segments[i] = (segment){texts[i], i, 1};
    }
    if (!run(d, tokens, count, segments, count, count, error) || !read_logits(d, count, logits, error)) return false;
    for (int64_t i = 0; i < count; i++)
        d->length[texts[i]]++;
    return true;
}

int64_t decoder_length(const decoder *d, int64_t text) {
    return d->length[text];
}

int64_t decoder_room(const decoder *d) {
    return d->context;
}

size_t decoder_weight_bytes(const decoder *d) {
    return d->weight_bytes;
}

size_t decoder_cache_bytes(const decoder *d) {
    return d->cache_bytes;
}

void decoder_clear(decoder *d, int64_t text) {
    d->length[text] = 0;
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

static bool find_nodes(decoder *d, char error[TRAIN_ERROR]) {
    size_t values = (size_t)d->graph->values, nodes = (size_t)d->graph->nodes;
    bool *result = calloc(values, sizeof *result);
    int32_t *maker = malloc(values * sizeof *maker);
    d->needed = calloc(values, sizeof *d->needed);
    d->node_list = calloc(nodes + 1, sizeof *d->node_list);
    d->place = calloc(values, sizeof *d->place);
    d->layer = calloc(nodes + 1, sizeof *d->layer);
    bool ok = result && maker && d->needed && d->node_list && d->place && d->layer &&
              graph_find_needed(d->graph, &d->logits, 1, d->needed, result, maker, d->node_list, &d->nodes);
    free(result);
    free(maker);
    if (!ok) return fail_memory(error);
    for (int32_t n = 0; n < d->nodes; n++)
        if (is_attention(node_at(d, n))) d->after = n + 1;
    return true;
}

/* Whether a node reads nothing that depends on the tokens. */
static bool reads_fixed(const decoder *d, const graph_node *node) {
    const vjp_pass_info *pass = pass_of(node);
    for (size_t i = pass->outputs; i < pass->count; i++)
        if (node->value[i] && place_of(d, node->value[i])->kind != PLACE_FIXED) return false;
    return true;
}

/* Bytes of one row of a value that has rows: its shape must be [1, context, ...]. */
static bool set_rows(decoder *d, vjp_value value, place_kind kind, char error[TRAIN_ERROR]) {
    const graph_value *v = &d->graph->value[value];
    place *p = &d->place[value];
    if (v->shape.ndim < 2 || v->shape.size[0] != 1 || v->shape.size[1] != d->context)
        return train_fail(error, "%.200s is not computed token by token: the model cannot be run with a cache",
                          v->name ? v->name : "a value");
    *p = (place){.kind = kind, .row_bytes = v->bytes / (size_t)d->context};
    return true;
}

/* A view must have the rows of its origin. */
static bool check_views(const decoder *d, const graph_node *node, char error[TRAIN_ERROR]) {
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        if (!node->value[i]) continue;
        const graph_value *v = &d->graph->value[node->value[i]];
        place_kind kind = place_of(d, node->value[i])->kind;
        if (v->role != GRAPH_VIEW || kind == PLACE_FIXED || kind == PLACE_NONE) continue;
        if (v->shape.ndim < 2 || v->shape.size[0] != 1 || v->shape.size[1] != d->context)
            return train_fail(error, "%.200s mixes tokens: the model cannot be run with a cache", node->name);
    }
    return true;
}

/* Decides the kind of each value's place. */
static bool set_places(decoder *d, char error[TRAIN_ERROR]) {
    const vjp_graph *g = d->graph;
    for (vjp_value v = 1; v < g->values; v++) {
        if (g->value[v].role == GRAPH_PARAMETER || g->value[v].role == GRAPH_CONSTANT) d->place[v].kind = PLACE_FIXED;
        if (g->value[v].role == GRAPH_PARAMETER) d->place[v].loads = g->value[v].name;
    }
    if (!set_rows(d, d->input, PLACE_ROWS, error)) return false;
    for (int32_t n = 0; n < d->nodes; n++) {
        const graph_node *node = node_at(d, n);
        bool fixed = reads_fixed(d, node);
        if (node->pass != VJP_FORWARD || node->adds || (node->op->id == OP_ID(rope) && node->value[ROPE_POSITIONS]))
            return train_fail(error, "%.200s cannot be run with a cache", node->name);
        for (size_t i = 0; i < pass_of(node)->outputs; i++) {
            vjp_value value = node->value[i];
            if (!value || !d->needed[value]) continue;
            if (!fixed && !set_rows(d, value, n < d->after ? PLACE_ROWS : PLACE_LAST_ROWS, error)) return false;
            if (fixed) d->place[value].kind = PLACE_FIXED;
            /* A cast of a parameter is loaded in the type of its result. */
            vjp_value from = node->value[pass_of(node)->outputs];
            if (fixed && node->op->id == OP_ID(cast) && d->graph->value[from].role == GRAPH_PARAMETER)
                d->place[value].loads = d->place[from].loads;
        }
        if (!check_views(d, node, error)) return false;
    }
    return true;
}

/* Plans the arena of everything that has rows. */
static bool plan_rows(decoder *d, char error[TRAIN_ERROR]) {
    size_t values = (size_t)d->graph->values, bytes = 0;
    plan_range *range = calloc(values, sizeof *range);
    int32_t *index = calloc(values, sizeof *index), ranges = 0;
    int64_t last_rows = d->all_logits ? d->rows : d->texts;
    bool ok = range && index;
    for (int32_t n = -1; n < d->nodes && ok; n++) {
        const graph_node *node = n < 0 ? NULL : node_at(d, n);
        size_t slots = node ? pass_of(node)->count : 1;
        for (size_t i = 0; i < slots && ok; i++) {
            vjp_value value = node ? node->value[i] : d->input;
            place *p = value ? place_of(d, value) : NULL;
            if (!p || (p->kind != PLACE_ROWS && p->kind != PLACE_LAST_ROWS)) continue;
            vjp_value origin = d->graph->value[value].origin;
            if (!index[origin]) {
                index[origin] = ++ranges;
                range[ranges - 1].first = n < 0 ? 0 : n;
                int64_t rows = p->kind == PLACE_ROWS ? d->rows : last_rows;
                ok = vjp_mul_size(p->row_bytes, (size_t)rows, &range[ranges - 1].bytes);
            }
            range[index[origin] - 1].last = n < 0 ? 0 : n;
        }
    }
    vjp_value result = d->graph->value[d->logits].origin;
    if (ok && index[result]) range[index[result] - 1].last = d->nodes;
    ok = ok && plan_sizes_fit(range, ranges) && plan_arena(range, ranges, &bytes) &&
         vjp_alloc(d->device, bytes, &d->arena) == VJP_OK;
    for (size_t v = 1; v < values && ok; v++)
        if (index[v]) {
            d->place[v].data = d->arena;
            d->place[v].offset = range[index[v] - 1].offset;
        }
    d->arena_bytes = bytes;
    free(range);
    free(index);
    return ok || fail_memory(error);
}

static bool allocate_cache(decoder *d, char error[TRAIN_ERROR]) {
    size_t positions = (size_t)d->rows * sizeof *d->host_positions, logits_rows, logits_bytes;
    for (int32_t n = 0; n < d->nodes; n++) {
        if (!is_attention(node_at(d, n))) continue;
        vjp_value k = node_at(d, n)->value[ATTENTION_K], v = node_at(d, n)->value[ATTENTION_V];
        cache_layer *layer = &d->layer[n];
        size_t bytes;
        layer->row_bytes = place_of(d, k)->row_bytes;
        if (place_of(d, v)->row_bytes != layer->row_bytes)
            return train_fail(error, "%.200s has values of another size than its keys", node_at(d, n)->name);
        if (!vjp_mul_size(layer->row_bytes, (size_t)d->context, &bytes) ||
            !vjp_mul_size(bytes, (size_t)d->texts, &bytes) || vjp_alloc(d->device, bytes, &layer->keys) != VJP_OK ||
            vjp_alloc(d->device, bytes, &layer->values) != VJP_OK)
            return train_fail(error, "there is no memory for the keys and values of %lld texts of %lld tokens",
                              (long long)d->texts, (long long)d->context);
        d->cache_bytes += 2 * bytes;
    }
    logits_rows = (size_t)(d->all_logits ? vjp_max(d->rows, d->texts) : d->texts);
    d->host_positions = malloc(positions);
    d->length = calloc((size_t)d->texts, sizeof *d->length);
    if (vjp_mul_size(place_of(d, d->logits)->row_bytes, logits_rows, &logits_bytes))
        d->host_logits = malloc(logits_bytes);
    if (!d->host_positions || !d->length || !d->host_logits || vjp_alloc(d->device, positions, &d->positions) != VJP_OK)
        return fail_memory(error);
    return true;
}

/* Fills an allocation of the device: directly where the host can, else through memory of the host. */
static bool load_value(decoder *d, vjp_value value, decoder_load load, void *context, char error[TRAIN_ERROR]) {
    const graph_value *v = &d->graph->value[value];
    place *p = &d->place[value];
    if (vjp_alloc(d->device, v->bytes, &p->data) != VJP_OK) return fail_memory(error);
    p->owned = true;
    if (v->role == GRAPH_CONSTANT)
        return vjp_upload(d->device, p->data, 0, v->data, v->bytes) == VJP_OK || fail_device(d, error);
    if (!p->loads) return true; /* a node computes it */
    vjp_tensor want = graph_tensor(d->graph, value);
    bool host = vjp_device_is_host(d->device);
    void *to = host ? p->data : malloc(v->bytes + 1);
    bool ok = to ? load(context, p->loads, &want, to, error) : fail_memory(error);
    if (ok && !host) ok = vjp_upload(d->device, p->data, 0, to, v->bytes) == VJP_OK || fail_device(d, error);
    if (!host) free(to);
    return ok;
}

/* Whether slot i of a node needs its fixed value in memory: a parameter that is loaded as its cast does not. */
static bool needs_fixed(const decoder *d, int32_t n, size_t i) {
    const graph_node *node = node_at(d, n);
    if (!node->value[i]) return false;
    vjp_value origin = d->graph->value[node->value[i]].origin;
    bool computed = is_fixed_node(d, n) && !place_of(d, node->value[0])->loads;
    bool read_here = i >= pass_of(node)->outputs ? computed || !is_fixed_node(d, n) : is_fixed_node(d, n);
    return d->place[origin].kind == PLACE_FIXED && d->needed[origin] && read_here;
}

/* Whether everything fits, before weights are loaded: memory that was only reserved so far does not count. */
static bool check_memory(const decoder *d, char error[TRAIN_ERROR]) {
    double needed = (double)d->cache_bytes + (double)d->arena_bytes;
    bool *counted = calloc((size_t)d->graph->values, sizeof *counted);
    if (!counted) return fail_memory(error);
    for (int32_t n = 0; n < d->nodes; n++)
        for (size_t i = 0; i < pass_of(node_at(d, n))->count; i++) {
            if (!needs_fixed(d, n, i)) continue;
            vjp_value origin = d->graph->value[node_at(d, n)->value[i]].origin;
            if (!counted[origin]) needed += (double)d->graph->value[origin].bytes;
            counted[origin] = true;
        }
    free(counted);
    return fit_bytes(d->device, needed, "sampling this model", error);
}

/* Loads what the nodes read and computes what depends on that alone. */
static bool load_fixed(decoder *d, decoder_load load, void *context, char error[TRAIN_ERROR]) {
    for (int32_t n = 0; n < d->nodes; n++) {
        const graph_node *node = node_at(d, n);
        bool computed = is_fixed_node(d, n) && !place_of(d, node->value[0])->loads;
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            if (!needs_fixed(d, n, i)) continue;
            vjp_value origin = d->graph->value[node->value[i]].origin;
            if (!d->place[origin].data && !load_value(d, origin, load, context, error)) return false;
        }
        if (computed && !run_rows(d, n, 0, 1, error)) return false;
        /* An embedding is only looked up; a table that is also the head is counted there. */
        if (node->op->id == OP_ID(linear)) d->weight_bytes += d->graph->value[node->value[LINEAR_B]].bytes;
    }
    return true;
}

decoder *decoder_open(vjp_device *device, const train_model *model, const decoder_options *options, decoder_load load,
                      void *context, char error[TRAIN_ERROR]) {
    decoder *d = calloc(1, sizeof *d);
    if (!d) {
        fail_memory(error);
        return NULL;
    }
    *d = (decoder){.device = device,
                   .graph = model->graph,
                   .input = model->input,
                   .logits = model->logits,
                   .texts = options->texts,
                   .context = model->context,
                   .rows = vjp_min(vjp_max(options->rows, options->texts), model->context),
                   .all_logits = options->all_logits};
    d->rows = vjp_max(d->rows, d->texts);
    bool ok = model->graph != NULL;
    if (!ok) fail_memory(error);
    if (ok && vjp_graph_status(model->graph) != VJP_OK)
        ok = train_fail(error, "%.*s", TRAIN_ERROR - 1, vjp_graph_error(model->graph));
    if (ok && (d->texts < 1 || d->texts > DECODER_MAX_TEXTS))
        ok = train_fail(error, "%lld texts at once; it must be 1 to %d", (long long)d->texts, DECODER_MAX_TEXTS);
    if (ok) {
        vjp_shape shape = model->graph->value[model->logits].shape;
        d->vocabulary = shape.size[shape.ndim - 1];
    }
    ok = ok && find_nodes(d, error) && set_places(d, error) && plan_rows(d, error) && allocate_cache(d, error) &&
         check_memory(d, error) && load_fixed(d, load, context, error);
    if (ok) return d;
    decoder_close(d);
    return NULL;
}

void decoder_close(decoder *d) {
    if (!d) return;
    for (vjp_value v = 1; d->place && v < d->graph->values; v++)
        if (d->place[v].owned) vjp_free(d->device, d->place[v].data);
    for (int32_t n = 0; d->layer && n < d->nodes; n++) {
        vjp_free(d->device, d->layer[n].keys);
        vjp_free(d->device, d->layer[n].values);
    }
    vjp_free(d->device, d->arena);
    vjp_free(d->device, d->positions);
    free(d->needed);
    free(d->node_list);
    free(d->place);
    free(d->layer);
    free(d->host_positions);
    free(d->host_logits);
    free(d->length);
    free(d);
}
