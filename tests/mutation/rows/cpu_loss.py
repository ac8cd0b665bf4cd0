# SPDX-License-Identifier: MIT
[
    ("cross_entropy: the largest logit is not subtracted", "check cross_entropy",
     [("src/cpu/loss/cross_entropy.c", "n, finite_shift(row->max), smooth);", "n, 0, smooth);"),
      ("src/cpu/loss/cross_entropy.c", "            f64_logs(log_sums + r);\n",
       "            f64_logs(log_sums + r);\n        for (int64_t r = 0; r < step; r++)\n            log_sums[r] -= (double)rows[r].max;\n")]),
    ("cross_entropy: the last of the narrow rows of a block is not summed", "check cross_entropy",
     [("src/cpu/loss/cross_entropy.c", "r < end && classes <= BLOCK; r++)", "r < end - (end - first > 1) && classes <= BLOCK; r++)")]),
    ("cross_entropy: a block that raises the maximum leaves the sum as it was", "full cross_entropy",
     [("src/cpu/loss/cross_entropy.c", "row.sum *= (double)exp_of(row.max - max);", "row.sum *= 1;")]),
    ("cross_entropy: the mean is over all rows, ignored ones too", "check cross_entropy",
     [("src/cpu/loss/cross_entropy.c", "total.loss /= (double)total.count;", "total.loss /= (double)call.s.rows;")]),
    ("cross_entropy: an ignored row's gradient is left as it was", "check cross_entropy",
     [("src/cpu/loss/cross_entropy.c", "write_zeros(dtype, mode, to, s->classes);", "")]),
]
