"""Failing together: when one rank finds a fault, every rank raises it, so that nobody waits in the next collective."""

from __future__ import annotations

import datetime
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.operations import (
    Group,
    all_gather_later,
    all_gather_objects,
    all_gather_single,
    all_reduce_,
    host_device,
)
from shardwise.errors import ConfigError, RankError, ShardwiseError
from shardwise.failure import Failure

__all__ = [
    "agree_on",
    "check_calls",
    "check_equal",
    "check_same",
    "compare_later",
    "gather_from_all",
    "meet",
    "once_per_machine",
    "raise_on_all_ranks",
    "run_in_turns",
    "sum_of",
]

_Result = TypeVar("_Result")

logger = logging.getLogger("shardwise.comm")

_PATIENCE_SECONDS = 8.0  # after so long a rank that waits for others says so,
_SECONDS_APART = 1.0  # when those have said so that came a little later
_POLL_SECONDS = 0.0005
SECONDS_TO_MEET = 60.0
_LONGEST_WORK = datetime.timedelta(days=7)


@contextmanager
def raise_on_all_ranks(group: Group | None, doing: str) -> Iterator[None]:
    """Runs a block that does not communicate; if it raises on some rank, the lowest such rank's error is raised on all.

    Args:
        group: of the ranks that run the block; None where there is one.
        doing: what the block does, for the message of ranks that had no part in the fault.

    Communicates: one gather of a small object over the group, at the end of the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - raised below, on every rank
        error = fault

    def settle() -> None:
        if error is not None:
            raise error

    gather_from_all(group, doing, settle)


def gather_from_all(group: Group | None, doing: str, make: Callable[[], _Result]) -> list[_Result]:
    """What `make` returns on every rank of `group`, in rank order: small and picklable. Where it raises on some rank,
    the lowest such rank's error is raised on all.

    Args:
        doing: what `make` does, for the message of ranks that had no part in the fault.

    Communicates: one gather of a small object over the group.
    """
    made: _Result | Failure
    error: Exception | None = None
    try:
        made = make()
    except Exception as fault:  # noqa: BLE001 - raised below, on every rank
        made, error = Failure.of(fault), fault
    everyone: list[_Result | Failure] = all_gather_objects(made, group)
    for rank, failure in enumerate(everyone):
        if isinstance(failure, Failure):
            if error is not None and (group is None or rank == group.rank()):
                raise error
            why = f"{failure.name}: {failure.message}"
            raise failure.restore() or RankError(f"rank {rank} failed while {doing}", why=why) from error
    return [each for each in everyone if not isinstance(each, Failure)]


def run_in_turns(
    work: Callable[[], _Result], group: Group | None, *, turn: int, num_turns: int, doing: str
) -> _Result | None:
    """Runs `work` on the ranks of turn 0, then on those of turn 1, and so on: not all at the same time. It must not
    communicate, and a rank whose `turn` is none of them does not run it.

    Returns:
        What `work` did; None where it was not run.

    Raises:
        Exception: what `work` raised on some rank, on all of them; see `raise_on_all_ranks`.

    Communicates: one gather of a small object over the group for every turn.
    """
    result: _Result | None = None
    for current in range(num_turns):
        with raise_on_all_ranks(group, doing):
            if current == turn:
                result = work()
    return result


def once_per_machine(work: Callable[[], None], *, local_rank: int) -> None:
    """Runs `work` on the ranks whose `local_rank` is 0; returns on every rank when all of them are done.

    Raises:
        Exception: what `work` raised, on every rank; a RankError in its place where it cannot travel.

    Communicates: an all-gather of the outcome over all ranks, on a gloo group of its own: tokenizing may take longer
    than any collective of the training may.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WORK)
    try:
        with raise_on_all_ranks(group, "doing the work of its machine"):
            if local_rank == 0:
                work()
    finally:
        dist.destroy_process_group(group)


def agree_on(
    group: Group | None,
    make: Callable[[], tuple[_Result, Mapping[str, str]]],
    *,
    doing: str,
    what: str,
    fix: str,
) -> _Result:
    """Runs `make` and returns its result, once it has succeeded on every rank with the same description.

    Args:
        make: returns the result, which stays on this rank, and texts that describe it; does not communicate.
        doing: what it does, for the message of ranks that had no part in the fault.
        what, fix: the error where descriptions differ.

    Raises:
        Exception: what `make` raised on the lowest rank where it did, on all of them.
        RankError: descriptions differ; names the first that does, as `check_equal`.

    Communicates: one gather of a small object over the group, and another of everything where the texts differ.
    """
    made: list[tuple[_Result, Mapping[str, str]]] = []

    def digest() -> bytes:
        made.append(make())
        return _digest(made[0][1])

    if len(set(gather_from_all(group, doing, digest))) > 1:
        assert group is not None, "a rank agrees with itself"
        raise _difference(group, made[0][1], what=what, fix=fix, error=RankError)
    return made[0][0]


def check_equal(
    group: Group | None,
    described: Mapping[str, str],
    *,
    what: str,
    fix: str,
    device: torch.device,
    error: type[ShardwiseError] = RankError,
) -> None:
    """Raises the same error on every rank of `group` unless `described`, texts by the names of what they describe, is
    the same on all. It names the first thing that differs, and says what it is on which ranks.

    Args:
        device: where a group that knows no host tensors communicates.

    Communicates: one all-gather of a digest of 16 bytes, and one of everything where they differ.
    """
    if group is None:
        return
    digest = torch.frombuffer(bytearray(_digest(described)), dtype=torch.int64)
    digest = digest.to(host_device(group, device))
    digests = digest.new_empty(2 * group.size())
    all_gather_single(digests, digest, group)
    if isinstance(digests, FakeTensor) or bool((digests.view(-1, 2) == digest).all()):
        return
    raise _difference(group, described, what=what, fix=fix, error=error)


def _digest(described: Mapping[str, str]) -> bytes:
    text = "\0".join(map("\0".join, described.items())).encode()
    return hashlib.sha256(text).digest()[:16]


def _difference(
    group: Group, described: Mapping[str, str], *, what: str, fix: str, error: type[ShardwiseError]
) -> ShardwiseError:
    """The error for descriptions that differ; every rank of the group asks for it."""
    # As `check_calls` gathers it: a rank may be there instead.
    same = {"the call": "a forward or a step", **described}
    everyone = all_gather_objects({"rank": dist.get_rank(), "same": same}, group)
    names = list(dict.fromkeys(name for each in everyone for name in each["same"]))
    differing = (name for name in names if len({each["same"].get(name) for each in everyone}) > 1)
    name = next(differing, "the order of the parts")
    said: dict[str, list[int]] = {}
    for place, each in enumerate(everyone):
        said.setdefault(each["same"].get(name, "not there"), []).append(each.get("rank", place))
    why = "\n".join(
        f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()
    )
    return error(what, at=name, why=why, fix=fix)


def compare_later(
    group: Group | None, text: str | None, *, device: torch.device, doing: str, balance: int = 0
) -> Callable[[], bool]:
    """Begins to compare `text` over the group. What is returned waits for the answer: whether all ranks have one, and
    the same, and their numbers `balance` add up to zero. While some do not come, a rank that waits says who.

    Args:
        text: None is the same as nothing.
        balance: of 64 bits, and so is the sum.
        device: where a group that knows no host tensors communicates.
        doing: what all of the ranks are expected to do, for the message.

    Communicates: one all-gather of 16 bytes, which other work may hide.
    """
    if group is None:
        return lambda: text is not None
    own = hashlib.sha256(text.encode(errors="replace")).digest()[:8] if text is not None else bytes(8)
    own += (balance % 2**64).to_bytes(8, sys.byteorder)
    word = torch.frombuffer(bytearray(own), dtype=torch.int64).to(host_device(group, device))
    words = word.new_empty(2 * group.size())  # as `check_equal`: a rank may be there instead
    work = all_gather_later(words, word, group)

    def is_same() -> bool:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not work.is_completed():
            with _saying_who_is_missing(group, doing):
                work.wait()
        work.wait()
        texts, balances = words.view(-1, 2).unbind(1)
        return text is not None and bool((texts == word[0]).all()) and not balances.sum()

    return is_same


def check_calls(group: Group | None, described: Mapping[str, str], *, device: torch.device, doing: str) -> None:
    """Raises on every rank unless all call `doing`, with what `described` says by name.

    Communicates: one all-gather of 16 bytes; where they do not agree, one gather of a small object.
    """
    same = {"the call": doing, **described}
    if not compare_later(group, str(same), device=device, doing=doing)():
        check_same(all_gather_objects({"same": same}, group), what=f"ranks do not call {doing} alike")


def check_same(everyone: Sequence[Mapping[str, Mapping[str, str]]], *, what: str) -> None:
    """Raises unless what the ranks say under "same" is the same: what each has gathered of all.

    Raises:
        ConfigError: it names the first that differs, and says what it is on rank 0 and on another.
    """
    for name in dict.fromkeys(name for each in everyone for name in each["same"]):
        said = [each["same"].get(name) for each in everyone]
        if rank := next((rank for rank, value in enumerate(said) if value != said[0]), 0):
            raise ConfigError(
                f"{what}: {name} is not the same on all",
                why=f"on rank 0: {str(said[0])[:200]}\non rank {rank}: {str(said[rank])[:200]}",
                fix="pass the same on every rank; what belongs to a rank alone is not kept",
            )


@contextmanager
def _saying_who_is_missing(group: Group, doing: str) -> Iterator[None]:
    """Says which ranks of the group do not wait as this one does during the block; one of those that wait says it."""
    store = dist.distributed_c10d._get_default_store()
    own, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    place = f"shardwise/waits/{group.group_name}/{doing}"
    store.set(f"{place}/{own}", "")
    time.sleep(_SECONDS_APART)
    waiting = [rank for rank in ranks if store.check([f"{place}/{rank}"])]
    if own == waiting[0] and len(waiting) < len(ranks):
        missing = ", ".join(str(rank) for rank in ranks if rank not in waiting)
        say = "%d of %d ranks wait in %s, which every rank must call: rank %s did not come"
        logger.warning(say, len(waiting), len(ranks), doing, missing)
    try:
        yield
    finally:
        store.delete_key(f"{place}/{own}")


def meet(group: Group | None, place: str, *, after: str | None = None, who: str, looks_at: str, why: str) -> None:
    """Waits until every rank of `group` has come to `place`, which all call by the same name and visit once: before a
    collective that the code of a caller starts by looking at a tensor.

    Args:
        after: the place where all have met last; its name is forgotten.
        who, looks_at, why: for the error: who must look at what, and why all of them must.

    Raises:
        RankError: some ranks have not come within a minute.

    Communicates: nothing but a word in the store through which the processes found each other.
    """
    store = dist.distributed_c10d._get_default_store()
    assert group is not None, "a single rank looks at nothing of others"
    own, deadline = dist.get_rank(), time.monotonic() + SECONDS_TO_MEET
    store.set(f"{place}/{own}", "")
    missing = []
    for rank in dist.get_process_group_ranks(group):
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([f"{place}/{rank}"], datetime.timedelta(seconds=left))
        except dist.DistStoreError:
            missing.append(rank)
    if after is not None:
        store.delete_key(f"{after}/{own}")
    if missing:
        raise RankError(
            f"rank {own} looks at {looks_at}, and not every {who} rank does",
            why=f"{why}, and rank {', '.join(map(str, missing))} did not come to join it within "
            f"{SECONDS_TO_MEET:.0f} seconds",
            fix="compute on every rank what needs it, and let one rank report it",
        )


def sum_of(number: int, group: Group | None, device: torch.device) -> int:
    """The sum of every rank's number.

    Communicates: over the group, one all-reduce of one integer.
    """
    if group is None:
        return number
    total = torch.tensor(number, device=host_device(group, device))
    all_reduce_(total, group)
    return int(total)
