/* SPDX-License-Identifier: MIT */
/* What the trainer needs of a group beside vjp.h. */
#ifndef VJP_COMM_GROUP_H
#define VJP_COMM_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "vjp.h"

/* The engine of the launcher that started this process, "openmpi" or "mpich", by its environment; NULL: none did. */
const char *vjp_group_launcher(void);

/* How many processes that launcher started on this machine; 1 where it does not say. */
int64_t vjp_group_local_size(void);

/* Whether the communication has failed, and the rank that reports it: the lowest that is known to have noticed. */
bool vjp_group_has_failed(const vjp_group *group);
int32_t vjp_group_reporter(const vjp_group *group);

#endif
