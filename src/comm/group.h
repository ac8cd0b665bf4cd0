/* SPDX-License-Identifier: MIT */
/* What the trainer needs of a group beside vjp.h. */
#ifndef VJP_COMM_GROUP_H
#define VJP_COMM_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "vjp.h"

/* The engine of the launcher that started this process, "openmpi" or "mpich", by its environment; NULL: none did. */
const char *vjp_group_launcher(void);

/* How many processes a launcher has started without the means to find each other; 0: none has. */
int64_t vjp_group_unconnected(void);

/* How many processes that launcher started on this machine; 1 where it does not say. */
int64_t vjp_group_local_size(void);

/* The number of this process among those, and among all that were launched; 0 where the launcher does not say. */
int64_t vjp_group_local_rank(void);
int64_t vjp_group_launched_rank(void);

/* How many processes were launched; 1 where the launcher does not say. */
int64_t vjp_group_launched_size(void);

/*
 * Whether the launcher does not say which rank has died: MPICH's mpirun kills the others at once, with SIGKILL, and
 * prints the number of one of the processes.
 */
bool vjp_group_launcher_is_silent(void);

/* Whether the communication has failed, and the rank that reports it: the lowest that is known to have noticed. */
bool vjp_group_has_failed(const vjp_group *group);
int32_t vjp_group_reporter(const vjp_group *group);

/*
 * vjp_group_reduce_scatter() and vjp_group_all_gather() with ranges of the caller's: range k is elements
 * [bounds[k], bounds[k + 1]), with one range for each process. A rank owns the range vjp_group_range_of(rank), and
 * range k belongs to rank vjp_group_range_of(k).
 */
int32_t vjp_group_range_of(const vjp_group *group, int32_t rank);
vjp_status vjp_group_reduce_scatter_at(vjp_group *group, const vjp_tensor *tensor, const int64_t *bounds);
vjp_status vjp_group_all_gather_at(vjp_group *group, const vjp_tensor *tensor, const int64_t *bounds);

/*
 * The first of these in parts, by another thread than the one that uses the device, which makes no other call of the
 * group from the beginning to the end: only where vjp_group_is_any_thread(). Where the host cannot read the device's
 * memory, the group has a second queue, so that parts travel and are added beside what the device computes. `tensor`
 * has one axis; the parts, elements [first, last), are the same in all processes and in the same order, and together
 * they are all of it. A failure's sentence is that of the group's next call.
 */
bool vjp_group_is_any_thread(const vjp_group *group);
vjp_status vjp_group_reduce_prepare(vjp_group *group); /* once, before the first */
vjp_status vjp_group_reduce_begin(vjp_group *group, const vjp_tensor *tensor, const int64_t *bounds);
vjp_status vjp_group_reduce_part(vjp_group *group, const vjp_tensor *tensor, const int64_t *bounds, int64_t first,
                                 int64_t last);
void vjp_group_reduce_end(vjp_group *group);

/* By that thread, before a part: waits for an event of the device, after which the part is complete. */
vjp_status vjp_group_reduce_await(vjp_group *group, vjp_event *event);

/*
 * Passes host memory from process to process in the order of their ranges. Each calls `turn`, which changes it, after
 * the one before it; then all have what the last one left.
 */
vjp_status vjp_group_relay(vjp_group *group, void *host, size_t bytes, vjp_status (*turn)(void *context, void *host),
                           void *context);

#endif
