# SPDX-License-Identifier: MIT
"""Graphs: ops on named values, differentiated, and compiled for a device into a program that runs without allocating.

    g = vjp.Graph()
    x = g.input("x", "f32", (64, 784))
    w = g.parameter("w", "f32", (10, 784))
    t = g.input("t", "i32", (64,))
    loss = g.cross_entropy(g.linear(x, w, transpose_b=True), t)
    training = g.minimize(loss, max_norm=1.0)
    program = training.compile(seed=1)
    program[x] = images
    program[t] = labels
    print(program.step(1e-3))
"""
from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Sequence, Union

from vjp import _core


class Value:
    """A tensor of a graph: an input, a parameter, a state, a constant, or what an op made."""
    __slots__ = ("graph", "number")

    def __init__(self, graph: "Graph", number: int):
        self.graph = graph
        self.number = number

    def _described(self) -> tuple[str, str, tuple[int, ...]]:
        return _core.graph_describe(self.graph._handle, self.number)

    @property
    def name(self) -> str:
        return self._described()[0]

    @property
    def dtype(self) -> str:
        return self._described()[1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._described()[2]

    def output(self, name: str) -> "Value":
        """Another output of the op that made this value: `g.layer_norm(x).output("rstd")`."""
        return Value(self.graph, _core.graph_output(self.graph._handle, self.number, name))

    def reshape(self, *shape: int) -> "Value":
        """The same elements under another shape; one size may be -1."""
        return Value(self.graph, _core.graph_reshape(self.graph._handle, self.number, shape))

    def __add__(self, other: "Value") -> "Value":
        return self.graph.add(self, other)

    def __mul__(self, other: Union["Value", float]) -> "Value":
        return self.graph.mul(self, other) if isinstance(other, Value) else self.graph.scale(self, factor=other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        name, dtype, shape = self._described()
        return f"<vjp.Value {name or self.number}: {dtype} {list(shape)}>"


class Graph:
    """A graph under construction. Every op is a method that takes values and options and returns its first output."""

    def __init__(self) -> None:
        self._handle: Any = _core.graph_create()

    if TYPE_CHECKING:  # the ops, which _add_methods() adds
        def __getattr__(self, op: str) -> Callable[..., Value]: ...

    def _leaf(self, kind: str, name: str, dtype: Any, shape: Sequence[int]) -> Value:
        return Value(self, _core.graph_leaf(self._handle, kind, name, dtype, tuple(shape)))

    def input(self, name: str, dtype: Any, shape: Sequence[int]) -> Value:
        """What the caller writes before a run."""
        return self._leaf("input", name, dtype, shape)

    def parameter(self, name: str, dtype: Any, shape: Sequence[int]) -> Value:
        """What training changes; zero at first."""
        return self._leaf("parameter", name, dtype, shape)

    def state(self, name: str, dtype: Any, shape: Sequence[int]) -> Value:
        """What is kept from run to run, such as a moment of an optimiser; zero at first."""
        return self._leaf("state", name, dtype, shape)

    def constant(self, name: str, array: Any) -> Value:
        """What never changes; the array is copied."""
        return Value(self, _core.graph_constant(self._handle, name, array))

    def find(self, name: str) -> Optional[Value]:
        """The input, parameter, state or constant of that name."""
        number = _core.graph_find(self._handle, name)
        return Value(self, number) if number else None

    def call(self, op: str, *inputs: Optional[Value], dtype: Any = None, **options: Any) -> Value:
        """An op by its name. `inputs` are in the order of the op's tensors, None for an absent one."""
        for value in inputs:
            if value is not None and (not isinstance(value, Value) or value.graph is not self):
                raise TypeError(f"{op}: {value!r} is not a value of this graph")
        numbers = tuple(0 if value is None else value.number for value in inputs)
        return Value(self, _core.graph_call(self._handle, op, numbers, options, dtype))

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of ops built inside begin with this one; scopes nest."""
        _core.graph_scope(self._handle, name)
        try:
            yield
        finally:
            _core.graph_scope(self._handle, None)

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """What is built inside is computed again in the backward instead of being kept: less memory, the same bits."""
        _core.graph_recompute(self._handle, True)
        try:
            yield
        finally:
            _core.graph_recompute(self._handle, False)

    def assign(self, state: Value, output: Value) -> Value:
        """The op that made `output` writes it to `state`."""
        return Value(self, _core.graph_assign(self._handle, state.number, output.number, False))

    def accumulate(self, total: Value, output: Value) -> Value:
        """The op that made `output` adds it to `total`, an older output."""
        return Value(self, _core.graph_assign(self._handle, total.number, output.number, True))

    def grad(self, scalar: Value, wrt: Sequence[Value], into: Optional[Sequence[Value]] = None, add: bool = False) -> list[Value]:
        """The gradients of a scalar; `into`: states to write them to, or with `add` to add them to."""
        targets = None if into is None else tuple(value.number for value in into)
        numbers = _core.graph_grad(self._handle, scalar.number, tuple(value.number for value in wrt), targets, add)
        return [Value(self, number) for number in numbers]

    def minimize(self, loss: Value, parameters: Optional[Sequence[Value]] = None, *, optimizer: str = "adamw", max_norm: float = 0.0,
                 uses_muon: Optional[Callable[[str, tuple[int, ...]], bool]] = None, adamw: Optional[dict[str, Any]] = None,
                 **options: Any) -> "Training":
        """Adds gradients, clipping and a step of the optimiser for each parameter (None: all): "adamw", "sgd" or "muon". The options
        are the optimiser's.

        Muon (momentum, weight_decay, nesterov, iterations, scale: docs/optimisers.md) trains the matrices that `uses_muon(name,
        shape)` accepts, by default all of them; AdamW, with the options `adamw`, trains the rest."""
        numbers = None if parameters is None else tuple(value.number for value in parameters)
        muon = optimizer == "muon"
        if not muon and (uses_muon is not None or adamw is not None):
            raise TypeError('minimize: uses_muon and adamw are for optimizer="muon"')
        chosen = ("adamw", dict(adamw or {}), options, uses_muon) if muon else (optimizer, options, None, None)
        results, lr, step, norm = _core.graph_minimize(self._handle, loss.number, numbers, max_norm, *chosen)
        return Training(self, loss, [Value(self, number) for number in results], lr, step, Value(self, norm) if norm else None)

    def compile(self, results: Union[Value, Sequence[Value]], device: str = "cpu", share: Optional["Program"] = None,
                halves: bool = False, arena_limit: int = 0) -> "Program":
        """A program that computes `results`; `share`: uses the inputs, parameters and states of a program of this graph.

        `halves`: on CUDA an f32 parameter that only casts to bf16 and AdamW use is kept as a bf16 and the bits that it lacks, so that
        no step casts it. It is read and written as f32 all the same. Programs that share it must be compiled so, too.

        `arena_limit`: values that one pass over memory computes are recomputed in the backward until intermediates take no more than
        so many bytes. Where that is not enough, on CUDA, others wait in the host's memory, as far as copying them takes no longer than
        the calls beside it. The results have the same bits; report()["host_bytes"] is the host memory that this takes."""
        return Program(self, results, device, share, halves, arena_limit)

    def text(self) -> str:
        """One line for each node."""
        return _core.graph_text(self._handle, False)

    def dot(self) -> str:
        """The graph for Graphviz."""
        return _core.graph_text(self._handle, True)


def _method(op: str, inputs: Sequence[str], takes_dtype: bool) -> Any:
    def method(self: Graph, *values: Optional[Value], **options: Any) -> Value:
        given = list(values) + [None] * (len(inputs) - len(values))
        for at, name in enumerate(inputs):
            if name in options:
                if at < len(values):
                    raise TypeError(f"{op}: two values for {name}")
                given[at] = options.pop(name)
        dtype = options.pop("dtype", None) if takes_dtype else None
        return self.call(op, *given, dtype=dtype, **options)

    method.__name__ = method.__qualname__ = op
    method.__doc__ = f"The op {op} ({', '.join(inputs)}), as vjp.{op} describes it."
    return method


def _add_methods() -> None:
    import inspect
    for name, function in _core.functions.items():
        if name.endswith("_backward"):
            continue
        parameters = inspect.signature(function).parameters.values()
        inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        setattr(Graph, name, _method(name, inputs, any(p.name == "dtype" for p in parameters)))


_add_methods()


class Program:
    """A graph compiled for a device. `program[value] = array` writes a value, `program[value]` reads a copy of it."""

    def __init__(self, graph: Graph, results: Union[Value, Sequence[Value]], device: str = "cpu", share: Optional["Program"] = None,
                 halves: bool = False, arena_limit: int = 0):
        values = [results] if isinstance(results, Value) else list(results)
        self.graph = graph
        self.results = values
        self._handle: Any = _core.program_compile(graph._handle, tuple(value.number for value in values), device,
                                             share._handle if share else None, halves, arena_limit)

    def _value(self, value: Union[Value, str]) -> Value:
        if isinstance(value, str):
            found = self.graph.find(value)
            if found is None:
                raise KeyError(value)
            return found
        if value.graph is not self.graph:
            raise ValueError(f"{value!r} is of another graph")
        return value

    def __getitem__(self, value: Union[Value, str]) -> Any:
        return _core.program_read(self._handle, self.graph._handle, self._value(value).number)

    def __setitem__(self, value: Union[Value, str], array: Any) -> None:
        _core.program_write(self._handle, self.graph._handle, self._value(value).number, array)

    def run(self, **inputs: Any) -> list[Any]:
        """Writes inputs by name, runs, and returns the results as NumPy arrays."""
        for name, array in inputs.items():
            self[name] = array
        _core.program_run(self._handle)
        return [self[value] for value in self.results]

    def interrupt(self) -> None:
        """Stops a run that another thread is in, before its next call."""
        _core.program_interrupt(self._handle)

    def init(self, seed: int = 1) -> None:
        """Kaiming's first values for every parameter with two axes or more."""
        _core.program_init(self._handle, seed)

    def init_normal(self, value: Union[Value, str], mean: float = 0.0, deviation: float = 1.0, seed: int = 1) -> None:
        """Normal first values, which depend on the seed, the name and the index alone."""
        _core.program_init_normal(self._handle, self._value(value).number, mean, deviation, seed)

    def save(self, path: Union[str, os.PathLike]) -> None:
        """All parameters and states as a safetensors file."""
        _core.program_file(self._handle, path, True)

    def load(self, path: Union[str, os.PathLike]) -> None:
        """Loads such a file; one with other names, dtypes or shapes is refused and changes nothing."""
        _core.program_file(self._handle, path, False)

    def report(self) -> dict[str, Any]:
        """Calls, bytes of the arena, bytes that are alive at most, floating-point operations."""
        return _core.program_report(self._handle)


class Training:
    """What Graph.minimize() added: a run of `results` is one step of training."""

    def __init__(self, graph: Graph, loss: Value, results: Sequence[Value], lr: int, step: int, norm: Optional[Value]):
        self.graph, self.loss, self.results, self.norm = graph, loss, list(results), norm
        self._lr, self._step = lr, step

    def compile(self, device: str = "cpu", seed: Optional[int] = None, halves: bool = False,
                arena_limit: int = 0) -> "TrainingProgram":
        """The program of a step; with a seed, parameters get Kaiming's first values. The rest: see Graph.compile()."""
        program = TrainingProgram(self, device, halves, arena_limit)
        if seed is not None:
            program.init(seed)
        return program


class TrainingProgram(Program):
    """A program whose run is one step of training."""

    def __init__(self, training: Training, device: str, halves: bool = False, arena_limit: int = 0):
        super().__init__(training.graph, training.results, device, halves=halves, arena_limit=arena_limit)
        self.training = training
        self.steps = 0

    def step(self, lr: float, **inputs: Any) -> float:
        """Writes inputs by name, takes the next step with this learning rate and returns the loss before it."""
        for name, array in inputs.items():
            self[name] = array
        t = self.training
        loss = _core.program_step(self._handle, t.loss.number, t._lr, t._step, lr, self.steps + 1)
        self.steps += 1
        return loss
