/* SPDX-License-Identifier: MIT */
/*
 * How many processors the process may use. Containers and batch systems give a process part of a machine in two ways:
 * an affinity mask, which says on which processors it may run, and control groups, which say how much processor time it
 * may use. More threads than that would only wait for each other.
 *
 * The groups of a process are in /proc/self/cgroup, and their files below /sys/fs/cgroup, where every system mounts
 * them. Limits hold for a group and all below it, so each group up to the root counts. Inside a container the path is
 * often that of the host and not there; then the container's own group is at the top, which is read in any case.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/system.h"
#include "cpu/threads/threads.h"

enum { MAX_PATH = 4096 };

/* Up to two numbers from the file folder/name; a word that is no number ends them. Returns how many. */
static int read_numbers(const char *folder, const char *name, int64_t numbers[2]) {
    char path[MAX_PATH];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return 0;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int count = fscanf(file, "%" SCNd64 " %" SCNd64, &numbers[0], &numbers[1]);
    fclose(file);
    return count < 0 ? 0 : count;
}

/*
 * The processors of one group: its quota of time per period, rounded up. Version 2 has both in one file, version 1 in
 * two; no limit is "max" or -1. INT64_MAX: no limit, or no such group.
 */
static int64_t limit_of(const char *folder) {
    int64_t quota[2] = {0, 0}, period[2] = {0, 0};
    if (read_numbers(folder, "cpu.max", quota) == 2)
        period[0] = quota[1];
    else if (!read_numbers(folder, "cpu.cfs_quota_us", quota) || !read_numbers(folder, "cpu.cfs_period_us", period))
        return INT64_MAX;
    return quota[0] > 0 && period[0] > 0 ? vjp_divide_up(quota[0], period[0]) : INT64_MAX;
}

/* The lowest limit of the group `path` below the folder `mount`, and of all groups that it is in. */
static int64_t limit_up_from(const char *mount, const char *path) {
    char folder[MAX_PATH];
    int length = snprintf(folder, sizeof folder, "%s%s", mount, path);
    if (length >= (int)sizeof folder) return INT64_MAX;
    int64_t limit = INT64_MAX;
    for (;;) {
        limit = vjp_min(limit, limit_of(folder));
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= strlen(mount) || !slash) return limit;
        *slash = 0;
    }
}

/* Whether a list such as "cpu,cpuacct" names the processor time. */
static bool names_cpu(const char *list, const char *end) {
    while (list < end) {
        size_t length = strcspn(list, ",:");
        if (length == 3 && memcmp(list, "cpu", 3) == 0) return true;
        list += length + 1;
    }
    return false;
}

/* Lines are NUMBER:CONTROLLERS:PATH, in version 2 without controllers. */
int64_t vjp_cpu_group_limit(const char *root) {
    char name[MAX_PATH], line[MAX_PATH], mount[MAX_PATH];
    if (snprintf(name, sizeof name, "%s/proc/self/cgroup", root) >= (int)sizeof name) return INT64_MAX;
    FILE *file = fopen(name, "r");
    if (!file) return INT64_MAX;
    int64_t limit = INT64_MAX;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (!path) continue;
        static const char *const mounts[] = {"", "/unified", "/cpu", "/cpu,cpuacct"};
        bool second = path == list + 1;
        if (!second && !names_cpu(list + 1, path)) continue;
        for (int i = second ? 0 : 2; i < (second ? 2 : 4); i++)
            if (snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, mounts[i]) < (int)sizeof mount)
                limit = vjp_min(limit, limit_up_from(mount, path + 1));
    }
    fclose(file);
    return limit;
}

int64_t vjp_cpu_processors(void) {
    return vjp_min(system_allowed_processors(), vjp_cpu_group_limit(""));
}
