"""The axes of a device mesh: names, order, and spelling of sizes."""

from shardwise.errors import MeshError, did_you_mean

AXES: tuple[str, ...] = ("pp", "ddp", "fsdp", "cp", "tp")
"""Axis names, outermost first: ranks along the last axis are neighbours, where the links are fastest."""

DATA_AXES: tuple[str, ...] = ("ddp", "fsdp")
"""Axes along which ranks see different rows of a batch."""

FSDP_AXES: tuple[str, ...] = ("ddp", "fsdp")
"""Axes of FSDP2's mesh: weights are replicated over ddp and sharded over fsdp, gradients are summed over both."""

SAME_ROWS_AXES: tuple[str, ...] = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Axes along which ranks must be given the same rows."""

UNSERVED_AXES: tuple[str, ...] = ("cp",)
"""Axes that layouts can name and that nothing serves yet."""

SIZE_NAMES: dict[str, str] = {
    "pp": "pp_size",
    "ddp": "dp_replicate_size",
    "fsdp": "fsdp_size",
    "cp": "cp_size",
    "tp": "tp_size",
}
"""Axis name -> the name of its size, as transformers spells it."""


def check_axis(axis: str) -> None:
    """Checks that `axis` is an axis name.

    Raises:
        MeshError: there is no such axis.
    """
    if axis not in SIZE_NAMES:
        raise MeshError(
            f"unknown mesh axis {axis!r}{did_you_mean(axis, AXES)}",
            fix=f"use one of {', '.join(AXES)}",
        )
