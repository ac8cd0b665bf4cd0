# SPDX-License-Identifier: MIT
"""Uses the installed package as a caller does: ops beside NumPy in f64, steps of training, the program that the package contains.

Needs NumPy alone and takes seconds under an emulator, so it tests wheels for processors that this machine can only emulate."""
import os
import subprocess
import sys
import tempfile

import numpy as np

import vjp

rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v):
    """Causal, of [batch, time, heads, dim]."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    return np.einsum("bhij,bjhd->bihd", softmax(scores), v)


def cross_entropy(logits, target):
    """The loss and its gradient."""
    p, rows = softmax(logits), np.arange(len(target))
    loss = -np.log(p[rows, target]).mean()
    p[rows, target] -= 1
    return loss, p / len(target)


x, dy, up = random(3, 9, 70)
w, gamma, beta, table = random(33, 70), random(70), random(70), random(20, 70)
q, k, v = random(3, 1, 6, 2, 16)
target = rng.integers(0, 70, 9).astype(np.int32)
X, DY, UP, W = (a.astype(np.float64) for a in (x, dy, up, w))

normal = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)
scaled = DY * gamma
dnormal = scaled - scaled.mean(1, keepdims=True) - normal * (scaled * normal).mean(1, keepdims=True)
y, mean, rstd = vjp.layer_norm(x, gamma, beta, eps=1e-5)
dx, dgamma, dbeta = vjp.layer_norm_backward(dy, x, gamma, mean, rstd)
linear = vjp.linear(x, w, transpose_b=True, outputs="y")
da, db = vjp.linear_backward(linear, x, w, transpose_b=True, outputs=("da", "db"))
loss, lse = vjp.cross_entropy(x, target)
index = np.array([3, 0, 19, 3], np.int32)

# What, computed, expected, and how large their largest difference may be.
TABLE = [
    ("add", vjp.add(x, dy), x + dy, 0),
    ("cast", vjp.cast(x, dtype="f16"), x.astype(np.float16), 0),
    ("gather", vjp.gather(table, index), table[index], 0),
    ("cumsum", vjp.cumsum(x), X.cumsum(1), 1e-5),
    ("swiglu", vjp.swiglu(x, up), X / (1 + np.exp(-X)) * UP, 1e-5),
    ("layer_norm", y, normal * gamma + beta, 1e-5),
    ("layer_norm dx", dx, dnormal / np.sqrt(X.var(1, keepdims=True) + 1e-5), 1e-5),
    ("layer_norm dgamma", dgamma, (DY * normal).sum(0), 1e-5),
    ("layer_norm dbeta", dbeta, DY.sum(0), 1e-5),
    ("linear", linear, X @ W.T, 1e-4),
    ("linear da", da, linear.astype(np.float64) @ W, 1e-3),
    ("linear db", db, linear.T.astype(np.float64) @ X, 1e-3),
    ("attention", vjp.attention(q, k, v, outputs="y"), attention(*(a.astype(np.float64) for a in (q, k, v))), 1e-5),
    ("cross_entropy", loss, cross_entropy(X, target)[0], 1e-6),
    ("cross_entropy dlogits", vjp.cross_entropy_backward(np.float32(1), x, target, lse), cross_entropy(X, target)[1], 1e-6),
]
for what, computed, expected, bound in TABLE:
    assert computed.shape == np.shape(expected), f"{what}: its shape is {computed.shape}"
    error = np.abs(computed.astype(np.float64) - expected).max()
    assert error <= bound, f"{what}: wrong by {error:.3g}, more than {bound:.3g}"

try:
    vjp.layer_norm(x, gamma[:3], beta)
    sys.exit("a wrong shape was taken")
except vjp.Error as error:
    print(error)

# Plain gradient descent on one matrix.
g = vjp.Graph()
data, labels, weight = g.input("x", "f32", x.shape), g.input("labels", "i32", target.shape), g.parameter("w", "f32", w.shape)
objective = g.cross_entropy(g.linear(data, weight, transpose_b=True), labels)
program = g.minimize(objective, optimizer="sgd", beta=0.0).compile()
classes = target % 33
program["w"] = w
losses = []
for step in range(5):
    losses.append(program.step(0.5, x=x, labels=classes))
    expected, dlogits = cross_entropy(X @ W.T, classes)
    assert abs(losses[-1] - expected) < 1e-5 * losses[0], f"step {step + 1}: the loss is {losses[-1]}, not {expected}"
    W -= 0.5 * dlogits.T @ X
assert losses[-1] < 0.5 * losses[0], losses
assert np.abs(program["w"] - W).max() < 1e-5, "the weights after 5 steps"

# The program, by the module and from Python.
info = subprocess.run([sys.executable, "-m", "vjp", "info"], capture_output=True, text=True, check=True).stdout
assert vjp.__version__ in info and ["cpu", "yes"] in [line.split()[:2] for line in info.splitlines()], info
with tempfile.TemporaryDirectory() as folder:
    text = os.path.join(folder, "text.txt")
    with open(text, "w") as file:
        file.write("the quick brown fox jumps over the lazy dog\n" * 200)
    rows = vjp.train(text, out=os.path.join(folder, "run"), steps=3, batch=1, context=8)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(3 < row["loss"] < 7 for row in rows), list(rows)
    assert os.path.exists(os.path.join(folder, "run", "loss.svg"))
print(info, end="")
print(len(TABLE), "results of ops are right, losses", *(f"{value:.4f}" for value in losses), vjp.devices())
