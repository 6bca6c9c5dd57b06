"""States that a checkpoint holds beside parameters: learning-rate schedulers, and random generators by data rank.

Some lists of a scheduler have one entry per optimizer group, and groups differ between layouts, and between the stages
of one layout. Their options are stored by parameter; these lists are stored as rank 0 has them. So ranks compare only
the rest. When a scheduler is loaded with its optimizer, the entries are taken from the groups' options.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.errors import LoadError
from shardwise.mesh import Mesh

_OPTIONS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists of torch's schedulers, and the option of a group that each repeats."""
_EQUAL = ("min_lrs", "lr_lambdas")
"""Lists that no option repeats: they fit other groups where all entries are equal."""
_INNER = "_schedulers"


def common_state(state: Any) -> Any:
    """The part of `state` that must be equal on every rank, whatever groups its optimizer has."""
    if not isinstance(state, Mapping):
        return state
    found = {name: value for name, value in state.items() if name not in _OPTIONS}
    for name in found.keys() & {*_EQUAL}:
        found[name] = found[name][:1] if _are_equal(found[name]) else found[name]
    if _INNER in found:
        found[_INNER] = [common_state(each) for each in found[_INNER]]
    return found


def state_for_groups(state: Any, groups: Sequence[Mapping[str, Any]], *, is_inner: bool = False) -> Any:
    """Converts `state` to the state of a scheduler whose optimizer has these `groups`.

    Args:
        is_inner: whether another scheduler drives this one: its lists may be of an earlier step.
    """
    if not isinstance(state, Mapping):
        return state
    found = dict(state)
    for name in found.keys() & _OPTIONS.keys():
        values = [group.get(_OPTIONS[name]) for group in groups]
        if None not in values and not (is_inner and len(found[name]) == len(groups)):
            found[name] = [value.clone() if isinstance(value, Tensor) else value for value in values]
    for name in found.keys() & {*_EQUAL}:
        if len(found[name]) != len(groups):
            if not _are_equal(found[name]):
                raise LoadError(
                    f"the scheduler's {name} differ, and were of other parameter groups",
                    why=f"{len(found[name])} entries for what are {len(groups)} groups now",
                    fix="load it with the layout it was saved with, or build the scheduler again",
                )
            found[name] = found[name][:1] * len(groups)
    if _INNER in found:
        found[_INNER] = [state_for_groups(each, groups, is_inner=True) for each in found[_INNER]]
    return found


def _are_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)


def random_axes(mesh: Mesh) -> dict[str, int]:
    """Sizes that must be equal for streams to continue."""
    return {"pp": mesh.size("pp"), "data": mesh.data_size, "cp": mesh.size("cp")}


def read_random(mesh: Mesh) -> dict[str, Tensor]:
    """States of this rank's streams by key; empty if an earlier tp rank has the same."""
    if mesh.coord("tp"):
        return {}
    state: Any = numpy.random.get_state()
    _, keys, *rest = state
    version, numbers, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), int(rest[0]), int(rest[1])], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(rest[2])], dtype=torch.float64),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
    }
    if gauss is not None:
        found["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    if mesh.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(mesh.device)
    return {f"{_place(mesh)}/{kind}": value for kind, value in found.items()}


def restore_random(mesh: Mesh, saved_axes: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Continues this rank's streams from the states `saved`, or starts new ones in another layout.

    Ranks that compute on the same rows start from equal states, whatever their tp coordinate (see [Note: random
    numbers]). So states belong to a stage and a data rank. If the numbers of both are the same, each stream continues.
    Otherwise every rank starts a new stream, seeded by the saved states and its data rank: the same on every such
    layout, and different on each data rank.
    """
    place = f"{_place(mesh)}/"
    own = {key.removeprefix(place): value for key, value in saved.items() if key.startswith(place)}
    if dict(saved_axes) != random_axes(mesh):
        _restart_streams(mesh, saved)
        return
    torch.set_rng_state(own["torch"].clone())
    *keys, position, has_gauss = own["numpy"].tolist()
    gauss = float(own["numpy_gauss"])
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    version, *numbers = own["python"].tolist()
    python_gauss = float(own["python_gauss"]) if "python_gauss" in own else None
    random.setstate((version, tuple(numbers), python_gauss))
    if "cuda" in own and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"].clone(), mesh.device)


def _restart_streams(mesh: Mesh, saved: Mapping[str, Tensor]) -> None:
    first = min(key for key in saved if key.endswith("/torch"))
    digest = hashlib.sha256(f"{mesh.data_rank}".encode() + saved[first].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def _place(mesh: Mesh) -> str:
    return f"random/{mesh.coord('pp')}.{mesh.coord('cp')}.{mesh.data_rank}"
