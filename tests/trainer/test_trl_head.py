"""TRL's fused head on split models: outputs and gradients are TRL's on the unsplit model."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

import shardwise
from shardwise.comm.simulated import run_ranks
from shardwise.errors import UnsupportedError
from shardwise.loss import cross_entropy
from shardwise.loss.scores import HeadFormula, Scoring
from shardwise.pipeline.runner import runner_of
from shardwise.pipeline.scores import StagedScores
from shardwise.runtime.context import Axis
from shardwise.trainer import trl as trl_head
from shardwise.trainer.trl import fuse_head, replace_fused_head
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
VOCABULARY = 97  # which does not divide
ALLOWED = 1e-5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 4 * 7 * VOCABULARY)


def models():
    """Models with each way of making logits, by name."""
    phi = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "llama": lambda: tiny_model("llama", vocab_size=VOCABULARY),
        "llama, tied": lambda: tiny_model("llama", vocab_size=VOCABULARY, tied=True),
        "gemma2, tied, capped": lambda: tiny_model(
            "gemma2", vocab_size=VOCABULARY, tied=True, final_logit_softcapping=2.0
        ),
        "cohere2, tied, scaled": lambda: tiny_model("cohere2", vocab_size=VOCABULARY, tied=True, logit_scale=0.25),
        "granite, divided": lambda: tiny_model("granite", vocab_size=VOCABULARY),
        "mixtral, balanced": lambda: tiny_model("mixtral", vocab_size=VOCABULARY),
        "phi, bias": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(vocab_size=VOCABULARY, **phi)),
    }


def objective(output, weights, num_data_ranks):
    """A loss with other gradients for each token, the mean over data ranks of which is that of all rows."""
    tokens = output.log_probs * weights + output.entropy * weights.flip(1)
    return tokens.sum(1).mean() + output.loss * num_data_ranks


def rows(value, mesh):
    """This data rank's rows."""
    return value.chunk(mesh.data_size)[mesh.data_rank]


def compare(mesh, name, layout):
    """What a split model answers otherwise than TRL's fused head on the unsplit one."""
    cross_entropy.CHUNK_ELEMENTS = 4 * 7 * VOCABULARY
    full = models()[name]().train()
    split = shardwise.parallelize(copy.deepcopy(full), mesh, sequence_parallel=layout.endswith("+sp")).train()
    batch = tiny_batch(full, rows=4, length=9)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :5] = batch["labels"][3, 2:] = -100
    weights = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    add_fused_lm_head(full, temperature=0.7, outputs=OUTPUTS)
    fuse_head(split, temperature=0.7, outputs=OUTPUTS)
    own = {name: rows(value, mesh) for name, value in batch.items()}
    expected = full(**batch, fused_lm_head=True, num_items_in_batch=11)
    found = split(**own, fused_lm_head=True, num_items_in_batch=11)
    assert isinstance(found, FusedCausalLMOutput)
    problems = []
    for field in (*OUTPUTS, "label_mask", "aux_loss"):
        theirs, ours = expected.get(field), found.get(field)
        assert (theirs is None) == (ours is None), field
        if theirs is not None:
            theirs = rows(theirs, mesh) if theirs.ndim else theirs
            assert theirs.dtype == ours.dtype, field
            problems += differing(field, ours.detach(), theirs.detach(), ALLOWED)
    if mesh.data_size == 1:
        problems += differing("loss", found.loss.detach(), expected.loss.detach(), ALLOWED)
    objective(expected, weights, 1).backward()
    objective(found, rows(weights, mesh), mesh.data_size).backward()
    gradients = shardwise.full_gradients(split)
    for parameter, value in full.named_parameters():
        largest = max(1.0, float(value.grad.abs().max()))
        problems += differing(parameter, gradients[parameter], value.grad, ALLOWED * largest)
    with torch.no_grad():
        plain, logits = full(input_ids=batch["input_ids"]).logits, split(input_ids=own["input_ids"]).logits
    return problems + differing("logits", logits, rows(plain, mesh), 1e-4)


CASES = [
    *(("tp2", name) for name in models()),
    *(("tp2+sp", name) for name in ("gemma2, tied, capped", "mixtral, balanced")),
    *(("fsdp2", name) for name in ("llama", "phi, bias")),
    ("ddp2", "llama, tied"),
    ("fsdp2.tp2", "gemma2, tied, capped"),
    *[("tp2+sp", "llama"), ("fsdp2", "gemma2, tied, capped"), ("ddp2", "llama"), ("fsdp2.tp2", "llama")] * FULL_PRODUCT,
]


@pytest.mark.spawn
@pytest.mark.parametrize(("layout", "name"), CASES)
def test_outputs_and_gradients_are_those_of_the_unsplit_model(on_ranks, layout, name):
    assert not any(on_ranks(compare, layout=layout.removesuffix("+sp")))


def scores_of_trl(hidden, weight, bias, target, formula):
    found = (hidden, weight, bias, target, formula.temperature, 7, formula.softcap, formula.scale, OUTPUTS[1:])
    return ChunkedLogProbFunction.apply(*found)


@pytest.mark.single
@pytest.mark.parametrize("formula", [HeadFormula(), HeadFormula(scale=0.5, softcap=1.5, temperature=0.7)])
@pytest.mark.parametrize(("num_ranks", "num_classes"), [(1, 23), (3, 23), (4, 5)])  # the last of the four has none
@pytest.mark.parametrize("chunk", [40, 2**26])
def test_scores_are_those_of_trls_kernel(monkeypatch, formula, num_ranks, num_classes, chunk):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randint(-2, 3, size) / 4 for size in ((31, 8), (num_classes, 8), (num_classes,)))
    weight[-1], bias[-1] = weight[1], bias[1] = 3 * weight[1], 1.0  # exactly equal, on other ranks, and often largest
    target = torch.randint(num_classes, (31,))
    target[:20] = torch.tensor([1, num_classes - 1]).repeat(10)
    by_log_probs, by_entropy = torch.randn(31), torch.randn(31)

    def backward(scores, *leaves):
        ((scores[0] * by_log_probs).sum() + (scores[1] * by_entropy).sum()).backward()
        return [*(each.detach() for each in scores), *(each.grad for each in leaves)]

    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    expected = backward(scores_of_trl(*leaves, target, formula), *leaves)
    assert 0 < int(expected[4].sum()) < 31

    def run(group):
        axis = Axis("tp", group if num_ranks > 1 else None, num_ranks, group.rank())
        sizes = axis.even_sizes(num_classes)
        own = [hidden, *(each.split(sizes)[axis.coord] for each in (weight, bias))]
        own = [each.clone().requires_grad_() for each in own]
        scoring = Scoring(target=target, formula=formula, fields=OUTPUTS)
        return backward(scoring.score(*own, axis=axis, num_classes=num_classes), *own)

    found = run_ranks(run, num_ranks)
    for rank in found:
        for ours, theirs in zip(rank[:5], expected[:5], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=ALLOWED)
    ours = [sum(rank[5] for rank in found), *(torch.cat([rank[part] for rank in found]) for part in (6, 7))]
    torch.testing.assert_close(ours, expected[5:], rtol=0, atol=ALLOWED)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation has made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [each.numel() for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.most = max([self.most, *made])
        return out


def largest(mesh, sp):
    """The most elements of a tensor in a step of the fused head."""
    cross_entropy.CHUNK_ELEMENTS = 2**12
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    split = shardwise.parallelize(tiny_model("llama", vocab_size=2000, **sizes), mesh, sequence_parallel=sp).train()
    fuse_head(split, outputs=OUTPUTS)
    ids = torch.randint(2000, (4, 32))
    with Largest() as found:
        output = split(input_ids=ids, labels=ids, fused_lm_head=True)
        (output.loss + output.entropy.mean()).backward()
    return found.most


@pytest.mark.spawn
@pytest.mark.parametrize(("layout", "sp"), [("tp2", False), ("tp2", True), ("fsdp2", False), ("fsdp2.tp2", False)])
def test_no_rank_makes_the_logits_of_all_tokens_or_holds_a_whole_head_over_tp(on_ranks, layout, sp):
    head, logits = 2000 * 16, 4 * 31 * 2000
    held = head // 2 if "tp" in layout else head  # FSDP2 gathers a unit whole
    assert held < logits // 2
    assert max(on_ranks(largest)) <= held


def adapted(mesh, saved):
    """LoRA, over TRL's fused head of the split model, which is replaced; a data rank has no targets."""
    full = tiny_model("llama", vocab_size=VOCABULARY)
    targets = ["q_proj", "down_proj"]
    options = {"target_modules": targets, "init_lora_weights": False, "modules_to_save": ["lm_head"] if saved else None}
    torch.manual_seed(0)
    full = peft.get_peft_model(full, peft.LoraConfig(**options)).train()
    split = shardwise.parallelize(copy.deepcopy(full), mesh).train()
    batch = tiny_batch(full.get_base_model(), rows=4, length=9)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][2:] = -100
    own = {name: rows(value, mesh) for name, value in batch.items()}
    for model in (full, split):
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "is_top1"))
    replace_fused_head(split)
    expected = full(**batch, fused_lm_head=True, num_items_in_batch=11)
    found = split(**own, fused_lm_head=True, num_items_in_batch=11)
    assert found.entropy is None
    problems = differing("log_probs", found.log_probs.detach(), rows(expected.log_probs.detach(), mesh), ALLOWED)
    expected.loss.backward()
    (found.loss * mesh.data_size).backward()
    gradients = shardwise.full_gradients(split)
    for name, parameter in full.named_parameters():
        if parameter.requires_grad:
            allowed = ALLOWED * max(1.0, float(parameter.grad.abs().max()))
            problems += differing(name, gradients[name], parameter.grad, allowed)
    with torch.no_grad(), full.disable_adapter(), split.disable_adapter():  # as for DPO's reference
        expected, found = (model(**given, fused_lm_head=True) for model, given in ((full, batch), (split, own)))
    problems += differing("reference", found.log_probs, rows(expected.log_probs, mesh), ALLOWED)
    first = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(split.generate(**first), full.generate(**first))
    return problems


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "saved"), [("tp2", True), ("fsdp2", False), *[("tp2", False), ("fsdp2", True)] * FULL_PRODUCT]
)
def test_adapters_train_and_are_switched_off(on_ranks, layout, saved):
    assert not any(on_ranks(adapted))


def in_stages(mesh):
    """The loss of a fused head on the last stage, and log-probabilities on every rank."""
    full = tiny_model("llama", vocab_size=VOCABULARY).train()
    split = shardwise.parallelize(copy.deepcopy(full), mesh).train()
    batch = tiny_batch(full, rows=4, length=9)
    for model in (full, split):
        add_fused_lm_head(model, outputs=OUTPUTS)
    replace_fused_head(split)
    expected, found = (model(**batch, fused_lm_head=True, num_items_in_batch=11) for model in (full, split))
    problems = differing("loss", found.loss.detach(), expected.loss.detach(), ALLOWED)
    problems += differing("log_probs", (found.log_probs + 0).detach(), expected.log_probs.detach(), ALLOWED)
    for output in (expected, found):
        output.loss.backward()
    gradients = shardwise.full_gradients(split)
    for name, parameter in full.named_parameters():
        problems += differing(
            name, gradients[name], parameter.grad, ALLOWED * max(1.0, float(parameter.grad.abs().max()))
        )
    with torch.no_grad():
        expected, found = (model(**batch, fused_lm_head=True) for model in (full, split))
    return problems + [
        problem for name in OUTPUTS[:4] for problem in differing(name, found[name], expected[name], ALLOWED)
    ]


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["pp2", "pp2.tp2"])
def test_a_model_in_stages_scores_on_its_last(on_ranks, layout):
    assert not any(on_ranks(in_stages))


def of_scores(mesh, name):
    """A loss that is made outside of a model in stages, of two calls."""
    full = models()[name]().train()
    split = shardwise.parallelize(copy.deepcopy(full), mesh).train()
    add_fused_lm_head(full, outputs=OUTPUTS)
    fuse_head(split, outputs=OUTPUTS)
    scorer, losses = StagedScores(split), []
    for number, model in enumerate((full, scorer)):
        loss = 0.0
        for seed in range(2):
            batch = tiny_batch(full, rows=4, length=9, seed=seed)
            batch["labels"][1, :5] = -100
            weights = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            own = rows if number else lambda value, _: value
            output = model(**{key: own(value, mesh) for key, value in batch.items()}, fused_lm_head=True)
            tokens = output.log_probs.exp() * own(weights, mesh) + output.entropy * own(weights.flip(1), mesh)
            loss = loss + (seed + 1) * tokens.sum(1).mean()
            if output.aux_loss is not None:
                loss = loss + output.aux_loss
        losses.append(loss)
    losses[0].backward()
    scorer.backward(losses[1])
    gradients, problems = shardwise.full_gradients(split), []
    for name, parameter in full.named_parameters():
        allowed = ALLOWED * max(1.0, float(parameter.grad.abs().max()))
        problems += differing(name, gradients[name], parameter.grad, allowed)
    return problems


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "name"),
    [("pp2", "llama"), ("pp2", "mixtral, balanced"), ("pp2.tp2", "llama, tied"), ("pp2.ddp2", "llama")],
)
def test_losses_made_of_scores_train_a_model_in_stages(on_ranks, layout, name):
    assert not any(on_ranks(of_scores))


def dropped(mesh):
    """Gradients of the loss in one run of the stages, and of the same loss made of scores, with dropout."""
    model = tiny_model("llama", vocab_size=VOCABULARY, attention_dropout=0.3)
    split = shardwise.parallelize(model, mesh).train()
    fuse_head(split)
    batch, found = tiny_batch(model, rows=4, length=9), []
    for model in (split, StagedScores(split)):
        runner_of(split).num_microbatches = 1 if model is split else None
        torch.manual_seed(5)
        output = model(**batch, fused_lm_head=True, num_items_in_batch=7)
        if model is split:
            output.loss.backward()
        else:
            model.backward(-output.log_probs.sum() / 7)
        found.append(shardwise.full_gradients(split))
        split.zero_grad()
    return [problem for name, value in found[0].items() for problem in differing(name, found[1][name], value, ALLOWED)]


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["pp2"])
def test_both_runs_of_stages_drop_the_same(on_ranks, layout):
    assert not any(on_ranks(dropped))


@pytest.mark.single
def test_heads_with_adapters_and_other_versions_of_trl_are_refused(monkeypatch):
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["lm_head"]))
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        split = shardwise.parallelize(model, mesh)
        with pytest.raises(UnsupportedError, match=r"a fused head of LlamaForCausalLM[^$]*modules_to_save"):
            fuse_head(split)
    monkeypatch.setattr(trl_head, "add_fused_lm_head", lambda model, temperature, outputs: None)
    with pytest.raises(UnsupportedError, match=r"trl\.trainer\.utils[^$]*it has model, temperature, outputs;"):
        trl_head.check_trl()
