# SPDX-License-Identifier: MIT
[
    ("gather: of repeated indices only the first counts", "check gather",
     [("src/cpu/index/gather.c", "row = item % rows, begin = row_begin(call, row), end = call->row_end[row];",
       "row = item % rows, begin = row_begin(call, row), end = begin + (call->row_end[row] > begin);")]),
    ("gather: of many repeats only the last few count", "check gather",
     [("src/cpu/index/gather.c", "if (!place->first) sum = vd_add(vd_load(place->sums + j), sum);", "")]),
]
