"""Random states of a job, and how they are restored in another layout.

Ranks that compute on the same rows start from equal states, whatever their tp coordinate (see [Note: random numbers],
runtime/rng.py). So states belong to a stage and a data rank. If the numbers of stages and data ranks are the same when
a checkpoint is loaded, each stream continues. Otherwise every rank starts a new stream, seeded by the saved states and
its data rank: the same on every such layout, and different on each data rank.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.mesh import Mesh


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
    """Continues this rank's streams from the states `saved`, or starts new ones in another layout; see the module."""
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
