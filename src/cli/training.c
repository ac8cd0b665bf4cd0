/* SPDX-License-Identifier: MIT */
/*
 * What train, graph and bench train share: --memory, --residual, --moments, --gradients and --shards, and processes of
 * a launcher.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "comm/group.h"
#include "core/system.h"
#include "train/job/job.h"

static const struct {
    const char *name;
    double bytes;
} units[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
             {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"%", 0}};

int cli_memory(const char *command, const char *text, vjp_device *device, int64_t *bytes) {
    char *end = NULL, total[32];
    double amount = strtod(text, &end), unit = -1;
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(end, units[i].name) == 0) unit = units[i].bytes;
    bool share = unit == 0;
    if (end == text || unit < 0 || !(amount > 0) || (share ? amount > 100 : amount * unit > 0x1p60))
        return cli_misuse(command,
                          "--memory is \"%s\"; it must be an amount such as 40GiB, 512MiB or 24GB, or a share "
                          "of the device's memory such as 80%%",
                          text);
    if (!device) return CLI_CONTINUE;
    if (share && vjp_device_property(device, "memory_total", total, sizeof total) != VJP_OK)
        return cli_fail(command, "%s does not report its memory: give --memory as an amount such as 40GiB",
                        vjp_device_name(device));
    *bytes = (int64_t)(share ? strtod(total, NULL) * amount / 100 : amount * unit);
    if (*bytes < 1) *bytes = 1; /* 0 would be no limit */
    return CLI_CONTINUE;
}

int cli_residual(const char *command, int dtype, int residual) {
    if (residual < 0 || residual == VJP_F32 || residual == dtype) return CLI_CONTINUE;
    return cli_misuse(command, "--residual is %s; it must be f32 or the type of --dtype",
                      vjp_dtype_name((vjp_dtype)residual));
}

int cli_precision(const char *command, int dtype, int moments, int gradients, trainer_options *how) {
    const int dtypes[] = {moments, gradients};
    for (int i = 0; i < 2; i++)
        if (dtypes[i] >= 0 && dtypes[i] != VJP_F32 && dtypes[i] != VJP_BF16)
            return cli_misuse(command, "--%s is %s; it must be f32 or bf16", i ? "gradients" : "moments",
                              vjp_dtype_name((vjp_dtype)dtypes[i]));
    how->moments = moments < 0 ? VJP_F32 : (vjp_dtype)moments;
    how->gradients = gradients < 0 ? VJP_F32 : (vjp_dtype)gradients;
    if (how->moments == VJP_BF16 && how->optimiser == TRAINER_SGD)
        return cli_misuse(command, "--moments is for AdamW's; sgd has none");
    if (how->moments == VJP_BF16 && how->beta2 > JOB_MAX_NARROW_BETA2)
        return cli_misuse(command,
                          "--beta2 is %g; with --moments bf16 it must be at most %g: a smaller change of the second "
                          "moment is lost when it is rounded",
                          how->beta2, JOB_MAX_NARROW_BETA2);
    if (how->gradients == VJP_BF16 && dtype != VJP_BF16)
        return cli_misuse(command, "--gradients bf16 needs --dtype bf16, whose products give such gradients");
    if (how->gradients == VJP_BF16 && (how->accumulate > 1 || how->shards > 1))
        return cli_misuse(command, "--gradients bf16 is for batches of one part: with --accumulate or --shards their "
                                   "sum is kept in f32, which bf16 would cut to 8 bits at every addition");
    return CLI_CONTINUE;
}

int cli_shards(const char *command, int64_t shards) {
    if ((shards & (shards - 1)) == 0) return CLI_CONTINUE;
    return cli_misuse(command, "--shards is %lld; it must be a power of two", (long long)shards);
}

int cli_switch(const char *command, const char *option, const char *text, bool *value) {
    if (text && strcmp(text, "on") != 0 && strcmp(text, "off") != 0)
        return cli_misuse(command, "--%s is \"%s\"; it must be on or off", option, text);
    if (text) *value = strcmp(text, "on") == 0;
    return CLI_CONTINUE;
}

/* One card for each process of a machine that has several. */
static void share_cards(cli_device_options *on) {
    static char own[32];
    if (!on->device || strcmp(on->device, "cuda") != 0 || vjp_group_local_size() == 1) return;
    size_t cards = vjp_device_count("cuda");
    if (cards < 2) return;
    snprintf(own, sizeof own, "cuda:%lld", (long long)vjp_group_local_rank() % (long long)cards);
    on->device = own;
}

bool cli_outlive(const char *command, int *status) {
    enum { A_WHILE = 1000000000 }; /* nanoseconds */
    system_ending ending;
    if (!vjp_group_launcher_is_silent() || !system_continue_as_child(&ending)) return false;
    *status = ending.status;
    if (!ending.signal) return true;
    /* UCX aborts a process whose partner has died: that one has the word, and the launcher then ends this one. */
    if (ending.aborted) system_sleep(A_WHILE);
    *status = cli_fail(command, "rank %lld of %lld has died: %s (signal %d); the last checkpoint is intact",
                       (long long)vjp_group_launched_rank(), (long long)vjp_group_launched_size(), ending.reason,
                       ending.signal);
    return true;
}

void cli_share_cores(cli_device_options *on) {
    share_cards(on);
    int64_t processes = vjp_group_local_size(), cores = system_allowed_processors();
    if (on->threads || getenv("VJP_THREADS") || processes == 1 || cores < system_processors()) return;
    on->threads = cores > processes ? cores / processes : 1;
}
