# SPDX-License-Identifier: MIT
"""vjp for torch: differentiable functions, ops for torch.compile, modules, and `patch()` for models that exist.

    y = vjp.torch.layer_norm(x, gamma, beta)   # differentiable, also under torch.compile and torch.func
    print(vjp.torch.patch(model))              # replaces what it can in a Hugging Face model, and says what
    print(vjp.torch.deterministic_report(model, batch))

Tensors are on the CPU or, with the CUDA backend, on an NVIDIA GPU. On the CPU calls run on torch's own threads, and the same inputs
give the same bits for any number of them; on a GPU they are enqueued on torch's current stream. f64 tensors on the CPU are computed
by vjp's reference kernels: slow, for gradcheck. `import vjp` does not import torch; `import vjp.torch` does.
"""
from vjp.torch._ops import KERNELS
from vjp.torch.determinism import DeterminismReport, deterministic_report
from vjp.torch.functions import *  # noqa: F403
from vjp.torch.functions import __all__ as _functions
from vjp.torch.modules import (AdamW, Attention, CrossEntropyLoss, GroupNorm, LayerNorm, Linear, LinearCrossEntropy, RMSNorm,
                               RotaryEmbedding, SwiGLU)
from vjp.torch.patching import PatchReport, patch, unpatch

__all__ = [*_functions, "AdamW", "Attention", "CrossEntropyLoss", "DeterminismReport", "GroupNorm", "KERNELS", "LayerNorm", "Linear",
           "LinearCrossEntropy", "PatchReport", "RMSNorm", "RotaryEmbedding", "SwiGLU", "deterministic_report", "patch", "unpatch"]
