"""Optimum Neuron's parallelizers train as the unsplit model does, where theirs did not either."""

from __future__ import annotations

import contextlib
import copy
import time
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.api.prepare import decide
from shardwise.api.sources import WeightSource
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.compat.optimum_neuron.distributed import (
    Parallelizer,
    ParallelizersManager,
    consolidate_model_parallel_checkpoints_to_unified_checkpoint,
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)
from shardwise.compat.optimum_neuron.distributed.utils import from_pretrained_for_mp
from shardwise.compat.warned import CompatWarning
from shardwise.errors import ConfigError, LoadError, ShardwiseError, UnsupportedError
from shardwise.parameters.replicas import check_replicas
from shardwise.plan.options import ParallelSpec
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from shardwise.topology.shape import MeshShape
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model
from tests.oracle import LOSS, differing, differing_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT
ON_RANKS = pytest.mark.spawn
SINGLE = pytest.mark.single


class HandWritten(Parallelizer):
    """As the document has it: layers written by hand, of the MLPs alone."""

    @classmethod
    def _parallelize(cls, model, device=None, parallelize_embeddings=True, sequence_parallel_enabled=False):
        for layer in model.model.layers:
            sizes = model.config.hidden_size, model.config.intermediate_size
            for name in ("gate_proj", "up_proj"):
                new = parallel_layers.ColumnParallelLinear(*sizes, bias=False, gather_output=False, device=device)
                setattr(layer.mlp, name, new)
            layer.mlp.down_proj = parallel_layers.RowParallelLinear(*sizes[::-1], bias=False, input_is_parallel=True)
        return model


class OnlyAttention(Parallelizer):
    """Hands on what it is given, and a predicate."""

    @classmethod
    def _parallelize(cls, model, **options):
        options["should_parallelize_layer_predicate_func"] = lambda layer: hasattr(layer, "q_proj")
        return super()._parallelize(model, **options)


class OnlyMlp(Parallelizer):
    """Attention stays whole on every rank, also where hidden states are split along the sequence."""

    @classmethod
    def _parallelize(cls, model, **options):
        options["should_parallelize_layer_predicate_func"] = lambda layer: not hasattr(layer, "q_proj")
        return super()._parallelize(model, **options)


def batch_of(model):
    """With ignored labels, padding tokens and a mask."""
    batch = tiny_batch(model, rows=4)
    batch["input_ids"][1, :2] = 0
    batch["labels"][1, :2] = -100
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    return batch


def mapping(before, model):
    return {id(before[name]): value for name, value in model.named_parameters()}


def train(model, optimizer, batch, steps=3):
    """Losses, and the gradients of the first step."""
    losses, gradients = [], None
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        if gradients is None:
            split = hasattr(model, "run_train")
            gradients = shardwise.full_gradients(model) if split else own_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, gradients


def own_gradients(model):
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def problems_of(whole, make, *, batch=None):
    """What a split model trains differently from `whole`: `make` returns it, with its optimizer."""
    batch, reference = batch or batch_of(whole), copy.deepcopy(whole)
    trained = [each for each in reference.parameters() if each.requires_grad]
    losses, gradients = train(reference, torch.optim.AdamW(trained, lr=1e-3), batch)
    model, optimizer = make()
    found, own = train(model, optimizer, batch)
    problems = differing("losses", torch.stack(found), torch.stack(losses), LOSS)
    problems += differing_gradients(own, gradients)
    check_replicas(model)
    return problems


def parallelized(whole, cls=Parallelizer, **options):
    """A copy, split, with a lazy optimizer."""
    model = copy.deepcopy(whole) if isinstance(whole, nn.Module) else whole()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = make_optimizer_constructor_lazy(torch.optim.AdamW)(params=trained, lr=1e-3)
    before = dict(model.named_parameters(remove_duplicate=False))  # of a tied one stages have one name or the other
    config = copy.deepcopy(model.config.to_dict())
    model = cls.parallelize(model, **options)
    assert model.config.to_dict() == config, "theirs divided config.vocab_size"
    return model, cls.optimizer_for_mp(optimizer, mapping(before, model))


MODELS = {
    "llama": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "vocab_size": 97}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {"tied": True, "vocab_size": 97}),
    "mistral": ("mistral", {"num_key_value_heads": 1}),
    "gpt_neox": ("gpt_neox", {}),
}
OPTIONS = {
    "embeddings": {"parallelize_embeddings": False},
    "sequence": {"sequence_parallel_enabled": True},
    "plain": {},
}


def trains(mesh, case, directory):
    """Problems of a case on two ranks."""
    name, _, option = case.partition("-")
    family, sizes = MODELS[name]
    whole = tiny_model(family, num_hidden_layers=3, **sizes) if family != "gpt2" else tiny_model(family, **sizes)
    parallel_state.initialize_model_parallel(2)
    problems = problems_of(whole, lambda: parallelized(whole, **OPTIONS[option]))
    parallel_state.destroy_model_parallel()
    return problems


@ON_RANKS
@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize(
    "case",
    [
        "llama-plain",
        "qwen3-sequence",
        "gpt2-embeddings",
        "mistral-sequence",
        "gpt_neox-sequence",
        *["llama-embeddings", "llama-sequence", "gpt2-plain"] * FULL_PRODUCT,
    ],
)
def test_it_trains_as_the_unsplit_model(on_ranks, layout, case):
    assert on_ranks(trains, directory="") == [[], []]


def in_stages(mesh, number, recomputes):
    """Three layers in two stages; the loop of the document and `run_train`."""
    whole = tiny_model("llama", num_hidden_layers=3, tied=True)
    parallel_state.initialize_model_parallel(1, 2)
    options = {
        "pipeline_parallel_num_microbatches": number,
        "pipeline_parallel_gradient_checkpointing_enabled": recomputes,
        "pipeline_parallel_use_zero1_optimizer": False,
    }
    problems = problems_of(whole.train(), lambda: parallelized(whole, **options))
    model, _ = parallelized(whole, **options)
    batch = batch_of(whole)
    reference = copy.deepcopy(whole)
    loss = reference(**batch).loss
    loss.backward()
    problems += differing("loss", model.run_train(**batch), loss.detach(), LOSS)
    problems += differing_gradients(shardwise.full_gradients(model), own_gradients(reference))
    problems += differing("logits", model.run_eval(**batch).logits, whole(**batch).logits.detach(), 1e-4)
    plain = make_optimizer_constructor_lazy(torch.optim.AdamW)(whole.parameters())
    held = dict(model.named_parameters())
    names = {id(value): held[name] for name, value in whole.named_parameters() if name in held}
    with pytest.raises(ConfigError, match="knows it by its other name") if mesh.rank else contextlib.nullcontext():
        Parallelizer.optimizer_for_mp(plain, names)
    parallel_state.destroy_model_parallel()
    return problems


@ON_RANKS
@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize(("number", "recomputes"), [(1, False), (2, True)])
def test_stages_train_as_the_unsplit_model(on_ranks, layout, number, recomputes):
    assert on_ranks(in_stages) == [[], []]


def small_print(mesh, directory):
    """What else the documents say, on two ranks: by name, what was found."""
    found = {}
    whole = tiny_model("llama", num_key_value_heads=1)
    parallel_state.initialize_model_parallel(2)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    with_adapters = peft.get_peft_model(copy.deepcopy(whole), lora)
    for sp in (False, True):
        found[f"adapters, sequence {sp}"] = problems_of(
            with_adapters, lambda sp=sp: parallelized(with_adapters, sequence_parallel_enabled=sp)
        )
    found["by hand"] = problems_of(whole, lambda: parallelized(whole, HandWritten))
    if mesh.rank == 0:
        whole.save_pretrained(f"{directory}/hf", max_shard_size="30KB")
    shardwise_wait(mesh)

    def loaded():
        with lazy_load_for_parallelism(tensor_parallel_size=2):
            return AutoModelForCausalLM.from_pretrained(f"{directory}/hf", attn_implementation="eager")

    whole.eval()
    found["lazily, by hand"] = problems_of(whole, lambda: parallelized(loaded, HandWritten))
    found["lazily, from several files"] = problems_of(whole, lambda: parallelized(loaded, num_local_ranks_per_step=-1))
    model, _ = parallelized(whole, OnlyAttention)
    shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    found["predicate"] = [shapes[f"model.layers.0.{name}.weight"] for name in ("self_attn.q_proj", "mlp.up_proj")]
    found["predicate"] += [shapes["lm_head.weight"]]
    for name, cls in {"attention": OnlyAttention, "MLPs": OnlyMlp}.items():
        for sp in (False, True):
            found[f"only {name}, sequence {sp}"] = problems_of(
                whole, lambda cls=cls, sp=sp: parallelized(whole, cls, sequence_parallel_enabled=sp)
            )

    started = copy.deepcopy(whole)  # a regular optimizer, with groups and a state
    groups = [{"params": [started.lm_head.weight], "lr": 1e-4}]
    groups += [{"params": [each for each in started.parameters() if each is not started.lm_head.weight]}]
    regular = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.2)
    batch = batch_of(whole)
    train(started, regular, batch, 2)
    before, unsplit = dict(started.named_parameters()), copy.deepcopy((started, regular))
    model = Parallelizer.parallelize(started)  # its parameters are the ones that the optimizer has a state for
    moved = Parallelizer.optimizer_for_mp(regular, mapping(before, model))
    losses, gradients = train(*unsplit, batch)
    own, own_grads = train(model, moved, batch)
    found["regular optimizer"] = differing("losses", torch.stack(own), torch.stack(losses), LOSS)
    found["regular optimizer"] += differing_gradients(own_grads, gradients)
    found["groups"] = [(group["lr"], group["weight_decay"]) for group in moved.param_groups]

    fill, found["at once"] = WeightSource.fill, {}
    for at_once in (2, 1):

        def counted(self, *args, at_once=at_once, **kwargs):
            """Waits for as many ranks as may load at a time, or a while for more than may."""
            Path(f"{directory}/loading-{mesh.rank}").touch()
            for _ in range(100 if at_once == 1 else 3000):
                counts = [len(list(Path(directory).glob("loading-*")))]
                if counts[0] > 1:
                    break
                time.sleep(0.005)
            found["at once"][at_once] = counts[0]
            fill(self, *args, **kwargs)
            if at_once == 1:
                Path(f"{directory}/loading-{mesh.rank}").unlink()

        WeightSource.fill = counted
        try:
            model = Parallelizer.parallelize(loaded(), num_local_ranks_per_step=at_once)
        finally:
            WeightSource.fill = fill
        shardwise_wait(mesh)
        Path(f"{directory}/loading-{mesh.rank}").unlink(missing_ok=True)
        shardwise_wait(mesh)

    Parallelizer.save_model_checkpoint(model, f"{directory}/both", as_regular=True, as_sharded=True)
    Parallelizer.save_model_sharded_checkpoint(model, f"{directory}/later", async_save=True)
    for value in model.parameters():
        value.data.zero_()
    Parallelizer.load_model_checkpoint(model, f"{directory}/both")
    Parallelizer.load_model_sharded_checkpoint(model, f"{directory}/later")
    state = shardwise.full_state_dict(model)
    found["loaded"] = [name for name, value in whole.state_dict().items() if not torch.equal(state[name], value)]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    with lazy_load_for_parallelism(pipeline_parallel_size=2):
        other = AutoModelForCausalLM.from_config(whole.config, attn_implementation="eager")
    other = Parallelizer.parallelize(other, checkpoint_dir=f"{directory}/both")
    state = shardwise.full_state_dict(other)
    found["at other degrees"] = [n for n, value in whole.state_dict().items() if not torch.equal(state[n], value)]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1)  # data ranks, whose rows have different numbers of targets
    model = Parallelizer.parallelize(copy.deepcopy(whole))
    rows = {name: value.chunk(2)[mesh.rank] for name, value in batch.items()}
    reference = copy.deepcopy(whole)
    loss = reference(**batch).loss
    loss.backward()
    found["data ranks"] = differing("loss", model.run_train(**rows), loss.detach(), LOSS)
    found["data ranks"] += differing_gradients(shardwise.full_gradients(model), own_gradients(reference))
    parallel_state.destroy_model_parallel()
    found["untouched"] = float((whole(**batch).loss - batch_loss(whole, batch)).detach())
    return found


def shardwise_wait(mesh):
    torch.distributed.barrier()


def batch_loss(model, batch):
    """The loss by hand: nothing of torch or the class has been changed for it."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return nn.CrossEntropyLoss()(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@ON_RANKS
@pytest.mark.parametrize("layout", ["tp2"])
def test_the_small_print(on_ranks, layout, tmp_path):
    first, second = on_ranks(small_print, directory=str(tmp_path))
    for found in (first, second):
        assert found.pop("at once") == {2: 2, 1: 1}, "so many ranks load at a time"
        found.pop("untouched")
        assert found.pop("predicate") == [[32, 64], [96, 64], [96, 64]]
        assert found.pop("groups") == [(1e-4, 0.2), (1e-3, 0.2)]
        assert {name: problems for name, problems in found.items() if problems} == {}
    unified = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    expected = tiny_model("llama", num_key_value_heads=1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in unified.state_dict().items())
    consolidate_model_parallel_checkpoints_to_unified_checkpoint(tmp_path / "both", tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    with pytest.raises(ConfigError, match="is not empty"):
        consolidate_model_parallel_checkpoints_to_unified_checkpoint(tmp_path / "both", tmp_path / "one")
    with pytest.raises(ConfigError, match="save_format is 'pytorch'"):
        consolidate_model_parallel_checkpoints_to_unified_checkpoint(tmp_path / "both", tmp_path / "two", "pytorch")


def refusals(mesh, directory):
    """What is said of bad input, by name; nobody waits for anybody."""
    found = {}

    def note(name, call):
        try:
            call()
            found[name] = "nothing"
        except (ShardwiseError, TypeError) as error:
            found[name] = str(error)

    whole = tiny_model("llama")
    note("before", lambda: Parallelizer.parallelize(tiny_model("llama")))
    note("degrees", lambda: parallel_state.initialize_model_parallel(3))
    parallel_state.initialize_model_parallel(2)
    for name, options in {
        "microbatches": {"pipeline_parallel_num_microbatches": 0},
        "ranks": {"num_local_ranks_per_step": "all"},
        "device": {"device": "cuda"},
        "checkpoint": {"checkpoint_dir": f"{directory}/nowhere"},
    }.items():
        note(name, lambda options=options: Parallelizer.parallelize(tiny_model("llama"), **options))
    note("differs", lambda: Parallelizer.parallelize(tiny_model("llama", seed=mesh.rank)))
    with lazy_load_for_parallelism(2) if mesh.rank else torch.no_grad():
        model = AutoModelForCausalLM.from_config(whole.config)
    note("lazy on one rank", lambda: Parallelizer.parallelize(model))
    note("unsplit", lambda: Parallelizer.save_model_sharded_checkpoint(whole, directory))
    note("load unsplit", lambda: Parallelizer.load_model_sharded_checkpoint(whole, directory))
    model = Parallelizer.parallelize(copy.deepcopy(whole))
    note("twice", lambda: Parallelizer.parallelize(model))
    if mesh.rank == 0:
        whole.save_pretrained(f"{directory}/hf")
    shardwise_wait(mesh)
    note("kind", lambda: Parallelizer.load_model_sharded_checkpoint(model, f"{directory}/hf"))
    note("resized", lambda: model.resize_token_embeddings(101))
    note("neither", lambda: Parallelizer.save_model_checkpoint(model, directory, as_sharded=False))
    lazy = make_optimizer_constructor_lazy(torch.optim.AdamW)(whole.parameters(), lr=1e-3)
    note("steps", lazy.step)
    note("mapping", lambda: Parallelizer.optimizer_for_mp(lazy, {}))
    note("ids", lambda: Parallelizer.optimizer_for_mp(lazy, {1: 2}))
    note("options", lambda: make_optimizer_constructor_lazy(torch.optim.AdamW)(whole.parameters(), leraning_rate=1e-3))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    note("by hand in stages", lambda: HandWritten.parallelize(tiny_model("llama")))
    parallel_state.destroy_model_parallel()
    return found


@ON_RANKS
@pytest.mark.parametrize("layout", ["tp2"])
def test_bad_input_is_one_clear_error_on_every_rank(on_ranks, layout, tmp_path):
    first, second = on_ranks(refusals, directory=str(tmp_path))
    expected = {
        "before": "model parallel is not initialised",
        "degrees": "does not divide 2 ranks",
        "microbatches": "pipeline_parallel_num_microbatches is 0",
        "ranks": "num_local_ranks_per_step cannot be a str",
        "device": "device is cuda, but ranks compute on cpu",
        "checkpoint": "nowhere",
        "differs": "the ranks were given different models",
        "lazy on one rank": "the ranks were given different models",
        "unsplit": "is not a model that Shardwise has split",
        "load unsplit": "is not a model that Shardwise has split",
        "twice": "is split already",
        "kind": "hf",
        "resized": "resize_token_embeddings of a split model",
        "neither": "as_sharded=False",
        "steps": "a step of a lazy AdamW",
        "mapping": "of the optimizer is not said",
        "ids": "one of ids to parameters",
        "options": "leraning_rate",
        "by hand in stages": "it cannot be cut into stages",
    }
    for found in (first, second):
        assert {name: found[name] for name, part in expected.items() if part not in found[name]} == {}
    assert first == second


@SINGLE
def test_support_is_what_the_checks_say():
    types = ParallelizersManager.get_supported_model_types()
    documented = {"bert", "roberta", "gpt_neo", "gpt_neox", "llama", "mistral", "t5"}
    assert documented <= set(types) and len(types) > 250
    for given in ("llama", transformers.LlamaForCausalLM, tiny_model("llama")):
        support = ParallelizersManager.is_model_supported(given)
        assert support == (True, True, True) and support and support.reason == ""
        assert ParallelizersManager.parallelizer_for_model(given) is Parallelizer
    assert ParallelizersManager.is_model_supported("vit"), "a type that has no causal language model"
    tp, sp, pp = ParallelizersManager.is_model_supported(nn.Linear(2, 2))
    assert (tp, sp, pp) == (False, False, False)
    support = ParallelizersManager.is_model_supported("no such type")
    assert not support and "no such type" in support.reason
    with pytest.raises(UnsupportedError, match="did you mean 'llama'"):
        ParallelizersManager.parallelizer_for_model("lama")
    with pytest.raises(UnsupportedError, match="no model type None"):
        ParallelizersManager.parallelizer_for_model(None)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    convolutions = transformers.ResNetModel(config)
    support = ParallelizersManager.is_model_supported(convolutions)
    assert support[:2] == (False, False) and support.reason.startswith("tp2: ")
    with pytest.raises(ShardwiseError) as told:
        decide(convolutions, MeshShape(tp_size=2), ParallelSpec())
    assert told.value.summary in support.reason, "what the table says is what a split says"


@SINGLE
def test_what_changes_nothing_warns_once():
    parallel_state.initialize_model_parallel(1)
    try:
        for options in (
            {"kv_size_multiplier": 4},
            {"pipeline_parallel_input_names": {"LlamaForCausalLM": ("input_ids", "labels")}},
            {"pipeline_parallel_use_zero1_optimizer": True},
        ):
            with pytest.warns(CompatWarning, match=next(iter(options))):
                Parallelizer.parallelize(tiny_model("llama"), **options)
            Parallelizer.parallelize(tiny_model("llama"), **options)  # warnings are errors
    finally:
        parallel_state.destroy_model_parallel()


@SINGLE
def test_lazy_loading_of_one_rank_and_its_sizes(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with lazy_load_for_parallelism():
        assert not any(value.is_meta for value in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    for sizes in ((0, 1), (1, "2"), (True, 1)):
        with pytest.raises(ConfigError, match="parallel_size is"), lazy_load_for_parallelism(*sizes):
            pass
    model, info = from_pretrained_for_mp(
        transformers.LlamaForCausalLM, tmp_path, torch_dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.dtype is torch.bfloat16 and model.lm_head.weight.is_meta and not info["missing_keys"]
    assert set(model._weight_map) == set(dict(model.named_parameters())), "nothing but weights"
    with pytest.raises(LoadError):
        from_pretrained_for_mp(transformers.LlamaForCausalLM, tmp_path / "nowhere")


UNNAMED = {
    "causal": "bloom codegen cohere falcon gemma gpt_bigcode gptj olmo opt phi qwen2 qwen2_moe stablelm starcoder2",
    "masked": "electra mpnet deberta xlm",
    "seq2seq": "bart pegasus",
}
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}
CHOSEN = {("electra", 1)}  # another, whose plan is derived, is gpt2 above


def unnamed(mesh, task, family, tp):
    """Three steps of a tiny model of the family, over two ranks."""
    config = shrink_config(transformers.AutoConfig.for_model(family), without_dropout=True)
    whole = build_tiny_model(config, AUTO[task], seed=0)
    batch = make_batch(whole, seed=0)
    set_runnable_mode(whole, batch)
    parallel_state.initialize_model_parallel(tp, 2 // tp)
    problems = problems_of(whole, lambda: parallelized(whole), batch=batch)
    parallel_state.destroy_model_parallel()
    return problems


@ON_RANKS
@pytest.mark.parametrize("layout", ["tp2"])
@pytest.mark.parametrize(
    ("task", "family", "tp"),
    [
        (task, family, tp)
        for task, families in UNNAMED.items()
        for family in families.split()
        for tp in (2, 1)
        if FULL_PRODUCT or (family, tp) in CHOSEN
    ],
)
def test_architectures_that_no_document_names(on_ranks, layout, task, family, tp):
    assert on_ranks(unnamed) == [[], []]
