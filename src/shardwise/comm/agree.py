"""Collective error handling: if one rank finds a fault, every rank raises it, so none waits in the next."""

import datetime
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import Group, all_gather_later, all_gather_objects, all_reduce_, host_device
from shardwise.errors import ConfigError, RankError, ShardwiseError
from shardwise.failure import Failure
from shardwise.job.processes import PATIENT

_Result = TypeVar("_Result")

_NUM_NUMBERS = 2
_LONGEST_WORK = datetime.timedelta(days=7)


@contextmanager
def raise_on_all_ranks(group: Group | None, doing: str) -> Iterator[None]:
    """Context manager: if the block raises on any rank, the error of the lowest such rank is raised on all ranks.

    Args:
        group: ranks that run the block, which must not communicate; None for one rank.
        doing: what the block does, for the message on other ranks.

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
    """Returns the results of `make` on every rank of `group`, in rank order. They must be small and picklable.

    If `make` raises on any rank, the error of the lowest such rank is raised on all ranks.

    Args:
        doing: what `make` does, for the message on other ranks.

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


def run_serially(
    work: Callable[[], _Result], group: Group | None, *, turn: int, num_turns: int, doing: str
) -> _Result | None:
    """Runs `work` on the ranks of turn 0, then on those of turn 1, and so on. `work` must not communicate.

    Returns:
        The result of `work`; None if this rank's `turn` is not in `range(num_turns)`.

    Raises:
        Exception: the error of the lowest rank on which `work` raised, on all ranks.

    Communicates: one gather of a small object over the group per turn.
    """
    result: _Result | None = None
    for current in range(num_turns):
        with raise_on_all_ranks(group, doing):
            if current == turn:
                result = work()
    return result


def run_on_local_rank_0(work: Callable[[], None], *, local_rank: int) -> None:
    """Runs `work` on the ranks whose `local_rank` is 0. Returns on every rank when all are done.

    Raises:
        Exception: the error of `work`, on every rank; a RankError if the error cannot be pickled.

    Communicates: one all-gather of the outcome over all ranks, on its own gloo group: tokenizing may take longer than
    the timeout of the training's collectives.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = dist.new_group(backend="gloo", timeout=_LONGEST_WORK, group_desc=PATIENT)
    try:
        with raise_on_all_ranks(group, "doing the work of its machine"):
            if local_rank == 0:
                work()
    finally:
        dist.destroy_process_group(group)


class Agreement:
    """Comparison of all ranks' fields, numbers and faults; the constructor starts it, `wait` ends it.

    Args:
        group: ranks that compare; None for one rank.
        fields: texts to compare, by name.
        doing: what the ranks do, for messages about a rank that is missing or failed.
        what, fix: message and remedy if fields differ. The error names the first such field and its texts.
        fault: this rank's error, or None. The error of the lowest such rank is raised on all.
        numbers: at most two integers, as many on every rank.

    Communicates: one all-gather of 40 bytes; if ranks disagree, also a gather of small objects.
    """

    def __init__(
        self,
        group: Group | None,
        fields: Mapping[str, str],
        *,
        doing: str,
        what: str,
        fix: str,
        fault: Exception | None = None,
        numbers: Sequence[int] = (),
        error: type[ShardwiseError] = RankError,
    ) -> None:
        self._group, self._fields, self._doing, self._fault = group, fields, doing, fault
        self._what, self._fix, self._error = what, fix, error
        self._numbers = list(numbers)
        if group is None:
            return
        text = "\0".join(map("\0".join, fields.items())).encode(errors="replace")
        words = torch.frombuffer(bytearray(hashlib.sha256(text).digest()[:16]), dtype=torch.int64).tolist()
        assert len(numbers) <= _NUM_NUMBERS, "every agreement is of one length: ranks may have come from other calls"
        terms = [*words, fault is not None, *numbers, *[0] * (_NUM_NUMBERS - len(numbers))]
        mine = torch.tensor(terms, dtype=torch.int64, device=_device_of(group))
        self._everyone = mine.new_empty(group.size() * len(mine))
        self._work = all_gather_later(self._everyone, mine, group)

    def wait(self, *, is_late: bool = False) -> list[list[int]]:
        """Returns the numbers of every rank, in rank order.

        Raises the same error on every rank unless all ranks have equal fields and no rank has a fault.

        Args:
            is_late: whether a rank with a fault has raised it already and joins no further collective.
        """
        if self._group is None:
            if self._fault is not None:
                raise self._fault
            return [self._numbers]
        everyone = self.gathered()
        if isinstance(self._everyone, FakeTensor):
            return [self._numbers] * self._group.size()
        failed = [rank for rank, (_, _, has_fault, *_) in enumerate(everyone) if has_fault]
        if failed and is_late:
            ranks = dist.get_process_group_ranks(self._group)
            raise RankError(f"rank {ranks[failed[0]]} failed while {self._doing}", why="that rank has raised the error")
        if failed:
            gather_from_all(self._group, self._doing, self._raise_fault)
        if any(said[:2] != everyone[0][:2] for said in everyone):
            same = {"the call": "a forward or a step", **self._fields}  # other ranks may have come by another call
            gathered = all_gather_objects({"rank": dist.get_rank(), "same": same}, self._group)
            raise _difference(gathered, what=self._what, fix=self._fix, error=self._error)
        return [numbers[: len(self._numbers)] for _, _, _, *numbers in everyone]

    def gathered(self) -> list[list[int]]:
        """Returns, for every rank, two words of the fields' digest, whether the rank has a fault, and its numbers."""
        assert self._group is not None
        self._work.wait()
        if isinstance(self._everyone, FakeTensor):
            return []
        everyone: list[list[int]] = self._everyone.view(self._group.size(), -1).tolist()
        return everyone

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def agree_on(
    group: Group | None,
    make: Callable[[], tuple[_Result, Mapping[str, str]]],
    *,
    doing: str,
    what: str,
    fix: str,
    error: type[ShardwiseError] = RankError,
) -> _Result:
    """Runs `make` and returns its result if it succeeds on every rank with equal fields.

    Args:
        make: returns the result, which stays on this rank, and the fields; must not communicate.
        doing, what, fix, error: see `Agreement`.

    Raises:
        Exception: the error of the lowest rank on which `make` raised, on all ranks.
        ShardwiseError: fields differ.

    Communicates: what `Agreement` does.
    """
    fields: Mapping[str, str] = {}
    fault, made = None, []
    try:
        result, fields = make()
        made.append(result)
    except Exception as raised:  # noqa: BLE001 - raised by the agreement, on every rank
        fault = raised
    Agreement(group, fields, doing=doing, what=what, fix=fix, fault=fault, error=error).wait()
    return made[0]


def check_calls(group: Group | None, fields: Mapping[str, str], *, doing: str) -> None:
    """Raises on every rank unless all ranks call the function named `doing` with equal `fields`.

    Communicates: what `Agreement` does.
    """
    Agreement(
        group,
        {"the call": doing, **fields},
        doing=doing,
        what=f"ranks do not call {doing} alike",
        fix=_SAME_ON_ALL,
        error=ConfigError,
    ).wait()


_SAME_ON_ALL = "pass the same on every rank; what belongs to a rank alone is not kept"


def _difference(
    everyone: Sequence[Mapping[str, Any]], *, what: str, fix: str, error: type[ShardwiseError]
) -> ShardwiseError:
    """Returns the error that names the first differing field and its text on each rank."""
    names = list(dict.fromkeys(name for said in everyone for name in said["same"]))
    differing = (name for name in names if len({said["same"].get(name) for said in everyone}) > 1)
    name = next(differing, "the order of the parts")
    ranks_by_text: dict[str, list[int]] = {}
    for place, said in enumerate(everyone):
        ranks_by_text.setdefault(str(said["same"].get(name, "not there")), []).append(said.get("rank", place))
    why = "\n".join(
        f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text[:400]}"
        for text, ranks in ranks_by_text.items()
    )
    return error(what, at=name, why=why, fix=fix)


def _device_of(group: Group) -> torch.device:
    """Returns the device for small values of a group: the CPU if the group supports it."""
    devices = group._device_types
    return torch.device("cpu") if not devices or torch.device("cpu") in devices else devices[0]


def meet(
    group: Group | None,
    place: str,
    *,
    timeout: datetime.timedelta,
    after: str | None = None,
    who: str,
    looks_at: str,
    why: str,
) -> None:
    """Waits until every rank of `group` has called this with the same `place`. Each place is used once.

    Called before a collective that user code starts by reading a tensor.

    Args:
        timeout: timeout of the mesh.
        after: place of the previous meeting; its key is deleted.
        who, looks_at, why: parts of the error message.

    Raises:
        RankError: some ranks have not come in time.

    Communicates: nothing except a key in the process group's store.
    """
    store = dist.distributed_c10d._get_default_store()
    assert group is not None, "a single rank looks at nothing of others"
    own, deadline = dist.get_rank(), time.monotonic() + timeout.total_seconds()
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
            f"{timeout.total_seconds():.0f} seconds, the mesh's timeout",
            fix="compute on every rank what needs it, and let one rank report it",
        )


def all_reduce_int(number: int, group: Group | None, device: torch.device) -> int:
    """Returns the sum of every rank's number.

    Communicates: over the group, one all-reduce of one integer.
    """
    if group is None:
        return number
    total = torch.tensor(number, device=host_device(group, device))
    all_reduce_(total, group)
    return int(total)
