"""The measurements in bench/ still run; what they measure at this size means nothing."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.spawn
in_coverage = pytest.mark.skipif(not FULL_PRODUCT, reason="make coverage runs it")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script of bench/ in this process, so that its ranks come from the server that is warm already."""

    def run(script, *options):
        file = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [script, "--quick", *options, "--json", str(file)])
        assert importlib.import_module(script).main() == 0
        return json.loads(file.read_text())

    return run


def test_steps_are_compared_and_counted(run):
    (record,) = run("tp", "--rounds", "2", "--device", "cpu")["records"]
    minimum = 4 * record["size"]["layers"] + 2
    assert record["minimum"]["calls"] == minimum
    contenders = record["contenders"]
    assert contenders["shardwise"]["calls"] == minimum + 2, "the loss takes two small ones"
    assert contenders["transformers"]["calls"] > minimum + 2
    assert contenders["one process"]["calls"] == 0
    assert contenders["shardwise"]["to_transformers"]["median"] > 0


@in_coverage
def test_data_parallel_steps_are_compared_and_counted(run):
    (record,) = run("fsdp", "--rounds", "2", "--layouts", "fsdp2")["records"]
    ours, by_hand = record["contenders"]["shardwise"], record["contenders"]["FSDP2 by hand"]
    assert ours["calls"] == {**by_hand["calls"], "all_gather": by_hand["calls"]["all_gather"] + 1, "all_reduce": 1}
    assert ours["held_bytes"] == pytest.approx(ours["expected_bytes"], rel=0.05)
    assert ours["busy_to_by_hand"]["median"] > 0


@in_coverage
def test_loads_are_compared(run):
    ours = run("load", "--rounds", "2")["contenders"]["shardwise"]
    assert ours["requested_to_owned"] == pytest.approx(1.0, abs=0.05)
    assert ours["time_to_transformers"]["median"] > 0


@in_coverage
def test_checkpoints_are_compared(run):
    record = run("checkpoint", "--rounds", "1")
    assert record["contenders"]["save"]["ratio"]["median"] > 0
    assert record["contenders"]["async stall"]["seconds"] > 0


@in_coverage
def test_pipelines_are_compared_and_drawn(run, tmp_path):
    record = run("pipeline", "--rounds", "2", "--timelines", str(tmp_path / "drawn"))
    assert record["step"]["busy_to_by_hand"]["median"] > 0
    for each in record["bubbles"]:
        assert 0 < each["theory"] < 1 and 0 < each["measured"] < 1
        assert max(each["most_received"]) <= max(each["in_flight"]) + 1
    drawn = {path.suffix for path in (tmp_path / "drawn").iterdir()}
    assert drawn == {".svg", ".json"}


@in_coverage
@pytest.mark.filterwarnings("ignore")  # of peers, which are run as they are
def test_contenders_on_one_card_are_rows_whatever_becomes_of_them(run):
    rows = run("gpu")["rows"]
    states = {(row["part"], row["contender"]): row["state"] for row in rows}
    assert not {key: state for key, state in states.items() if state != "ok" and not state.startswith("missing: ")}
    ours = {part: row for (part, name), row in zip(states, rows, strict=True) if name.startswith("shardwise")}
    assert len(ours["curve"]["losses"]) == 25
    assert ours.keys() == {"lora", "full", "pretrain", "curve", "loss", "host"} and all(
        row["state"] == "ok" for row in ours.values()
    )
    assert {row["verdict"] for row in rows if row["part"] == "right"} == {"ok"}
    for part in ("loss", "lora"):
        losses = [row["loss"] for row in rows if row["part"] == part and row["state"] == "ok"]
        assert len(losses) >= 2 and max(losses) - min(losses) < (1e-4 if part == "loss" else 1.0)


@in_coverage
def test_starts_are_compared_with_an_import(run):
    found = run("start")
    assert list(found["verbs"]) == ["--help", "inspect"]
    assert all(seen[kind]["median"] > 0 for seen in found["verbs"].values() for kind in ("time", "busy"))
