"""The pages that lead over from another system name everything that its documents do, and nothing that is not there."""

from __future__ import annotations

import re

import pytest

from tests.compat.documented import DOCUMENTED
from tests.compat.test_documented import find
from tests.guards.sources import ROOT

pytestmark = pytest.mark.single

HOMES = {
    "nemo_automodel": ["nemo_automodel.distributed.parallelizer"],
    "optimum_neuron": ["optimum_neuron.distributed"],
    "neuronx_distributed": [
        "neuronx_distributed",
        "neuronx_distributed.parallel_layers.parallel_state",
        "neuronx_distributed.trainer.model.NxDModel",
        "neuronx_distributed.modules.lora.LoraConfig",
        "neuronx_distributed.optimizer.NeuronZero1Optimizer",
    ],
}


def names(page):
    """What the first columns of the first table name."""
    table = page.split("\n\n|", 1)[1].split("\n\n", 1)[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[1] or row[0])]


@pytest.mark.parametrize("system", HOMES)
def test_a_page_names_what_the_documents_do(system):
    named = names((ROOT / "docs" / "migrate" / f"{system}.md").read_text())
    mine = [item for item in DOCUMENTED if item.path.split(".")[0] == system]
    wanted = {item.path.removeprefix(f"{system}.") for item in mine}
    short = {name.rpartition(".")[2] for name in named}
    assert {path for path in wanted if path.rpartition(".")[2] not in short} == set()


@pytest.mark.parametrize("system", HOMES)
def test_what_a_page_names_is_there(system):
    for name in names((ROOT / "docs" / "migrate" / f"{system}.md").read_text()):
        homes = [home for home in HOMES[system] if _is_in(home, name)]
        assert homes, f"{name} is in none of {HOMES[system]}"


def _is_in(home, name):
    try:
        find(f"{home}.{name}")
    except (AttributeError, ModuleNotFoundError):
        return False
    return True
