"""What is computed with the logits of a split model is what the unsplit model's logits give, gradients included."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn
from tests.families import tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn

VOCABULARY = 99  # odd: the ranks' parts are unequal


def accuracy(output, batch):
    return (output.logits.argmax(-1) == batch["labels"]).float()


def z_loss(output, batch):
    return output.loss + 1e-2 * torch.logsumexp(output.logits, -1).pow(2).mean()


def distilled(output, batch):
    teacher = torch.linspace(-1, 1, VOCABULARY).expand(output.logits.shape)
    return output.loss + F.kl_div(F.log_softmax(output.logits, -1), teacher.softmax(-1), reduction="batchmean")


def own_loss(output, batch):
    return F.cross_entropy(output.logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


def written_into(output, batch):
    output.logits[..., 0] = 0.0
    return (output.logits + torch.ones(VOCABULARY)).square().mean()


def best(output, batch):
    return output.logits.detach().float().topk(3, dim=-1).values.cpu()


def numbers(output, batch):
    values = output.logits.detach()
    return torch.tensor([values[0, 0, 5].item(), float(values.max()), *values.numpy()[1, 2, -3:]])


USES = (accuracy, z_loss, distilled, own_loss, written_into, best, numbers)


def use_all(layout):
    """For every use, what differs from the unsplit model, and the all-gathers it made."""
    with shardwise.Mesh.open(layout) as mesh:
        found = {}
        for sequence_parallel in (False, True):
            whole = tiny_model("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
            split = shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)
            batch = tiny_batch(whole)
            for use in USES:
                try:
                    found[use.__name__, sequence_parallel] = compare(use, whole, split, batch)
                except (RuntimeError, TypeError) as error:  # on every rank alike
                    found[use.__name__, sequence_parallel] = [str(error)]
        return found


def compare(use, whole, split, batch):
    wanted, output = use(whole(**batch), batch), split(**batch)
    assert isinstance(output.logits, DTensor) and output.logits.to_local().shape[-1] < VOCABULARY
    assert tuple(output.logits.shape) == (*batch["input_ids"].shape, VOCABULARY) and "DTensor" in f"{output.logits}"
    with CommunicationCount() as count:
        value = use(output, batch)
        use(output, batch)  # a second look joins nothing more
    problems = differing("value", value.detach(), wanted.detach(), 1e-5)
    if wanted.requires_grad:
        wanted.backward()
        with torch.autograd.set_detect_anomaly(mode=use is z_loss):  # asks of gradients in parts, too
            value.backward()
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        problems += differing_gradients(shardwise.full_gradients(split), expected)
        whole.zero_grad()
        split.zero_grad()
    return problems + [f"{number} of {call}" for call, number in count.calls.items() if number > 1] * (
        len(count.calls) != 1
    )


@pytest.fixture(scope="module")
def found():
    return spawn(use_all, 2, "tp2")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_logits_are_full_for_whoever_computes_with_them(found, use, sequence_parallel):
    assert [rank[use.__name__, sequence_parallel] for rank in found] == [[], []]


class Masked(LlamaForCausalLM):
    """Writes into its logits, which no split tensor can do."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state) * 2
        logits[..., :3] = -1e4
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean() * 1e-9
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def write_in_forward():
    said = []
    logging.getLogger("shardwise.loss").addFilter(lambda record: said.append(record.getMessage()) or True)
    with shardwise.Mesh.open("tp2") as mesh:
        plain = tiny_model("llama", vocab_size=VOCABULARY)
        whole = Masked(plain.config).eval()
        whole.load_state_dict(plain.state_dict())
        split = shardwise.parallelize(copy.deepcopy(whole), mesh)
        batch = tiny_batch(whole)
        wanted = whole(**batch)
        wanted.loss.backward()
        split(**batch)
        found = split(**batch)
        found.loss.backward()
        problems = differing("loss", found.loss.detach(), wanted.loss.detach(), 1e-5)
        problems += differing("logits", found.logits.detach() * 1, wanted.logits.detach(), 1e-4)
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        return problems + differing_gradients(shardwise.full_gradients(split), expected), said


def test_a_forward_may_write_into_its_logits_and_it_is_said_once():
    for problems, said in spawn(write_in_forward, 2):
        assert problems == []
        assert len(said) == 1 and "Masked gathers the logits of every forward" in said[0] and "__setitem__" in said[0]


def look_alone():
    with shardwise.Mesh.open("tp2", timeout_seconds=4) as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh).train()
        batch = tiny_batch(model)
        output = model(**batch)
        said = ""
        if mesh.rank == 0:
            with pytest.raises(RankError) as raised:
                output.logits.argmax(-1)
            said = str(raised.value)
        else:
            time.sleep(5)  # it writes, say, or is in a debugger
        output.loss.backward()  # nothing was communicated, so that the ranks are still together
        return said, float(model(**batch).logits.detach().sum())


def test_a_rank_that_looks_alone_is_told_so():
    (said, total), (_, other) = spawn(look_alone, 2)
    assert "rank 0 looks at the logits" in said and "rank 1 did not come to join it within 4 seconds" in said
    assert total == other


def as_tuple():
    with shardwise.Mesh.open("tp2") as mesh:
        whole = tiny_model("llama")
        batch = tiny_batch(whole)
        split = shardwise.parallelize(copy.deepcopy(whole), mesh)
        with torch.no_grad():
            pairs = zip(split(**batch, return_dict=False), whole(**batch, return_dict=False), strict=True)
            return [
                problem
                for found, wanted in pairs
                if isinstance(wanted, torch.Tensor)
                for problem in differing("output", found * 1, wanted, 1e-5)
            ]


def test_logits_in_a_tuple_are_full_too():
    assert spawn(as_tuple, 2) == [[], []]
