"""Two dozen random configurations: each is right under its layout, or refused in words."""

from __future__ import annotations

import pytest

# Which configurations of each layout, of architectures that take a second or two; those of one line share their ranks.
# `make coverage` proves hundreds of all.
TOGETHER = (
    ("tp2", False, range(8)),
    ("pp2", False, range(5)),
    ("tp4", False, range(1, 4)),
    ("tp2", True, range(5)),
    ("fsdp2.tp2", False, range(3)),
)

MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "glm4", "cohere2", "olmo2", "gpt_neox", "starcoder2"),
    *("smollm3", "granite", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "opt", "bert", "stablelm", "bloom"),
)


@pytest.mark.spawn
@pytest.mark.timeout(330)  # where they fail together, each runs on its own
@pytest.mark.parametrize(("layout", "sequence_parallel", "numbers"), TOGETHER)
def test_random_configurations_are_right_or_refused(layout, sequence_parallel, numbers):
    from sweep.fuzz import draw_cases, prove_together

    drawn = draw_cases(numbers.stop, layout=layout, sequence_parallel=sequence_parallel, seed=2026, of=MODEL_TYPES)
    for row in prove_together(drawn[numbers.start :], timeout_seconds=100):
        assert row["result"] in ("ok", "refused", "no tiny model"), f"{row}\n{row['cause']}"
        if row["result"] == "refused":
            assert any(letter.isdigit() for letter in row["cause"]), row
