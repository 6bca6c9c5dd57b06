"""Starts and ends this process as a rank of a job; rank heartbeats name the ranks that a failed collective misses.

# [Note: the last collective]
gloo's thread releases the tensors of a collective a moment after its result is there, and takes the GIL for it. Up to
Python 3.13 a thread that asks for the GIL while the interpreter shuts down is ended, and C++ then aborts the process:
about one run in forty that ended within that moment ended with SIGABRT. So a process that used gloo sleeps briefly
before it ends.

# [Note: heartbeats]
A collective that a rank never joins fails at the timeout of its process group, with an error that names no rank. So a
thread of every rank writes a `Beat` into the store of the rendezvous every two seconds: a count, the training step, and
the place in the main thread's stack. A rank that ends writes why. `diagnose` reads all beats when a
collective has failed (`Heartbeat.explain`), and for a warning after half of the timeout, because NCCL's watchdog ends a
process without an exception. The thread ends no process. A beat is one write of 130 bytes (40 microseconds), over a
connection of its own.
"""

import atexit
import datetime
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from shardwise.errors import MeshError, RankError, ShardwiseError, counted
from shardwise.job.rendezvous import RankAddress, call_with_timeout, read_address, rendezvous, shown_ranks

BEAT_SECONDS = 2.0
QUIET_BEATS = 3  # A rank is missing when this many of its beats have not come
ANSWER_SECONDS = 5.0
PATIENT = "patient"  # description of groups with a timeout of days, which `run_collective` ends when heartbeats stop

logger = logging.getLogger("shardwise.job")

_INNER = ("torch", "shardwise.comm", "shardwise.job", "transformers.utils")  # frames of these modules are skipped


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        collective: the collective that its main thread is in; "" where it computes.
        where: file, line and function that the main thread is in.
        ended: "", or how the rank ended: "left" or "failed".
        order: position among the ranks that ended, from 1.
        heard_at: when the reader saw `count` change last, on the reader's monotonic clock.
    """

    count: int = 0
    step: int = 0
    collective: str = ""
    where: str = "its first lines"
    ended: str = ""
    order: int = 0
    text: str = ""
    heard_at: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step}, {self.collective + ' at ' if self.collective else ''}{self.where}"

    @property
    def place(self) -> tuple[int, str, str]:
        """What changes while the rank makes progress."""
        return self.step, self.collective, self.where


def diagnose(beats: Sequence[Beat], now: float, *, rank: int, quiet_seconds: float, is_late: bool) -> RankError | None:
    """Says why the collective in which this rank waits does not end.

    Args:
        beats: the last beat of every rank; that of `rank` names the collective.
        now: on the clock of `heard_at`.
        quiet_seconds: a rank without a beat for this long is missing.
        is_late: whether the collective has timed out, here or on a rank that then closed its connections, or may soon.

    Returns:
        The error; None where no rank is missing and the collective is not late.
    """
    mine = beats[rank]
    what, at = f"{mine.collective} of step {mine.step}", f"rank {rank}, {mine}"
    ends = [(beat.order, number) for number, beat in enumerate(beats) if beat.ended]
    if ends:
        _, first = min(ends)
        beat = beats[first]
        if beat.ended == "failed":
            return RankError(f"rank {first} failed in step {beat.step}", at=at, why=beat.text)
        return RankError(
            f"rank {first} left after step {beat.step}, and did not come to {what}",
            at=at,
            why="it ended without an error: its data may have ended before that of the others",
            fix="give every rank as many batches",
        )
    peers = [peer for peer in range(len(beats)) if peer != rank]
    quiet = [peer for peer in peers if now - beats[peer].heard_at > quiet_seconds]
    elsewhere = [peer for peer in peers if not beats[peer].collective or beats[peer].step != mine.step]
    if missing := quiet or elsewhere:
        lines = [f"rank {peer} {'was last' if quiet else 'is'} in {beats[peer]}" for peer in missing[:8]]
        lines += ["and no longer sends heartbeats: it ended, was stopped, or cannot be reached"] if quiet else []
        fix = None if quiet else "find out what keeps it there; if that may take so long, raise timeout_seconds"
        return RankError(f"{shown_ranks(missing)} did not come to {what}", at=at, why="\n".join(lines), fix=fix)
    if not is_late:
        return None
    return RankError(
        f"{what} did not end, though every rank is in a collective",
        at=at,
        why="\n".join(f"rank {peer} is in {beat}" for peer, beat in enumerate(beats[:8])),
        fix="if the collectives differ, make the same calls on every rank, in the same order; if a rank may be so\n"
        "late, raise timeout_seconds",
    )


def find_place(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Returns the collective that a stack is in ("" for none), and the line that called it.

    The collective is the innermost function of `torch.distributed`, or else the outermost one of `shardwise.comm`: a
    wait for a started collective has no frame of torch.

    Args:
        frames: frames with their line numbers, innermost first.
    """
    collective = ours = ""
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.distributed") and not module.endswith("c10d_logger"):
            collective = collective or frame.f_code.co_name
        if module.startswith("shardwise.comm"):
            ours = frame.f_code.co_name
        is_standard = module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names
        if not is_standard and not module.startswith(_INNER):
            path = Path(frame.f_code.co_filename)
            return collective or ours, f"{path.parent.name}/{path.name}:{line} in {frame.f_code.co_name}"
    return collective or ours, "unknown code"


class Heartbeat:
    """This rank's heartbeat thread; see [Note: heartbeats]."""

    def __init__(self, store: dist.Store, address: RankAddress, *, timeout_seconds: float) -> None:
        self.step = 0
        self.address = address
        self._failed_at: Beat | None = None  # a rank that explains a failed collective counts as being in it
        self.timeout_seconds = timeout_seconds
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's types lack it
        self._main_thread = threading.get_ident()
        self._beat = Beat()
        self._heard: list[Beat] = []
        self._is_lost = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwise-heartbeat")
        self._thread.start()

    def note_end(self, error: BaseException | None) -> None:
        """Publishes that this rank ends, and with which error. Only the first call counts."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(timeout=2.0)  # it must not run while the interpreter shuts down
        if self._is_lost:
            return
        ended, text = ("left", "") if error is None else ("failed", _in_words(error))
        last = replace(self._beat, step=self.step, ended=ended, text=text)
        with suppress(dist.DistError):  # the rank that keeps the store has ended
            call_with_timeout(ANSWER_SECONDS, lambda: self._publish(replace(last, order=self._store.add("ended", 1))))

    def explain(self, error: BaseException) -> RankError | None:
        """Explains the error of a collective by the ranks that were missing from it.

        Returns:
            None for an error of another kind, and where no rank was missing.

        Communicates: through the store alone; takes a few seconds.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, ShardwiseError):
            return None
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            return None
        collective, where = find_place(list(traceback.walk_tb(error.__traceback__))[::-1])
        mine = self._failed_at = Beat(step=self.step, collective=collective or "a collective", where=where)
        self._heard = []
        rank, quiet_seconds, start = self.address.rank, QUIET_BEATS * BEAT_SECONDS, time.monotonic()
        while (beats := self._read_in_time()) is not None:
            # A rank that was killed just now has not missed a beat yet.
            if any(beat.ended for beat in beats) or time.monotonic() - start > quiet_seconds + BEAT_SECONDS:
                beats[rank] = mine
                is_late = any(text in str(error) for text in ("imed out", "closed by peer"))
                return diagnose(beats, time.monotonic(), rank=rank, quiet_seconds=quiet_seconds, is_late=is_late)
            time.sleep(BEAT_SECONDS)
        return RankError(
            f"rank 0 or its launcher did not come to {mine.collective} of step {mine.step}",
            at=f"rank {rank}, {mine}",
            why=f"its store at {self.address} no longer answers: it ended, was stopped, or cannot be reached",
        )

    def _read_in_time(self) -> list[Beat] | None:
        """Returns every rank's last beat; None where the store does not answer."""
        beats = None
        with suppress(dist.DistError):
            beats = call_with_timeout(ANSWER_SECONDS, self._read)
        self._is_lost = beats is None
        return beats

    def read(self) -> list[Beat] | None:
        """Returns what the ranks have published last; None if the store takes long."""
        return call_with_timeout(ANSWER_SECONDS, self._published)

    def _published(self) -> list[Beat]:
        keys = [f"beat/{rank}" for rank in range(self.address.world_size)]
        return [Beat(**json.loads(text or "{}")) for text in self._store.multi_get(keys)]

    def _read(self) -> list[Beat]:
        beats, now = self._published(), time.monotonic()
        last = self._heard or [replace(beat, heard_at=now) for beat in beats]
        self._heard = [
            replace(new, heard_at=old.heard_at if new.count == old.count else now)
            for old, new in zip(last, beats, strict=True)
        ]
        return [*self._heard]

    def _publish(self, beat: Beat) -> None:
        self._beat = beat
        self._store.set(f"beat/{self.address.rank}", json.dumps(asdict(beat)))

    def _run(self) -> None:
        place, moved_at, has_warned = self._beat.place, time.monotonic(), False
        with suppress(dist.DistError):  # the store has ended with rank 0 or its launcher
            while not self._stopped.wait(BEAT_SECONDS):
                frame = sys._current_frames().get(self._main_thread)
                collective, where = find_place(traceback.walk_stack(frame)) if frame is not None else ("", "its end")
                beat = self._failed_at or Beat(step=self.step, collective=collective, where=where)
                self._publish(replace(beat, count=self._beat.count + 1))
                if self._beat.place != place:
                    place, moved_at, has_warned = self._beat.place, time.monotonic(), False
                if self.address.rank < 2 and self._beat.collective and not has_warned:
                    has_warned = self._warn(time.monotonic() - moved_at)

    def _warn(self, seconds: float) -> bool:
        """Logs which ranks are missing from a collective that has taken half of its timeout; returns whether it did."""
        quiet_seconds, late_seconds = QUIET_BEATS * BEAT_SECONDS, self.timeout_seconds / 2
        if seconds < late_seconds - quiet_seconds - BEAT_SECONDS:
            return False
        beats = self._read()  # several times, to tell who is quiet
        if seconds < late_seconds:
            return False
        error = diagnose(beats, time.monotonic(), rank=self.address.rank, quiet_seconds=quiet_seconds, is_late=True)
        if self.address.rank == 0 or not beats[0].collective:
            logger.warning("%s has taken %.0f seconds: %s", self._beat.collective, seconds, error)
        return True


def _in_words(error: BaseException) -> str:
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int) and code - 128 in set(signal.Signals):
        return f"it was ended by {signal.Signals(code - 128).name}"
    return f"{type(error).__name__}: {error}"


DEVICE_VARIABLE = "SHARDWISE_DEVICE"  # environment variable with the default device of ranks: `cpu`, `cuda`, `cuda:0`


def pick_device(device: str | torch.device | None) -> torch.device:
    """Returns this rank's device: `device`, or that of `SHARDWISE_DEVICE`, or a GPU if there are any, or the CPU. A GPU
    becomes torch's current device.

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


def start_processes(device: torch.device, backend: str | None, timeout: datetime.timedelta) -> None:
    """Initializes the process group from the environment, and starts the heartbeat. Communicates: the rendezvous."""
    address = read_address()
    store = rendezvous(address, timeout_seconds=timeout.total_seconds())
    if device.type == "cuda" and backend != "gloo":
        check_own_cards(store, address, device)
    try:
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
            store=store,
            rank=address.rank,
            world_size=address.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" and backend in (None, "nccl") else None,
        )
    except RuntimeError as error:
        raise MeshError(
            f"rank {address.rank} on {socket.gethostname()} cannot connect to all other ranks",
            why=str(error).splitlines()[0],
            fix="open all TCP ports between the machines; if they have several networks, set GLOO_SOCKET_IFNAME",
        ) from error
    atexit.register(end_processes)
    with suppress(dist.DistError):  # the rank that keeps the store has failed already
        _HEARTBEATS.append(Heartbeat(store, address, timeout_seconds=timeout.total_seconds()))


_HEARTBEATS: list[Heartbeat] = []


def current_heartbeat() -> Heartbeat | None:
    """Returns this rank's heartbeat; None if another library initialized the process group."""
    return _HEARTBEATS[-1] if _HEARTBEATS and dist.is_initialized() else None


def run_collective(group: dist.ProcessGroup, collective: Callable[[], object]) -> None:
    """Runs a collective; in a patient group raises DistError if a rank that runs sends no heartbeat for the mesh's
    timeout. A rank that has left its mesh sends none, and is not missing.
    """
    heartbeat = current_heartbeat()
    if heartbeat is None or group.group_desc != PATIENT:
        collective()
        return
    seconds = heartbeat.timeout_seconds
    period = max(BEAT_SECONDS, seconds / 10)
    looked_at = time.monotonic()
    heard = dict.fromkeys(range(heartbeat.address.world_size), (-1, looked_at))  # a rank's count, and when it changed

    def check_alive() -> bool:
        nonlocal looked_at
        now = time.monotonic()
        if now - looked_at > QUIET_BEATS * period:  # this process was stopped, and maybe the others too
            heard.update({rank: (count, now) for rank, (count, _) in heard.items()})
        with suppress(dist.DistError):
            for rank, beat in enumerate(heartbeat.read() or ()):
                if beat.ended == "left" or beat.count != heard[rank][0]:
                    heard[rank] = beat.count, time.monotonic()
        looked_at = time.monotonic()
        if any(looked_at - at > seconds for _, at in heard.values()):
            raise dist.DistError("a rank has sent no heartbeat for too long")
        return True

    call_with_timeout(period, collective, check_alive)


def end_processes(error: BaseException | None = None) -> None:
    """Undoes `start_processes`; also runs at exit.

    After an uncaught error NCCL's groups are not destroyed: that waits for peers, which may wait for this rank, so the
    error would never be printed.
    """
    error = error or getattr(sys, "last_value", None)
    while _HEARTBEATS:
        _HEARTBEATS.pop().note_end(error)
    if not dist.is_initialized():
        return
    if error is not None and "nccl" in dist.get_backend():
        atexit.unregister(end_processes)
        return
    uses_gloo = "gloo" in dist.get_backend()
    dist.destroy_process_group()
    if uses_gloo:
        time.sleep(0.1)  # [Note: the last collective]
