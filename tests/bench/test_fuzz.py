"""Two dozen random configurations: each is right under its layout, or refused in words."""

from __future__ import annotations

import pytest

# How many configurations of each layout, of architectures that take a second or two; `make coverage` proves hundreds of
# all.
LAYOUTS = {("tp2", False): 11, ("pp2", False): 4, ("tp4", False): 2, ("tp2", True): 4, ("fsdp2.tp2", False): 3}

MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "glm4", "cohere2", "olmo2", "gpt_neox", "starcoder2"),
    *("smollm3", "granite", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "opt", "bert", "stablelm", "bloom"),
)


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "number"),
    [(*variant, number) for variant, count in LAYOUTS.items() for number in range(count)],
)
def test_a_random_configuration_is_right_or_refused(layout, sequence_parallel, number):
    from sweep.fuzz import draw_cases, prove_random

    case = draw_cases(number + 1, layout=layout, sequence_parallel=sequence_parallel, seed=2026, of=MODEL_TYPES)[number]
    row = prove_random(case, timeout_seconds=120)
    assert row["result"] in ("ok", "refused", "no tiny model"), f"{case}\n{row.get('changes')}\n{row['cause']}"
    if row["result"] == "refused":
        assert any(letter.isdigit() for letter in row["cause"])
