"""Random configurations are right under their layout, or refused in words. Large jobs compute little on hosts."""

from __future__ import annotations

import sys

import pytest

from tests.families import FULL_PRODUCT

# Which configurations of each layout, of architectures that take a second or two; those of one line share their ranks.
# A plan is derived for some of each that splits over tp, which is most of what a configuration costs. `make coverage`
# proves hundreds of all, on four ranks, too.
TOGETHER = [("tp2", False, (1, 3, 15)), *[("pp2", False, (0, 1)), ("tp2", True, (1, 11))] * FULL_PRODUCT]

MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "glm4", "cohere2", "olmo2", "gpt_neox", "starcoder2"),
    *("smollm3", "granite", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "opt", "bert", "stablelm", "bloom"),
)


@pytest.mark.spawn
@pytest.mark.timeout(330)  # where they fail together, each runs on its own
@pytest.mark.parametrize(("layout", "sequence_parallel", "numbers"), TOGETHER)
def test_random_configurations_are_right_or_refused(layout, sequence_parallel, numbers):
    from sweep.fuzz import draw_cases, prove_together

    drawn = draw_cases(21, layout=layout, sequence_parallel=sequence_parallel, seed=2026, of=MODEL_TYPES)
    for row in prove_together([drawn[number] for number in numbers], timeout_seconds=100):
        assert row["result"] in ("ok", "refused", "no tiny model"), f"{row}\n{row['cause']}"
        if row["result"] == "refused":
            assert any(letter.isdigit() for letter in row["cause"]), row


@pytest.mark.single
def test_a_thousand_ranks_divide_save_and_load_a_model_of_a_hundred_tensors(monkeypatch, capsys):
    import scale

    monkeypatch.setattr(sys, "argv", ["scale.py", "--layers", "11", "--documents", "20000"])
    assert scale.main() == 0
    out = capsys.readouterr().out
    assert "102 parameters" in out and "documents" in out
