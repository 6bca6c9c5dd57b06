"""Runs transformers' and TRL's own trainer tests through `shardwise.trainer`, and prints what passed.

    python bench/trainer_suites.py DIRECTORY
    python bench/trainer_suites.py DIRECTORY --runs plain own tp2 -k checkpoint --json out.json

DIRECTORY holds test files of the peers in packages (their `tests/trainer`, TRL's `tests`), as their repositories have
them. A run imports them with the trainer classes replaced: `plain` and `plain2` by nothing (on one rank, and on two
under DDP), `own` by adapted classes without a layout, others by adapted classes that pass this layout.
Every test runs in fresh processes, one for each rank, which are forked after the imports. A test of 2 ranks passes if
it passes on both. Nothing of the hub is asked for: small models of the same class and rows of the same columns stand
in for it, where they can.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from _pytest.runner import runtestprotocol
from rich import box
from rich.console import Console
from rich.table import Table
from sidebyside.report import write_json
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.errors import ConfigError, PlanError, UnsupportedError
from shardwise.parameters.registry import is_split
from shardwise.tiny.models import build_tiny_model
from shardwise.tiny.shrink import shrink_config
from shardwise.trainer import adapt

RUNS = ("plain", "own", "tp1", "tp2", "plain2", "fsdp2")
BASES = {"tp1": "plain", "tp2": "plain", "own": "plain"}
"""The run with transformers' own classes on as many data ranks; `plain2` for others."""

REPLACED = {"transformers": ("Trainer", "Seq2SeqTrainer"), "trl": ("SFTTrainer", "DPOTrainer", "RewardTrainer")}
BY_DESIGN = {
    "test_save_checkpoints": "optimizer and scheduler are in files that any layout reads, and not in optimizer.pt",
    "test_save_checkpoints_not_pretrained": "optimizer and scheduler are in files that any layout reads",
    "test_save_collator_tokenizer_by_default": "the test takes the first file of output_dir, where `latest` is",
    "test_can_resume_training": "an unknown checkpoint is a LoadError in other words",
    "test_resume_batch_order": "a buffer that has grown is an error on resume, which names it",
    "test_checkpoint_rotation": "each rank of the test makes and deletes the same directories",
    "test_number_of_steps_in_training": "the test counts the rows of one data rank",
    "test_training_loss": "the test counts the rows of one data rank",
    "test_neftune": "the test counts forward hooks, and FSDP gathers a unit's parameters in one",
}
"""Tests that split models fail, with what differs; some of them at several data ranks alone."""

OF_HUB = re.compile(r"couldn't connect|offline mode|LocalEntryNotFound|OfflineMode|outgoing traffic|stand-in", re.I)


# What stands in for the hub


def write_models(hub: Path, names: Sequence[str]) -> None:
    """Writes small models, with a tokenizer of bytes, where huggingface_hub keeps what it has downloaded."""
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    for name in names:
        kind = next((word for word in re.split(r"[/-]", name) if hasattr(transformers, word)), None)
        if kind is None or not re.search(r"CausalLM$|Bart|T5|SequenceClassification$", kind):
            continue
        place = hub / f"models--{name.replace('/', '--')}"
        files = place / "snapshots" / "0"
        files.mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0")
        words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=words[2], pad_token=words[3], additional_special_tokens=words[:3]
        )
        fast.chat_template = template.read_text()
        fast.save_pretrained(files)
        cls = getattr(transformers, kind)
        config = shrink_config(cls.config_class(), vocab_size=len(words) + 4)
        for field, value in {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}.items():
            setattr(config, field, value)
        build_tiny_model(config, cls, seed=0).save_pretrained(files)


def load_rows(path: str, name: str | None = None, split: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`, with rows of our own for TRL's `zen`."""
    if path != "trl-internal-testing/zen" or name is None:
        if "/" in path and not Path(path).exists():
            raise OSError(f"{path} has no stand-in")
        return _load_dataset(path, name, split=split, **options)
    chats, _, kind = name.partition("_")
    columns = {
        "language_modeling": {"standard": ("text",), "conversational": ("messages",)}[chats],
        "prompt_only": ("prompt",),
        "prompt_completion": ("prompt", "completion"),
        "preference": ("prompt", "chosen", "rejected"),
        "implicit_prompt_preference": ("chosen", "rejected"),
        "unpaired_preference": ("prompt", "completion", "label"),
    }[kind]

    def value(column: str, row: int) -> Any:
        asked, answered = f"What is better than number {row}?", f"Number {row + 1}."
        answered = f"The worse number {row - 1}." if column == "rejected" else answered
        if column == "label":
            return row % 2 == 0
        roles = {"user": asked, "assistant": answered}
        roles = {"user": asked} if column == "prompt" else roles
        if "prompt" in columns and column != "prompt":
            del roles["user"]
        if chats == "standard":
            return " ".join(roles.values())
        return [{"role": role, "content": content} for role, content in roles.items()]

    parts = {"train": range(17), "test": range(20, 23)}
    made = datasets.DatasetDict(
        {
            part: datasets.Dataset.from_dict({column: [value(column, row) for row in rows] for column in columns})
            for part, rows in parts.items()
        }
    )
    rows = made if split is None else made[split]
    return rows.to_iterable_dataset() if options.get("streaming") else rows


_load_dataset = datasets.load_dataset


# The classes that the tests get


def compute_in_float32() -> None:
    """TRL's arguments ask for bfloat16 on a GPU, unless told otherwise."""
    for config in (trl.SFTConfig, trl.DPOConfig, trl.RewardConfig):
        check = config.__post_init__

        def checked(self: Any, check: Any = check) -> None:
            self.bf16 = bool(self.bf16)
            check(self)

        config.__post_init__ = checked


def compare_whole_tensors() -> None:
    """Tests compare parameters by `torch.allclose`, for which a DTensor has no rule."""
    allclose = torch.allclose

    def compare(*pair: torch.Tensor, **options: Any) -> bool:
        return allclose(*(each.full_tensor() if isinstance(each, DTensor) else each for each in pair), **options)

    torch.allclose = compare


MEASURED = re.compile("runtime|per_second|preparation_time|_mem_")
TRAINED: list[Any] = []


def replacement_of(trainer: type[Any], run: str) -> type[Any]:
    """Returns the class that tests of a run get for `trainer`."""
    base = trainer if run.startswith("plain") else adapt(trainer)

    class Kept(base):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any = None, *args: Any, **options: Any) -> None:
            is_ours = isinstance(model, torch.nn.Module) and is_split(model)
            if run not in ("plain", "plain2", "own") and not is_ours:
                options["layout"] = run
                if "tp" in run and not isinstance(model, str) and not _is_of_transformers(model):
                    options["plan"] = {"**": "replicate"}
            TRAINED.append(self)
            super().__init__(model, *args, **options)

    Kept.__name__ = Kept.__qualname__ = trainer.__name__
    return Kept


def _is_of_transformers(model: Any) -> bool:
    """Returns whether the model, or the one inside an adapter, has a class of transformers, which we can split."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__module__.startswith("transformers.")


def digest() -> str:
    """Returns a digest of what the trainers of this test have logged, without times."""
    logs = [
        [
            {
                name: value
                for name, value in row.items()
                if not re.search("runtime|per_second|preparation_time|_mem_", name)
            }
            for row in state
        ]
        for state in (each.state.log_history for each in TRAINED if hasattr(each, "state"))
    ]
    return hashlib.sha256(repr(logs).encode()).hexdigest()


# One run


class ForkedRanks:
    """pytest plugin: runs each test in `size` forked processes, and keeps the outcomes."""

    def __init__(self, run: str, timeout: float, place: Path) -> None:
        self.size = 2 if re.search("2", run) else 1
        self.timeout, self.place = timeout, place
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes, start = {}, time.perf_counter()
        for rank in range(self.size):
            reader, writer = os.pipe()
            if (process := os.fork()) == 0:
                self._run_rank(item, rank, port, writer)
            os.close(writer)
            pipes[reader] = process
        outcome = min((self._outcome_of(*each) for each in _read_all(pipes, self.timeout)), key=_rank_of)
        outcome["seconds"] = round(time.perf_counter() - start, 1)
        self.outcomes[item.nodeid] = outcome
        why = " ".join(outcome["why"].split())[:160]
        print(f"{outcome['outcome']:8}{outcome['seconds']:6.1f} s  {item.nodeid}  {why}", flush=True)
        return True

    def _run_rank(self, item: Any, rank: int, port: int, writer: int) -> None:
        os.setpgid(0, 0)
        if self.size > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            os.environ.update({name: str(value) for name, value in ranks.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            share_directories(self.place / hashlib.sha256(item.nodeid.encode()).hexdigest()[:12])
        torch.manual_seed(0)
        reports = runtestprotocol(item, log=False, nextitem=None)
        made = {
            "reports": [(each.when, each.outcome, str(each.longrepr or "")) for each in reports],
            "seen": self.seen,
            "digest": digest(),
        }
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(made))
        os._exit(0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Iterator[None]:
        yield  # pytest has put unittest's error in place
        error = call.excinfo.value if call.excinfo else None
        while error is not None:
            if isinstance(error, ConfigError | PlanError | UnsupportedError):
                self.seen["refused"] = f"{type(error).__name__}: {error}"
            if OF_HUB.search(f"{type(error).__name__} {error}"):
                self.seen["hub"] = "needs the hub"
            self.seen.setdefault("error", f"{type(error).__name__}: {error}")
            error = error.__cause__ or error.__context__

    def _outcome_of(self, text: str, ended: str) -> dict[str, Any]:
        if not text:
            return {"outcome": "failed", "why": ended, "digest": "", "trace": ""}
        made = json.loads(text)
        states = {state for _, state, _ in made["reports"]}
        state = next((each for each in ("failed", "skipped") if each in states), "passed")
        trace = "\n".join(text for _, outcome, text in made["reports"] if outcome == state)
        seen, why = made["seen"], ""
        if state == "skipped":
            why = trace.rsplit("Skipped: ", 1)[-1].strip("')")
        elif state == "failed":
            why = seen.get("error", trace[-300:])
            if "hub" in seen:
                state, why = "skipped", seen["hub"]
            elif "refused" in seen:
                state, why = "refused", seen["refused"]
        return {"outcome": state, "why": why, "digest": made["digest"], "trace": trace if state != "passed" else ""}


def _rank_of(outcome: Mapping[str, Any]) -> int:
    return ("refused", "failed", "skipped", "passed").index(outcome["outcome"])


def _read_all(pipes: Mapping[int, int], timeout: float) -> Iterator[tuple[str, str]]:
    """Yields what each process writes before it ends, and how those without an answer end."""
    texts, open_pipes, deadline = dict.fromkeys(pipes, b""), {*pipes}, time.monotonic() + timeout
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for reader in select.select([*open_pipes], [], [], left)[0]:
            if more := os.read(reader, 1 << 16):
                texts[reader] += more
            else:
                open_pipes.discard(reader)
                if texts[reader] == b"" or b'"failed"' in texts[reader]:
                    deadline = min(deadline, time.monotonic() + 5)  # other ranks wait for this one
    for reader, process in pipes.items():
        ended = "the process died"
        if reader in open_pipes:
            ended = f"no end within {timeout:.0f} s, or 5 s after the other rank's"
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
        yield texts[reader].decode(), ended


def share_directories(place: Path) -> None:
    """Gives all ranks the same temporary directories, which stay until the run ends."""
    made = Counter[str]()

    def make(*_: Any, **__: Any) -> str:
        made["directories"] += 1
        directory = place / str(made["directories"])
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory)

    def keep(*_: Any, **__: Any) -> None: ...

    tempfile.mkdtemp = make  # type: ignore[assignment]
    tempfile.TemporaryDirectory.cleanup = keep  # type: ignore[method-assign]
    tempfile.TemporaryDirectory.__exit__ = keep  # type: ignore[method-assign]
    kept = SimpleNamespace(**{**vars(shutil), "rmtree": keep})
    for name, module in [*sys.modules.items()]:
        if hasattr(module, "shutil") and name.rpartition(".")[2].endswith(("testing_utils", "test_utils")):
            module.shutil = kept  # type: ignore[attr-defined]


def run_once(directory: Path, run: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all tests of a directory once, in this process and its forks."""
    # transformers puts another module in its place while it is imported.
    places = [(sys.modules[module], name) for module, names in REPLACED.items() for name in names]
    kinds = [getattr(*place) for place in places]
    for place, kind in zip(places, [replacement_of(kind, run) for kind in kinds], strict=True):
        setattr(*place, kind)
    datasets.load_dataset = load_rows
    compute_in_float32()
    compare_whole_tensors()

    def restore() -> None:
        for place, kind in zip(places, kinds, strict=True):
            setattr(*place, kind)

    class Restores:
        @pytest.hookimpl
        def pytest_collection_finish(self) -> None:
            restore()

    with tempfile.TemporaryDirectory(prefix="trainer-suites-") as place:
        ranks = ForkedRanks(run, arguments.timeout, Path(place))
        words = ["-q", "-c", os.devnull, "--continue-on-collection-errors"]
        words += [f"-pno:{name}" for name in ("cacheprovider", "xdist", "timeout")]
        words += ["-k", arguments.keyword] if arguments.keyword else []
        pytest.main([*words, "--rootdir", str(directory), str(directory)], plugins=[ranks, Restores()])
    return ranks.outcomes


# All runs


def main() -> int:
    arguments = _parse()
    directory = arguments.directory.resolve()
    if arguments.one is not None:
        write_json(arguments.json, run_once(directory, arguments.one, arguments))
        return 0
    kept = arguments.json is not None and arguments.json.exists()
    outcomes: dict[str, dict[str, Any]] = json.loads(arguments.json.read_text())["outcomes"] if kept else {}
    versions = {each.__name__: each.__version__ for each in (shardwise, transformers, trl, torch)}
    with tempfile.TemporaryDirectory(prefix="trainer-suites-hub-") as made:
        text = "\n".join(each.read_text() for each in directory.rglob("*.py"))
        write_models(Path(made, "hub"), sorted({*re.findall(r'"([\w-]+/[\w.-]+)"', text)}))
        environment = {**os.environ, "HF_HOME": made, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}
        for run in arguments.runs:
            answer = Path(made, f"{run}.json")
            words = [sys.executable, __file__, str(directory), "--one", run, "--json", str(answer)]
            words += ["--timeout", str(arguments.timeout)]
            words += ["-k", arguments.keyword] if arguments.keyword else []
            subprocess.run(words, check=True, env=environment, cwd=made)
            outcomes.setdefault(run, {}).update(json.loads(answer.read_text()))
            write_json(arguments.json, {"bench": "trainer_suites", "versions": versions, "outcomes": outcomes})
    judge(outcomes)
    show(outcomes, Console(width=160))
    return any(each["outcome"] == "failed" for found in outcomes.values() for each in found.values())


def judge(outcomes: dict[str, dict[str, Any]]) -> None:
    """Calls a failure that transformers' own class has too "as plain", and other digits in `own` a failure."""
    for run, found in outcomes.items():
        base = outcomes.get(BASES.get(run, "plain2"), {}) if not run.startswith("plain") else found
        for name, each in found.items():
            other = base.get(name, {"outcome": "passed", "digest": ""})
            if each["outcome"] == "failed" and other["outcome"] in ("failed", "as plain"):
                each["outcome"] = "as plain"
            elif each["outcome"] == "failed" and run != "own" and (reason := BY_DESIGN.get(name.rpartition("::")[2])):
                each.update(outcome="other", why=f"{reason} ({each['why']})")
            elif run == "own" and each["outcome"] == "passed" and other["digest"] not in ("", each["digest"]):
                each.update(outcome="failed", why="other digits than plain")


def show(outcomes: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Prints the table of outcomes by run and file, and the reasons."""
    kinds = ("passed", "refused", "other", "as plain", "skipped", "failed")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "tests of", *kinds):
        table.add_column(heading, justify="left" if heading in ("run", "tests of") else "right", no_wrap=True)
    for run, found in outcomes.items():
        for file in sorted({name.split("::")[0] for name in found}):
            counts = Counter(each["outcome"] for name, each in found.items() if name.split("::")[0] == file)
            table.add_row(run, file, *(str(counts[kind]) for kind in kinds))
    console.print(table)
    for kind in ("refused", "other", "failed"):
        reasons: dict[str, list[str]] = {}
        for run, found in outcomes.items():
            for name, each in found.items():
                if each["outcome"] == kind:
                    why = " ".join(each["why"].split())[:300]
                    reasons.setdefault(why, []).append(f"{run} {name.split('::')[-1]}")
        for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            console.print(f"{kind}: {why}\n    {len(names)}: {', '.join(names)}", markup=False, highlight=False)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of the peers' test packages")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="plain, plain2, own, or layouts (default: %(default)s)")
    parser.add_argument("-k", dest="keyword", help="pytest's -k: the tests to run")
    parser.add_argument("--timeout", type=float, default=180, help="seconds of a test (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the outcomes; those of earlier runs stay in it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
