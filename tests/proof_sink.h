/* SPDX-License-Identifier: MIT */
/* What the tests of proofs share: a sink that prints failures and counts, so that a test can fail with them. */
#ifndef VJP_TESTS_PROOF_SINK_H
#define VJP_TESTS_PROOF_SINK_H

#include <stdio.h>

#include "proof/proof.h"

typedef struct proof_tally {
    int rows, failed;
} proof_tally;

static inline void proof_sink(void *context, const proof_row *row) {
    proof_tally *tally = context;
    tally->rows++;
    if (row->ok) return;
    /* A wrong kernel fails everywhere; the first failures are enough. */
    if (tally->failed++ < 20)
        fprintf(stderr, "%s.%s %s %s on %s: error %.3g, bound %.3g: %s%s%s\n", row->op, row->pass, row->output,
                row->dtype, row->device, row->error, row->bound, row->text, row->why[0] ? ": " : "", row->why);
}

#endif
