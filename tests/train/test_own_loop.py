"""Loops written by hand with torch's own calls train as the unsplit model does, or are refused in words."""

from __future__ import annotations

import copy
import math
import tempfile

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import shardwise
from shardwise.errors import ConfigError, GradientError, LayoutError, RankError, UnsupportedError
from shardwise.optim.summing import time_reduction
from shardwise.parameters.registry import entry_of, local_part, registry_of
from shardwise.plan.options import FsdpPolicy
from tests.families import CACHE, checkpoint_layers, rows_of, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn

ROWS = 4
PARAMETERS = 2e-5
"""How far a parameter may be off after a few steps."""
ADAM = {"lr": 1e-3, "eps": 1e-4}


class Pair:
    """An unsplit model with its rows, and a split copy with this data rank's."""

    def __init__(self, layout, mesh, **options):
        sequence_parallel = layout.endswith("+sp")
        self.mesh = mesh
        # One key/value head, so that tp ranks share it; q/k norms, whose gradients are partial.
        self.full = tiny_model("qwen3", num_hidden_layers=max(1, mesh.size("pp")), num_key_value_heads=1)
        self.split = shardwise.parallelize(
            copy.deepcopy(self.full), mesh, sequence_parallel=sequence_parallel, **options
        )
        self.batches = [self._batch(seed) for seed in range(5)]

    def _batch(self, seed):
        batch = tiny_batch(self.full, rows=ROWS, length=9, seed=seed)
        batch["labels"] = batch["input_ids"].clone()  # as many targets in every row
        return batch

    def backward(self, number, *, scale=1.0):
        """Forward and backward of a batch, of both, by hand."""
        (self.full(**self.batches[number]).loss * scale).backward()
        (self.split(**rows_of(self.batches[number], self.mesh)).loss * scale).backward()

    def both(self, call):
        """What `call` returns for the unsplit model and for the split one."""
        return call(self.full), call(self.split)

    def gradient_problems(self):
        expected = {name: value.grad for name, value in self.full.named_parameters() if value.grad is not None}
        return differing_gradients(shardwise.full_gradients(self.split), expected)

    def parameter_problems(self):
        found = shardwise.full_state_dict(self.split)
        return [
            problem
            for name, value in self.full.state_dict().items()
            for problem in differing(name, found[name], value, PARAMETERS)
        ]


def closures(pair):
    """As Lightning calls an optimizer: gradients are zeroed and made inside the closure."""
    theirs = torch.optim.AdamW(pair.full.parameters(), **ADAM)
    ours = shardwise.build_optimizer(pair.split, torch.optim.AdamW, **ADAM)
    for batch in pair.batches:
        for model, optimizer, rows in (pair.full, theirs, batch), (pair.split, ours, rows_of(batch, pair.mesh)):

            def closure(model=model, optimizer=optimizer, rows=rows):
                loss = model(**rows).loss
                optimizer.zero_grad()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss.ndim == 0
    return pair.parameter_problems()


def plain_adamw(pair, **options):
    optimizers = pair.both(lambda model: torch.optim.AdamW(model.parameters(), **ADAM, **options))
    for number in range(3):
        pair.backward(number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return pair.parameter_problems()


def fused_adamw(pair):
    return plain_adamw(pair, fused=True)


def foreach_adamw(pair):
    return plain_adamw(pair, foreach=True)


def plain_clipping(pair):
    problems = []
    optimizers = pair.both(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for number, order in enumerate((2.0, 1.0, math.inf)):
        pair.backward(number)
        expected, found = pair.both(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order))  # noqa: B023
        problems += differing(f"norm of order {order}", found, expected, 1e-5 * float(expected))
        problems += pair.gradient_problems()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return problems + pair.parameter_problems()


def norms_by_hand(pair):
    """The idioms of hand-written loops: norms of norms are those of the full gradients, a single one is refused."""

    def stacked(model):
        gradients = [parameter.grad.detach() for parameter in model.parameters()]
        return torch.norm(torch.stack([torch.norm(gradient, 2.0) for gradient in gradients]), 2.0)

    def total(model):
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    def foreach(model):  # as on GPUs
        norms = torch._foreach_norm([parameter.grad for parameter in model.parameters()], 3.0)
        return torch.linalg.vector_norm(torch.stack([norm.to("cpu") for norm in norms]), 3.0)

    pair.backward(0)
    problems = []
    for name, call in ("stacked", stacked), ("get_total_norm", total), ("foreach", foreach):
        expected, found = pair.both(call)
        problems += differing(name, found, expected, 1e-5 * float(expected))
    with pytest.raises(UnsupportedError, match="the norm of the gradient of a single parameter"):
        sum(parameter.grad.data.norm(2).item() ** 2 for parameter in pair.split.parameters())
    for model in (pair.full, pair.split):
        for parameter in model.parameters():
            parameter.grad = parameter.grad / 3 * parameter.grad.abs()
    expected, found = pair.both(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
    return problems + differing("scaled", found, expected, 1e-5 * float(expected)) + pair.gradient_problems()


def norms_of_some(pair):
    """Of which stages have others: two norms, or one of both, for all that a rank can tell."""
    pair.backward(0)
    own = list(pair.split.parameters())
    for some in (own[:1], own[1:]) if len(own) > 1 else ():  # the first stage has the embedding alone
        with pytest.raises(UnsupportedError, match="gradients of one stage of a pipeline"):
            torch.nn.utils.clip_grad_norm_(some, 1.0)
    return []


def clipping_by_value(pair):
    pair.backward(0)
    pair.both(lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    return pair.gradient_problems()


def grad_scaler(pair):
    """An infinite gradient of one rank alone is found on all: nobody steps."""
    optimizers = pair.both(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in optimizers]
    for number, overflows in enumerate((False, True, False)):
        for scaler in scalers:
            scaler.scale(torch.zeros(()))  # makes the scale
        pair.backward(number, scale=float(scalers[0].get_scale()))
        if overflows:
            pair.full.lm_head.weight.grad[0, 0] = math.inf
            if pair.mesh.rank == 0:
                local_part(pair.split.lm_head.weight.grad)[0, 0] = math.inf
        for model, optimizer, scaler in zip((pair.full, pair.split), optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    return pair.parameter_problems()


def averaged_model(pair):
    """A copy is a split model of its own, and parameters are averaged part by part."""
    averages = pair.both(
        lambda model: AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    )
    optimizers = pair.both(lambda model: torch.optim.AdamW(model.parameters(), **ADAM))
    for number in range(3):
        pair.backward(number)
        for optimizer, average, model in zip(optimizers, averages, (pair.full, pair.split), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    pair.full, pair.split = (average.module for average in averages)
    problems = pair.parameter_problems()
    pair.backward(0)
    return problems + pair.gradient_problems()


def reading_gradients(pair):
    """`p.grad` is complete when `backward` returns: this rank's part of the full gradient, accumulated or not."""
    problems = []
    for number in range(2):
        pair.backward(number)
        expected = dict(pair.full.named_parameters())
        for name, parameter in pair.split.named_parameters():
            if entry_of(parameter).split is None:
                found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                problems += differing(name, found, expected[name].grad, 1e-4)
    for parameter in pair.split.parameters():
        assert parameter.grad.detach_() is parameter.grad
    copied = copy.deepcopy(next(pair.split.parameters()).grad)
    assert type(copied) in (torch.Tensor, DTensor)
    assert torch.equal(_local(copied), _local(next(pair.split.parameters()).grad))
    return problems + pair.gradient_problems()


def drifted_replicas(pair):
    """What would be a mixture of the ranks' copies is not exported."""
    with torch.no_grad():
        pair.split.model.norm.weight.add_(0.1 * pair.mesh.rank)
    with pytest.raises(LayoutError, match=r"different copies of model\.norm\.weight"):
        shardwise.export_pretrained(pair.split, "nowhere")
    return []


def other_calls(pair):
    """Data ranks that clip otherwise, divide their rows otherwise, or keep gradients, are one error."""
    rows, rank = rows_of(pair.batches[0], pair.mesh), pair.mesh.rank
    steps = [shardwise.TrainStep(pair.split, pair.mesh, num_microbatches=number) for number in (1, 2)]
    with pytest.raises(RankError, match="ranks do not train alike") as caught:
        steps[rank](rows)
    assert caught.value.at == "num_microbatches"
    steps[0](rows)
    if rank:
        pair.split.zero_grad()
    with pytest.raises(RankError, match="ranks do not train alike") as caught:
        steps[0](rows)
    assert caught.value.at == "gradients of earlier steps"
    pair.split.zero_grad()
    steps[0](rows)
    shardwise.clip_grad_norm_(pair.split, 1.0 + rank)
    with pytest.raises(RankError, match=r"ranks do not train alike[^$]*clip_grad_norm_ to 2\.0"):
        steps[0](rows)
    with pytest.raises(ConfigError, match="ranks do not call (full_gradients|full_state_dict) alike"):
        (shardwise.full_gradients if rank else shardwise.full_state_dict)(pair.split)
    return []


def other_directories(pair):
    """Nobody's directory is written where ranks name several, or shards of different sizes."""
    place = tempfile.gettempdir()
    with pytest.raises(ConfigError, match="at:  directory"):
        shardwise.export_pretrained(pair.split, f"{place}/shardwise-{pair.mesh.rank}")
    with pytest.raises(ConfigError, match="at:  max_shard_bytes"):
        shardwise.export_pretrained(pair.split, f"{place}/shardwise", max_shard_bytes=10**6 + pair.mesh.rank)
    return []


def _local(gradient):
    return getattr(gradient, "_local_tensor", gradient)


def functional_gradients(pair):
    """`torch.autograd.grad` hands gradients out before anybody could sum them."""
    for options in ({}, {"allow_unused": True}):
        loss = pair.split(**rows_of(pair.batches[0], pair.mesh)).loss
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
            torch.autograd.grad(loss, list(pair.split.parameters()), **options)
    pair.backward(0)  # in which is nothing of what was refused
    return pair.gradient_problems()


def second_derivatives(pair):
    """What sums gradients over ranks has no derivative."""
    loss = pair.split(**rows_of(pair.batches[0], pair.mesh)).loss
    with pytest.raises(UnsupportedError, match="a backward with create_graph=True"):
        loss.backward(create_graph=True)
    pair.split.zero_grad()
    return []


def inner_backward(pair):
    """A loss on what an inner model puts out, past the outer model's own forward."""
    for model in (pair.full, pair.split):
        rows = pair.batches[0] if model is pair.full else rows_of(pair.batches[0], pair.mesh)
        hidden = model.model(input_ids=rows["input_ids"]).last_hidden_state
        hidden.square().mean().backward()
    return pair.gradient_problems()


def head_by_itself(pair):
    """A loss of one's own, from the base model and the head in chunks of the sequence."""
    for model in (pair.full, pair.split):
        rows = pair.batches[0] if model is pair.full else rows_of(pair.batches[0], pair.mesh)
        hidden = model.model(input_ids=rows["input_ids"]).last_hidden_state
        chunks = [model.lm_head(each).float().logsumexp(-1).sum() for each in hidden.split(4, dim=1)]
        (torch.stack(chunks).sum() / hidden.shape[:2].numel()).backward()
    return pair.gradient_problems()


def layers_run_again(pair):
    """transformers' checkpointing with torch's older function, which calls layers in backward."""
    for model in (pair.full, pair.split):
        model.train().enable_input_require_grads()
        checkpoint_layers(model, {"use_reentrant": True})
    pair.backward(0)
    return pair.gradient_problems()


def embedding_by_itself(pair):
    """What the embedding gives is changed, and passed to the model."""
    for model in (pair.full, pair.split):
        rows = pair.batches[0] if model is pair.full else rows_of(pair.batches[0], pair.mesh)
        embedded = model.get_input_embeddings()(rows["input_ids"]) * 1.5
        model(inputs_embeds=embedded, labels=rows["labels"]).loss.backward()
    return pair.gradient_problems()


def positions_that_restart(pair):
    """Beside the cache that it builds, the unsplit model takes such a row for one."""
    pair.both(lambda model: model.train())
    for batch in pair.batches:
        batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(ROWS, -1)
    pair.backward(0)
    return pair.gradient_problems()


def hooks_on_gradients(pair):
    """FSDP2 puts gradients in place itself: hooks from before the split would never run."""
    pair.full.model.norm.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(UnsupportedError, match="register_hook on model.norm.weight"):
        shardwise.parallelize(pair.full, pair.mesh)
    return []


def transforms(pair):
    """`torch.func` hides what ranks compare."""
    parameters = {name: value.detach() for name, value in pair.split.named_parameters()}
    rows = rows_of(pair.batches[0], pair.mesh)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda given: torch.func.functional_call(pair.split, given, (), rows).loss)(parameters)
    return []


def mask_for_each_head(pair):
    """A rank has some of the heads."""
    batch = pair.batches[0] | {"attention_mask": torch.zeros(ROWS, 4, 9, 9)}
    with pytest.raises(
        UnsupportedError, match=r"a mask for each head, attention_mask \[4, 4, 9, 9\] of a model that is split"
    ):
        pair.split(**batch)
    return []


def trained_prefix(pair):
    """Keys and values that a rank attends to with its own heads; those of earlier forwards are its own."""
    ids, cache = pair.batches[0]["input_ids"], DynamicCache(config=pair.split.config)
    for layer in range(pair.split.config.num_hidden_layers):
        cache.update(*(torch.zeros(ROWS, 1, 2, 16, requires_grad=True) for _ in "kv"), layer)
    with pytest.raises(UnsupportedError, match=f"trained keys and values in {CACHE}"):
        pair.split(input_ids=ids, **{CACHE: cache})
    logits = []
    for model in (pair.full, pair.split):
        first = model.eval()(input_ids=ids[:, :4], use_cache=True)
        logits.append(model(input_ids=ids[:, 4:], **{CACHE: first[CACHE]}).logits.detach())
    return differing("logits", *logits[::-1], 1e-4)


def parts_of_stages(pair):
    """Nothing of a model in stages runs by itself, and no schedule runs inside of a backward."""
    ids, labels = pair.batches[0]["input_ids"], pair.batches[0]["labels"]
    for call in (lambda: pair.split.model(ids), lambda: pair.split.model.layers[0](torch.zeros(1, 2, 64))):
        with pytest.raises(
            UnsupportedError, match="of a model in stages(: no rank can run it alone| is called by itself)"
        ):
            call()
    for reentrant in (False, True):
        with pytest.raises(UnsupportedError, match="in stages inside of torch.utils.checkpoint"):
            checkpoint(
                lambda given, _: pair.split(given, labels=labels).loss,
                *(ids, torch.ones((), requires_grad=True)),
                use_reentrant=reentrant,
            ).backward()
    return []


def changed_while_gathered(pair):
    """A forward without backward leaves units gathered: what is then done to their parameters counts."""
    pair.backward(0)
    pair.both(lambda model: model(**pair.batches[0]))
    lost = torch.optim.SGD(pair.split.parameters(), lr=0.1)
    pair.both(lambda model: model.get_parameter("model.norm.weight").requires_grad_(False))
    pair.both(lambda model: model.zero_grad())
    pair.backward(1)
    problems = pair.gradient_problems()
    with pytest.raises(UnsupportedError, match="as FSDP2 has gathered it"):
        lost.step()
    with torch.no_grad():
        pair.both(lambda model: model(**pair.batches[0]))
    for optimizer in pair.both(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)):
        optimizer.step()
    return problems + pair.parameter_problems()


def two_models(pair):
    """A teacher and a student in one loss, both trained."""
    other = Pair("", pair.mesh)
    for full in (True, False):
        rows = pair.batches[0] if full else rows_of(pair.batches[0], pair.mesh)
        losses = [(each.full if full else each.split)(**rows).loss for each in (pair, other)]
        (losses[0] + 2 * losses[1]).backward()
    return pair.gradient_problems() + other.gradient_problems()


def interrupted_backward(pair):
    """Ctrl-C in a backward, and then another batch."""
    step = shardwise.TrainStep(pair.split, pair.mesh)
    step(rows_of(pair.batches[0], pair.mesh))
    interrupt = pair.split.model.layers[0].register_full_backward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(rows_of(pair.batches[1], pair.mesh))
    interrupt.remove()
    pair.split.zero_grad()
    if not hasattr(FSDPModule, "reset_iter_state"):  # before torch 2.13
        with pytest.raises(UnsupportedError, match="backward that was interrupted"):
            step(rows_of(pair.batches[2], pair.mesh))
        return []
    step(rows_of(pair.batches[2], pair.mesh))
    pair.full(**pair.batches[2]).loss.backward()
    return pair.gradient_problems()


def sums_put_off(pair):
    """What FSDP2 has not reduced yet when a step is left, or gradients are cleared, is in no later step."""
    pair = Pair("", pair.mesh, fsdp=FsdpPolicy(zero_stage=1))
    calls = []
    second = pair.split.register_forward_pre_hook(lambda *_: calls.append(0) or (_interrupt() if calls[1:] else None))
    with pytest.raises(KeyboardInterrupt):
        shardwise.TrainStep(pair.split, pair.mesh, num_microbatches=2)(rows_of(pair.batches[0], pair.mesh))
    second.remove()
    pair.backward(1)
    problems = pair.gradient_problems()
    pair.full.zero_grad()
    time_reduction(registry_of(pair.split), is_last=False)
    pair.split(**rows_of(pair.batches[2], pair.mesh)).loss.backward()
    time_reduction(registry_of(pair.split), is_last=True)
    pair.split.zero_grad()
    pair.backward(3)
    return problems + pair.gradient_problems()


def _interrupt(*_):
    raise KeyboardInterrupt


def nothing_to_train(pair):
    """Steps that make no gradient: there are no targets anywhere, gradients are off, nothing is trained."""
    rows = rows_of(pair.batches[0], pair.mesh)
    step = shardwise.TrainStep(pair.split, pair.mesh)
    assert float(step(rows | {"labels": torch.full_like(rows["labels"], -100)}).loss) == 0
    assert all(parameter.grad is None for parameter in pair.split.parameters())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(UnsupportedError, match=f"a training step under torch.{mode.__name__}"):
            step(rows)
    pair.split.requires_grad_(requires_grad=False)
    with pytest.raises(GradientError, match="depends on nothing that is trained"):
        step(rows)
    return []


def autocast_around_steps(pair):
    """Autocast keeps casts of parameters for what comes later: other microbatches, and other forwards."""
    problems = []
    for step in (shardwise.TrainStep(pair.split, pair.mesh, num_microbatches=2), None):
        pair.full.zero_grad()
        pair.split.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in (0, 1):
                rows = rows_of(pair.batches[number], pair.mesh)
                pair.full(**pair.batches[number]).loss.backward()
                step(rows) if step is not None else pair.split(**rows).loss.backward()
        found = shardwise.full_gradients(pair.split)
        for name, value in pair.full.named_parameters():
            if float((found[name] - value.grad).norm()) > 0.05 * float(value.grad.norm()):
                problems.append(f"{name}, {'by hand' if step is None else 'microbatches'}")
    return problems


def untied_later(pair):
    """What was found for one parameter does not hold for two."""
    model = shardwise.parallelize(tiny_model("qwen3", tie_word_embeddings=True, num_hidden_layers=1), pair.mesh)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(LayoutError, match="were one parameter when the model was split, and are two now"):
        shardwise.TrainStep(model, pair.mesh)
    model = shardwise.parallelize(tiny_model("qwen3", tie_word_embeddings=True, num_hidden_layers=1), pair.mesh)
    model.set_input_embeddings(torch.nn.Embedding(model.config.vocab_size, model.config.hidden_size))
    with pytest.raises(LayoutError, match=r"lm_head.weight and model.embed_tokens.weight were one parameter"):
        model(**pair.batches[0]).loss.backward()
    return []


def other_learning_rates(pair):
    """Ranks that update differently are told so at the next step, where only an export would have found it."""
    rows, step = rows_of(pair.batches[0], pair.mesh), shardwise.TrainStep(pair.split, pair.mesh)
    optimizer = shardwise.build_optimizer(pair.split, torch.optim.AdamW, lr=1e-3 * (1 + pair.mesh.rank))
    step(rows)
    optimizer.step()
    calls = [step] if pair.mesh.size("tp") == 1 else [step, lambda given: pair.split(**given)]
    for call in calls:
        with pytest.raises(RankError, match=r"ranks do not train alike[^$]*'lr': 0\.002") as caught:
            call(rows)
        assert caught.value.at == "the optimizers' steps"
    with pytest.raises(ConfigError, match="at:  the optimizers' steps"):
        shardwise.full_state_dict(pair.split)  # of which no loop over data ranks alone would know
    return []


AT_TP = (
    *(closures, plain_adamw, plain_clipping, norms_by_hand, grad_scaler, reading_gradients),
    *(fused_adamw, foreach_adamw, clipping_by_value, averaged_model, functional_gradients, inner_backward),
    *(second_derivatives, two_models, drifted_replicas, head_by_itself, transforms),
    *(mask_for_each_head, trained_prefix, nothing_to_train, untied_later, other_learning_rates, other_directories),
)
ALONE = (head_by_itself, embedding_by_itself)
CASES = {
    "tp2": AT_TP,
    "fsdp2.tp2": (plain_clipping, norms_by_hand, grad_scaler, reading_gradients),
    "tp2+sp": (closures, plain_clipping, *ALONE, positions_that_restart, layers_run_again),
    "fsdp2": (
        *(closures, plain_clipping, changed_while_gathered, *ALONE, inner_backward, hooks_on_gradients),
        *(interrupted_backward, sums_put_off, nothing_to_train, other_learning_rates, other_calls),
        *(autocast_around_steps, norms_by_hand, grad_scaler, reading_gradients),
    ),
    "pp2": (positions_that_restart, parts_of_stages, norms_of_some),
}


def run_case(mesh, layout, case):
    return globals()[case](Pair(layout, mesh))


@pytest.mark.parametrize(("layout", "case"), [(layout, case.__name__) for layout in CASES for case in CASES[layout]])
def test_a_loop_of_torch_calls_trains_as_the_unsplit_model_does(on_ranks, layout, case):
    assert not any(on_ranks(run_case, layout=layout.removesuffix("+sp")))
