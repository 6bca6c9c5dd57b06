"""What every test starts from. Set before anything imports torch or transformers, which read these once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # its own processes share the one directory that the session makes
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="shardwise-tests-")  # no plan of other code is found again
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a network
os.environ.setdefault("SHARDWISE_DEVICE", "cpu")  # also where there are cards, fewer than ranks perhaps
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores, and sums must not depend on how many there are
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every rank imports us again: compiling us each time takes longer

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from shardwise.ranks import rank as ranks

sys.dont_write_bytecode = False
gc.disable()  # until all is imported: of that nothing is garbage, and to look takes a sixth of the time

# What ranks would each take long to import: a compiler, and the families that most tests are of. Last what each would
# otherwise find out with its first model.
_FAMILIES = ("bart", "bert", "gemma2", "gemma3", "gpt2", "gpt_neox", "mixtral", "phi3", "qwen3", "t5")
ranks.PRELOADED = (
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    *ranks.PRELOADED,
    "tests.warm_ranks",
)

DEAR = (
    "peft",
    "lightning.pytorch",
    "shardwise.lightning",
    "shardwise.accelerate.accelerator",
    "shardwise.trainer",
    "shardwise.trainer.trl_trainers",
    "shardwise.cli.training",
    "shardwise.compat.neuronx_distributed.trainer",
)
"""Takes every rank a second to import, so ranks find it imported where any selected test file imports it."""

TIERS = ("pure", "single", "spawn", "device")

# The same examples in every run, and no deadlines: a busy machine is not a defect.
NUM_EXAMPLES = 250 if "SHARDWISE_FULL_PRODUCT" in os.environ else 50
settings.register_profile("shardwise", derandomize=True, deadline=None, max_examples=NUM_EXAMPLES)
settings.load_profile("shardwise")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m pure` and `-m "not pure"` read no test file that has none of theirs: the others import torch and more."""
    asked = {"pure": False, "not pure": True}.get(config.option.markexpr)
    if asked is None or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return "\npytestmark = pytest.mark.pure\n" in text if asked else "pytest.mark.pure" not in text or None


@pytest.hookimpl(tryfirst=True)  # before -m deselects: every run sees a forgotten marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    forgotten = sorted(
        {item.nodeid.split("[")[0] for item in items if not any(item.get_closest_marker(t) for t in TIERS)}
    )
    if forgotten:
        shown = "\n  ".join(forgotten[:20])
        raise pytest.UsageError(
            f"{len(forgotten)} test(s) say in no way what they need; mark the module with one of {', '.join(TIERS)}, "
            f"for example `pytestmark = pytest.mark.pure`:\n  {shown}"
        )
    ranks.PRELOADED = (*(name for name in DEAR if name in sys.modules), *ranks.PRELOADED)
    if hasattr(config, "workerinput"):
        from tests.together import arrange

        arrange(config, items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.together import Groups  # not above: a run in one process does without xdist

    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    from tests import fork_server

    ranks.PRELOADED = (*DEAR, *(name for name in ranks.PRELOADED if name not in DEAR))
    node.workerinput["fork_server"] = fork_server.start(node.config)


def pytest_configure(config: pytest.Config) -> None:
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        from tests import fork_server

        fork_server.use(address)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("device"):
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("needs an accelerator")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends the ranks that wait where a session stops early: they would keep its process from ending."""
    if "tests.rank_cases" in sys.modules:
        sys.modules["tests.rank_cases"].end_waiting(session)


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Runs a function on the ranks of a layout, which wait for the next case: see `tests/rank_cases.py`."""
    from tests.rank_cases import Ranks  # not above: pure tests stay pure

    ranks = Ranks(request.node)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def same_seeds() -> None:
    """Every test draws the same random numbers, whichever ran before it. Imports nothing: pure tests stay pure."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
