"""Files of what one rank holds, which the same rank of the same layout reads again: for code that saves by itself.

See `shardwise.save_checkpoint` for checkpoints that any layout can load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.errors import LoadError
from shardwise.weights.staging import atomic_file

__all__ = ["read_file", "read_tree", "write_tree"]

_MARK = "shardwise tensor "
_NAME = "checkpoint.pt"


def write_tree(tree: Any, place: Path, *, file_per_tensor: bool = False, dtype: torch.dtype | None = None) -> None:
    """Writes tensors and plain values to `place/checkpoint.pt`, complete or not at all.

    Args:
        file_per_tensor: write every tensor to a file of its own in `place.tensors`, and then their tree to `place`.
        dtype: of floating-point tensors in the file; by default their own.

    Raises:
        LoadError: a file cannot be written.
    """
    tensors: list[Tensor] = []

    def stored(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        tensors.append(value)
        return f"{_MARK}{len(tensors) - 1}" if file_per_tensor else value

    tree = tree_map(stored, tree)
    try:
        for number, tensor in enumerate(tensors if file_per_tensor else ()):
            with atomic_file(_tensor_file(place, number)) as partial:
                torch.save(tensor.clone(), partial)
        with atomic_file(place if file_per_tensor else place / _NAME) as partial:  # last: it names all of them
            torch.save(tree, partial)
    except OSError as error:
        raise LoadError(f"cannot write {place}", why=str(error)) from error


def read_tree(place: Path, *, file_per_tensor: bool = False) -> Any:
    """What `write_tree` wrote, on the CPU. No code in the files is run.

    Raises:
        LoadError: it is not there, or was written the other way.
    """
    path = place if file_per_tensor else place / _NAME
    if not path.is_file():
        other = _tensor_file(place, 0).parent.is_dir() if not file_per_tensor else (place / _NAME).is_file()
        raise LoadError(
            f"no checkpoint at {path}",
            why=f"it was written {'with' if not file_per_tensor else 'without'} a file for every tensor (xser)"
            if other
            else "there is no such file",
            fix=f"pass load_xser={not file_per_tensor}" if other else "load it at the degrees at which it was saved",
        )
    tree = read_file(path)
    if not file_per_tensor:
        return tree

    def put_back(value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(_MARK):
            return value
        return read_file(_tensor_file(place, int(value.removeprefix(_MARK))))

    return tree_map(put_back, tree)


def _tensor_file(place: Path, number: int) -> Path:
    return Path(f"{place}.tensors") / f"tensor_{number}.pt"


def read_file(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU. No code in the file is run.

    Raises:
        LoadError: it is not there or damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LoadError(f"cannot read {path}", why=" ".join(str(error).split())[:300]) from error
