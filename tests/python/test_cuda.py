# SPDX-License-Identifier: MIT
"""torch's CUDA tensors, on a machine with an NVIDIA GPU and the CUDA backend: every op against torch in f64, streams, captured
graphs, torch.compile, a patched Llama. test_gpu_arrays.py has what can be shown without a GPU.

    LD_LIBRARY_PATH=build PYTHONPATH=build/python python3 -m pytest tests/python/test_cuda.py
"""
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import vjp  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if not any(device.name == "cuda:0" for device in vjp.devices()):
    pytest.skip("the CUDA backend is not installed", allow_module_level=True)

import vjp.torch as vt  # noqa: E402
from test_torch import CASES, against_torch, compare  # noqa: E402
from test_torch_modules import make_model  # noqa: E402
from test_torch_ops import all_samples, arguments, sample  # noqa: E402
from vjp.torch._ops import ROWS  # noqa: E402
from vjp.torch.functions import OPS, as_tuple  # noqa: E402

PLACE = "cuda:0"


def here(value):
    return value.to(PLACE) if torch.is_tensor(value) else value


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("op", CASES)
def test_against_torch(op, dtype):
    against_torch(op, dtype, PLACE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(dtype):
    x, counter = (torch.rand(100, 77) + 1).to(PLACE, dtype), torch.tensor([5, 9], device=PLACE)
    y = vjp.dropout(x, counter, p=0.25)
    assert torch.equal(y.cpu() != 0, vjp.dropout(x.cpu(), counter.cpu(), p=0.25) != 0)  # the same elements as on the CPU
    compare("dropout", "y", y.cpu(), ((y != 0) * x.double() / 0.75).cpu())


def test_results_are_torchs():
    x = torch.randn(7, 65, device=PLACE)
    y, mean, rstd = vjp.layer_norm(x)
    assert all(type(t) is torch.Tensor and t.device == x.device for t in (y, mean, rstd))
    before = torch.cuda.memory_allocated()
    del y, mean, rstd
    assert torch.cuda.memory_allocated() < before
    out = torch.empty_like(x)
    assert vjp.layer_norm(x, outputs="y", out=out) is out
    with pytest.raises(ValueError, match="in the memory of cuda:0 and gamma in that of the host"):
        vjp.layer_norm(x, torch.ones(65))


@pytest.mark.parametrize("view", [lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, -t], -1)[..., 0]], ids=["transposed", "sliced"])
def test_layouts(view):
    x = torch.randn(64, 65, device=PLACE)
    for got, expected in zip(vjp.layer_norm(view(x)), vjp.layer_norm(x)):
        assert torch.equal(got, expected)
    base = torch.full((65, 64), 5.0, device=PLACE)
    vjp.layer_norm(x, outputs="y", out=base.t())
    assert torch.equal(base.t(), vjp.layer_norm(x)[0])
    leaf = x.clone().requires_grad_()
    vt.layer_norm(leaf).sum().backward()  # an expanded gradient
    assert leaf.grad.abs().max() < 1e-4
    assert vjp.scale(torch.empty(0, 4, device=PLACE)).shape == (0, 4)


def test_numbers():
    w, m, v, g = torch.rand(4, 1000, device=PLACE)
    expected = vjp.adamw(*(t.cpu() for t in (w, m, v, g)), 0.01, 3)
    for a, b in zip(vjp.adamw(w, m, v, g, 0.01, 3), expected):
        assert torch.allclose(a.cpu(), b, rtol=1e-6, atol=1e-7)


def test_an_index_outside_its_table():
    table = torch.randn(9, 4, device=PLACE)
    vjp.gather(table, torch.tensor([0, 9], device=PLACE))
    torch.cuda.synchronize()
    with pytest.raises(vjp.InvalidError, match=r"index\[1\] is 9"):
        vjp.synchronize(PLACE)
    vjp.synchronize(PLACE)


# ---- torch.ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_opcheck(name):
    tensors, options = next((t, o) for n, t, o in all_samples(torch.float32) if n == name)
    row = ROWS[name]
    leaves = tuple(here(t).requires_grad_() if t is not None and t.is_floating_point() and not row.backward and row.op in OPS else here(t)
                   for t in tensors)
    kinds = ["test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.vjp, name).default, leaves, options, test_utils=kinds[:3] if row.backward else kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, dtype):
    """Eager, by torch.ops and compiled: the same bits, near those of the CPU."""
    tensors, options = sample(op, dtype)
    values = arguments(op, tensors)
    where = [i for i in OPS[op].gradients if i is not None and values[i] is not None]

    def run(function, place):
        leaves = [t if t is None else t.to(place).requires_grad_() if i in where else t.to(place) for i, t in enumerate(values)]
        results = as_tuple(function(*leaves))
        dy = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(place, y.dtype) for y in results]
        return [*(y.detach() for y in results), *torch.autograd.grad(results, [leaves[i] for i in where], dy)]

    def first(*leaves):
        return OPS[op].results(as_tuple(getattr(torch.ops.vjp, op)(*leaves, **options)))

    def eager(*leaves):
        return getattr(vt, op)(*leaves, **options)

    torch._dynamo.reset()
    expected = run(eager, PLACE)
    for path in (first, torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager"), torch.compile(eager, fullgraph=True)):
        for a, b in zip(expected, run(path, PLACE)):
            assert torch.equal(a, b)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(expected, run(eager, "cpu")):
        assert (a.cpu().double() - b.double()).abs().max() <= bound * b.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rope_pair(dtype):
    """Queries and keys at once: the bits of two calls, also in a captured graph."""
    q, k = (torch.randn(2, 257, heads, 128, device=PLACE, dtype=dtype) for heads in (32, 8))
    angle = torch.rand(300, 64, device=PLACE)
    for positions in (None, torch.randint(0, 300, (2, 257), device=PLACE)):
        for tables in ((angle.cos(), angle.sin()), (angle.cos().to(dtype), angle.sin().to(dtype))):
            expected = [(vjp.rope(t, *tables, positions), vjp.rope_backward(t, *tables, positions)) for t in (q, k)]
            leaves = [t.clone().requires_grad_() for t in (q, k)]
            results = vt.rope_pair(*leaves, *tables, positions)
            gradients = torch.autograd.grad(results, leaves, (q, k))
            for (y, dx), a, b in zip(expected, results, gradients):
                assert torch.equal(y, a) and torch.equal(dx, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = vt.rope_pair(q, k, *tables)
    graph.replay()
    for a, b in zip(results, (q, k)):
        assert torch.equal(a, vjp.rope(b, *tables))


def test_adamw_of_many_tensors():
    """Several parameters at once: the bits of a call for each."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        start = [torch.randn(5 + 37 * i, device=PLACE, dtype=dtype) for i in range(40)]
        models = [[nn.Parameter(t.clone()) for t in start] for _ in range(2)]
        optimizers = [vt.AdamW(models[0], lr=1e-2)], [vt.AdamW([p], lr=1e-2) for p in models[1]]
        for _ in range(3):
            for a, b in zip(*models):
                a.grad = b.grad = torch.randn_like(a)
            for optimizer in (*optimizers[0], *optimizers[1]):
                optimizer.step()
        for a, b, before in zip(*models, start):
            assert torch.equal(a, b) and not torch.equal(a, before)


def test_autocast():
    x, w = torch.randn(4, 16, device=PLACE, requires_grad=True), torch.randn(8, 16, device=PLACE, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = vt.linear(x, w, transpose_b=True)
        normed = vt.layer_norm(y, torch.ones(8, device=PLACE))
    assert y.dtype == normed.dtype == torch.bfloat16
    normed.float().square().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vt.linear(x, w, transpose_b=True).dtype == torch.float32


def test_f64_is_refused():
    with pytest.raises(Exception, match="no kernel for f64"):
        vt.layer_norm(torch.randn(3, 8, dtype=torch.float64, device=PLACE))


# ---- Streams and graphs ---------------------------------------------------------------------------------


def slow(stream):
    """A stretch of work on a stream, long enough that a call on another stream would be wrong."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)


def test_the_current_stream_is_used():
    """x is written late on a side stream: a kernel on any other stream would read zeros."""
    side = torch.cuda.Stream()
    x, value = torch.zeros(1024, 1024, device=PLACE), torch.randn(1024, 1024, device=PLACE)
    w = torch.randn(1024, 1024, device=PLACE)
    expected, product = vjp.layer_norm(value)[0], vjp.linear(value, w, outputs="y")
    torch.cuda.synchronize()
    slow(side)
    with torch.cuda.stream(side):
        x.copy_(value)
        y, z = vjp.layer_norm(x)[0], vjp.linear(x, w, outputs="y")
        again = vt.layer_norm(x)
    assert not side.query()  # nothing has waited
    side.synchronize()
    assert torch.equal(y, expected) and torch.equal(again, expected) and torch.equal(z, product)


def test_two_streams_at_once():
    """Products on two streams do not share scratch memory."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    a, b = torch.randn(2, 512, 2048, device=PLACE), torch.randn(2, 2048, 512, device=PLACE)
    expected = [vjp.linear(a[i], b[i], outputs="y") for i in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        made = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made.append([vjp.linear(a[i], b[i], outputs="y") for _ in range(10)])
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected[i]) for i in range(2) for y in made[i])


def test_captured_graph():
    """A step, forward and backward, captured as torch's documentation does it, and replayed on other values."""
    torch.manual_seed(0)
    gamma = torch.randn(256, device=PLACE, requires_grad=True)
    w = torch.randn(64, 256, device=PLACE, requires_grad=True)
    x, target = torch.randn(128, 256, device=PLACE), torch.randint(0, 64, (128,), device=PLACE)

    def step():
        loss = vt.cross_entropy(vt.linear(vt.rms_norm(x, gamma), w, transpose_b=True), target)
        return loss, *torch.autograd.grad(loss, (gamma, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(128, 256))
        graph.replay()
        replayed = [t.clone() for t in made]
        for a, b in zip(replayed, step()):
            assert torch.equal(a, b)


def test_compile_reduce_overhead():
    """torch.compile with CUDA graphs of its own."""
    torch._dynamo.reset()
    gamma = torch.randn(256, device=PLACE, requires_grad=True)
    step = torch.compile(lambda x: vt.swiglu(vt.rms_norm(x, gamma), x).sum(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(64, 256, device=PLACE)
        got, = torch.autograd.grad(step(x), gamma)
        expected, = torch.autograd.grad(vt.swiglu(vt.rms_norm(x, gamma), x).sum(), gamma)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_memory_stays_flat():
    x, gamma = torch.randn(64, 256, device=PLACE), torch.ones(256, device=PLACE)
    dy = torch.randn(64, 256, device=PLACE)
    for i in range(3000):
        if i == 1000:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        vjp.layer_norm(x, gamma), vjp.layer_norm_backward(dy, x, gamma)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# ---- Models ---------------------------------------------------------------------------------------------


def train(model, optimizer, steps):
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1)).to(PLACE)
    update = optimizer(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        update.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_patched_models_train_alike(family, dtype, bound):
    own, patched = (make_model(family).to(PLACE, dtype) for _ in range(2))
    report = vt.patch(patched)
    assert len(report.replaced) > 8, report
    expected, got = train(own, torch.optim.AdamW, 20), train(patched, vt.AdamW, 20)
    assert expected[-1] < 0.97 * expected[0]
    assert max(abs(a - b) / a for a, b in zip(expected, got)) < bound


@pytest.mark.parametrize("use_cache", [True, False])
def test_patched_model_compiles(use_cache):
    """As it is trained, with every torch: vjp's attention in every layer, although transformers makes a mask before 2.14."""
    from torch._inductor.compile_fx import compile_fx
    model = make_model("Llama").to(PLACE)
    ids = torch.randint(0, 256, (2, 32), device=PLACE)
    expected = model(input_ids=ids, labels=ids).loss
    vt.patch(model)
    targets = []

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=ids, use_cache=use_cache).loss
    got.backward()
    assert abs(got - expected) / expected < 1e-5
    assert targets.count(torch.ops.vjp.attention.default) == 2


def test_modules_against_torch():
    x = torch.randn(6, 96, device=PLACE)
    for ours, theirs in ((vt.LayerNorm(96), nn.LayerNorm(96)), (vt.Linear(96, 32), nn.Linear(96, 32)), (vt.RMSNorm(96), nn.RMSNorm(96))):
        ours.load_state_dict(theirs.state_dict())
        assert torch.allclose(ours.to(PLACE)(x), theirs.to(PLACE)(x), rtol=1e-4, atol=1e-4)
    logits, target = torch.randn(8, 33, device=PLACE), torch.randint(0, 33, (8,), device=PLACE)
    assert torch.allclose(vt.CrossEntropyLoss()(logits, target), F.cross_entropy(logits, target))


def test_cupy():
    cupy = pytest.importorskip("cupy")
    x = cupy.random.standard_normal((7, 65), dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True):
        y = vjp.layer_norm(x * 2, outputs="y")
        assert isinstance(y, cupy.ndarray)
        assert abs(y - (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)).max() < 1e-4
