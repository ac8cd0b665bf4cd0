# SPDX-License-Identifier: MIT
"""Modules in place of torch's and Hugging Face's: the same parameters under the same names, so a state dict fits either.

What vjp's kernels do not compute (class weights, attention dropout) is left to torch: a module then does what the one that it
replaces does.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from vjp import _core
from vjp.torch import functions as F


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, axes=len(self.normalized_shape), eps=self.eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return F.rms_norm(x, self.weight, axes=len(self.normalized_shape), eps=eps)


class GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.weight, self.bias, groups=self.num_groups, eps=self.eps)


def linear(module: nn.Linear, x: Tensor, activation: str = "none") -> Tensor:
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    y = F.linear(rows, module.weight, module.bias, activation=activation, transpose_b=True)
    return y if x.dim() > 1 else y.squeeze(0)


class Linear(nn.Linear):
    """A linear layer with its activation: none, relu, gelu_tanh, gelu_erf, silu, sigmoid or tanh."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str = "none", **keywords):
        super().__init__(in_features, out_features, bias, **keywords)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return linear(self, x, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class SwiGLU(nn.Module):
    """The feed-forward block of Llama: down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.swiglu(self.gate_proj(x), self.up_proj(x)))


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys [..., time, heads, dim] by their positions, which are 0, 1, 2, ... unless given;
    pair() rotates both, by one launch on a GPU."""
    cosine: Tensor
    sine: Tensor

    def __init__(self, dim: int, positions: int = 2048, base: float = 10000.0, interleaved: bool = False):
        super().__init__()
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)
        self.pairing = "interleaved" if interleaved else "half"

    def forward(self, x: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        return F.rope(x, *self.tables(x), positions, **self.options())

    def pair(self, q: Tensor, k: Tensor, positions: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        return F.rope_pair(q, k, *self.tables(q), positions, **self.options())

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32  # what the tables may be beside x
        return self.cosine.to(exact), self.sine.to(exact)

    def options(self) -> dict[str, Any]:
        return {"n_rot": 2 * self.cosine.shape[1], "pairing": self.pairing}


class Attention(nn.Module):
    """Causal attention with grouped heads between its projections, as Llama's (and Qwen3's, with `qk_norm`)."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: Optional[int] = None, head_dim: Optional[int] = None, bias: bool = False,
                 output_bias: Optional[bool] = None, qk_norm: Optional[float] = None, causal: bool = True):
        super().__init__()
        kv_heads, self.head_dim, self.causal = kv_heads or heads, head_dim or hidden_size // heads, causal
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias if output_bias is None else output_bias)
        if qk_norm is not None:
            self.q_norm, self.k_norm = RMSNorm(self.head_dim, qk_norm), RMSNorm(self.head_dim, qk_norm)

    def forward(self, x: Tensor, cosine: Optional[Tensor] = None, sine: Optional[Tensor] = None, positions: Optional[Tensor] = None) -> Tensor:
        q, k, v = project(self, x, cosine, sine, positions)
        return self.o_proj(F.attention(q, k, v, causal=self.causal).flatten(-2))


def project(module: Any, x: Tensor, cosine: Optional[Tensor], sine: Optional[Tensor], positions: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, time, heads, dim], the first two normalised where the module does so, and rotated."""
    shape = (*x.shape[:-1], -1, module.head_dim)
    q, k, v = (projection(x).view(shape) for projection in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    if cosine is not None:
        q, k = F.rope_pair(q, k, cosine, sine, positions)
    return q, k, v


class CrossEntropyLoss(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002: torch's name
        if self.weight is not None or self.reduction == "none" or target.is_floating_point():
            return super().forward(input, target)
        logits = input if input.dim() <= 2 else input.movedim(1, -1)
        return F.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction=self.reduction, label_smoothing=self.label_smoothing)


class LinearCrossEntropy(nn.Linear):
    """The last layer of a language model and its loss, without storing the logits: module(x, target)."""

    def __init__(self, in_features: int, out_features: int, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
                 **keywords):
        super().__init__(in_features, out_features, bias=False, **keywords)
        self.options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear_cross_entropy(x, self.weight, target, **self.options)


def scalar(known: dict[tuple, Tensor], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one number, made once for each."""
    key = (value, dtype, device)
    if key not in known:
        known[key] = torch.full((), value, dtype=dtype, device=device)
    return known[key]


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's step and state dict. The averages are f32 where the parameters have 16 bits."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2):
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: lr {lr}, betas {betas}, eps {eps} and weight_decay {weight_decay} must not be negative, and betas below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scalars: dict[tuple, Tensor] = {}  # shared by the parameters of this step
        for group in self.param_groups:
            if group.get("amsgrad") or group.get("maximize"):
                raise ValueError("AdamW: amsgrad and maximize are not supported")
            calls: dict[torch.device, list[dict[str, Any]]] = {}  # on a GPU, several are one launch
            for parameter in group["params"]:
                if parameter.grad is not None:
                    calls.setdefault(parameter.device, []).append(self.arguments(parameter, parameter.grad, group, scalars))
            for some in calls.values():
                _core.call_many("adamw", some)
        return loss

    def arguments(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], scalars: dict[tuple, Tensor]) -> dict[str, Any]:
        """Of vjp.adamw(), for one parameter's step."""
        exact = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=exact, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):  # a loaded state dict has the parameter's dtype
            state[name] = state[name].to(exact)
        rate: Any = float(group["lr"])
        step: Any = int(state["step"])
        if parameter.device.type != "cpu":  # a number would be copied there by a call that waits
            rate, step = (scalar(scalars, value, dtype, parameter.device) for value, dtype in ((rate, exact), (step, torch.int64)))
        w, m, v = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
        return {"w": w, "m": m, "v": v, "g": gradient.detach(), "lr": rate, "step": step, "beta1": group["betas"][0],
                "beta2": group["betas"][1], "eps": group["eps"], "weight_decay": group["weight_decay"],
                "device": "ref" if exact == torch.float64 else None, "out": (w, m, v)}
