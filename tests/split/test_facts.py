"""What is read of a model is the same in every process, in the same order: ranks compare it as text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.single

FACTS = """
import torch, transformers
from shardwise.split.facts import read_facts
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(num_hidden_layers=2, vocab_size=301))
print(read_facts(model))
"""


def test_facts_do_not_depend_on_the_order_of_a_set():
    def read(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", FACTS], env=environment, capture_output=True, text=True, check=True
        )

    first, second = (read(seed).stdout for seed in ("1", "2"))
    assert "config.num_hidden_layers" in first
    assert first == second
