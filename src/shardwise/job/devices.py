"""Which device a rank computes on, and that ranks which exchange over NCCL have a card each."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from shardwise.errors import MeshError, counted
from shardwise.job.rendezvous import RankAddress

__all__ = ["DEVICE_VARIABLE", "check_own_cards", "pick_device"]

DEVICE_VARIABLE = "SHARDWISE_DEVICE"
"""Environment variable with the default device of ranks: `cpu`, `cuda`, `cuda:0`."""


def pick_device(device: str | torch.device | None) -> torch.device:
    """This rank's device, made current where it is a GPU: the one asked for, or that of `SHARDWISE_DEVICE`, or a GPU
    where there are any, or the CPU.

    Of several GPUs a rank takes the one of its local rank. A single visible one is its own: many launchers show each
    rank one card.

    Raises:
        MeshError: there is no such device, or fewer GPUs than ranks.
    """
    asked = device if device is not None else os.environ.get(DEVICE_VARIABLE) or None
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        picked = torch.device(asked if asked is not None else "cuda" if available else "cpu")
    except RuntimeError as error:
        origin = "device" if device is not None else DEVICE_VARIABLE
        raise MeshError(
            f"{origin} is {str(asked)!r}", why=str(error).splitlines()[0], fix='use "cpu" or "cuda"'
        ) from None
    if picked.type != "cuda":
        return picked
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_numbered = ":" in str(picked)
    if not is_numbered and 1 < available < local_world_size:
        raise MeshError(
            f"{counted(local_world_size, 'rank')} on this machine but {counted(available, 'GPU')}",
            why="each rank takes one GPU",
            fix=f"start at most {counted(available, 'rank')} here, or set {DEVICE_VARIABLE}=cpu",
        )
    if not is_numbered:
        picked = torch.device("cuda", 0 if available == 1 else local_rank)
    if picked.index >= available:
        shown = (
            f"{counted(available, 'GPU')} visible here" if available else "no GPU is visible here, or torch has no CUDA"
        )
        raise MeshError(
            f"rank of local rank {local_rank} asks for {picked}",
            why=shown,
            fix=f"set {DEVICE_VARIABLE}=cpu" if device is None else 'use the device "cpu"',
        )
    torch.cuda.set_device(picked)
    return picked


def check_own_cards(store: dist.Store, address: RankAddress, device: torch.device) -> None:
    """Checks that no two ranks compute on one card, which NCCL cannot serve.

    Raises:
        MeshError: two ranks do; the same on every rank.

    Communicates: through the store alone.
    """
    card = f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"
    store.set(f"card/{address.rank}", card)
    cards = [card.decode() for card in store.multi_get([f"card/{rank}" for rank in range(address.world_size)])]
    for rank, card in enumerate(cards):
        first = cards.index(card)
        if first != rank:
            raise MeshError(
                f"ranks {first} and {rank} compute on the same card",
                why=f"it is {card}; NCCL needs a card for each rank",
                fix=f'start fewer ranks, set {DEVICE_VARIABLE}=cpu, or share the card with backend="gloo"',
            )
