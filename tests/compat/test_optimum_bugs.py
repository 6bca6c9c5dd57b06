"""What of the list of Optimum Neuron's limits and faults has no test elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import shardwise
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.compat.optimum_neuron.distributed import Parallelizer, lazy_load_for_parallelism
from tests.families import tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn


def of_the_process():
    """What theirs changed for everybody."""
    classes = (nn.Linear, nn.Embedding, nn.Parameter, nn.CrossEntropyLoss, transformers.PreTrainedModel)
    classes += (modeling_llama.LlamaAttention, modeling_llama.LlamaForCausalLM, modeling_llama.LlamaMLP)
    return {
        f"{each.__name__}.{name}": value
        for each in (*classes, nn.functional, modeling_llama)
        for name, value in vars(each).items()
    }


def a_second_model(mesh, directory):
    """A model that is loaded lazily and split, and another one that was there before and one that comes after."""
    before, beside = of_the_process(), tiny_model("llama")
    ids = torch.arange(12).view(2, 6)
    expected = beside(input_ids=ids, labels=ids)
    if mesh.rank == 0:
        beside.save_pretrained(directory)
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(2)
    with lazy_load_for_parallelism(tensor_parallel_size=2):
        model = AutoModelForCausalLM.from_pretrained(directory)
    model = Parallelizer.parallelize(model, sequence_parallel_enabled=True)
    model(input_ids=ids, labels=ids).loss.backward()
    after = tiny_model("llama")
    same = [torch.equal(each(input_ids=ids, labels=ids).logits, expected.logits) for each in (beside, after)]
    parallel_state.destroy_model_parallel()
    now = of_the_process()
    changed = [name for name in before.keys() | now if before.get(name, now) is not now.get(name, before)]
    return same, [name for name in changed if not name.endswith("_cached_value")]  # transformers' own


@pytest.mark.parametrize("layout", ["tp2"])
def test_nothing_of_the_process_is_changed(on_ranks, layout, tmp_path):
    assert on_ranks(a_second_model, directory=str(tmp_path)) == [([True, True], [])] * 2


def back_again(mesh, directory, tp):
    """The full tensors and the whole model of a split one, vocabulary and heads that do not divide."""
    whole = tiny_model("llama", num_key_value_heads=1, vocab_size=97, num_hidden_layers=2)
    parallel_state.initialize_model_parallel(tp, 2 // tp)
    model = Parallelizer.parallelize(copy.deepcopy(whole))
    state, expected = shardwise.full_state_dict(model), whole.state_dict()
    problems = [name for name in expected if not torch.equal(state[name], expected[name])]
    Parallelizer.save_model_checkpoint(model, f"{directory}/{tp}", as_regular=True, as_sharded=False)
    again = AutoModelForCausalLM.from_pretrained(f"{directory}/{tp}").state_dict()
    parallel_state.destroy_model_parallel()
    return problems + [f"{name} on disk" for name in expected if not torch.equal(again[name], expected[name])]


@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize("tp", [2, 1])
def test_full_tensors_and_the_whole_model_come_back(on_ranks, layout, tp, tmp_path):
    assert on_ranks(back_again, directory=str(tmp_path)) == [[], []]


def ignored(mesh):
    """Loss and gradients of a batch in which one label counts, over a vocabulary that does not divide."""
    whole = tiny_model("llama", vocab_size=97)
    parallel_state.initialize_model_parallel(2)
    model = Parallelizer.parallelize(copy.deepcopy(whole))
    ids = torch.arange(24).view(2, 12)
    labels = torch.full_like(ids, -100)
    labels[1, 5] = 96
    outputs = [each(input_ids=ids, labels=labels) for each in (model, whole)]
    problems = differing("logits", outputs[0].logits.detach(), outputs[1].logits.detach(), 1e-4)
    for output in outputs:
        output.loss.backward()
    problems += differing("loss", outputs[0].loss.detach(), outputs[1].loss.detach(), 1e-5)
    expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    problems += differing_gradients(shardwise.full_gradients(model), expected)
    parallel_state.destroy_model_parallel()
    return problems


@pytest.mark.parametrize("layout", ["tp2"])
def test_ignored_labels_count_nothing_and_logits_stay(on_ranks, layout):
    assert on_ranks(ignored) == [[], []]


def lazily_in_stages(mesh):
    """Which parameters an optimizer has of a model that is loaded lazily over stages and data ranks."""
    parallel_state.initialize_model_parallel(1, 2)
    with lazy_load_for_parallelism(pipeline_parallel_size=2):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters())
    model = Parallelizer.parallelize(model)
    held = dict(model.named_parameters())
    moved = Parallelizer.optimizer_for_mp(optimizer, {id(before[name]): value for name, value in held.items()})
    parallel_state.destroy_model_parallel()
    return [id(value) for group in moved.param_groups for value in group["params"]] == list(map(id, held.values()))


@pytest.mark.parametrize("layout", ["tp4"])
def test_an_optimizer_of_a_lazy_model_leaves_out_other_stages(on_ranks, layout):
    assert on_ranks(lazily_in_stages) == [True] * 4
