"""Adapters trained on ranks as PEFT trains them unsplit: families, layouts, targets and biases."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardwise
from shardwise.comm.collectives import all_gather_objects
from shardwise.lora.files import adapter_state
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.plan.options import Recompute
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from tests.families import FULL_PRODUCT, rows_of, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

# peft warns of attributes that transformers has renamed, of tied layers, and of patterns of its own for experts.
pytestmark = [
    pytest.mark.spawn,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:.*_pattern keys:RuntimeWarning"),
]

ADAM = {"lr": 1e-3, "eps": 1e-2}
"""With eps far below the gradients three steps of float32 say little: an unsplit T5, whose gradients reach 5, is then
itself 2.9e-6 off what float64 trains (eps 1e-4); with this one 3e-7, and no family more than 6e-7. An error of a
gradient's size, which Adam hides where eps is small, shows here.
"""
TRAINED = 1e-6
"""How far parameters and files may be off PEFT's own after three steps, in which they move by up to 3e-3; gradients are
compared by themselves.
"""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

BUILT = {"t5": (transformers.T5Config, "Seq2SeqLM"), "bloom": (transformers.BloomConfig, "CausalLM")}
"""Those that are not in tests/families.py; for bloom transformers declares no plan."""
QUERY_AND_VALUE = {
    **{family: ["q_proj", "v_proj"] for family in ("llama", "qwen3", "mixtral")},
    "gpt2": ["c_attn"],
    "phi3": ["qkv_proj"],
    "bert": ["query", "value"],
    "t5": ["q", "v"],
    "bloom": ["query_key_value"],
}
EMBEDDING_AND_HEAD = {
    **{family: ["embed_tokens", "lm_head"] for family in ("llama", "qwen3", "phi3", "mixtral")},
    "gpt2": ["wte", "lm_head"],
    "bert": ["word_embeddings", "decoder"],
    "t5": ["shared", "lm_head"],
    "bloom": ["word_embeddings", "lm_head"],
}
OWN = {
    "phi3": {"modules_to_save": ["norm"]},
    "t5": {"layers_to_transform": [1]},
    "mixtral": {"target_parameters": EXPERTS},
}
"""What a family is given besides."""


def model_class(family):
    kind = BUILT[family][1] if family in BUILT else "MaskedLM" if family == "bert" else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}")


def base_of(family, *, tied=False):
    if family in BUILT:
        config = shrink_config(BUILT[family][0](tie_word_embeddings=tied), without_dropout=True)
        return build_tiny_model(config, model_class(family), seed=0)
    own = {"router_aux_loss_coef": 0.0} if family == "mixtral" else {}  # a balance is that of a microbatch
    own |= {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    return tiny_model(family, tied=tied, **own)


def options_of(family, targets, bias):
    given = {"r": 4, "bias": bias, "init_lora_weights": False, **OWN.get(family, {})}
    chosen = {"all-linear": "all-linear", "query and value": QUERY_AND_VALUE[family]}
    chosen["embedding and tied head"] = QUERY_AND_VALUE[family] + EMBEDDING_AND_HEAD[family]
    given["target_modules"] = chosen[targets]
    if targets != "query and value":  # PEFT takes layers with lists only, and a head is in none
        given.pop("layers_to_transform", None)
    return given


def with_lora(family, *, tied=False, **options):
    """A tiny model with an adapter that is no zeros."""
    base = base_of(family, tied=tied)
    torch.manual_seed(4)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return peft.get_peft_model(base, peft.LoraConfig(**given)).eval()


def add_second(model, targets, name="two"):
    torch.manual_seed(9)
    model.add_adapter(name, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def batch_of(model, rows=4):
    if not hasattr(model.config, "vocab_size") or model.config.is_encoder_decoder:
        return make_batch(model.get_base_model(), batch_size=rows, seed=0)
    batch = tiny_batch(model, rows=rows)
    batch["labels"] = batch["input_ids"].clone()
    return batch


class Trained:
    """One cell of the product: a model with two adapters, unsplit and split, and what differs between both."""

    def __init__(self, mesh, family, targets, bias, is_split):
        self.mesh, self.family, self.problems = mesh, family, []
        tied = targets == "embedding and tied head"
        self.full = with_lora(family, tied=tied, **options_of(family, targets, bias))
        add_second(self.full, QUERY_AND_VALUE[family])
        self.full.set_adapter("default")
        self.base = base_of(family, tied=tied)
        split = copy.deepcopy(self.full)
        self.frozen = [name for name, value in split.named_parameters() if not value.requires_grad]
        again = Recompute(mode="full") if is_split else None  # also of layers whose input needs no gradient
        self.split = shardwise.parallelize(split, mesh, sequence_parallel=is_split, recompute=again)
        self.batch = batch_of(self.full)
        self.step = shardwise.TrainStep(self.split, mesh, num_microbatches=2 if mesh.size("pp") > 1 else 1)

    def compare_a_step(self, what):
        loss = self.full(**self.batch).loss
        loss.backward()
        self.problems += differing(f"{what}: loss", self.step(rows_of(self.batch, self.mesh)).loss, loss, 1e-5)
        expected = {name: value.grad for name, value in self.full.named_parameters() if value.grad is not None}
        found = differing_gradients(shardwise.full_gradients(self.split), expected)
        self.problems += [f"{what}: {each}" for each in found]

    def train(self):
        """Three steps of both, compared; then steps of the split one alone, after which copies are compared."""
        theirs = torch.optim.AdamW([each for each in self.full.parameters() if each.requires_grad], **ADAM)
        ours = shardwise.build_optimizer(self.split, torch.optim.AdamW, **ADAM)
        for number in range(3):
            self.compare_a_step(f"step {number}")
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        found = shardwise.full_state_dict(self.split)
        for name, value in self.full.state_dict().items():
            self.problems += differing(name, found[name], value, TRAINED)
        if len(ours.state) > sum(value.requires_grad for value in self.split.parameters()):
            self.problems.append("the optimizer has state of frozen parameters")
        with_gradient = {name for name, value in self.split.named_parameters() if value.grad is not None}
        self.problems += [f"{name} is frozen and has a gradient" for name in with_gradient & {*self.frozen}]
        return ours

    def go_on(self, optimizer, num_steps):
        for _ in range(num_steps):
            self.step(rows_of(self.batch, self.mesh))
            optimizer.step()
            optimizer.zero_grad()
        self.problems += [f"after all steps the copies of {each} differ" for each in find_unequal_replicas(self.split)]

    def compare_written(self, out, allowed):
        """The adapter's file with what PEFT would write."""
        shardwise.export_pretrained(self.split, out)
        expected = peft.get_peft_model_state_dict(self.full)
        written = load_file(out / "adapter_model.safetensors") if self.mesh.rank == 0 else expected
        self.problems += [f"{name} is on one side only" for name in sorted(expected.keys() ^ written.keys())]
        for name in expected.keys() & written.keys():
            self.problems += differing(f"written {name}", written[name], expected[name], allowed)

    def compare_files(self, place):
        """The adapter written, read by plain PEFT; and plain PEFT's loaded."""
        mesh, out = self.mesh, place / "ours"
        self.compare_written(out, TRAINED)
        if mesh.rank == 0:
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(self.base), out).eval()
            self.compare_logits("their model of our file", theirs)
        own = place / "theirs"
        if mesh.rank == 0:
            self.full.save_pretrained(own / "adapter", selected_adapters=["default"])
            self.base.save_pretrained(own / "base")
        all_gather_objects(None, mesh.group())
        loaded = shardwise.load(
            own / "base",
            mesh,
            adapter=own / "adapter",
            auto_class=model_class(self.family),
            attn_implementation="eager",
        )
        self.compare_logits("our model of their file", loaded)

    def compare_logits(self, what, model):
        inputs = {name: value for name, value in self.batch.items() if name != "labels"}
        if "decoder_input_ids" not in inputs and self.full.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = self.batch["labels"]
        with torch.no_grad():
            found, expected = (each(**inputs).logits for each in (model, self.full))
        self.problems += differing(what, found, expected, 1e-4)

    def switch(self):
        """The second adapter computes, and the first again."""
        for name in ("two", "default"):
            for model in (self.full, self.split):
                model.set_adapter(name)
                model.zero_grad()
            self.compare_a_step(f"adapter {name}")


def train(mesh, family, targets, bias, is_split, place):
    """What differs from PEFT unsplit."""
    place = Path(place) / f"{family}-{targets}-{is_split}-{mesh.shape}"
    cell = Trained(mesh, family, targets, bias, is_split)
    cell.compare_written(place / "first", 0.0)
    optimizer = cell.train()
    cell.compare_files(place)
    cell.switch()
    cell.go_on(optimizer, 17 if FULL_PRODUCT else 0)
    return cell.problems


BIASES = ("none", "all", "lora_only")
TARGETS = ("query and value", "all-linear", "embedding and tied head")
LAYOUTS = (
    ("tp2", False),
    ("tp4", False),
    ("tp2", True),
    ("fsdp2", False),
    ("ddp2", False),
    ("fsdp2.tp2", False),
    ("pp2", False),
    ("pp2.tp2", False),
)
"""The second is whether activations are split along the sequence, too."""


CHOSEN = (
    ("tp2", False, "bloom", "all-linear", "all"),
    ("tp2", True, "llama", "query and value", "lora_only"),
    ("fsdp2.tp2", False, "phi3", "all-linear", "none"),
    ("pp2.tp2", False, "qwen3", "embedding and tied head", "all"),
    ("ddp2", False, "mixtral", "all-linear", "lora_only"),
    ("pp2.fsdp2", False, "t5", "query and value", "none"),
)
"""Families in layouts of their own, all targets and biases with several of them; one plan is derived. Others that
declare none are tried with simulated ranks: tests/lora/test_adapters.py. In fsdp2 and pp2: tests/lora/test_several.py.
"""


def cells():
    """`CHOSEN`; for `make coverage` every family with all targets in every layout, such that every bias meets each of
    them. And one family in stages of shards.
    """
    if not FULL_PRODUCT:
        yield from CHOSEN
        return
    yield "pp2.fsdp2", False, "gpt2", "all-linear", "lora_only"
    for place, family in enumerate(QUERY_AND_VALUE):
        for (column, layout), (row, targets) in product(enumerate(LAYOUTS), enumerate(TARGETS)):
            yield *layout, family, targets, BIASES[(place + column + row) % 3]


@pytest.mark.parametrize(("layout", "is_split", "family", "targets", "bias"), [*cells()])
def test_an_adapter_trains_as_with_peft_unsplit(on_ranks, tmp_path_factory, layout, is_split, family, targets, bias):
    found = on_ranks(train, place=str(tmp_path_factory.mktemp("lora")), timeout=500.0 if FULL_PRODUCT else 100.0)
    assert not any(found), next(filter(None, found))


def add_with_other_seeds(mesh):
    split = shardwise.parallelize(with_lora("llama"), mesh)
    torch.manual_seed(mesh.rank)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    split.add_adapter("later", config)
    entries = shardwise.parameters.registry.named_entries(split)
    copies = [name for name in entries if "later" in name and ("lora_A" in name or mesh.size("tp") == 1)]
    return {name: split.get_parameter(name).detach().clone() for name in copies}, torch.initial_seed()


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "ddp2"])
def test_adapters_that_come_later_start_alike_whatever_the_ranks_seeds(on_ranks, layout):
    (first, seed), (second, other) = on_ranks(add_with_other_seeds)
    assert first and seed != other
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def name_without_peft(mesh):
    model = shardwise.parallelize(with_lora("llama"), mesh)
    fails = mock.patch.object(peft, "get_peft_model_state_dict", side_effect=ValueError("no such adapter"))
    with fails, pytest.raises(ValueError, match="no such adapter"):
        adapter_state(model, "default")


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_what_peft_refuses_on_rank_0_is_an_error_on_all(on_ranks, layout):
    on_ranks(name_without_peft)
