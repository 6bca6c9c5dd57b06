"""Splits feature dims of a block among tp ranks: by heads in attention, in plain runs elsewhere."""

from shardwise.errors import PlanError
from shardwise.plan.structure import Heads
from shardwise.sharding.placement import Split, split_blocks, split_even, split_heads, split_sections


def _is_legal(heads: Heads, num_parts: int) -> bool:
    """Whether query heads divide among `num_parts` ranks, and key/value heads divide or replicate evenly."""
    kv = heads.num_key_value_heads
    return heads.num_heads % num_parts == 0 and (kv % num_parts == 0 or num_parts % kv == 0)


def check_heads(heads: Heads, num_parts: int) -> tuple[str, str] | None:
    """Reason and remedy if `heads` cannot be divided among `num_parts` ranks; None if they can."""
    if _is_legal(heads, num_parts):
        return None
    reasons = []
    if heads.num_heads % num_parts:
        reasons.append(f"{heads.num_heads} query heads do not divide among {num_parts} ranks")
    kv = heads.num_key_value_heads
    if kv % num_parts and num_parts % kv:
        reasons.append(
            f"{kv} key-value heads do not divide among {num_parts} ranks, and {num_parts} is not a multiple of {kv}"
        )
    sizes = ", ".join(str(size) for size in range(1, heads.num_heads + 1) if _is_legal(heads, size))
    return "; ".join(reasons), f"use tp_size {sizes}, or replicate this attention with the style replicate"


def local_heads(heads: Heads, num_parts: int) -> Heads:
    """The heads of one rank."""
    return Heads(
        num_heads=heads.num_heads // num_parts,
        num_key_value_heads=max(1, heads.num_key_value_heads // num_parts),
        head_dim=heads.head_dim,
    )


def feature_split(dim: int, size: int, *, heads: Heads | None, num_parts: int) -> Split:
    """Split of a feature dim of `size`: by query heads, by key/value heads, or in plain runs without heads.

    Raises:
        PlanError: `size` is no multiple of the number of heads, or a rank would have nothing.
    """
    if heads is None:
        if size < num_parts:
            raise PlanError(
                f"{size} features cannot be split over tp={num_parts}", why="a rank would hold none of them"
            )
        return split_even(dim, size, parts=num_parts)
    kv, head_dim = heads.num_key_value_heads, heads.head_dim
    if head_dim is not None and size == kv * head_dim:
        return split_heads(dim, kv, head_dim=head_dim, parts=num_parts)
    if size % heads.num_heads == 0:
        return split_blocks(dim, heads.num_heads, block_size=size // heads.num_heads, parts=num_parts)
    if size % kv == 0:
        return split_heads(dim, kv, head_dim=size // kv, parts=num_parts)
    raise PlanError(
        f"{size} features do not divide into heads",
        why=f"the module has {heads.num_heads} query and {kv} key-value heads"
        + (f" of {head_dim} features" if head_dim else ""),
        fix='replicate it with the style "replicate", or split its features in plain runs in a block without heads',
    )


def qkv_split(dim: int, size: int, *, heads: Heads | None, num_parts: int) -> Split:
    """Split of a fused `[q | k | v]` dim, each section by its own heads.

    Raises:
        PlanError: the module has no known heads, or the sections do not add up to `size`.
    """
    if heads is None:
        raise PlanError("qkv_colwise needs the heads of the module it is in", why="no head counts were found on it")
    num_blocks = heads.num_heads + 2 * heads.num_key_value_heads
    if size % num_blocks:
        raise PlanError(
            f"{size} features are not q, k and v sections",
            why=f"{heads.num_heads} query and 2 x {heads.num_key_value_heads} key-value heads make {num_blocks} heads",
        )
    head_dim = size // num_blocks
    kv = split_heads(dim, heads.num_key_value_heads, head_dim=head_dim, parts=num_parts)
    return split_sections(dim, [split_blocks(dim, heads.num_heads, block_size=head_dim, parts=num_parts), kv, kv])
