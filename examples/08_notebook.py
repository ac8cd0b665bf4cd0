# SPDX-License-Identifier: MIT
"""A tour as a notebook: editors that know the `# %%` marks run it cell by cell (`jupytext --to ipynb` makes a notebook file of it),
and `python3 examples/08_notebook.py` runs it all in a few seconds. It needs NumPy; the plot needs matplotlib."""
# %% [markdown]
# # Gradients that are proved, one op at a time
# Every op has a function for its forward and one for its backward pass. Here the backward of a layer norm is compared with a
# central difference in f64, on the device `ref`.

# %%
import numpy as np

import vjp

rng = np.random.default_rng(0)
x, gamma, beta = rng.standard_normal((4, 16)), rng.standard_normal(16), rng.standard_normal(16)
dy, direction = rng.standard_normal((2, 4, 16))


def along(step):
    y = vjp.layer_norm(x + step * direction, gamma, beta, outputs="y", device="ref")
    return float((y * dy).sum())


dx = vjp.layer_norm_backward(dy, x, gamma, outputs="dx", device="ref")
difference = (along(1e-5) - along(-1e-5)) / 2e-5
print(f"by the backward pass {(dx * direction).sum():.9f}, by differences {difference:.9f}")
assert abs((dx * direction).sum() - difference) < 1e-7

# %% [markdown]
# ## The same bits for any number of threads

# %%
wide = rng.standard_normal((2048, 512)).astype(np.float32)
results = []
for threads in (1, 2, 3):
    vjp.set_threads(threads)
    results.append(vjp.layer_norm_backward(wide, wide, np.ones(512, np.float32), outputs="dgamma"))
vjp.set_threads(0)
assert all(np.array_equal(results[0], other) for other in results)
print("dgamma has the same bits with 1, 2 and 3 threads")

# %% [markdown]
# ## A network, trained
# Two moons of points. Muon trains the hidden matrix, AdamW the rest, and the rate follows a cosine.

# %%
COUNT, STEPS = 256, 120
angle = rng.uniform(0, np.pi, COUNT)
labels = (np.arange(COUNT) % 2).astype(np.int32)
points = np.stack([np.cos(angle) * (1 - 2 * labels) + labels, np.sin(angle) * (1 - 2 * labels) + 0.5 * labels], 1)
points = (points + 0.1 * rng.standard_normal(points.shape)).astype(np.float32)

g = vjp.Graph()
data, target = g.input("data", "f32", (COUNT, 2)), g.input("target", "i32", (COUNT,))
first, bias = g.parameter("first", "f32", (32, 2)), g.parameter("bias", "f32", (32,))
hidden, head = g.parameter("hidden", "f32", (32, 32)), g.parameter("head", "f32", (2, 32))
h = g.linear(data, first, bias, transpose_b=True, activation="gelu_tanh")
h = g.linear(h, hidden, transpose_b=True, activation="gelu_tanh")
logits = g.linear(h, head, transpose_b=True)
loss = g.cross_entropy(logits, target)
program = g.minimize(loss, optimizer="muon", uses_muon=lambda name, shape: name == "hidden", max_norm=1.0, weight_decay=0.0).compile(seed=1)
losses = [program.step(vjp.learning_rate(step, STEPS, 3e-2), data=points, target=labels) for step in range(1, STEPS + 1)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f}")
assert losses[-1] < 0.1 * losses[0]

# %% [markdown]
# ## The losses as a picture

# %%
try:
    from matplotlib import pyplot

    pyplot.plot(losses)
    pyplot.xlabel("step")
    pyplot.ylabel("loss")
except ImportError:
    print("matplotlib is not installed")
