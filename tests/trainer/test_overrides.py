"""Each touch of a Trainer on a split model: rows, losses of one's own, optimizers, precision, and what is refused."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

import shardwise
from shardwise.accelerate.overrides import check_overridden
from shardwise.accelerate.rows import Dealer
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.trainer import Trainer, adapt
from shardwise.trainer.adapted import SplitTrainer
from shardwise.trainer.losses import _passes_numbers_on, _reads_number
from tests.families import FULL_PRODUCT
from tests.trainer.modules import Over, Rows, arguments, build, curve, split_trainer

pytestmark = pytest.mark.spawn


def own_loss(output, labels, num_items_in_batch=None):
    """Half of the usual one."""
    logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 0.5 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class OfRows(transformers.Trainer):
    """A loss that is a mean over rows, and not over targets."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = output.logits.float().logsumexp(-1).mean()
        return (loss, output) if return_outputs else loss


class Textbook(transformers.Trainer):
    """A loss that is a mean over classes, of which a copy alone has none."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = torch.nn.functional.cross_entropy(output.logits, labels)
        return (loss, output) if return_outputs else loss


class Inner(torch.nn.Module):
    def forward(self, labels=None, **kwargs):
        return self.loss_function(labels, **kwargs)


class Outer(torch.nn.Module):
    """As of Kosmos-2: another module computes the loss."""

    def __init__(self):
        super().__init__()
        self.text = Inner()

    def forward(self, labels=None, **kwargs):
        return self.text(labels=labels, **kwargs)


class Named(torch.nn.Module):
    def forward(self, labels=None, num_items_in_batch=None):
        return self.loss_function(labels, num_items_in_batch=num_items_in_batch)


class OldStyle(transformers.Trainer):
    """Knows the number of targets, and does not pass it on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


class Attributes(transformers.Trainer):
    """Reads its batch by attributes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(input_ids=inputs.input_ids, labels=inputs.labels, num_items_in_batch=num_items_in_batch)
        loss = output.loss * self.accelerator.num_processes if num_items_in_batch is not None else output.loss
        return (loss, output) if return_outputs else loss


def encoded(examples):
    return transformers.BatchEncoding(transformers.default_data_collator(examples))


class Focal(torch.nn.Module):
    def forward(self, output, labels, num_items_in_batch=None):
        return output.logits.sum() * labels.sum()


class Penalized(transformers.Trainer):
    """A term beside the loss of the model, which ignores the number of targets."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        loss = loss + 0.1 * output.logits.square().mean()
        return (loss, output) if return_outputs else loss


class Nested(transformers.Trainer):
    """A mean over a batch in a list, which has no tensor of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        output = model(**inputs["one"][0])
        return (output.loss, output) if return_outputs else output.loss


def nested(examples):
    return {"one": [transformers.default_data_collator(examples)]}


def squares(output, labels, num_items_in_batch=None):
    """Of numbers that must be above -10."""
    return (output.logits.squeeze(-1) - (labels + 10).sqrt()).square().sum() / num_items_in_batch


def doubled(examples):
    """Two rows of each example."""
    turned = [{name: value.flip(0) for name, value in row.items()} for row in examples]
    return transformers.default_data_collator([row for pair in zip(examples, turned, strict=True) for row in pair])


class Counting:
    """A mixin of a user's."""

    def training_step(self, *args, **options):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().training_step(*args, **options)


class Ours(Counting, Trainer):
    """A script whose import alone has changed."""

    compute_loss = OfRows.compute_loss

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class Theirs(Counting, transformers.Trainer):
    compute_loss, create_optimizer = OfRows.compute_loss, Ours.create_optimizer


class Streamed(IterableDataset):
    def __init__(self, family, number):
        self.rows = Rows(family, number)

    def __iter__(self):
        return (self.rows[row] for row in range(len(self.rows)))


class Sharded(Streamed):
    """Each of several workers reads its own part."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


# By name: options of the arguments, and what else the Trainer is given; "rows": what makes the data.
OPTIONS = {
    "label_smoothing": ({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}, {}),
    "compute_loss_func": ({}, {"compute_loss_func": own_loss}),
    "subclass": ({"gradient_accumulation_steps": 2}, {"trainer": OfRows}),
    "subclass_of_ours": ({}, {"trainer": Theirs, "ours": Ours}),
    "subclassed_model": ({"gradient_accumulation_steps": 2}, {"family": "over"}),
    "old_style": ({"label_smoothing_factor": 0.1}, {"trainer": OldStyle}),
    "attributes": ({}, {"trainer": Attributes, "data_collator": encoded}),
    "textbook": ({}, {"trainer": Textbook, "family": "bert"}),
    "penalized": ({"gradient_accumulation_steps": 2}, {"trainer": Penalized, "family": "bert"}),
    "nested": (
        {"remove_unused_columns": False, "label_names": ["one"]},
        {"trainer": Nested, "data_collator": nested, "family": "vit"},
    ),
    "numbers": ({}, {"compute_loss_func": squares, "family": "numbers"}),
    "smoothed": ({"label_smoothing_factor": 0.1}, {"family": "gemma3"}),
    "doubled": ({}, {"data_collator": doubled}),
    "no_clipping": ({"max_grad_norm": 0.0, "include_num_input_tokens_seen": "all"}, {}),
    "sgd": ({"optim": "sgd"}, {}),
    "adagrad": ({"optim": "adagrad", "lr_scheduler_type": "cosine", "warmup_steps": 2}, {}),
    "checkpointing": ({"activation_checkpointing": True}, {}),
    "workers": ({"dataloader_num_workers": 2}, {}),
    "streamed": ({}, {"rows": Streamed}),
    "streamed_by_workers": ({"dataloader_num_workers": 2}, {"rows": Sharded}),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, {}),
    "dropped_last": ({"dataloader_drop_last": True}, {}),
    "flattened": ({}, {"data_collator": transformers.DataCollatorWithFlattening(return_seq_idx=False)}),
}


def train(mesh, option, directory):
    options, beside = OPTIONS[option]
    beside = dict(beside)
    family = beside.pop("family", "llama")
    kind, rows = adapt(beside.pop("trainer", transformers.Trainer)), beside.pop("rows", Rows)
    kind = beside.pop("ours", kind)
    split = 1 if "accelerator_config" in options else mesh.data_size
    given = arguments(directory, split, max_steps=6, **options)
    run = kind(shardwise.parallelize(build(family), mesh), given, train_dataset=rows(family, 13), **beside)
    run.train()
    assert not find_unequal_replicas(run.model)
    assert getattr(run, "num_calls", run.state.global_step) == run.state.global_step
    assert math.isfinite(run.evaluate(Rows(family, 5))["eval_loss"])
    return curve(run), run.state.num_input_tokens_seen, run.state.total_flos


@functools.cache
def unsplit(option):
    options, beside = OPTIONS[option]
    beside = dict(beside)
    family = beside.pop("family", "llama")
    kind, rows = beside.pop("trainer", transformers.Trainer), beside.pop("rows", Rows)
    beside.pop("ours", None)
    with tempfile.TemporaryDirectory() as directory:
        given = arguments(directory, max_steps=6, **options)
        run = kind(build(family), given, train_dataset=rows(family, 13), **beside)
        run.train()
    return curve(run), run.state.num_input_tokens_seen


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        *(("fsdp2", option) for option in OPTIONS if FULL_PRODUCT or "workers" not in option),  # a minute of processes
        *(("tp2", "label_smoothing"), ("pp2", "streamed"), ("pp2", "subclassed_model")),
        *[("tp2", option) for option in ("checkpointing", "subclass", "no_clipping", "streamed")] * FULL_PRODUCT,
        *[("pp2", option) for option in ("no_clipping", "checkpointing", "sgd")] * FULL_PRODUCT,
    ],
)
def test_every_option_does_what_it_does_in_one_process(on_ranks, tmp_path, layout, option):
    wanted, num_tokens = unsplit(option)
    for found, seen, flos in on_ranks(train, directory=str(tmp_path)):
        assert [each for pair in found for each in pair] == pytest.approx(
            [each for pair in wanted for each in pair], rel=1e-5, abs=1e-5
        )
        assert seen == num_tokens
        assert flos > 0 or option == "nested"


def read_rows(mesh, sampling, directory):
    """The rows of an epoch that this rank reads, after random numbers of its own."""
    torch.manual_seed(mesh.rank)
    run = split_trainer(mesh, "llama", directory, train_sampling_strategy=sampling)
    torch.manual_seed(mesh.rank)
    loader = run.get_train_dataloader()
    known = {
        tuple(row["input_ids"].tolist()): number
        for number, row in enumerate(map(Rows("llama", 13).__getitem__, range(13)))
    }
    return mesh.data_rank, [[known[tuple(row)] for row in batch["input_ids"].tolist()] for batch in loader]


@pytest.mark.parametrize("sampling", ["random", "group_by_length", "sequential"])
@pytest.mark.parametrize("layout", ["fsdp2.tp2"])
def test_rows_are_dealt_by_data_rank(on_ranks, tmp_path, layout, sampling):
    read = on_ranks(read_rows, directory=str(tmp_path))
    by_rank = dict(read)
    assert all(batches == by_rank[rank] for rank, batches in read), "tp ranks read the same rows"
    order = [row for pair in zip(by_rank[0], by_rank[1], strict=True) for batch in pair for row in batch]
    assert sorted(order[:13]) == list(range(13))
    assert order[13:] == [order[12]], "the last batch has one row, of which a rank without any has a copy"


def noise(mesh, directory):
    run = split_trainer(mesh, "llama", directory, neftune_noise_alpha=5.0, bf16=True, max_steps=2)
    run.train()
    return find_unequal_replicas(run.model), curve(run)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_noise_and_bfloat16_leave_copies_equal(on_ranks, tmp_path, layout):
    (unequal, first), *others = on_ranks(noise, directory=str(tmp_path))
    assert not unequal
    assert all(found == first for _, found in others)


def from_a_path(mesh, directory):
    """With `layout`, in processes whose groups accelerate has opened."""
    given = arguments(directory, max_steps=2, activation_checkpointing=True)
    run = Trainer(f"{directory}/model", given, train_dataset=Rows("llama", 8), layout="tp2", sequence_parallel=True)
    run.train()
    return curve(run)


@pytest.mark.parametrize("layout", ["tp2"])
def test_a_path_and_a_layout(on_ranks, tmp_path, layout):
    build("llama").save_pretrained(tmp_path / "model")
    given = arguments(tmp_path, max_steps=2)
    run = transformers.Trainer(build("llama"), given, train_dataset=Rows("llama", 8))
    run.train()
    for found in on_ranks(from_a_path, directory=str(tmp_path)):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in curve(run)], abs=1e-5)


def refused(mesh, options, beside, directory, family="llama"):
    with pytest.raises(UnsupportedError) as raised:
        split_trainer(mesh, family, directory, num_rows=15, beside=beside, **{"max_steps": 5, **options}).train()
    return str(raised.value)


def with_a_foreign_optimizer(mesh, directory):
    model = build("llama")
    given = arguments(directory, max_steps=2)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), None
    with pytest.raises(ConfigError) as raised:
        Trainer(model, given, train_dataset=Rows("llama", 8), layout="fsdp2", optimizers=optimizers).train()
    return str(raised.value)


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_an_optimizer_of_the_unsplit_model_is_refused(on_ranks, tmp_path, layout):
    assert all("not the split model's" in text for text in on_ranks(with_a_foreign_optimizer, directory=str(tmp_path)))


@pytest.mark.parametrize(
    ("layout", "options", "beside", "words"),
    [
        ("fsdp2", {"auto_find_batch_size": True}, {}, "auto_find_batch_size=True"),
        ("fsdp2", {"average_tokens_across_devices": False}, {}, "average_tokens_across_devices=False"),
        ("fsdp2", {"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance"),
        ("fsdp2", {"optim": "adafactor"}, {}, "Adafactor"),
        ("fsdp2", {"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches=True"),
        ("pp2", {"fp16": True}, {}, "fp16=True"),
        ("pp2", {"label_smoothing_factor": 0.1}, {}, "loss or a step of Trainer's own"),
        ("pp2", {}, {"compute_loss_func": own_loss}, "loss or a step of Trainer's own"),
    ],
)
def test_what_cannot_be_is_one_error(on_ranks, tmp_path, layout, options, beside, words):
    assert all(words in text for text in on_ranks(refused, directory=str(tmp_path)))


@pytest.mark.parametrize(("layout", "family"), [("pp2", "numbers")])
def test_numbers_as_labels_are_not_copied_in_a_pipeline(on_ranks, tmp_path, layout, family):
    for text in on_ranks(refused, directory=str(tmp_path), options={"rows": 6}, beside={"num_microbatches": 4}):
        assert "without labels of classes or tokens" in text


@pytest.mark.single
def test_wrong_arguments_of_the_adapter():
    with pytest.raises(TypeError, match="derive it from transformers.Trainer"):
        type("Own", (type("Between", (Trainer,), {}),), {"compute_loss": OfRows.compute_loss})
    with pytest.raises(TypeError, match="subclass of transformers.Trainer"):
        adapt(torch.nn.Linear)
    with pytest.raises(ConfigError, match="sequence_parallel= without a layout"):
        Trainer(build("llama"), sequence_parallel=True)
    assert adapt(Trainer) is Trainer
    assert adapt(OfRows) is adapt(OfRows)


@pytest.mark.single
def test_an_overridden_method_that_changes_is_an_error_with_its_name():
    class Renamed:
        pass

    with pytest.raises(UnsupportedError, match="Renamed"):
        check_overridden(SplitTrainer, Renamed)


@pytest.mark.single
@pytest.mark.parametrize(("num_rows", "size"), [(1, 2), (3, 2), (4, 2), (5, 4), (8, 4)])
def test_parts_hold_each_row_once_and_then_copies(num_rows, size):
    rows = list(range(num_rows))
    filled = [Dealer(size, rank, 9, fills=True).deal(rows) for rank in range(size)]
    assert len({len(part) for part, _ in filled}) == 1
    assert [row for part, dealt in filled for row in part[: dealt.own]] == rows
    for rank in range(size):
        part, dealt = Dealer(size, rank, 9, fills=False).deal(rows)
        assert len(part) == dealt.held
        assert part == (filled[rank][0][: dealt.own] or rows[:1])


class Saving(transformers.Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)


def with_a_loss_function(mesh, directory):
    model = build("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    run = adapt(Penalized)(shardwise.parallelize(model, mesh), arguments(directory), train_dataset=Rows("llama", 8))
    with pytest.raises(UnsupportedError, match="with a loss_function of your own"):
        run.train()


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_what_a_subclass_adds_to_is_checked_as_the_models_loss(on_ranks, tmp_path, layout):
    on_ranks(with_a_loss_function, directory=str(tmp_path))


def with_methods(mesh, directory):
    model, given = shardwise.parallelize(build("llama"), mesh), arguments(directory)
    with pytest.raises(UnsupportedError, match=r"Saving\._save with a split model"):
        adapt(Saving)(model, given)
    late = type(
        "Late", (transformers.Trainer,), {"__init__": lambda self, *_, args: super(late, self).__init__(model, args)}
    )
    with pytest.raises(ConfigError, match="a split model that is not the first argument"):
        adapt(late)(args=given)


@pytest.mark.parametrize("layout", ["tp1"])
def test_methods_that_would_not_be_called_are_refused(on_ranks, tmp_path, layout):
    on_ranks(with_methods, directory=str(tmp_path))


@pytest.mark.single
def test_losses_that_take_the_number_of_targets_are_told_by_the_code_of_the_forward():
    takes = transformers.LlamaForCausalLM, transformers.Qwen2_5OmniThinkerForConditionalGeneration, Over, Named
    ignores = transformers.BertForMaskedLM, transformers.T5ForConditionalGeneration
    found = [_passes_numbers_on(each.__new__(each)) for each in (*takes, *ignores, Outer)]
    assert found == [True, True, True, True, False, False, False] and _passes_numbers_on(Outer())
    read = [own_loss, functools.partial(own_loss, labels=1), Penalized.compute_loss, lambda **given: given["x"]]
    unread = [Textbook.compute_loss, functools.partial(Focal().forward, 1), Focal(), lambda output, **given: output]
    assert all(map(_reads_number, read)) and not any(map(_reads_number, unread))
