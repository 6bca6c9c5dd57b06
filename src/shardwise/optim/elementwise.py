"""Whether an optimizer may be given parts of parameters, found out by what it does to tiny ones.

An elementwise optimizer (SGD, Adam and their kin) updates a part exactly as it would the full parameter. Others read a
full matrix: its spectrum (Muon), its rows and columns (Adafactor), its norm (LAMB), or all parameters together
(LBFGS). They would compute another update on every rank.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import ParameterEntry, entry_of

__all__ = ["check_optimizer"]

_Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

_SIZE = 4  # of each dim of a tiny parameter
_MANY = 2**16  # elements
_NUM_STEPS = 3
_MANY_DRAWS = 256  # elements, of which some are rounded up
_QUANTIZED = 4096  # elements; libraries compress states of so many
_LR = 0.01
_ALLOWED = 1e-3  # of the largest update
_PLAIN = (bool, int, float, str, tuple, type(None))
_PASSED: set[tuple[Any, ...]] = set()
"""What has been tried: class, options, and on which tensors. Whoever builds an optimizer again need not try again."""
_CHECKED: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def check_optimizer(optimizer: torch.optim.Optimizer, options: Mapping[str, Any] | None = None) -> None:
    """Tries optimizers of the same class and options on tiny tensors, unless that has been done: on parts, as its
    parameters are parts, on some of all parameters where the others are in other stages, and on `DTensor`s.

    Args:
        options: what it was built with, and that it makes a step at all is tried too; by default as far as it says.

    Raises:
        UnsupportedError: it computes other updates from parts, or cannot be tried, or updates no dense gradients.

    Communicates: nothing.
    """
    if _CHECKED.get(optimizer) == len(optimizer.param_groups):
        return
    for group in (each for each in optimizer.param_groups if each["params"]):  # a stage may have nothing to train
        _check_group(optimizer, {**(options or {}), **group}, group["params"], updates=options is not None)
    _CHECKED[optimizer] = len(optimizer.param_groups)


def _check_group(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameters: Sequence[Tensor], *, updates: bool
) -> None:
    """The checks of one group of parameters; with `updates`, also that a step changes it."""
    name, known, device = type(optimizer).__name__, _taken(optimizer, options), parameters[0].device
    dtype = parameters[0].dtype
    build = _builder(optimizer, known)
    entries = [entry for parameter in parameters if (entry := entry_of(parameter)) is not None]
    checks: dict[tuple[Any, ...], Callable[[], None]] = {}
    if updates:
        shape = min((parameter.shape for parameter in parameters), key=math.prod)
        small = tuple(shape) if math.prod(shape) <= _MANY else (_SIZE,) * len(shape)
        checks["dense", small] = lambda: _check_dense(name, build, torch.ones(small, device=device))
    for num_dims, dim in sorted({(len(entry.layout.shape), dim) for entry in entries for dim in _split_dims(entry)}):
        checks["parts", num_dims, dim] = functools.partial(
            _check_parts, name, build, num_dims=num_dims, dim=dim, device=device
        )
    if any(entry.registry.mesh.size("pp") > 1 for entry in entries):
        num_dims = len(entries[0].layout.shape)
        checks["apart", num_dims] = functools.partial(_check_apart, name, build, num_dims=num_dims, device=device)
    for num_dims, entry in {len(each.layout.shape): each for each in entries if each.data == "managed"}.items():
        key = "dtensors", num_dims, _placements(entry), dtype
        checks[key] = functools.partial(_check_dtensors, name, build, entry, parameters[0])
    if any(map(_is_held_by_several, entries)):
        checks["draws", parameters[0].ndim, dtype] = functools.partial(_check_draws_nothing, name, build, parameters[0])
    for key, check in checks.items():
        tried = type(optimizer), str(device), tuple(sorted((each, repr(value)) for each, value in known.items())), *key
        if tried in _PASSED:
            continue
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            check()
        if all(isinstance(value, _PLAIN) for value in known.values()):  # other values may differ and have the same repr
            _PASSED.add(tried)


def _taken(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that its class is built with, with a learning rate whose updates can be seen."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    known = {name: value for name, value in options.items() if name in taken and name != "params"}
    if known.get("lr") is not None:  # a schedule may start from 0
        known["lr"] = _LR
    return known


def _builder(optimizer: torch.optim.Optimizer, known: Mapping[str, Any]) -> _Build:
    def build(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            return type(optimizer)(parameters, **known)
        except Exception as error:
            raise UnsupportedError(
                f"{type(optimizer).__name__} on a split model cannot be tried on a tiny tensor",
                why=f"{type(error).__name__}: {error}",
                fix="build it by shardwise.build_optimizer(model, optimizer_class, **options)",
            ) from error

    return build


def _split_dims(entry: ParameterEntry) -> set[int]:
    """The dims along which ranks hold parts of a parameter."""
    return {part.dim for part in (entry.split, entry.chunk) if part is not None}


def _check_dense(name: str, build: _Build, ones: Tensor) -> None:
    """Raises where it cannot update a full tensor either, such as `SparseAdam`."""
    try:
        _train(build, ones, [ones])
    except Exception as error:  # an optimizer refuses in any way
        raise UnsupportedError(
            f"{name} cannot update parameters of this model",
            why=f"{type(error).__name__}: {str(error).strip()}",
            fix="use an optimizer for dense gradients (SGD, Adam, AdamW, …)",
        ) from error


def _check_parts(name: str, build: _Build, *, num_dims: int, dim: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn([_SIZE] * num_dims, generator=generator).to(device) for _ in range(_NUM_STEPS + 1))
    full = _train(build, start, gradients)
    halves = [
        _train(build, value, [gradient.chunk(2, dim)[number] for gradient in gradients])
        for number, value in enumerate(start.chunk(2, dim))
    ]
    error = float((torch.cat(halves, dim) - full).abs().max())
    largest = float((full - start).abs().max())
    if not error <= _ALLOWED * largest:
        raise UnsupportedError(
            f"{name} on parameters of which ranks hold parts",
            why=f"it is not elementwise: it updates two halves (along dim {dim}) of a tensor of {num_dims} dims\n"
            f"differently from the full tensor, by up to {error:.1e}, where the largest update is {largest:.1e}",
            fix="use an elementwise optimizer (SGD, Adam, AdamW, …), or a layout that leaves parameters in one piece "
            "(ddp)",
        )


def _check_apart(name: str, build: _Build, *, num_dims: int, device: torch.device) -> None:
    """Raises where it does not update each parameter by itself: of a pipeline every rank has those of its stages."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn([_SIZE] * num_dims, generator=generator).to(device)

    starts, *gradients = ([draw(), 3 * draw()] for _ in range(_NUM_STEPS + 1))
    together = _train_all(build, starts, gradients)
    error = largest = 0.0
    for number, (start, found) in enumerate(zip(starts, together, strict=True)):
        alone = _train(build, start, [each[number] for each in gradients])
        error = max(error, float((alone - found).abs().max()))
        largest = max(largest, float((found - start).abs().max()))
    if not error <= _ALLOWED * largest:
        raise UnsupportedError(
            f"{name} on the parameters of one stage of a pipeline",
            why=f"it updates two tensors together differently from each by itself, by up to {error:.1e}, where the\n"
            f"largest update is {largest:.1e}",
            fix="use an optimizer that updates every parameter by itself (SGD, Adam, AdamW, …), or pp_size 1",
        )


def _check_dtensors(name: str, build: _Build, entry: ParameterEntry, parameter: Tensor) -> None:
    mesh = entry.registry.mesh.data_mesh
    assert mesh is not None
    placements = _placements(entry)
    shape = [_QUANTIZED, *[1] * (len(entry.layout.shape) - 1)]
    ones = torch.ones(shape, device=parameter.device, dtype=parameter.dtype)
    value, gradient = (DTensor.from_local(ones.clone(), mesh, placements, run_check=False) for _ in range(2))
    try:
        _train(build, value, [gradient])
    except UnsupportedError:
        raise
    except Exception as error:  # whatever an optimizer does with tensors may not be there for DTensors
        raise UnsupportedError(
            f"{name} over fsdp or ddp",
            why=f"it cannot update DTensors: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="use another optimizer, or tp alone",
        ) from error


def _placements(entry: ParameterEntry) -> tuple[Replicate | Shard, ...]:
    mesh = entry.registry.mesh.data_mesh
    assert mesh is not None, "data parallelism manages it"
    last = Replicate() if entry.chunk is None else Shard(entry.chunk.dim)
    return (*[Replicate()] * (mesh.ndim - 1), last)


def _is_held_by_several(entry: ParameterEntry) -> bool:
    mesh = entry.registry.mesh
    is_copied_over_tp = bool(entry.holders) if entry.split is not None else mesh.size("tp") > 1
    return is_copied_over_tp or mesh.size("ddp") > 1


def _check_draws_nothing(name: str, build: _Build, parameter: Tensor) -> None:
    """Raises where an update depends on random numbers: ranks that hold the same elements may draw others."""
    found = []
    with torch.random.fork_rng(devices=[parameter.device] if parameter.device.type == "cuda" else []):
        for seed in range(2):
            torch.manual_seed(seed)
            start = torch.linspace(0.5, 2.0, _MANY_DRAWS, device=parameter.device, dtype=parameter.dtype)
            start = start.view([-1, *[1] * (parameter.ndim - 1)])
            found.append(_train(build, start, [start]))
    first, second = found
    if not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
        raise UnsupportedError(
            f"{name} on parameters that several ranks hold",
            why="it draws random numbers, perhaps to round by them, and copies would drift apart",
            fix="use a layout in which each rank holds its own parts (fsdp alone), or an optimizer that draws none",
        )


def _train(build: _Build, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """What `start` becomes by a step with each of `gradients`."""
    return _train_all(build, [start], [[gradient] for gradient in gradients])[0]


def _train_all(build: _Build, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What `starts` become by steps, each with one gradient for every one of them."""
    parameters = [nn.Parameter(start.detach().clone()) for start in starts]
    optimizer = build(parameters)
    for same_step in gradients:

        def closure(same_step: Sequence[Tensor] = same_step) -> Any:
            loss: Any = 0.0
            for parameter, gradient in zip(parameters, same_step, strict=True):
                parameter.grad = gradient.clone()
                loss = loss + (parameter.detach() * gradient).sum()
            return loss

        closure()
        optimizer.step(closure)
    return [parameter.detach() for parameter in parameters]
