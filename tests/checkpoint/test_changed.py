"""What has changed between a save and a load: the model, the precision, the ranks, the clock, the directory."""

from __future__ import annotations

import random
import shutil
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

import shardwise
from shardwise.checkpoint.store import find_tag
from shardwise.checkpoint.stored import open_checkpoint
from shardwise.errors import LayoutError, LoadError
from shardwise.parameters.registry import local_part
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.sharding.layout import Piece
from shardwise.weights.write import PretrainedWriter
from tests.checkpoint.training import Training, differing
from tests.families import rows_of, tiny_model

pytestmark = pytest.mark.single


@pytest.fixture(scope="module")
def mesh():
    return shardwise.Mesh.open("tp1")


@pytest.fixture(scope="module")
def training(mesh):
    return Training(mesh, "llama")


def tags_of(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_every_nth_is_kept_for_good_and_a_clock_that_goes_back_deletes_nothing_newer(training, tmp_path, monkeypatch):
    own = time.time
    for number, step in enumerate((10, 15, 20, 25, 5)):
        monkeypatch.setattr(time, "time", lambda number=number: own() - 10**6 * number)
        training.save(tmp_path, extra={"step": step}, keep_last=2, keep_every=10, async_save=number % 2 == 1)
    assert training.load(tmp_path) == {"step": 5}, "the last one that was saved"
    assert tags_of(tmp_path) == ["latest", "step-10", "step-20", "step-25", "step-5"]


def test_a_checkpoint_that_somebody_has_renamed_or_copied_is_found_and_never_deleted(training, tmp_path):
    training.save(tmp_path, extra={"step": 1})
    (tmp_path / "step-1").rename(tmp_path / "best")
    assert find_tag(tmp_path, None).name == "best"
    for step in (2, 3):
        training.save(tmp_path, extra={"step": step}, keep_last=1)
        shutil.copytree(tmp_path / f"step-{step}", tmp_path / f"copy-{step}")
    assert set(tags_of(tmp_path)) == {"best", "step-3", "copy-2", "copy-3", "latest"}


def test_a_volumes_own_directory_is_no_checkpoint(training, tmp_path, monkeypatch):
    """Only root may look into `lost+found`; a checkpoint that may not be looked into is an error."""
    training.save(tmp_path, extra={"step": 1})
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "manifest.json").write_text("nobody looks")
    assert training.load(tmp_path) == {"step": 1}
    real = Path.is_file

    def is_file(path):
        if path.parent.name == "step-1":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(LoadError, match=r"cannot look into[\s\S]*Permission denied"):
        training.load(tmp_path)


def test_what_others_export_to_the_directory_meanwhile_is_theirs(training, tmp_path):
    """Also the old model that one of them left beside its place, where it was killed between its two moves."""
    facts = [("a", torch.float32, (2,))]
    (tmp_path / ".old.replaced").mkdir(parents=True)
    (tmp_path / ".old.replaced" / "model.safetensors").touch()
    with PretrainedWriter(tmp_path / "new", max_shard_bytes=100, planned=facts) as writer:
        training.save(tmp_path)
        writer.add("a", torch.zeros(2))
        writer.finish()
    assert (tmp_path / "new" / "model.safetensors").is_file()
    assert (tmp_path / ".old.replaced" / "model.safetensors").is_file()


def test_latest_decides_nothing_and_a_link_is_followed(training, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for step in (1, 2):
        training.save(tmp_path / "link", extra={"step": step}, keep_last=1)
    (tmp_path / "real" / "latest").write_text("step-99\n")
    assert training.load(tmp_path / "link") == {"step": 2}
    training.save(tmp_path / "link" / ".." / "link", extra={"step": 3}, keep_last=1)
    assert tags_of(tmp_path / "real") == ["latest", "step-3"]
    assert (tmp_path / "real" / "latest").read_text() == "step-3\n"


def with_buffer(mesh, *values):
    whole = tiny_model("llama", num_key_value_heads=2)
    if values:
        whole.model.register_buffer("seen", torch.tensor(values))
    return shardwise.parallelize(whole, mesh)


@pytest.mark.parametrize(
    ("saved", "there", "says"),
    [
        ((1.0,), (), "unexpected: model.seen"),
        ((), (1.0,), "missing: model.seen"),
        ((1.0,), (1.0, 2.0), r"of other shapes: model.seen: \[1\] in the checkpoint, \[2\] in the model"),
    ],
)
def test_other_buffers_are_named(mesh, tmp_path, saved, there, says):
    shardwise.save_checkpoint(tmp_path, model=with_buffer(mesh, *saved))
    model = with_buffer(mesh, *there)
    with pytest.raises(LoadError, match=says):
        shardwise.load_checkpoint(tmp_path, model=model)
    assert not there or model.model.seen.tolist() == list(there)


def test_ties_that_were_none_are_named(mesh, tmp_path):
    tied, untied = (Training(mesh, "llama", model={"tied": tied}) for tied in (True, False))
    tied.save(tmp_path / "tied")
    untied.save(tmp_path / "untied")
    with pytest.raises(LoadError, match=r"missing: lm_head.weight"):
        untied.load(tmp_path / "tied")
    with pytest.raises(LoadError, match=r"unexpected: lm_head.weight"):
        tied.load(tmp_path / "untied")


PRECISIONS = {
    "float32": None,
    "bfloat16": Precision(compute="bfloat16", params="float32"),
    "float16": Precision(compute="float16", params="float32", nonfinite="skip"),
    "pure bfloat16": Precision(compute="bfloat16", params="bfloat16"),
}


@pytest.mark.filterwarnings("ignore:parameters are kept in bfloat16:UserWarning")
@pytest.mark.parametrize(
    ("then", "now"), [("bfloat16", "float16"), ("float16", "pure bfloat16"), ("pure bfloat16", "float32")]
)
def test_another_precision_loads_the_same_values_in_its_dtype(mesh, tmp_path, then, now):
    """Those of parameters and of states that follow them; what the old precision trained on is what is left of them."""
    here = Training(mesh, "llama", precision=PRECISIONS[then])
    here.steps(1)
    here.save(tmp_path)
    there = Training(mesh, "llama", lost=True, precision=PRECISIONS[now])
    there.load(tmp_path)
    saved, loaded = here.whole(), there.whole()
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.to(loaded[name].dtype), loaded[name]), name
    dtypes = {value.dtype for name, value in loaded.items() if name.endswith(("weight", "exp_avg"))}
    assert dtypes == {torch.bfloat16 if now.startswith("pure") else torch.float32}
    assert all(loss > 0 for loss in there.steps(1))


@pytest.mark.parametrize(("then", "now"), [(None, "bfloat16"), ("bfloat16", None)])
def test_frozen_parameters_are_loaded_in_the_dtype_in_which_they_rest(mesh, tmp_path, then, now):
    def build(precision, *, lost):
        whole = tiny_model("llama", num_key_value_heads=2)
        whole.lm_head.weight.requires_grad_(False)
        if lost:
            whole.lm_head.weight.data.mul_(1.5)
        model = shardwise.parallelize(whole, mesh, precision=PRECISIONS[precision or "float32"])
        return model, model.lm_head.weight

    model, weight = build(then, lost=False)
    shardwise.save_checkpoint(tmp_path, model=model)
    other, loaded = build(now, lost=True)
    shardwise.load_checkpoint(tmp_path, model=other)
    assert torch.equal(weight.to(loaded.dtype), loaded)
    assert loaded.dtype == (torch.bfloat16 if now else torch.float32)


def test_a_rank_may_begin_where_an_optimizer_of_torch_ended(mesh, tmp_path):
    model = tiny_model("llama", num_key_value_heads=2)
    shardwise.parallelize(model, mesh)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    plain.step()
    shardwise.save_checkpoint(tmp_path, model=model, optimizer=plain)
    other = shardwise.parallelize(tiny_model("llama", num_key_value_heads=2), mesh)
    built = shardwise.build_optimizer(other, torch.optim.AdamW, lr=1.0)
    shardwise.load_checkpoint(tmp_path, model=other, optimizer=built)
    assert {group["lr"] for group in built.param_groups} == {1e-3}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(plain.state[one]["exp_avg"], built.state[two]["exp_avg"])


class RowSums(torch.optim.SGD):
    """With a state that has another shape than its parameter, and follows from no layout."""


def with_row_sums(model, *, scale):
    optimizer = RowSums(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            optimizer.state[parameter]["rows"] = local_part(parameter).detach().sum(1) * scale
    return optimizer


def _goes_on_alone(mesh, base):
    """Whether such a state comes back on the ranks that had it."""
    model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=2, vocab_size=97), mesh)
    shardwise.save_checkpoint(f"{base}/rows", model=model, optimizer=with_row_sums(model, scale=1), tag="a")
    other, expected = with_row_sums(model, scale=0), with_row_sums(model, scale=1)
    shardwise.load_checkpoint(f"{base}/rows", model=model, optimizer=other)
    return all(torch.equal(each["rows"], expected.state[key]["rows"]) for key, each in other.state.items())


def on_other_ranks(mesh, base):
    """Loads what one process saved: what is refused, what is drawn afterwards, and what a save in the middle of an
    accumulation changes.
    """
    errors = []
    training = Training(mesh, "llama", "sgd", lost=True)
    before = training.whole()
    with pytest.raises(LoadError) as raised:
        training.load(base, "a")
    errors.append(str(raised.value).splitlines()[0])
    assert not differing(training.whole(), before)
    training = Training(mesh, "llama", lost=True)
    own, training.schedule = training.schedule, torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 9)
    with pytest.raises(LoadError) as raised:
        training.load(base, "a")
    errors.append(str(raised.value).splitlines()[0])
    training.schedule = own
    training.load(base, "a")
    drawn = float(torch.rand(())), float(numpy.random.rand()), random.random()
    after = [_accumulated(mesh, base, saves=saves) for saves in (False, True)]
    return errors, drawn, differing(*after), _goes_on_alone(mesh, base)


def _accumulated(mesh, base, *, saves):
    training = Training(mesh, "llama", fsdp=FsdpPolicy(zero_stage=1))
    rows = rows_of(training.batch, mesh)
    for half in range(2):
        training.model(**{name: value[half::2] for name, value in rows.items()}).loss.backward()
        if saves and half == 0:
            training.save(f"{base}/{mesh.shape}", tag="middle")
    training.optimizer.step()
    training.optimizer.zero_grad()
    return training.whole()


@pytest.mark.spawn
def test_ranks_refuse_draw_and_accumulate_alike(mesh, tmp_path, on_ranks):
    here = Training(mesh, "llama")
    here.steps(1)
    torch.manual_seed(3)
    here.save(tmp_path, tag="a")
    first, second = on_ranks(on_other_ranks, layout="fsdp2", base=str(tmp_path))
    errors = first[0]
    assert errors == second[0]
    assert "torch.optim.adamw.AdamW, the optimizer is torch.optim.sgd.SGD" in errors[0]
    assert errors[1] == "the checkpoint has no state of a CosineAnnealingLR: that of a MultiStepLR"
    own = float(torch.rand(()))
    assert len({own, first[1][0], second[1][0]}) == 3, "with more data ranks each begins a stream of its own"
    assert first[2] == second[2] == [], "a save in the middle of an accumulation leaves the gradients"
    assert first[3] and second[3]
    odd = shardwise.parallelize(tiny_model("llama", num_key_value_heads=2, vocab_size=97), mesh)
    here_too = with_row_sums(odd, scale=0)
    with pytest.raises(LoadError, match=r"embed_tokens.weight/rows fits no layout but its own[\s\S]*saved with fsdp2"):
        shardwise.load_checkpoint(tmp_path / "rows", model=odd, optimizer=here_too)
    with open_checkpoint(tmp_path / "fsdp2" / "middle") as stored:
        rows = ((0, 48), (0, 64))
        stored.plan("model/model.embed_tokens.weight", [Piece(rows, rows)])
        assert len(stored._parts) == 1, "the other rank's part is not looked at"


def test_gradients_of_other_weights_are_dropped(mesh, training, tmp_path):
    training.save(tmp_path, tag="a")
    other = Training(mesh, "llama", lost=True)
    other.model(**other.batch).loss.backward()
    other.load(tmp_path)
    assert other.steps(2) == training.steps(2)


def test_what_is_read_while_another_saves_and_deletes_is_whole_or_an_error(mesh, training, tmp_path):
    training.save(tmp_path, extra={"step": 0})
    other, found, errors = Training(mesh, "llama", lost=True), [], []
    saves = threading.Thread(
        target=lambda: [training.save(tmp_path, extra={"step": step}, keep_last=1) for step in range(1, 13)]
    )
    saves.start()
    while saves.is_alive():
        try:
            found.append(other.load(tmp_path)["step"])
        except LoadError as error:
            errors.append(str(error))
    saves.join()
    assert other.load(tmp_path) == {"step": 12}
    assert found == sorted(found)
    assert not any("loaded in part" in error for error in errors)
    assert not differing(other.whole(), training.whole())


def test_a_link_to_another_checkpoint_is_not_saved_through(training, tmp_path):
    training.save(tmp_path, tag="step-1")
    (tmp_path / "best").symlink_to("step-1")
    with pytest.raises(LoadError, match="best is a link to step-1"):
        training.save(tmp_path, tag="best")
    assert find_tag(tmp_path, "step-1").is_dir()


def save_unlike_frozen(mesh, base):
    model = shardwise.parallelize(tiny_model("llama").requires_grad_(requires_grad=False), mesh)
    with torch.no_grad():
        model.model.norm.weight.add_(mesh.rank)
    with pytest.raises(LayoutError, match="different copies of model.norm.weight"):
        shardwise.save_checkpoint(base, model=model, tag="a")


@pytest.mark.spawn
def test_frozen_copies_that_differ_are_not_mixed(on_ranks, tmp_path):
    on_ranks(save_unlike_frozen, layout="ddp2", base=str(tmp_path))
