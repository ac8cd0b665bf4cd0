/* SPDX-License-Identifier: MIT */
/* What tests add to the module of a browser: bits_hash, which prints one line per output to standard output. */
#include <stdio.h>

int bits_hash(int argc, char **argv);

/* Returns 0 if every call succeeded. */
__attribute__((export_name("vjp_test_bits_hash"))) int vjp_test_bits_hash(int threads);
int vjp_test_bits_hash(int threads) {
    char count[16], *argv[] = {"bits_hash", count, NULL};
    snprintf(count, sizeof count, "%d", threads);
    int failed = bits_hash(2, argv);
    return fflush(stdout) != 0 || failed;
}
