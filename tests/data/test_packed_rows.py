"""Documents that share a row compute what they compute alone, however the model is split."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import shardwise
from bench.onecard.reads import ReadCount
from shardwise.data.rows import segment_inputs
from shardwise.errors import UnsupportedError
from shardwise.optim.gradients import gradients_of
from shardwise.probe.label_use import probe_document_masking
from shardwise.train.step import TrainStep
from tests.families import FULL_PRODUCT, tiny_model

LENGTHS = ((7, 5, 12), (9, 14))
WIDTH = 26
"""The last positions of both rows are padding; windows are of 8 tokens."""


def documents():
    """The ids of each document, row by row, each from numbers of its own; the first two ids are a prompt."""
    generator, first = torch.Generator().manual_seed(0), 3
    rows = []
    for lengths in LENGTHS:
        rows.append([])
        for length in lengths:
            rows[-1].append(first + torch.randint(0, 15, (length,), generator=generator))
            first += 15
    return rows


def labels_of(ids):
    return torch.cat([torch.full((2,), -100), ids[2:]])


def packed_batch(learned=None):
    """Both rows; of all documents, or of the one numbered `learned` alone, the responses are learned."""
    ids, labels = torch.zeros(2, WIDTH, dtype=torch.long), torch.full((2, WIDTH), -100)
    number = 0
    for row, several in enumerate(documents()):
        at = 0
        for document in several:
            ids[row, at : at + len(document)] = document
            if learned in (None, number):
                labels[row, at : at + len(document)] = labels_of(document)
            at, number = at + len(document), number + 1
    return {"input_ids": ids, "labels": labels, **segment_inputs(LENGTHS, WIDTH, apart="positions")}


def model_of(family):
    model = tiny_model(family)
    model.set_attn_implementation("sdpa")
    return model.train()


def run_apart(model):
    """The mean loss over all documents' targets, and its gradients, from one forward for each document."""
    every = [document for row in documents() for document in row]
    num_targets = sum(len(document) - 2 for document in every)
    total = 0.0
    for document in every:
        loss = model(input_ids=document[None], labels=labels_of(document)[None]).loss
        loss = loss * (len(document) - 2) / num_targets
        loss.backward()
        total += float(loss.detach())
    return total, {name: value.grad for name, value in model.named_parameters()}


def split_step(mesh, model, batch, sequence_parallel, *, by_host):
    """By what transformers finds, or by a mask that is made of what the host says."""
    model = shardwise.parallelize(copy.deepcopy(model), mesh, sequence_parallel=sequence_parallel)
    gradients_of(model).is_late = by_host
    share = len(LENGTHS) // mesh.data_size
    own = slice(mesh.data_rank * share, (mesh.data_rank + 1) * share)
    step = TrainStep(model, mesh, num_microbatches=2 if mesh.size("pp") > 1 else 1)
    assert model.config._attn_implementation == ("shardwise" if by_host else "sdpa")
    by_host = by_host and mesh.size("pp") == 1  # where documents end, stages do not know
    with ReadCount() as reads:
        result = step({name: value[own] for name, value in batch.items()})
    assert not (by_host and [place for place in reads.places if "masking" in place]), reads.places
    return float(result.loss), shardwise.full_gradients(model)


def differences(mesh, family, sequence_parallel):
    """What differs from the documents run apart, and which documents the loss of one reaches."""
    model = model_of(family)
    problems = []
    expected_loss, expected = run_apart(copy.deepcopy(model))
    loss, gradients = split_step(mesh, model, packed_batch(), sequence_parallel, by_host=True)
    problems += [] if abs(loss - expected_loss) <= 1e-5 else [f"loss {loss} is not {expected_loss}"]
    problems += [f"only one side has {name}" for name in gradients.keys() ^ expected.keys()]
    for name in gradients.keys() & expected.keys():
        difference, largest = (gradients[name] - expected[name]).abs().max(), expected[name].abs().max()
        if not difference <= 1e-5 * max(1.0, float(largest)):
            problems.append(f"{name} differs by {difference:.1e}, its largest entry is {largest:.1e}")
    _, of_one = split_step(mesh, model, packed_batch(learned=1), sequence_parallel, by_host=False)
    reached = of_one["model.embed_tokens.weight"].abs().sum(1).nonzero()[:, 0].tolist()
    own = set(documents()[0][1].tolist())
    return [*problems, *(f"token {token} of another document is reached" for token in reached if token not in own)]


FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text")
LAYOUTS = (("tp1", False), ("tp2", False), ("tp2", True), ("fsdp2", False), ("pp2", False))
CELLS = [
    (layout, sequence_parallel, family)
    for number, (layout, sequence_parallel) in enumerate(LAYOUTS)
    for family in FAMILIES
    if FULL_PRODUCT or layout == "tp1" or family in ("gemma3_text", FAMILIES[number % 3])
]
"""Every layout with the family that has layers with windows and without, and with another one."""


@pytest.mark.spawn
@pytest.mark.parametrize(("layout", "sequence_parallel", "family"), CELLS)
def test_a_packed_row_equals_its_documents_run_apart(on_ranks, layout, sequence_parallel, family):
    assert on_ranks(differences) == [[]] * (1 if layout == "tp1" else 2)


@pytest.mark.single
@pytest.mark.parametrize(
    ("kind", "packed", "apart"),
    [("llama", True, "positions"), ("gemma3_text", True, "positions"), ("opt", True, "mask")],
)
def test_what_keeps_documents_apart_is_found_by_trying(kind, packed, apart):
    config = transformers.AutoConfig.for_model(kind)
    assert probe_document_masking(config, transformers.AutoModelForCausalLM, packed=packed) == apart


@pytest.mark.single
@pytest.mark.parametrize("kind", ["mamba", "bloom", "qwen3_next", "gpt_oss", "mpt"])
def test_models_in_which_documents_see_each_other_are_refused_in_words(kind):
    config = transformers.AutoConfig.for_model(kind)
    with pytest.raises(UnsupportedError, match=f"a model of type '{kind}' with several documents in a row") as raised:
        probe_document_masking(config, transformers.AutoModelForCausalLM, packed=True)
    assert "tried on a tiny one" in raised.value.why and raised.value.fix == "set data.rows=padded"
    assert probe_document_masking(config, transformers.AutoModelForCausalLM, packed=False).startswith("padded")
