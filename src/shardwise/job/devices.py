"""The device of a rank, and the check that ranks over NCCL do not share a card."""

import os
import socket

import torch
import torch.distributed as dist

from shardwise.errors import MeshError, counted
from shardwise.job.rendezvous import RankAddress

DEVICE_VARIABLE = "SHARDWISE_DEVICE"
"""Environment variable with the default device of ranks: `cpu`, `cuda`, `cuda:0`."""


def pick_device(device: str | torch.device | None) -> torch.device:
    """This rank's device: `device`, or that of `SHARDWISE_DEVICE`, or a GPU if there are any, or the CPU. A GPU becomes
    torch's current device.

    Of several GPUs a rank takes the one of its local rank. A single visible one is its own: many launchers show each
    rank one card.
    """
    asked = device if device is not None else os.environ.get(DEVICE_VARIABLE) or None
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        picked = torch.device(asked if asked is not None else "cuda" if available else "cpu")
    except RuntimeError as error:
        name = "device" if device is not None else DEVICE_VARIABLE
        raise MeshError(
            f"{name} is {str(asked)!r}", why=str(error).splitlines()[0], fix='use "cpu" or "cuda"'
        ) from None
    if picked.type != "cuda":
        return picked
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_index = ":" in str(picked)
    if not has_index:
        picked = torch.device("cuda", 0 if available == 1 else local_rank)
    if picked.index >= available or (not has_index and 1 < available < num_local):
        raise MeshError(
            f"{picked} for local rank {local_rank} of {num_local}",
            why=f"torch sees {counted(available, 'GPU')} here, and each rank needs one",
            fix=f"start fewer ranks on this machine, or set {DEVICE_VARIABLE}=cpu",
        )
    torch.cuda.set_device(picked)
    return picked


def check_own_cards(store: dist.Store, address: RankAddress, device: torch.device) -> None:
    """Raises `MeshError` on every rank if two ranks share a card, which NCCL does not support.

    Communicates: through the store alone.
    """
    card = f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"
    store.set(f"card/{address.rank}", card)
    cards = [card.decode() for card in store.multi_get([f"card/{rank}" for rank in range(address.world_size)])]
    for rank, card in enumerate(cards):
        first = cards.index(card)
        if first != rank:
            raise MeshError(
                f"ranks {first} and {rank} use the same card",
                why=f"it is {card}; NCCL needs one card per rank",
                fix=f'start fewer ranks, set {DEVICE_VARIABLE}=cpu, or share the card with backend="gloo"',
            )
