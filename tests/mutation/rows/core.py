# SPDX-License-Identifier: MIT
[
    ("cross_entropy: any negative target is let through", "test test_refusals",
     [("src/core/indices.c", "uint32_t i = (uint32_t)index[k], other = i ^ except;",
       "uint32_t i = (uint32_t)index[k], other = i >> 31 ? 0 : i ^ except;")]),
    ("dropout: a seed's upper half is dropped", "test test_dropout",
     [("src/core/philox.h", "(uint32_t)((uint64_t)seed >> 32)", "0")]),
    ("core: a negative index counts from the end", "test test_refusals",
     [("src/core/indices.c", "bad |= (uint32_t)index[k] | (last - (uint32_t)index[k]);",
       "bad |= last - (uint32_t)index[k];")]),
    ("core: the last quarter of a chunk of indices is not checked", "test test_refusals",
     [("src/core/indices.c", "from < k + STREAMS * each", "from < k + (STREAMS - 1) * each")]),
    ("core: outputs may partly overlap their inputs", "test test_refusals",
     [("src/core/call.c", "if (same && allowed && !(out->flags & VJP_ACCUMULATE)) continue;", "if (allowed) continue;")]),
    ("core: a call allocates", "test test_allocation",
     [("src/core/call.c", "return kernel->run(work);",
       "void *volatile scratch = __builtin_malloc(64);\n    vjp_status status = kernel->run(work);\n    __builtin_free(scratch);\n"
       "    return status;")]),
]
