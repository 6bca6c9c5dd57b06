"""The blocks of a model: what it repeats, and what data parallelism, recomputation and compilation go by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["find_blocks"]


def find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost lists of modules, each once."""
    seen: set[int] = set()
    for child in module.children():
        found = child.children() if isinstance(child, nn.ModuleList) else find_blocks(child)
        for block in found:
            if isinstance(block, nn.ModuleList | nn.ModuleDict):
                continue  # a list of lists has no forward to gather before
            if id(block) not in seen:
                seen.add(id(block))
                yield block
