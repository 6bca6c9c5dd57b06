"""accelerate's loops on split models do what they do on the unsplit model in one process."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

import shardwise
from shardwise.accelerate.accelerator import SplitAccelerator
from shardwise.accelerate.overrides import check_overridden
from shardwise.accelerate.rows import Rows
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.trainer import prepare
from tests.families import FULL_PRODUCT, tiny_model
from tests.oracle import differing
from tests.trainer.modules import build

pytestmark = pytest.mark.spawn

GLOBAL_ROWS = 4
EXACT = 1e-5


def rows(number):
    """Random tokens, with fewer targets in some rows than in others."""
    made = []
    for row in range(number):
        ids = torch.randint(3, 96, (9,), generator=torch.Generator().manual_seed(row))
        made.append({"input_ids": ids, "labels": ids.where(torch.arange(9) >= row % 7, -100), "row": torch.tensor(row)})
    return made


def new_accelerator(**options):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


class Run:
    """A user's script: what `prepare` returned, and a loop over it."""

    def __init__(self, accelerator, prepared, model, *, size=1, number=10, splits=False):
        self.accelerator = accelerator
        batch_size = GLOBAL_ROWS if splits else GLOBAL_ROWS // size
        order = torch.Generator().manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        unit = 1 if splits else size
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8 ** (step / unit))
        loader = DataLoader(rows(number), batch_size, shuffle=True, generator=order)
        self.model, self.optimizer, self.loader, self.scheduler = prepared(model, optimizer, loader, scheduler)
        self.losses, self.norms, self.rates = [], [], []

    def train(self, *, epochs=1, skipped=0, stop=math.inf):
        accelerator = self.accelerator
        self.model.train()
        for epoch in range(epochs):
            loader = self.loader if epoch or not skipped else accelerator.skip_first_batches(self.loader, skipped)
            for index, batch in enumerate(loader):
                if index == stop:
                    break
                batch.pop("row")
                with accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(accelerator.gather(loss.detach()).mean()))
                self.rates.append(self.scheduler.get_last_lr()[0])
        return self


def unsplit_run(number, accumulate, **options):
    accelerator = new_accelerator(gradient_accumulation_steps=accumulate)
    return Run(accelerator, accelerator.prepare, tiny_model("llama"), number=number).train(**options)


def split_run(mesh, number=10, accumulate=1, splits=False, **options):
    accelerator = new_accelerator(
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=splits),
        **options,
    )
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    return Run(
        accelerator, lambda *each: prepare(accelerator, *each), model, size=mesh.data_size, number=number, splits=splits
    )


def curve(mesh, number, accumulate, splits):
    run = split_run(mesh, number, accumulate, splits).train(epochs=2)
    return run.losses, run.norms, run.rates, run.accelerator.get_state_dict(run.model), find_unequal_replicas(run.model)


@pytest.mark.parametrize(
    ("layout", "number", "accumulate", "splits"),
    [
        ("tp2", 10, 3, False),
        ("fsdp2", 13, 1, True),
        ("ddp2", 13, 3, False),
        ("fsdp2.tp2", 13, 1, False),
        ("pp2.ddp2", 11, 3, False),
        *[("fsdp2", 11, 3, False), ("ddp2", 11, 1, False), ("pp2", 10, 3, False)] * FULL_PRODUCT,
    ],
)
def test_a_loop_has_the_curve_of_one_process(on_ranks, layout, number, accumulate, splits):
    wanted = unsplit_run(number, accumulate, epochs=2)
    parameters = wanted.model.state_dict()
    for losses, norms, rates, state, unequal in on_ranks(curve):
        assert losses == pytest.approx(wanted.losses, abs=EXACT)
        assert norms == pytest.approx(wanted.norms, rel=EXACT)
        assert rates == pytest.approx(wanted.rates, rel=1e-12)
        assert not [problem for name in state for problem in differing(name, state[name], parameters[name], EXACT)]
        assert not unequal


def from_logits(run):
    """An epoch of 5 rows, with a loss that the loop computes."""
    for batch in run.loader:
        ids = batch["input_ids"]
        logits = run.model(input_ids=ids).logits
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        targets = batch["labels"].where(batch["labels"] < 0, ids)[:, -1]  # one in each row
        run.accelerator.backward(torch.nn.functional.cross_entropy(whole[:, -2], targets))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.accelerator.get_state_dict(run.model)


def from_split_logits(mesh):
    return from_logits(split_run(mesh, 5))


def of_inputs(run):
    """Losses of an epoch of 7 rows whose labels are the inputs."""
    return [run.model(input_ids=each["input_ids"], labels=each["input_ids"]).loss.item() for each in run.loader]


def of_split_inputs(mesh):
    run = split_run(mesh, 7)
    accelerator = run.accelerator
    accelerator.rows = Rows((2, 1), mesh.data_rank, fills=False)
    assert accelerator.gather_for_metrics(torch.ones(1)).tolist() == [1.0, 1.0], "a number of each rank"
    assert accelerator.gather_for_metrics(torch.ones(3 - mesh.data_rank)).tolist() == [1.0] * 3
    return of_inputs(run)


def in_loops_in_loops(mesh):
    """What is gathered of a last batch after another loader was read, to its end and not."""
    accelerator = new_accelerator()
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    _, outer, inner = prepare(accelerator, model, DataLoader(rows(7), 2), DataLoader(rows(5), 2))
    found = []
    for batch in outer:
        assert len([*inner]) + len([next(iter(inner))]) > 2
        found += accelerator.gather_for_metrics(batch["row"]).tolist()
    return found


@pytest.mark.parametrize("layout", ["ddp2"])
def test_rows_are_those_of_the_batch_after_another_loader(on_ranks, layout):
    assert on_ranks(in_loops_in_loops) == [[*range(7)]] * 2


def numbered(mesh=None):
    """Losses of an epoch of 6 rows, one number each."""
    accelerator = new_accelerator()
    held = [{**each, "labels": each["row"].float()} for each in rows(6)]
    model, loader = build("numbers"), DataLoader(held, GLOBAL_ROWS // (mesh.data_size if mesh else 1))
    if mesh is None:
        model, loader = accelerator.prepare(model, loader)
    else:
        model, loader = prepare(accelerator, shardwise.parallelize(model, mesh), loader)
    return [model(input_ids=each["input_ids"], labels=each["labels"]).loss.item() for each in loader]


@pytest.mark.parametrize("layout", ["ddp4"])
def test_a_copied_number_does_not_count(on_ranks, layout):
    for losses in on_ranks(numbered):
        assert losses == pytest.approx(numbered(), abs=EXACT)


@pytest.mark.parametrize("layout", ["ddp2"])
def test_copies_of_inputs_that_are_labels_do_not_count(on_ranks, layout):
    accelerator = new_accelerator()
    wanted = of_inputs(Run(accelerator, accelerator.prepare, tiny_model("llama"), number=7))
    for losses in on_ranks(of_split_inputs):
        assert losses == pytest.approx(wanted, abs=EXACT)


@pytest.mark.parametrize("layout", ["ddp2"])
def test_a_loss_of_logits_is_a_number_on_a_rank_without_rows(on_ranks, layout):
    accelerator = new_accelerator()
    wanted = from_logits(Run(accelerator, accelerator.prepare, tiny_model("llama"), number=5))
    for state in on_ranks(from_split_logits):
        assert not [problem for name in state for problem in differing(name, state[name], wanted[name], EXACT)]


def halves(mesh, directory):
    """Saves at `fsdp2` after two steps, or goes on at another layout."""
    state = directory / "checkpoints" / "checkpoint_0"
    project = ProjectConfiguration(project_dir=str(directory), automatic_checkpoint_naming=True, total_limit=1)
    run = split_run(mesh, 15, 2, splits=True, project_config=project)
    run.accelerator.register_for_checkpointing(counter := Counter())
    if not state.exists():
        counter.number = 7
        run.train(stop=2)
        assert run.accelerator.save_state() == str(state)
        return run.losses
    run.accelerator.load_state(*([str(state)] if mesh.data_size > 1 else []))
    assert counter.number == 7
    return run.train(skipped=2).losses


class Counter:
    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_a_state_goes_on_at_another_layout(on_ranks, tmp_path):
    wanted = unsplit_run(15, 2).losses
    for losses in on_ranks(halves, layout="fsdp2", directory=tmp_path):
        assert losses == pytest.approx(wanted[:2], abs=EXACT)
    on_ranks.end()  # they hold the lock of the directory
    for layout in ("tp2", "ddp2"):
        for losses in on_ranks(halves, layout=layout, directory=tmp_path):
            assert losses == pytest.approx(wanted[2:], abs=EXACT)


def evaluate(mesh):
    """What is gathered of 10, 11 and 13 rows, by an evaluation that takes the model's loss and predictions."""
    found = []
    for number in (10, 11, 13):
        accelerator = new_accelerator()
        model, loader = prepare(
            accelerator, shardwise.parallelize(tiny_model("llama"), mesh), DataLoader(rows(number), 2)
        )
        gathered = {"row": [], "loss": [], "name": [], "prediction": []}
        for batch in loader:
            row = batch.pop("row")
            with torch.no_grad():
                output = model(**batch)
            pair = accelerator.gather_for_metrics({"row": row, "prediction": output.logits.argmax(-1)})
            gathered["row"] += pair["row"].tolist()
            gathered["prediction"] += pair["prediction"].tolist()
            gathered["loss"] += accelerator.gather_for_metrics(output.loss.repeat(2)).tolist()
            gathered["name"] += accelerator.gather_for_metrics([f"row {each}" for each in row.tolist()])
        found.append(gathered)
    return found


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "pp2"])
def test_gathered_metrics_have_each_row_once_and_in_order(on_ranks, layout):
    model, per_batch = tiny_model("llama"), 2 if layout in ("tp2", "pp2") else 4
    for found in on_ranks(evaluate):
        for number, gathered in zip((10, 11, 13), found, strict=True):
            assert gathered["row"] == [*range(number)]
            assert gathered["name"] == [f"row {row}" for row in range(number)]
            held = rows(number)
            batches = [held[first : first + per_batch] for first in range(0, number, per_batch)]
            wanted, predicted = [], []
            for batch in batches:
                stacked = {name: torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")}
                output = model(**stacked)
                wanted += [float(output.loss.detach())] * len(batch)
                predicted += output.logits.argmax(-1).tolist()
            assert gathered["loss"] == pytest.approx(wanted, abs=EXACT)
            assert gathered["prediction"] == predicted


def calls(mesh, directory):
    """What else an accelerator does, over two data ranks of two tp ranks."""
    run = split_run(mesh)
    accelerator, model = run.accelerator, run.model
    set_seed(3, device_specific=True)  # which counts all ranks
    loader = prepare(accelerator, model, DataLoader(rows(5), 2))[1]
    drawn = torch.random.initial_seed()
    with accelerator.split_between_processes([*"abc"]) as part, accelerator.join_uneven_inputs([model]):
        pass
    ran = []
    accelerator.on_main_process(ran.append)(-1)
    accelerator.on_last_process(ran.append)(-2)
    with accelerator.main_process_first(), accelerator.autocast():
        pass
    before = accelerator.check_trigger()
    if mesh.rank == 1:
        accelerator.set_trigger()
    triggered = accelerator.check_trigger(), accelerator.check_trigger()
    reduced = accelerator.reduce(torch.tensor(float(mesh.rank))), accelerator.reduce(torch.tensor(1.0), "mean")
    padded = accelerator.pad_across_processes(torch.ones(1 + mesh.data_rank))
    same = (
        accelerator.unwrap_model(model) is model and accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    )
    accelerator.save_model(model, str(directory / "model"))
    flags = accelerator.is_main_process, accelerator.is_last_process
    batch = next(iter(run.loader))
    batch.pop("row")
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    largest = max(float(each.abs().max()) for each in shardwise.full_gradients(model).values())
    freed = accelerator.free_memory(model, run.optimizer)
    return {
        "processes": (accelerator.num_processes, accelerator.process_index),
        "seed": drawn,
        "part": part,
        "ran": ran,
        "triggered": (before, *triggered),
        "reduced": [float(each) for each in reduced],
        "padded": padded.tolist(),
        "same": same,
        "flags": flags,
        "freed": freed,
        "held": (len(loader), len(accelerator.prepare(DataLoader(rows(8), 2)))),
        "largest": largest,
    }


@pytest.mark.parametrize("layout", ["fsdp2.tp2"])
def test_an_accelerator_counts_data_ranks(on_ranks, layout, tmp_path):
    found = on_ranks(calls, directory=tmp_path)
    assert [each["processes"] for each in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [each["seed"] for each in found] == [3, 3, 5, 5]
    assert [each["part"] for each in found] == [["a", "b"], ["a", "b"], ["c"], ["c"]]
    assert [each["ran"] for each in found] == [[-1], [], [], [-2]]
    assert [each["flags"] for each in found] == [(True, False), (False, False), (False, False), (False, True)]
    assert [each["triggered"] for each in found] == [(False, True, False)] * 4
    assert [each["reduced"] for each in found] == [[2.0, 1.0], [4.0, 1.0]] * 2
    assert [each["padded"] for each in found] == [[1.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
    assert all(each["same"] and each["freed"] == [None, None] and each["held"] == (2, 2) for each in found)
    assert all(each["largest"] == pytest.approx(1e-4) for each in found)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in tiny_model("llama").state_dict().items():
        assert torch.equal(saved[name], value), name


def deferred(mesh):
    """Gradients of two backwards, of which the first is not reduced, by `no_sync` and inside of it."""
    found = []
    for is_triggered in (False, True):
        accelerator = new_accelerator()
        model = prepare(accelerator, shardwise.parallelize(tiny_model("llama"), mesh)).train()
        first, second = (rows(2)[mesh.data_rank], rows(4)[2 + mesh.data_rank])

        def loss(each, model=model):
            return model(input_ids=each["input_ids"][None], labels=each["labels"][None]).loss

        with accelerator.no_sync(model):
            accelerator.backward(loss(first))
            accelerator.clip_grad_value_(model.parameters(), 1.0)  # reads them
            if is_triggered:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(loss(second))
        if not is_triggered:
            accelerator.backward(loss(second))
        found.append(shardwise.full_gradients(model))
    return found


@pytest.mark.parametrize("layout", ["fsdp2.tp2"])
def test_gradients_are_reduced_by_a_later_backward(on_ranks, layout):
    model, held = tiny_model("llama").train(), rows(4)
    for pair in (held[:2], held[2:]):
        model(**{name: torch.stack([row[name] for row in pair]) for name in ("input_ids", "labels")}).loss.backward()
    for found in on_ranks(deferred):
        for gradients in found:
            for name, value in model.named_parameters():
                assert not differing(name, gradients[name], value.grad, EXACT), name


def refusals(mesh, directory):
    """The errors of what cannot be."""

    def said(error, call):
        with pytest.raises(error) as caught:
            call()
        return str(caught.value)

    accelerator = new_accelerator()
    loader, other = DataLoader(rows(4), 2), torch.nn.Linear(2, 2)
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    found = [said(ConfigError, lambda: prepare(accelerator, loader))]
    accelerator.prepare(loader)
    found.append(said(ConfigError, lambda: prepare(accelerator, model)))
    run = split_run(mesh)
    accelerator, model = run.accelerator, run.model
    found.append(said(UnsupportedError, lambda: accelerator.prepare(other)))
    found.append(said(UnsupportedError, lambda: accelerator.save_state(directory / "a", safe_serialization=False)))
    hook = accelerator.register_save_state_pre_hook(lambda *each: None)
    found.append(said(UnsupportedError, lambda: accelerator.save_state(directory / "a")))
    accelerator.dataloader_config.use_stateful_dataloader = True  # whose place in the data would be lost
    hook.remove()
    found.append(said(UnsupportedError, lambda: accelerator.save_state(directory / "a")))
    accelerator.dataloader_config.use_stateful_dataloader = False
    accelerator.save_state(directory / "a")
    again = split_run(mesh, splits=True).accelerator
    found.append(said(UnsupportedError, lambda: again.load_state(directory / "a")))
    again.register_for_checkpointing(Counter())
    found.append(said(LoadError, lambda: again.load_state(directory / "a")))
    shardwise.save_checkpoint(directory, model=model, tag="b")
    found.append(said(LoadError, lambda: again.load_state(directory / "b")))
    found.append(said(ConfigError, again.save_state))
    numbers = [{**each, "labels": torch.zeros(1)} for each in rows(5)]
    uneven = accelerator.prepare(DataLoader(numbers[:3], 2))
    model.train()
    found.append(said(UnsupportedError, lambda: [*uneven]))
    assert len([*accelerator.prepare(DataLoader(numbers, 2))]) == 2  # one rank holds a copy alone
    with accelerator.no_sync(model):
        found.append(said(UnsupportedError, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)))
    assert not model.eval().training
    (batch,) = uneven
    batch.pop("row")
    found.append(said(UnsupportedError, lambda: model(**batch)))
    return found


@pytest.mark.parametrize("layout", ["ddp2"])
def test_what_cannot_be_is_said(on_ranks, layout, tmp_path):
    wanted = [
        "prepare without a split model",
        "an accelerator that is used already",
        "training a Linear that is not split",
        *["save_state of a split model with hooks, stateful loaders or options"] * 3,
        "going on with a scheduler that stepped 2 times for each step of the optimizer, and now 1",
        "does not hold what save_state of this script saves",
        "does not hold what save_state of this script saves",
        "no directory for a checkpoint",
        "a last batch of 3 rows for 2 data ranks, with numbers as labels",
        "clipping gradients that are not reduced yet, over ddp2",
        "the loss of a last batch of 3 rows for 2 data ranks, with numbers as labels",
    ]
    for found in on_ranks(refusals, directory=tmp_path):
        for text, said in zip(wanted, found, strict=True):
            assert text in said


def test_an_override_whose_target_is_gone_or_takes_other_arguments_is_an_error(monkeypatch):
    check_overridden(SplitAccelerator, Accelerator)
    for name, change in (("no_sync", None), ("is_last_process", None), ("reduce", lambda self, values: None)):
        with monkeypatch.context() as changed:
            changed.delattr(Accelerator, name) if change is None else changed.setattr(Accelerator, name, change)
            with pytest.raises(UnsupportedError, match=rf"Accelerator.{name} of accelerate \d"):
                check_overridden(SplitAccelerator, Accelerator)
