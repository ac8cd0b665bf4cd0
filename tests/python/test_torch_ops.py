# SPDX-License-Identifier: MIT
"""torch.ops.vjp.* and the functions of vjp.torch: what torch asks of an op, gradients, layouts, compiling, errors.

The numbers of the kernels are test_torch.py's; here it is shown that torch gets the same bits as vjp's own functions.
"""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import vjp  # noqa: E402
import vjp.torch as vt  # noqa: E402
from test_torch import CASES, make_inputs  # noqa: E402
from vjp.torch._ops import PAIRS, ROWS  # noqa: E402
from vjp.torch.functions import OPS, as_tuple  # noqa: E402

# Those that CASES, with vjp's own ops and torch's functions for them, does not have.
MORE = {"dropout": {"x": (6, 33), "counter": torch.tensor([5, 9])},
        "rope_pair": {"q": (2, 5, 4, 8), "k": (2, 5, 3, 8), "cosine": (9, 4), "sine": (9, 4), "positions": torch.tensor([8, 0, 3, 3, 1])}}


def sample(op, dtype):
    """(tensors by name, options) of an op's forward; numbers become tensors, which is what an op of torch takes."""
    shapes, options = (MORE[op], {}) if op in MORE else (CASES[op][1], dict(CASES[op][2]))
    made = make_inputs(shapes, dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    made = {name: t if torch.is_tensor(t) else torch.tensor(t, dtype=torch.int64 if name == "step" else exact) for name, t in made.items()}
    if op == "cast":
        options["dtype"] = torch.float32 if dtype != torch.float32 else torch.bfloat16
    return made, options


def arguments(name, tensors):
    return tuple(tensors.get(slot) for slot, _, _ in ROWS[name].inputs)


def backward_sample(op, dtype):
    tensors, options = sample(op, dtype)
    forward = getattr(torch.ops.vjp, op)(*arguments(op, tensors), **options)
    outputs = dict(zip((slot for slot, _ in ROWS[op].outputs), forward if isinstance(forward, tuple) else (forward,)))
    torch.manual_seed(2)
    for name, value in list(outputs.items()):
        outputs["d" + name] = torch.randn_like(value) if value.is_floating_point() else None
    options = OPS[op].options(arguments(op, tensors), options)
    return {**tensors, **outputs}, options


def all_samples(dtype):
    for name, row in ROWS.items():
        made, options = backward_sample(row.op, dtype) if row.backward else sample(row.op, dtype)
        yield name, arguments(name, made), options


@pytest.mark.parametrize("name, tensors, options", list(all_samples(torch.float32)), ids=lambda value: value if isinstance(value, str) else "")
def test_opcheck(name, tensors, options):
    row = ROWS[name]
    leaves = tuple(t.clone().requires_grad_() if t is not None and t.is_floating_point() and not row.backward and row.op in OPS else t
                   for t in tensors)
    kinds = ["test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.vjp, name).default, leaves, options, test_utils=kinds[:3] if row.backward else kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_bits_are_those_of_vjp(dtype):
    """Through the dispatcher, by each kernel, for every op and pass."""
    for name, tensors, options in all_samples(dtype):
        row = ROWS[name]
        got = getattr(torch.ops.vjp, name)(*tensors, **options)
        got = got if isinstance(got, tuple) else (got,)
        exact = {"device": "ref"} if dtype == torch.float64 else {}
        slots, got = zip(*((slot, t) for (slot, _), t in zip(row.outputs, got) if t.numel()))  # without a gate dgate is empty
        like = tuple(torch.empty_like(t) for t in got)
        options = {key: value for key, value in options.items() if key != "dtype"}
        if name in PAIRS:
            for y, x in zip(like, tensors):
                getattr(vjp, name.replace("_pair", ""))(x, *tensors[2:], **options, **exact, out=y)
        else:
            getattr(vjp, name)(*tensors, **options, **exact, outputs=slots, out=like)
        for slot, a, b in zip(slots, got, like):
            assert torch.equal(a, b), f"{name}: {slot}"


@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op):
    """In f64, by the reference kernels, with torch's finite differences."""
    tensors, options = sample(op, torch.float64)
    if op == "cast":
        options["dtype"] = torch.float64
    values = arguments(op, tensors)
    fixed = {"rope": (1, 2), "rope_pair": (2, 3)}.get(op, ())  # vjp gives no gradient of the tables
    leaves = tuple(t.clone().requires_grad_() if t is not None and t.is_floating_point() and i not in fixed else t for i, t in enumerate(values))
    assert torch.autograd.gradcheck(lambda *t: getattr(vt, op)(*t, **options), leaves, fast_mode=True)


@pytest.mark.parametrize("op", OPS)
def test_paths_agree(op):
    """Eager, torch.ops, torch.func and a compiled function give the same bits and the same gradients."""
    tensors, options = sample(op, torch.float32)
    values = arguments(op, tensors)
    where = [i for i in OPS[op].gradients if i is not None and values[i] is not None]

    def gradients_of(results):
        return [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype) for y in results]

    def run(function):
        leaves = [t.clone().requires_grad_() if i in where else t for i, t in enumerate(values)]
        results = as_tuple(function(*leaves))
        return [*(y.detach() for y in results), *torch.autograd.grad(results, [leaves[i] for i in where], gradients_of(results))]

    def first(*leaves):
        return OPS[op].results(as_tuple(getattr(torch.ops.vjp, op)(*leaves, **options)))

    torch._dynamo.reset()
    expected = run(lambda *leaves: getattr(vt, op)(*leaves, **options))
    for path in (first, torch.compile(lambda *leaves: getattr(vt, op)(*leaves, **options), fullgraph=True, dynamic=True, backend="aot_eager")):
        for a, b in zip(expected, run(path)):
            assert torch.equal(a, b)

    y, pull = torch.func.vjp(lambda *some: getattr(vt, op)(*[some[where.index(i)] if i in where else t for i, t in enumerate(values)], **options),
                             *[values[i] for i in where])
    dy = gradients_of(as_tuple(y))
    for a, b in zip(expected, [*as_tuple(y), *pull(tuple(dy) if isinstance(y, tuple) else dy[0])]):
        assert torch.equal(a, b)


def test_one_gradient_of_a_pair():
    """Only the gradient that is needed is computed, and a result that is not used has no gradient."""
    tensors, _ = sample("rope_pair", torch.float32)
    q, k, *tables = arguments("rope_pair", tensors)
    dy = torch.ones_like(q)
    alone = vjp.rope_backward(dy, *tables)
    for needed in ((True, False), (True, True)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((q, k), needed)]
        got = torch.autograd.grad(vt.rope_pair(*leaves, *tables)[0], leaves[0], dy)[0]
        assert torch.equal(got, alone)
    none, both = (torch.ops.vjp.rope_pair_backward(dy, torch.ones_like(k), *tables, outputs=bits) for bits in (1, 3))
    assert none[1].numel() == 0 and both[1].shape == k.shape and torch.equal(none[0], both[0])


def test_compile_with_other_shapes():
    """One graph without breaks serves other sizes, by Inductor where a compiler is there."""
    def step(x, gamma, w, gate):
        h = vt.rms_norm(x * 2, gamma)
        return vt.cross_entropy(vt.linear(vt.swiglu(h, gate), w, transpose_b=True), torch.zeros(x.shape[0], dtype=torch.int64))

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    gamma, w = torch.randn(16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    for rows in (4, 7, 33):
        x, gate = torch.randn(rows, 16), torch.randn(rows, 16)
        assert torch.equal(compiled(x, gamma, w, gate), step(x, gamma, w, gate))
        for a, b in zip(torch.autograd.grad(compiled(x, gamma, w, gate), (gamma, w)), torch.autograd.grad(step(x, gamma, w, gate), (gamma, w))):
            assert torch.equal(a, b)
    assert counter.frame_count == 1
    explained = torch._dynamo.explain(step)(x, gamma, w, gate)
    assert explained.graph_break_count == 0 and explained.graph_count == 1


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(1, t.shape[1]), t])[1:],
    "row-sliced": lambda t: torch.cat([t, t])[::2].contiguous() * 0 + t,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, gamma = torch.randn(6, 34), torch.randn(34)
    other = LAYOUTS[layout](x).requires_grad_()
    plain = x.clone().requires_grad_()
    for t in (other, plain):
        vt.layer_norm(t, gamma).mul(torch.linspace(0, 1, 34)).sum().backward()
    assert torch.equal(other.grad, plain.grad)


def test_expanded_and_zero_size():
    row = torch.randn(34)
    expanded = row.expand(5, 34)
    y = vt.layer_norm(expanded, row)
    assert torch.equal(y, vt.layer_norm(expanded.contiguous(), row)) and y.stride() == (34, 1)
    x = torch.randn(6, 33, requires_grad=True)
    vt.layer_norm(x).sum().backward()  # the gradient has strides (0, 0)
    assert x.grad.abs().max() < 1e-5
    for shape in ((0, 33), (2, 0, 33)):
        x, gamma = torch.randn(shape, requires_grad=True), torch.randn(33, requires_grad=True)
        y = vt.rms_norm(x, gamma)
        y.sum().backward()
        assert y.shape == shape and x.grad.shape == shape and torch.equal(gamma.grad, torch.zeros(33))


def test_channels_last():
    x = torch.randn(2, 6, 5, 7)
    weight, gamma = torch.randn(4, 6, 3, 3), torch.randn(6)
    calls = {
        "group_norm": (lambda t: vt.group_norm(t, gamma, groups=3), lambda t: F.group_norm(t, 3, gamma)),
        "maxpool2d": (lambda t: vt.maxpool2d(t), lambda t: F.max_pool2d(t, 2)),
        "conv2d": (lambda t: vt.conv2d(t, weight), lambda t: F.conv2d(t, weight)),
    }
    for name, (ours, theirs) in calls.items():
        last = x.to(memory_format=torch.channels_last).requires_grad_()
        reference = x.double().requires_grad_()
        weight, gamma = weight.double(), gamma.double()
        expected = theirs(reference)
        weight, gamma = weight.float(), gamma.float()
        y = ours(last)
        assert y.is_contiguous(memory_format=torch.channels_last) and torch.allclose(y.double(), expected, atol=1e-5), name
        torch.manual_seed(0)
        dy = torch.randn(y.shape)
        y.backward(dy)
        expected.backward(dy.double())
        assert torch.allclose(last.grad.double(), reference.grad, atol=1e-5), name


def test_autocast():
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vt.linear(x, w, transpose_b=True)
        normed = vt.layer_norm(y, torch.ones(8))
    assert y.dtype == normed.dtype == torch.bfloat16
    normed.float().square().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert torch.equal(y, vt.linear(x.bfloat16(), w.bfloat16(), transpose_b=True))
    assert vt.linear(x, w, transpose_b=True).dtype == torch.float32


def test_parameter_gradients_keep_their_dtype():
    """16-bit activations with f32 parameters: the gradients are summed and stored in f32, not rounded on the way."""
    x = torch.randn(4096, 32).bfloat16()
    gamma, beta = torch.ones(32, requires_grad=True), torch.zeros(32, requires_grad=True)
    dy = torch.rand(4096, 32).bfloat16()
    vt.layer_norm(x, gamma, beta).backward(dy)
    assert beta.grad.dtype == torch.float32
    assert ((beta.grad.double() - dy.double().sum(0)) / dy.double().sum(0)).abs().max() < 1e-6


def test_second_derivative_is_refused():
    x = torch.randn(3, 8, requires_grad=True)
    for function in (vt.layer_norm, lambda t: torch.ops.vjp.layer_norm(t)[0]):
        d, = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="layer_norm can be differentiated once"):
            d.sum().backward()


def test_statistics_are_not_differentiable():
    x = torch.randn(3, 8, requires_grad=True)
    y, mean, rstd = torch.ops.vjp.layer_norm(x)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad


def test_vmap():
    x, gamma = torch.randn(3, 4, 8), torch.randn(8)
    assert torch.equal(torch.vmap(lambda t: vt.rms_norm(t, gamma))(x), vt.rms_norm(x, gamma))


def test_errors():
    with pytest.raises(RuntimeError, match=r"linear.forward: a is \[4, 6\] and b is \[7, 5\]: K is 6 in one and 7 in the other"):
        torch.ops.vjp.linear(torch.ones(4, 6), torch.ones(7, 5))
    with pytest.raises(RuntimeError, match="activation is 'soft', which is not one of its choices"):
        torch.ops.vjp.linear(torch.ones(4, 6), torch.ones(6, 5), activation="soft")
    with pytest.raises(RuntimeError, match="scale: x has a dtype that vjp does not take"):
        torch.ops.vjp.scale(torch.ones(3, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="scale: x has rank 9"):
        torch.ops.vjp.scale(torch.ones((1,) * 9))
    with pytest.raises(TypeError):
        vt.layer_norm()
    with pytest.raises(TypeError):
        vt.swiglu(torch.ones(3))


def test_errors_leak_nothing():
    """A refused call frees what it took from torch, and the packed copies: 400 of them would need 200 MB."""
    import resource
    w = torch.ones(7, 5)
    for i in range(400):
        if i == 100:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(RuntimeError, match="linear"):
            torch.ops.vjp.linear(torch.ones(1024, 64).t(), w, torch.ones(1024, 64), activation="relu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50000  # KiB


def test_on_torchs_threads():
    """The kernels run on torch's pool, so a process that calls vjp by torch alone has no other threads."""
    if vt.KERNELS != "C":
        pytest.skip("torch's C functions are not there")
    code = """if True:
        import os, torch, vjp.torch
        torch.set_num_threads(2)
        x = torch.randn(2048, 1024)
        torch.nn.functional.layer_norm(x, (1024,))  # starts torch's threads
        before = len(os.listdir("/proc/self/task"))
        for count in (2, 1, 2):
            torch.set_num_threads(count)
            vjp.torch.layer_norm(x), vjp.layer_norm(x)
        assert len(os.listdir("/proc/self/task")) == before, (before, len(os.listdir("/proc/self/task")))
        expected = vjp.torch.layer_norm(x).numpy()
        if os.fork() == 0:  # the child has none of them
            os._exit(not (expected == vjp.torch.layer_norm(x).numpy()).all() or not (expected == vjp.layer_norm(x)[0].numpy()).all())
        assert os.wait()[1] == 0"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr


class Normalised(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return vt.layer_norm(torch.arange(4096.0).reshape(64, 64) * (i + 1)), vjp.layer_norm(torch.full((2, 4), float(i)))[1]


def test_data_loader_workers():
    """Forked workers call vjp after their parent has."""
    expected = [Normalised()[i] for i in range(6)]
    for got, value in zip(torch.utils.data.DataLoader(Normalised(), batch_size=None, num_workers=2, timeout=60), expected):
        assert torch.equal(got[0], value[0]) and torch.equal(got[1], value[1])


def test_python_kernels():
    """A torch without the C functions: the same bits from kernels in Python."""
    code = """if True:
        import torch, vjp, vjp.torch
        assert vjp.torch.KERNELS == "Python"
        torch.manual_seed(0)
        x, gamma, beta = torch.randn(7, 65).bfloat16(), torch.randn(65, requires_grad=True), torch.randn(65, requires_grad=True)
        y = vjp.torch.layer_norm(x, gamma, beta)
        y.sum().backward()
        assert torch.equal(y, vjp.layer_norm(x, gamma.detach(), beta.detach())[0])
        assert torch.equal(beta.grad, torch.full((65,), 7.0)) and gamma.grad.dtype == torch.float32
        torch.library.opcheck(torch.ops.vjp.layer_norm.default, (x, gamma, beta), {})
        d = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(vjp.torch.layer_norm, (d,))"""
    environment = {**os.environ, "VJP_TORCH_KERNELS": "python"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def test_kernels_of_torch_2_10():
    """A torch before 2.13 has no function that frees an optional value: C++'s delete does it, and nothing is left over."""
    code = """if True:
        import resource
        import torch
        from vjp import _core
        symbols = _core.torch_symbols()
        assert "torch_delete_stable_ivalue" in symbols
        _core.torch_symbols = lambda: tuple(name for name in symbols if name != "torch_delete_stable_ivalue")
        import vjp, vjp.torch
        assert vjp.torch.KERNELS == "C"
        torch.manual_seed(0)
        x, gamma, beta = torch.randn(7, 65), torch.randn(65), torch.randn(65)
        for optional in ((), (gamma,), (gamma, beta)):
            assert torch.equal(torch.ops.vjp.layer_norm(x, *optional)[0], vjp.layer_norm(x, *optional)[0])
        small = x[:1, :8].contiguous(), gamma[:8].contiguous(), beta[:8].contiguous()
        def peak(calls):
            for _ in range(calls):
                torch.ops.vjp.layer_norm(*small)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = peak(10000)
        grown = peak(200000) - before
        assert grown < 4096, f"{grown} KiB more after 200000 calls, of which each was given two optional values"
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_import_vjp_does_not_import_torch():
    done = subprocess.run([sys.executable, "-c", "import sys, vjp; assert not {'torch', 'jax', 'transformers'} & set(sys.modules)"])
    assert done.returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_tensor(dtype):
    """q, k and v as slices of one product: the bits of packed copies, in both passes."""
    torch.manual_seed(6)
    slices = torch.randn(2, 5, 8, 6, dtype=dtype).split((4, 2, 2), dim=2)
    packed = [t.contiguous() for t in slices]
    assert not any(t.is_contiguous() for t in slices)
    y, lse = torch.ops.vjp.attention(*slices)
    for got, expected in zip((y, lse), torch.ops.vjp.attention(*packed)):
        assert torch.equal(got, expected)
    gradients = torch.ops.vjp.attention_backward(y, *packed, y, lse, None)
    for got, expected in zip(torch.ops.vjp.attention_backward(y, *slices, y, lse, None), gradients):
        assert torch.equal(got, expected)


def test_rows_are_not_copied():
    """Slices whose rows meet are refused, which vjp can see only where it gets their own memory."""
    together, angle = torch.ones(5, 4, 6), torch.ones(5, 3)
    with pytest.raises(vjp.Error, match="y overlaps x"):
        vjp.rope(together[:, :2], angle, angle, out=together[:, 1:3])
    vjp.rope(together[:, :2], angle, angle, out=together[:, 2:])
    assert (together[:, 2:, :3] == 0).all() and (together[:, 2:, 3:] == 2).all() and (together[:, :2] == 1).all()


def test_linear_with_a_gate():
    """The gradient of gate needs pre, with its bias, although there is no activation."""
    made = make_inputs({"a": (9, 31), "b": (31, 17), "bias": (17,), "gate": (9, 17)}, torch.float64)
    tensors = {name: t.detach().float().requires_grad_() for name, t in made.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    y = vt.linear(**tensors)
    expected = F.silu(exact["gate"]) * (exact["a"] @ exact["b"] + exact["bias"])
    assert torch.equal(y, vt.swiglu(tensors["gate"], vt.linear(tensors["a"], tensors["b"], tensors["bias"])))
    y.square().sum().backward()
    expected.square().sum().backward()
    a, b, gate = (tensors[name].detach() for name in ("a", "b", "gate"))
    for gated, last in ((None, "dresidual"), (gate, "dgate")):  # of all outputs, the one that there is
        every = vjp.linear_backward(gate, a, b, gate=gated)
        assert len(every) == 4 and torch.equal(every[3], vjp.linear_backward(gate, a, b, gate=gated, outputs=last))
    for name, t in tensors.items():
        torch.testing.assert_close(t.grad.double(), exact[name].grad, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
