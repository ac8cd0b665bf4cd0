# SPDX-License-Identifier: MIT
[
    ("maxpool2d: the last of equal maxima wins", "check maxpool2d",
     [("src/cpu/pool/maxpool2d.h", "_CMP_NLE_UQ", "_CMP_NLT_UQ"),
      ("src/cpu/pool/maxpool2d.h", "~(native_i)(value.v[p] <= b->value.v[p])", "~(native_i)(value.v[p] < b->value.v[p])")]),
    ("maxpool2d: a NaN is passed over", "check maxpool2d",
     [("src/cpu/pool/maxpool2d.h", "_CMP_NLE_UQ", "_CMP_GT_OQ"),
      ("src/cpu/pool/maxpool2d.h", "~(native_i)(value.v[p] <= b->value.v[p])", "(native_i)(value.v[p] > b->value.v[p])")]),
    ("maxpool2d: padding counts as zero and wins", "check maxpool2d",
     [("src/cpu/pool/maxpool2d_rows.h", "vf outside = vf_set(-INFINITY);", "vf outside = vf_set(0);")]),
    ("maxpool2d: a saved argmax in a window's last column is passed over", "check maxpool2d",
     [("src/cpu/pool/maxpool2d_saved.h", "tap < a.kernel", "tap < a.kernel - 1")]),
    ("maxpool2d: with a saved argmax the tensor's last window is lost", "check maxpool2d",
     [("src/cpu/pool/maxpool2d_saved.h", "w < call->windows", "w < call->windows - 1")]),
    ("maxpool2d: with a saved argmax the next plane's windows answer too", "check maxpool2d",
     [("src/cpu/pool/maxpool2d_saved.h", "s->out_height * s->stride_h >= s->kernel_h", "s->out_height > 0")]),
]
