/* SPDX-License-Identifier: MIT */
/* Opening and closing groups: which libraries are loaded for a name, and what their processes must have in common. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/group.h"
#include "comm/state.h"
#include "core/system.h"

static const double USUAL_TIMEOUT = 600;

/* ---- Opening ----------------------------------------------------------------------------------------- */

static vjp_status refuse(vjp_group *g, const char *name, const char *what) {
    return vjp_fail(g->device, VJP_NO_DEVICE, "group %.64s: %s", name, what);
}

/*
 * Loads libvjp-<kind> and finds its entry. The library is never closed: MPI leaves threads and exit handlers behind. It
 * is loaded by the name of its file, so a second group uses the same copy. NULL: refused.
 */
static void *load(vjp_group *g, const char *name, const char *kind, const char *entry, char file[VJP_LIBRARY_FILE]) {
    char what[VJP_ERROR_BYTES];
    void *library = vjp_library_open(kind, file);
    if (!library)
        snprintf(what, sizeof what, "its engine is not installed (%.300s)", system_library_error());
    else
        snprintf(what, sizeof what, "%s has no %s() for version %d of the interface", file, entry,
                 VJP_ENGINE_INTERFACE);
    void *found = library ? system_library_find(library, entry) : NULL;
    if (!found) refuse(g, name, what);
    return found;
}

/* Whether a table is one for this library; both kinds begin with the same members. */
static vjp_status accept(vjp_group *g, const char *name, const char *file, bool is_one, const char *version) {
    char what[VJP_ERROR_BYTES];
    if (is_one && (!version || strcmp(version, VJP_VERSION) == 0)) return VJP_OK;
    if (is_one)
        snprintf(what, sizeof what, "%s is of version %.32s, this library of version %s", file, version, VJP_VERSION);
    else
        snprintf(what, sizeof what, "%s has no table for version %d of the interface", file, VJP_ENGINE_INTERFACE);
    return refuse(g, name, what);
}

static vjp_status load_engine(vjp_group *g, const char *name, const char *kind) {
    char file[VJP_LIBRARY_FILE];
    const vjp_engine *(*entry)(int32_t);
    *(void **)&entry = load(g, name, kind, "vjp_engine_entry", file);
    if (!entry) return VJP_NO_DEVICE;
    const vjp_engine *e = entry(VJP_ENGINE_INTERFACE);
    bool is_one = e && e->interface_version == VJP_ENGINE_INTERFACE && e->struct_size == sizeof *e;
    vjp_status status = accept(g, name, file, is_one, is_one ? e->version : NULL);
    if (status == VJP_OK) g->engine = e;
    return status;
}

static vjp_status load_carrier(vjp_group *g, const char *name, const char *kind) {
    char file[VJP_LIBRARY_FILE], what[VJP_ERROR_BYTES];
    const vjp_carrier *(*entry)(int32_t);
    *(void **)&entry = load(g, name, kind, "vjp_carrier_entry", file);
    if (!entry) return VJP_NO_DEVICE;
    const vjp_carrier *c = entry(VJP_ENGINE_INTERFACE);
    bool is_one = c && c->interface_version == VJP_ENGINE_INTERFACE && c->struct_size == sizeof *c;
    vjp_status status = accept(g, name, file, is_one, is_one ? c->version : NULL);
    if (status == VJP_OK && strcmp(c->kind, g->device->backend->name) != 0) {
        snprintf(what, sizeof what, "it moves the memory of %.32s devices; this one is %.32s", c->kind,
                 vjp_device_name(g->device));
        return refuse(g, name, what);
    }
    if (status == VJP_OK) g->carrier = c;
    return status;
}

/* "auto" and "mpi" are the engine of the launcher; without a launcher "mpi" is either that is installed. */
static vjp_status find_engine(vjp_group *g, const char *name) {
    const char *launcher = vjp_group_launcher();
    char kind[VJP_KIND_BYTES];
    bool is_auto = strcmp(name, "auto") == 0, is_mpi = strcmp(name, "mpi") == 0;
    if ((is_auto || is_mpi) && vjp_group_unconnected())
        return vjp_fail(
            g->device, VJP_NO_DEVICE,
            "group %.64s: srun has started %lld processes without an MPI: it needs --mpi=pmix (Open MPI) or "
            "--mpi=pmi2 (MPICH)",
            name, (long long)vjp_group_unconnected());
    if (strcmp(name, "self") == 0 || (is_auto && !launcher)) return VJP_OK;
    if ((is_auto || is_mpi) && launcher) return load_engine(g, name, launcher);
    if (is_mpi) return load_engine(g, name, "openmpi") == VJP_OK ? VJP_OK : load_engine(g, name, "mpich");
    if (vjp_library_kind(name, kind) && strcmp(kind, name) == 0) return load_engine(g, name, kind);
    return refuse(g, name, "unknown; there are self, mpi, openmpi, mpich, nccl and auto");
}

static vjp_status join(vjp_group *g, const char *name) {
    vjp_engine_failure failure = {.sentence = g->sentence, .bytes = sizeof g->sentence, .reporter = -1};
    g->size = 1;
    if (!g->engine) return VJP_OK;
    vjp_status status = g->engine->join(&g->state, &g->rank, &g->size, &failure);
    if (status != VJP_OK) return group_failed(g, status);
    while (g->levels < 30 && (int64_t)1 << g->levels < g->size)
        g->levels++;
    if (g->size > 0 && (int64_t)1 << g->levels == g->size) return VJP_OK;
    return vjp_fail(g->device, VJP_INVALID, "group %.64s: there are %d processes; it must be a power of two: 1, 2, 4",
                    name, (int)g->size);
}

/* "mpi+nccl": an engine and a carrier. "nccl" alone has the engine of "auto" beside it. */
static vjp_status find_both(vjp_group *g, const char *name) {
    char first[VJP_KIND_BYTES] = "auto", second[VJP_KIND_BYTES];
    const char *plus = strchr(name, '+'), *carrier = plus ? plus + 1 : "nccl";
    if (!plus && strcmp(name, "nccl") != 0) return find_engine(g, name);
    if (plus && (size_t)(plus - name) < sizeof first) {
        memcpy(first, name, (size_t)(plus - name));
        first[plus - name] = 0;
    }
    if (!vjp_library_kind(carrier, second) || strcmp(carrier, second) != 0)
        return refuse(g, name, "what follows the + is no name of a library");
    vjp_status status = find_engine(g, first);
    return status == VJP_OK ? load_carrier(g, name, second) : status;
}

/* Every process calls it, after join(). One that fails makes all others fail. */
static vjp_status join_carrier(vjp_group *g) {
    struct {
        vjp_status status;
        unsigned char id[VJP_CARRIER_ID_BYTES];
    } shared = {VJP_OK, {0}};
    vjp_engine_failure failure = {.sentence = g->sentence, .bytes = sizeof g->sentence, .reporter = -1};
    if (!g->carrier) return VJP_OK;
    snprintf(g->sentence, sizeof g->sentence, "rank 0 could not begin the group");
    if (g->rank == 0) shared.status = g->carrier->make_id(shared.id, &failure);
    vjp_status status = group_spread(g, 0, &shared, sizeof shared);
    if (status != VJP_OK) return status;
    if (shared.status == VJP_OK)
        shared.status =
            g->carrier->join(&g->carrier_state, shared.id, g->rank, g->size, vjp_device_name(g->device), &failure);
    if (shared.status != VJP_OK) return group_failed(g, shared.status);
    return vjp_alloc(g->device, DEVICE_BLOCK_BYTES, &g->device_stage);
}

vjp_status vjp_group_open(vjp_device *device, const char *name, const vjp_group_options *options, vjp_group **group) {
    if (group) *group = NULL;
    if (!device || !group || !name) return VJP_INVALID;
    if (options && options->struct_size != sizeof *options)
        return vjp_fail(device, VJP_INVALID,
                        "group %.64s: options.struct_size is %llu; it must be %zu: start from "
                        "VJP_GROUP_OPTIONS_DEFAULTS",
                        name, (unsigned long long)options->struct_size, sizeof *options);
    if (options && !(options->timeout >= 0))
        return vjp_fail(device, VJP_INVALID, "group %.64s: options.timeout is %g; it must be 0 or more", name,
                        options->timeout);
    vjp_group *g = calloc(1, sizeof *g);
    char *stage = malloc((size_t)STAGES * BLOCK_BYTES);
    vjp_status status = VJP_OUT_OF_MEMORY;
    if (g && stage) {
        *g = (vjp_group){.device = device, .reporter = -1, .stage = stage};
        g->timeout = options && options->timeout > 0 ? options->timeout : USUAL_TIMEOUT;
        status = find_both(g, name);
        if (status == VJP_OK) status = join(g, name);
        if (status == VJP_OK) status = join_carrier(g);
        if (status == VJP_OK) {
            *group = g;
            return VJP_OK;
        }
        g->stage = NULL;
        vjp_group_close(g);
    } else {
        vjp_fail(device, status, "group %.64s: there is no memory for it", name);
        free(g);
    }
    free(stage);
    return status;
}

/* A second device of the same name has the same memory and a stream of its own. It needs no workspace to add. */
vjp_status vjp_group_reduce_prepare(vjp_group *g) {
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = 1;
    options.workspace_bytes = 64;
    if (g->second || vjp_device_is_host(g->device)) return VJP_OK;
    vjp_status status = vjp_open(vjp_device_name(g->device), &options, &g->second);
    if (status == VJP_OK) return VJP_OK;
    vjp_fail(g->device, status, "group: there is no second queue: %s", vjp_error(g->second));
    vjp_close(g->second);
    g->second = NULL;
    return status;
}

void vjp_group_close(vjp_group *g) {
    if (!g) return;
    if (g->carrier_state) g->carrier->leave(g->carrier_state, g->failed);
    if (g->device_stage) vjp_free(g->device, g->device_stage);
    vjp_close(g->second);
    if (g->state) g->engine->leave(g->state, g->failed);
    free(g->stage);
    free(g);
}

int32_t vjp_group_rank(const vjp_group *g) {
    return g ? g->rank : 0;
}

int32_t vjp_group_size(const vjp_group *g) {
    return g ? g->size : 1;
}

bool vjp_group_has_failed(const vjp_group *g) {
    return g && g->failed;
}

int32_t vjp_group_reporter(const vjp_group *g) {
    return g->reporter >= 0 ? g->reporter : g->rank;
}

void vjp_group_abort(vjp_group *g, int32_t status) {
    if (g && g->state) g->engine->abort(g->state, status);
    exit(status);
}
