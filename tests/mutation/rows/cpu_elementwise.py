# SPDX-License-Identifier: MIT
[
    ("linear: tanh' as 1 - t * t", "test test_activations",
     [("src/cpu/elementwise/activation.h", "return vf_mul(vf_mul(s.value, s.complement), vf_set(4));",
       "vf t = vf_tanh(x);\n        return vf_add(vf_sub(vf_set(1), vf_mul(t, t)), vf_mul(s.value, vf_zero()));")]),
    ("linear: relu'(0) is one half", "check linear",
     [("src/cpu/elementwise/activation.h", "vf slope = vf_select(vf_greater(x, vf_zero()), vf_set(1), vf_zero());",
       "vf slope = vf_select(vf_greater(x, vf_zero()), vf_set(1), "
       "vf_select(vf_equal(x, vf_zero()), vf_set(0.5f), vf_zero()));")]),
    ("linear: a NaN pre-activation silently gives 0", "check linear",
     [("src/cpu/elementwise/activation.h", "return vf_select(vf_is_nan(x), x, slope);", "return slope;")]),
    ("linear: gelu' of 1e30 is NaN", "check linear",
     [("src/cpu/elementwise/activation.h", "return vf_min(vf_set(GELU_TANH_END), vf_abs(x));", "return vf_abs(x);")]),
    ("linear: gelu far out without what rounding its exponent lost", "test test_activations",
     [("src/cpu/elementwise/activation.h", "return vf_fma(vf_neg(v_rest), e, e);", "return e;")]),
    ("elementwise: the first input of a vector is read after the first output is written", "check swiglu",
     [("src/cpu/elementwise/elementwise.h", "    element_store(op, t, c, stores, 0, i, n, e.out[0]);\n    if (op->outputs > 1)",
       "    element_store(op, t, c, stores, 0, i, n, e.out[0]);\n    if (op->outputs > 1 && op->inputs > 2) {\n"
       "        e.in[0] = element_load(op, t, c, 0, i, row, n);\n        formula(c->parameters, &e);\n    }\n    if (op->outputs > 1)")]),
    ("swiglu: dy * up before the slope, past all range", "test test_activations",
     [("src/cpu/elementwise/swiglu.c", "vf_mul(vf_mul(slope, dy), up)", "vf_mul(slope, vf_mul(dy, up))")]),
    ("elementwise: a row begins one element late", "check add",
     [("src/cpu/elementwise/elementwise.h", "kind & ROW ? i - row : i, n);", "kind & ROW && i > row ? i - row - 1 : kind & ROW ? 0 : i, n);")]),
    ("elementwise: the last elements, less than a vector, are not written", "check scale",
     [("src/cpu/elementwise/elementwise.h", "        part = end - i;\n    } while (part);", "        part = 0;\n    } while (part);")]),
    ("mul: da in the place of a is written before a is read for db", "check mul",
     [("src/cpu/elementwise/elementwise.h", "EACH_ITS_OWN, 0, i, n, e.out[0]);\n    return e.out[op->outputs - 1];",
       "EACH_ITS_OWN, 0, i, n, e.out[0]);\n    if (op->inputs > 1) e = element_compute(formula, op, t, c, i, row, n);\n"
       "    return e.out[op->outputs - 1];")]),
    ("silu: x times a denormal exp(x)", "test test_activations",
     [("src/cpu/elementwise/activation.h", "SILU_TAIL = -87;", "SILU_TAIL = -1000;")]),
]
