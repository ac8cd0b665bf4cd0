# SPDX-License-Identifier: MIT
"""The modules of vjp.torch against those they replace, patch(), the optimiser, and the report on reproducibility."""
import copy
import inspect
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import vjp.torch as vt  # noqa: E402


def compare(ours, theirs, *inputs, bound=2e-6):
    """Loads one's state dict into the other; outputs and all gradients agree with theirs in f64."""
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    mine = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    doubles = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    y, expected = ours(*mine), exact(*doubles)
    assert y.shape == expected.shape
    dy = torch.randn(y.shape)
    y.backward(dy)
    expected.backward(dy.double())
    pairs = [(y, expected)] + [(a.grad, b.grad) for a, b in zip(mine, doubles) if a.is_floating_point()]
    pairs += [(p.grad, dict(exact.named_parameters())[name].grad) for name, p in ours.named_parameters()]
    for got, want in pairs:
        assert ((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() < bound


class Activated(nn.Linear):
    def forward(self, x):
        return nn.functional.gelu(super().forward(x), approximate="tanh")


class Block(nn.Module):
    """Llama's feed-forward block in torch's own functions."""
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(dim, hidden, False), nn.Linear(dim, hidden, False), nn.Linear(hidden, dim, False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Head(nn.Linear):
    def forward(self, x, target):
        return nn.functional.cross_entropy(super().forward(x), target, label_smoothing=0.1)


class Heads(nn.Module):
    """Grouped causal attention in torch's own functions."""
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, n, False) for n in (32, 16, 16, 32))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def test_modules():
    compare(vt.LayerNorm(33), nn.LayerNorm(33), torch.randn(7, 33))
    compare(vt.LayerNorm((5, 13)), nn.LayerNorm((5, 13)), torch.randn(4, 5, 13))
    compare(vt.LayerNorm(33, bias=False), nn.LayerNorm(33, bias=False), torch.randn(2, 7, 33))
    compare(vt.LayerNorm(33, elementwise_affine=False), nn.LayerNorm(33, elementwise_affine=False), torch.randn(7, 33))
    compare(vt.RMSNorm(33), nn.RMSNorm(33, eps=torch.finfo(torch.float32).eps), torch.randn(7, 33))
    compare(vt.GroupNorm(3, 6), nn.GroupNorm(3, 6), torch.randn(2, 6, 5, 7))
    compare(vt.Linear(33, 17), nn.Linear(33, 17), torch.randn(3, 5, 33), bound=5e-6)
    compare(vt.Linear(33, 17, activation="gelu_tanh"), Activated(33, 17), torch.randn(9, 33), bound=5e-6)
    compare(vt.Linear(33, 17, bias=False), nn.Linear(33, 17, bias=False), torch.randn(33), bound=5e-6)
    compare(vt.SwiGLU(16, 40), Block(16, 40), torch.randn(2, 5, 16), bound=5e-6)
    compare(vt.Attention(32, 4, 2), Heads(), torch.randn(2, 9, 32), bound=1e-5)
    target = torch.tensor([0, 5, -100, 16, 1])
    compare(vt.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1), torch.randn(5, 17), target)
    compare(vt.CrossEntropyLoss(weight=torch.rand(17)), nn.CrossEntropyLoss(weight=torch.rand(17)), torch.randn(5, 17), target)
    compare(vt.CrossEntropyLoss(), nn.CrossEntropyLoss(), torch.randn(5, 17, 3), torch.randint(0, 17, (5, 3)))
    compare(vt.LinearCrossEntropy(16, 17, label_smoothing=0.1), Head(16, 17, bias=False), torch.randn(5, 16), target, bound=5e-6)


def test_rotary_embedding():
    embed = vt.RotaryEmbedding(8, positions=16)
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    y = embed(x)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5) and torch.equal(y[:, 0], x[:, 0])
    later = embed(x, torch.arange(5).expand(2, 5) + 3)
    angle = torch.tensor(3.0) * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    a, b = y[..., :4], y[..., 4:]
    assert torch.allclose(later[..., :4], a * angle.cos() - b * angle.sin(), atol=1e-5)
    assert not embed.state_dict()
    k, positions = torch.randn(2, 5, 2, 8), torch.arange(5) + 3
    for a, b in zip(embed.pair(x, k, positions), (embed(x, positions), embed(k, positions))):
        assert torch.equal(a, b)


def test_adamw():
    """The steps of torch's, and either loads the other's state."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours, reference = vt.AdamW(mine, lr=1e-2, weight_decay=0.1), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(6):
        if step in (2, 4):  # exchanged; torch does not copy what it loads
            of_ours, of_theirs = (copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, reference))
            ours.load_state_dict(of_theirs)
            reference.load_state_dict({**of_theirs, "state": of_ours["state"]})
        for a, b in zip(mine, theirs):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
        for a, b in zip(mine, theirs):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    half = nn.Parameter(torch.randn(4).bfloat16())
    half.grad = torch.randn(4).bfloat16()
    optimizer = vt.AdamW([half])
    optimizer.step()
    assert optimizer.state[half]["exp_avg"].dtype == torch.float32
    with pytest.raises(ValueError, match="AdamW: lr -1"):
        vt.AdamW([half], lr=-1)


TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}


def make_model(family, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**{**TINY, **options}))


def train(model, optimizer, steps):
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    update = optimizer(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def one_thread():
    """Small tensors: on a busy machine torch's threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family, steps", [("Llama", 20), ("Mistral", 5), ("Qwen2", 5), ("Qwen3", 20)])
def test_patched_models_train_alike(family, steps, one_thread):
    """Steps of training, patched and with vjp's optimiser, and not: the losses agree to 1e-5."""
    own, patched = make_model(family), make_model(family)
    report = vt.patch(patched)
    norms = sum(type(module).__name__ == f"{family}RMSNorm" for module in patched.modules())
    assert len(report.replaced) == norms + 2 + 2 + 1, report
    assert "LlamaAttention" not in str(report) or family == "Llama"
    assert own.state_dict().keys() == patched.state_dict().keys()
    expected, got = train(own, torch.optim.AdamW, steps), train(patched, vt.AdamW, steps)
    assert expected[-1] < 0.97 * expected[0]
    assert max(abs(a - b) / a for a, b in zip(expected, got)) < 1e-5


def test_patch_changes_instances_alone():
    own, patched = make_model("Llama"), make_model("Llama")
    ids = torch.randint(0, 256, (1, 8))
    before = patched(input_ids=ids).logits
    with pytest.raises(ValueError, match="this model is patched"):
        vt.patch(patched), vt.patch(patched)
    assert all("forward" not in vars(module) for module in own.modules())
    assert any("forward" in vars(module) for module in patched.modules())
    vt.unpatch(patched)
    assert all("forward" not in vars(module) for module in patched.modules())
    assert torch.equal(patched(input_ids=ids).logits, before)
    assert patched.loss_function is own.loss_function


@pytest.mark.parametrize("family", ["Gemma", "Gemma2"])
def test_gemma_norms(family):
    own, patched = make_model(family), make_model(family)
    for model in (own, patched):
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, std=0.1)
    report = vt.patch(patched)
    assert "rms_norm with gamma = 1 + weight" in str(report) and "not a kind of module that vjp knows" in str(report)
    ids = torch.randint(0, 256, (2, 16))
    a, b = own(input_ids=ids, labels=ids).loss, patched(input_ids=ids, labels=ids).loss
    assert abs(a - b) / a < 1e-5
    a.backward(), b.backward()
    for p, q in zip(own.parameters(), patched.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item() + 1e-7)


def test_patched_attention_leaves_masks_and_caches_right():
    """Padding needs a mask, which the model's own attention computes; a cache has more keys than queries."""
    own, patched = make_model("Qwen3").eval(), make_model("Qwen3").eval()
    vt.patch(patched)
    ids = torch.randint(1, 256, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert torch.allclose(own(input_ids=ids, attention_mask=mask).logits[:, 5:], patched(input_ids=ids, attention_mask=mask).logits[:, 5:], atol=1e-5)
    positions = torch.stack([torch.arange(12), torch.arange(12) + 4])
    assert torch.allclose(own(input_ids=ids, position_ids=positions).logits, patched(input_ids=ids, position_ids=positions).logits, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(own.generate(ids[1:], **options), patched.generate(ids[1:], **options))


class Counted:
    """A patched model, and the calls of vjp's attention: those made (eager), those in the one compiled graph."""

    def __init__(self, model, monkeypatch):
        vt.patch(model)
        self.model, self.calls, self.graphs = model, 0, 0
        monkeypatch.setattr(vt.functions, "attention", self.attention)

    def attention(self, *arguments, **keywords):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return vt.attention(*arguments, **keywords)

    def backend(self, graph, inputs):
        self.calls += sum(node.target is torch.ops.vjp.attention.default for node in graph.graph.nodes)
        self.graphs += 1
        return graph

    def eager(self, **keywords):
        self.calls = 0
        return self.model(**keywords)

    def compiled(self, **keywords):
        self.calls = self.graphs = 0
        torch._dynamo.reset()
        result = torch.compile(self.model, fullgraph=True, backend=self.backend)(**keywords)
        assert self.graphs == 1
        return result


def compile_as_before_2_14(monkeypatch):
    """Before torch 2.14 dynamo says of every compiled function that it is exported; transformers makes a mask then."""
    masking = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masking, "is_torchdynamo_exporting", torch.compiler.is_dynamo_compiling)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_patched_model_compiles_without_breaks(family, monkeypatch):
    """With the torch that is installed."""
    patched = Counted(make_model(family), monkeypatch)
    ids = torch.randint(0, 256, (2, 16))
    patched.compiled(input_ids=ids, labels=ids).loss.backward()
    assert patched.calls == 2


PADDING = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
# What changes the mask: a family and its options, the call, and in how many of the 2 layers vjp computes the attention.
MASKS = {
    "plain": ("Llama", {}, {}, 2),
    "no cache": ("Llama", {}, {"use_cache": False}, 2),
    "embeddings": ("Qwen3", {}, {"inputs_embeds": torch.linspace(-1, 1, 2 * 12 * 64).reshape(2, 12, 64), "input_ids": None}, 2),
    "padding": ("Llama", {}, {"attention_mask": PADDING}, 0),
    "packed": ("Llama", {}, {"position_ids": PACKED, "use_cache": False}, 0),
    "not causal": ("Llama", {}, {"is_causal": False}, 0),
    "window": ("Mistral", {"sliding_window": 11}, {}, 0),
    "wide window": ("Mistral", {"sliding_window": 12}, {}, 2),
    "window in a layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {}, 0),
    "dropout": ("Llama", {"attention_dropout": 0.5}, {}, 0),
    "eager": ("Llama", {"attn_implementation": "eager", "output_attentions": True}, {}, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_patched_attention_runs_where_no_mask_is_needed(name, monkeypatch):
    """vjp's attention where it may, the model's own elsewhere, eager and compiled; the logits are the unpatched model's."""
    family, options, call, layers = MASKS[name]
    own, patched = make_model(family, **options), Counted(make_model(family, **options), monkeypatch)
    compile_as_before_2_14(monkeypatch)
    ids = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, **call}
    for run in (patched.eager, patched.compiled):
        torch.manual_seed(2)
        expected = own(**call)
        torch.manual_seed(2)
        got = run(**call)
        seen = call.get("attention_mask", torch.ones_like(ids)).bool()
        assert torch.allclose(got.logits[seen], expected.logits[seen], atol=1e-5)
        assert patched.calls == layers, run
        if options.get("output_attentions"):
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got.attentions, expected.attentions, strict=True))


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("window", [None, 7])
def test_patched_attention_with_caches(kind, window, monkeypatch):
    """Tokens in three calls: into an empty cache, several more, one more. A static cache has keys that are not written yet."""
    transformers = pytest.importorskip("transformers")
    own = make_model("Mistral", sliding_window=window)
    patched = Counted(make_model("Mistral", sliding_window=window), monkeypatch)
    ids = torch.randint(1, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = own(input_ids=ids, use_cache=False).logits
        for run in (patched.eager, patched.compiled):
            cache = getattr(transformers, kind)(config=own.config, **({"max_cache_len": 16} if kind == "StaticCache" else {}))
            if kind == "StaticCache":
                cache.early_initialization(2, 2, 16, torch.float32, ids.device)
            got = [run(input_ids=part, past_key_values=cache).logits for part in (ids[:, :6], ids[:, 6:11], ids[:, 11:])]
            assert torch.allclose(torch.cat(got, dim=1), expected, atol=1e-5), run
    if not window:
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        options["cache_implementation"] = kind.removesuffix("Cache").lower()
        assert torch.equal(own.generate(ids, **options), patched.model.generate(ids, **options))


def test_keyword_of_patch_stays_in_it(monkeypatch):
    """The model's own attention gets the caller's keywords, and the signature of forward stays the class's."""
    transformers = pytest.importorskip("transformers")
    attention, seen = transformers.AttentionInterface._global_mapping["sdpa"], []

    def spy(*arguments, **keywords):
        seen.append({name for name in keywords if "vjp" in name})
        return attention(*arguments, **keywords)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", spy)
    model = make_model("Llama", attention_dropout=0.5)
    vt.patch(model)
    assert inspect.signature(model.model.forward) == inspect.signature(make_model("Llama").model.forward)
    ids = torch.randint(0, 256, (2, 12))
    model(input_ids=ids)  # dropout
    model.eval().to("meta")(input_ids=ids.to("meta"))  # a device that vjp does not have
    assert seen == [set()] * 4
    taken = make_model("Llama")  # one layer's attention is another library's
    taken.model.layers[1].self_attn.forward = taken.model.layers[1].self_attn.forward
    vt.patch(taken)
    taken.eval()(input_ids=ids)
    assert seen == [set()] * 5


def test_packed_sequences_of_flash_attention(monkeypatch):
    """Flash attention gets no mask: it reads the sequences from the positions."""
    transformers = pytest.importorskip("transformers")
    counted = Counted(make_model("Llama"), monkeypatch)
    own = []
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2",
                        lambda module, q, k, v, mask, **keywords: own.append(mask) or (q.transpose(1, 2), None))
    counted.model.config._attn_implementation_internal = "flash_attention_2"
    counted.eager(input_ids=torch.randint(0, 256, (2, 12)), position_ids=PACKED, use_cache=False)
    assert counted.calls == 0 and own == [None, None]
    counted.eager(input_ids=torch.randint(0, 256, (2, 12)), use_cache=False)
    assert counted.calls == 2 and own == [None, None]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_patched_model_takes_other_lengths(strict):
    """An export of a model with a sliding window is for lengths above the window too."""
    model = make_model("Mistral", sliding_window=8, use_cache=False, num_key_value_heads=4).eval()
    ids = torch.randint(1, 256, (1, 24))
    expected = model(input_ids=ids).logits
    vt.patch(model)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (), {"input_ids": ids[:, :6]}, dynamic_shapes={"input_ids": {1: length}}, strict=strict)
    assert torch.allclose(program.module()(input_ids=ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copy_of_patched_model(duplicate):
    model = make_model("Llama")
    ids = torch.randint(0, 256, (1, 8))
    expected = model(input_ids=ids).logits
    vt.patch(model)
    twin = duplicate(model)
    patched = model(input_ids=ids, labels=ids)
    assert all(torch.equal(a, b) for a, b in zip(patched.to_tuple()[:2], twin(input_ids=ids, labels=ids).to_tuple()))
    vt.unpatch(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert ["forward" in vars(module) for module in twin.modules()].count(True) > 5
    assert all(vars(module)["forward"].__self__ is module for module in twin.modules() if "forward" in vars(module))
    vt.unpatch(twin)
    assert all("forward" not in vars(module) for module in twin.modules())
    assert torch.equal(twin(input_ids=ids).logits, expected)


def test_deterministic_report():
    """torch's layer_norm adds the gradients of its parameters thread by thread; vjp's does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU())
    x = torch.randn(3000, 64)
    report = vt.deterministic_report(model, x, threads=[1, 2, 3])
    assert not report
    blamed = {(d.kind, d.what, d.remedy) for d in report.differences}
    assert ("LayerNorm", "gradient of weight", "vjp.torch.LayerNorm") in blamed, str(report)
    assert "gradient of weight" in str(report) and torch.get_num_threads() > 0
    vt.patch(model, linear=True)
    report = vt.deterministic_report(model, x, threads=[1, 2, 3])
    assert report and "same bits" in str(report), str(report)
    assert all(parameter.grad is None for parameter in model.parameters())
