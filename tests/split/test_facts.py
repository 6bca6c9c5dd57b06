"""What is read of a model is the same in every process, in the same order: ranks compare it as text."""

from __future__ import annotations

import pytest
import torch
import transformers

from shardwise.split import facts

pytestmark = pytest.mark.single


def test_facts_do_not_depend_on_the_order_of_a_set(monkeypatch):
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=301)
        model = transformers.AutoModelForCausalLM.from_config(config)
    names, told = facts.names_read, []
    for order in (sorted, lambda read: sorted(read, reverse=True)):  # as two hash seeds may have it
        monkeypatch.setattr(facts, "names_read", lambda cls, order=order: order(names(cls)))
        told.append(repr(facts.read_facts(model)))
    assert "config.num_hidden_layers" in told[0]
    assert told[0] == told[1]
