/* SPDX-License-Identifier: MIT */
/*
 * Whether an MPI launcher started this process, by the variables that it sets:
 *
 *   Open MPI's mpirun            OMPI_COMM_WORLD_SIZE    openmpi
 *   srun --mpi=pmix, PRRTE       PMIX_RANK               openmpi
 *   MPICH's mpirun, Intel's      PMI_RANK                mpich
 *   srun --mpi=pmi2              PMI_RANK                mpich
 *
 * A program that srun starts without an MPI has none of these. Where there are several, each would train by itself, so
 * vjp_group_unconnected() finds them. Of Slurm's own variables it reads one of a step, which srun alone sets: a batch
 * script has those of its job for a program that it starts once.
 */
#include <stdlib.h>

#include "comm/group.h"

static const struct {
    const char *variable, *engine;
} launchers[] = {{"OMPI_COMM_WORLD_SIZE", "openmpi"}, {"PMIX_RANK", "openmpi"}, {"PMI_RANK", "mpich"}};

static const char *const all_ranks[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
static const char *const all_sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
static const char *const local_ranks[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};
static const char *const local_sizes[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE"};

const char *vjp_group_launcher(void) {
    for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++)
        if (getenv(launchers[i].variable)) return launchers[i].engine;
    return NULL;
}

/* The first of these variables that is a number of at least `least`; without a launcher or such a number, `least`. */
static int64_t number_of(const char *const variables[3], int64_t least) {
    for (int i = 0; vjp_group_launcher() && i < 3; i++) {
        const char *text = getenv(variables[i]);
        int64_t number = text ? strtoll(text, NULL, 10) : 0; /* Slurm writes "4(x2)" for 4 on each of 2 nodes */
        if (text && number >= least) return number;
    }
    return least;
}

bool vjp_group_launcher_is_silent(void) {
    return getenv("HYDI_CONTROL_FD") && getenv("PMI_RANK") && getenv("PMI_SIZE");
}

int64_t vjp_group_unconnected(void) {
    const char *text = getenv("SLURM_STEP_NUM_TASKS");
    int64_t number = text && !vjp_group_launcher() ? strtoll(text, NULL, 10) : 0;
    return number > 1 ? number : 0;
}

int64_t vjp_group_local_size(void) {
    return number_of(local_sizes, 1);
}

int64_t vjp_group_local_rank(void) {
    return number_of(local_ranks, 0);
}

int64_t vjp_group_launched_rank(void) {
    return number_of(all_ranks, 0);
}

int64_t vjp_group_launched_size(void) {
    return number_of(all_sizes, 1);
}
