# SPDX-License-Identifier: MIT
"""The learning rate of a step, by the trainer's formulas (docs/optimisers.md)."""
from __future__ import annotations

import math


def learning_rate(step: int, steps: int, lr: float, schedule: str = "cosine", *, warmup: int = 20, last_lr: float = 0.1,
                  decay_share: float = 0.2) -> float:
    """The rate of step 1, 2, ..., `steps`, as `vjp train` with these options has it.

    It rises in a straight line over `warmup` steps to `lr`, then falls to `last_lr * lr`: "cosine" by half a cosine, "linear" in a
    straight line, "wsd" in a straight line over the last `decay_share` of all steps; "constant" does not fall."""
    if schedule not in ("cosine", "linear", "wsd", "constant"):
        raise ValueError(f"learning_rate: schedule is {schedule!r}; it must be one of cosine, linear, wsd, constant")
    if step <= warmup:
        return lr * step / warmup
    done = min((step - warmup) / max(1, steps - warmup), 1.0)
    decay = max(1, math.floor(decay_share * steps))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "wsd": max(0.0, min(1.0, (steps - step) / decay)),
            "constant": 1.0}[schedule]
    return lr * (last_lr + (1 - last_lr) * left)
