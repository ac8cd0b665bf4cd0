# SPDX-License-Identifier: MIT
"""patch(model): vjp's kernels in a model that exists. unpatch(model) undoes it.

Only instances change: a patched module gets a `forward` of its own, and its parameters, class, hooks and state dict stay as
they are. Modules are recognised by the names of their classes, so transformers is not imported. Where a call needs what vjp
does not compute (an explicit attention mask, attention dropout, tensors on a device that vjp does not have), the module's own
forward runs.

A mask tensor is not read: attention sees that none is needed where transformers made none, or where the decoder around it was
called without padding, positions or a cache. The second is for compiled models, for which transformers makes a plain causal
mask as well: always with torch before 2.14, and with `use_cache=False`. torch removes such a mask from the graph if unused.
"""
from __future__ import annotations

import inspect
import types
from collections import Counter
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

import vjp
from vjp.torch import functions as F
from vjp.torch import modules

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
GEMMA = ("Gemma", "Gemma2", "Gemma3")
MARK = "_vjp_patched"  # the attribute of a model that holds what patch() changed
UNMASKED = "vjp_unmasked"  # the keyword from a patched decoder to its attention: causal, as many keys as queries, no padding


class Row(NamedTuple):
    module: str  # its name in the model
    kind: str  # its class
    replaced: bool
    why: str  # what computes it now, or why it was kept


class PatchReport:
    """What patch() replaced and what not; str() is a table."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    @property
    def replaced(self) -> list[str]:
        return [row.module for row in self.rows if row.replaced]

    def __str__(self) -> str:
        counts = Counter((row.kind, row.replaced, row.why) for row in self.rows)
        lines = [("count", "module", "", "")] + [(str(n), kind, "replaced" if replaced else "kept", why)
                                                 for (kind, replaced, why), n in sorted(counts.items(), key=lambda item: (not item[0][1], item[0]))]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        return "\n".join(f"{a:>{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in lines)


def forward_llama_norm(self, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


def forward_gemma_norm(self, x: Tensor) -> Tensor:
    return F.rms_norm(x, 1.0 + self.weight.float(), eps=self.eps)


def own_forward(self, *arguments, **keywords):
    keywords.pop(UNMASKED, None)
    return type(self).forward(self, *arguments, **keywords)


def forward_decoder(self, *arguments, **keywords):
    """Llama's, Mistral's or Qwen's stack of layers; tells its attention when the causal mask is all there is. Not for
    torch.export: a sliding window would limit the lengths that the exported model takes."""
    given = ("attention_mask", "position_ids", "past_key_values", "cu_seq_lens_q")
    # is_exporting() is True in every compiled function before torch 2.14; the variable that it returns is not
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    if len(arguments) < 2 and all(keywords.get(name) is None for name in given) and not exporting:
        keywords[UNMASKED] = True
    return type(self).forward(self, *arguments, **keywords)


def forward_attention(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, past_key_values=None, **keywords):
    """The attention of Llama, Mistral and Qwen where it is causal and nothing else."""
    unmasked = keywords.get(UNMASKED, False)
    if getattr(self.config, "_attn_implementation", None) == "sdpa":
        unmasked = unmasked or attention_mask is None
    else:  # flash attention gets packed sequences without a mask, eager attention without a mask is not causal
        unmasked = unmasked and attention_mask is None
    causal = getattr(self, "is_causal", True) if keywords.get("is_causal") is None else keywords["is_causal"]
    window = getattr(self, "sliding_window", None) or getattr(self.config, "sliding_window", None)
    time = hidden_states.shape[1]
    past = past_key_values.get_seq_length(self.layer_idx) if past_key_values is not None else 0
    plain = (unmasked and causal and hidden_states.dim() == 3 and position_embeddings is not None
             and position_embeddings[0].shape[-1] == self.head_dim and not (self.training and self.attention_dropout)
             and not keywords.get("output_attentions") and (window is None or time + past <= window))
    if not plain:
        return own_forward(self, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
                           past_key_values=past_key_values, **keywords)
    cosine, sine = position_embeddings
    half, positions = self.head_dim // 2, None
    if cosine.shape[0] > 1:  # a table for each sequence
        positions = torch.arange(cosine.shape[0] * time, device=cosine.device).view(-1, time)
    cosine, sine = (t[..., :half].reshape(-1, half) for t in (cosine, sine))
    q, k, v = modules.project(self, hidden_states, cosine, sine, positions)
    if past_key_values is not None:
        k, v = (t.transpose(1, 2) for t in past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx))
        if time > 1:  # the first tokens, which need no mask; a static cache has keys after them that are not written yet
            k, v = k[:, :time], v[:, :time]
    y = F.attention(q, k, v, causal=True, scale=self.scaling)
    return self.o_proj(y.flatten(-2)), None


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **keywords):
    """transformers' loss of a causal language model; 16-bit logits are read as they are, not copied to f32."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.reshape(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# The forward that replaces a class's own, and the function of vjp that it is.
NORMS: dict[str, tuple[Callable, str]] = {f"{family}RMSNorm": (forward_llama_norm, "rms_norm") for family in FAMILIES}
NORMS.update({f"{family}RMSNorm": (forward_gemma_norm, "rms_norm with gamma = 1 + weight") for family in GEMMA})
PLAIN: dict[type, tuple[Callable, str]] = {
    nn.LayerNorm: (modules.LayerNorm.forward, "layer_norm"),
    nn.GroupNorm: (modules.GroupNorm.forward, "group_norm"),
    nn.RMSNorm: (modules.RMSNorm.forward, "rms_norm"),
    nn.CrossEntropyLoss: (modules.CrossEntropyLoss.forward, "cross_entropy"),
}


def is_silu(module: Any) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def tells_attention(decoder: nn.Module, family: str) -> bool:
    """Whether a keyword of the decoder's forward reaches its attention, and all of that attention is patch()'s to replace."""
    passed = [module for module in decoder.modules() if type(module).__name__ in (f"{family}{part}" for part in ("Model", "DecoderLayer", "Attention"))]
    return all("forward" not in vars(module) and inspect.getfullargspec(inspect.unwrap(type(module).forward)).varkw for module in passed)


def choose(module: nn.Module, linear: bool) -> tuple[Optional[Callable], str]:
    """(the forward that replaces the module's own, or None; what computes it, or why not)"""
    name = type(module).__name__
    if "forward" in vars(module):
        return None, "its forward was replaced by something else"
    if name in NORMS and hasattr(module, "weight"):
        return NORMS[name]
    if type(module) in PLAIN:
        return PLAIN[type(module)]
    if type(module) is nn.Linear:
        return (modules.linear, "linear") if linear else (None, "torch's matrix products; patch(model, linear=True) replaces them")
    family = next((family for family in FAMILIES if name.startswith(family)), None)
    if family and name == f"{family}MLP":
        return (modules.SwiGLU.forward, "swiglu") if is_silu(module) else (None, f"its activation is {type(module.act_fn).__name__}, not SiLU")
    if family and name == f"{family}Attention":
        return forward_attention, "rope and attention, where no mask is given"
    if family and name == f"{family}Model":
        return (forward_decoder if tells_attention(module, family) else None), ""
    if name.endswith("Attention") or name.endswith("MLP") or name.endswith("Norm"):
        return None, "not a kind of module that vjp knows"
    return None, ""


def computed_places() -> tuple[str, ...]:
    """The types of torch's devices whose tensors vjp takes here."""
    cuda = torch.cuda.is_available() and any(device.name.startswith("cuda") for device in vjp.devices())
    return ("cpu", "cuda") if cuda else ("cpu",)


class Forward:
    """The forward of a patched module: the replacement for tensors in these places, the class's own for others. An object,
    because a function made here could not be pickled with its model."""

    def __init__(self, module: nn.Module, replacement: Callable, places: tuple[str, ...]):
        self.__self__, self.replacement, self.places = module, replacement, places

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.__self__).forward, self.__self__))

    def __call__(self, *arguments, **keywords):
        first = arguments[0] if arguments else keywords.get("hidden_states", keywords.get("x"))
        if first is not None and first.device.type not in self.places:
            return own_forward(self.__self__, *arguments, **keywords)
        return self.replacement(self.__self__, *arguments, **keywords)


class Loss:
    """vjp's loss for logits in these places, the model's own for others."""

    def __init__(self, own: Any, places: tuple[str, ...]):
        self.own, self.places = own, places

    def __call__(self, logits, *arguments, **keywords):
        return (causal_loss if logits.device.type in self.places else self.own)(logits, *arguments, **keywords)


def patch(model: nn.Module, linear: bool = False) -> PatchReport:
    """Replaces what vjp computes in this model, and reports it. With `linear`, matrix products too."""
    if MARK in vars(model):
        raise ValueError("patch: this model is patched; unpatch() it first")
    rows, patched, places = [], [], computed_places()
    for name, module in model.named_modules():
        replacement, why = choose(module, linear)
        if replacement:
            module.forward = Forward(module, replacement, places)  # type: ignore[method-assign]
            patched.append(module)
        if why:
            rows.append(Row(name, type(module).__name__, replacement is not None, why))
    loss = getattr(model, "loss_function", None)
    has_loss = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    if has_loss:
        model.loss_function = Loss(loss, places)  # type: ignore[assignment]
        rows.append(Row("loss_function", "ForCausalLMLoss", True, "cross_entropy"))
    model.__dict__[MARK] = (patched, loss if has_loss else None)
    return PatchReport(rows)


def unpatch(model: nn.Module) -> None:
    """Undoes patch(); does nothing to a model that is not patched."""
    patched, loss = model.__dict__.pop(MARK, ((), None))
    for module in patched:
        vars(module).pop("forward", None)
    if loss is not None:
        model.loss_function = loss
