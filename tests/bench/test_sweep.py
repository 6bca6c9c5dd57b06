"""The sweep of `make coverage`: cases are told apart, found again, and put into one table."""

from __future__ import annotations

import json

import pytest


def row_of(result="ok", *, layout="tp2", sequence_parallel=False, attention="", **rest):
    from sweep.cases import Case, Variant

    variant = Variant(layout=layout, sequence_parallel=sequence_parallel, attention=attention)
    case = Case(model_type="bert", task="masked_lm", class_name="BertForMaskedLM", variant=variant)
    measured = {
        "block_share": 0.99,
        "share": 0.9,
        "collectives_per_layer": [2.0, 2.5],
        "split_seconds": 0.5,
        "whole": [],
    }
    return case.fields() | {"result": result, "cause": "", "seconds": 1.0} | (measured if result == "ok" else {}) | rest


@pytest.mark.single
def test_what_was_found_for_one_case_is_not_taken_for_another():
    from sweep.cases import Variant, cases_of

    row = json.loads(json.dumps(row_of()))
    plain = cases_of(["masked_lm"], Variant())
    assert [case.class_name for case in plain if case.is_row(row)] == ["BertForMaskedLM"]
    for other in (
        Variant(layout="tp4"),
        Variant(sequence_parallel=True),
        Variant(attention="eager"),
        Variant(adapters="all-linear"),
    ):
        assert not any(case.is_row(row) for case in cases_of(["masked_lm"], other))
    assert not any(case.is_row(row | {"transformers_version": "1.0"}) for case in plain)


@pytest.mark.single
def test_groups_stand_for_their_tasks():
    from sweep.cases import GROUPS, Variant, cases_of

    assert {case.task for case in cases_of(["text", "base"], Variant())} == {*GROUPS["text"], "base"}


@pytest.mark.single
def test_one_table_holds_all_sweeps_and_every_failure_with_its_cause(tmp_path):
    from sweep.table import write_table

    whole = ["bert.layer.*.gate.weight: scores", "bert.layer.*.other.weight: scores", "bert.layer.*.x: a|b"]
    rows = [row_of(whole=whole), row_of(attention="eager"), row_of("refused", layout="tp4", cause="heads\nmore")]
    write_table(rows, tmp_path / "table.md")
    text = (tmp_path / "table.md").read_text()
    assert "| text | tp2 | 1 | 0 | 0 | 0 | 0 | 1 | 0.50 |" in text
    assert "| text | tp2 eager | 1 |" in text
    assert "| refused | `BertForMaskedLM` (tp4) | heads |" in text
    assert "| bert | `BertForMaskedLM` | ok | refused | ok | 99% | 2 / 2.5 | gate, other: scores; x: a/b |" in text


@pytest.mark.single
def test_a_tiny_model_that_does_not_run_is_a_row_with_its_cause():
    from sweep.cases import Case, Variant, prove

    case = Case(model_type="patchtst", task="base", class_name="PatchTSTModel", variant=Variant())
    row = prove(case, timeout_seconds=1)
    assert row["result"] == "no tiny model"
    assert "past_values" in row["cause"]


@pytest.mark.spawn
def test_a_case_is_proved_with_the_attention_asked_for():
    from sweep.cases import Case, Variant, prove

    case = Case(model_type="gpt2", task="causal_lm", class_name="GPT2LMHeadModel", variant=Variant(attention="eager"))
    row = prove(case, timeout_seconds=60)
    assert row["result"] == "ok", row["cause"]
    assert row["block_share"] > 0.9
    assert row["split_seconds"] > 0
