/* SPDX-License-Identifier: MIT */
/* What `vjp bench`, `vjp bench train` and `vjp bench sample` share: how much the copy moves, and how times and shares
 * look. */
#ifndef VJP_CLI_BENCH_H
#define VJP_CLI_BENCH_H

#include "cli/cli.h"

/* vjp bench train: argv[0] is "train". */
int cli_bench_train(int argc, char **argv);

/* vjp bench sample: argv[0] is "sample". */
int cli_bench_sample(int argc, char **argv);

/* Bytes that a pass should move, and that the copy moves, so that no cache serves them. */
double bench_target_bytes(const vjp_device *device, bool quick);

/* The threads that this device was opened with; `asked` 0: as many as it takes by itself. */
int bench_threads(const char *device, int64_t asked);

enum { BENCH_TEXT = 32 };

/* As milliseconds; "-" where the number is not known. */
void bench_milliseconds(double seconds, char text[BENCH_TEXT]);

/* As a number of two decimals, or "-". */
void bench_share(double share, char text[BENCH_TEXT]);

cli_colour bench_colour(double share);

#endif
