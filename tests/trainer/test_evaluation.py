"""Evaluation, prediction and generation: one copy of each row, the same numbers in every layout."""

from __future__ import annotations

import functools
import tempfile

import numpy
import pytest
import torch
import transformers

from shardwise.trainer import Seq2SeqTrainer, Trainer
from tests.families import FULL_PRODUCT
from tests.trainer.modules import Rows, arguments, build, split_trainer

pytestmark = pytest.mark.spawn

LAYOUTS = ["tp1", "tp2", "fsdp2", "ddp2", "fsdp2.tp2", "pp2"]


def measure(prediction):
    """Of rows in order: a number that another order, or one row twice, changes."""
    labels, best = prediction.label_ids, prediction.predictions.argmax(-1)
    weights = numpy.arange(1, len(labels) + 1).reshape(-1, *[1] * (labels.ndim - 1))
    return {"rows": len(labels), "order": int((labels * weights).sum()), "best": int((best * weights).sum())}


def evaluate(mesh, family, num_rows, directory):
    run = split_trainer(mesh, family, directory, beside={"compute_metrics": measure})
    found = run.evaluate(Rows(family, num_rows))
    predicted = run.predict(Rows(family, num_rows))
    return {name: found[f"eval_{name}"] for name in ("loss", "rows", "order", "best")}, predicted.predictions


@functools.cache
def unsplit_evaluation(family, num_rows):
    model, rows = build(family).eval(), Rows(family, num_rows)
    batches = [{name: torch.stack([rows[row][name]]) for name in rows[row]} for row in range(num_rows)]
    with torch.no_grad():
        outputs = [model(**batch) for batch in batches]
    shift = 1 if family == "llama" else 0
    counts = [int((batch["labels"][..., shift:] != -100).sum()) for batch in batches]
    pairs = zip(outputs, counts, strict=True)
    loss = sum(float(output.loss) * count for output, count in pairs if count) / sum(counts)
    logits = torch.cat([output.logits for output in outputs]).numpy()
    labels = torch.cat([batch["labels"] for batch in batches]).numpy()
    return loss, measure(transformers.EvalPrediction(predictions=logits, label_ids=labels)), logits


@pytest.mark.parametrize(
    ("family", "num_rows", "layout"),
    [
        *(("llama", 11, layout) for layout in LAYOUTS),
        *(("llama", number, layout) for number in (10, 13) for layout in ["fsdp2", *["tp1"] * FULL_PRODUCT]),
        *(("bert", 13, layout) for layout in ("ddp2", "tp2")),
    ],
)
def test_losses_and_metrics_are_those_of_all_rows_once(on_ranks, tmp_path, family, num_rows, layout):
    loss, metrics, logits = unsplit_evaluation(family, num_rows)
    for found, predicted in on_ranks(evaluate, directory=str(tmp_path)):
        assert found.pop("loss") == pytest.approx(loss, abs=1e-6)
        assert found == metrics
        numpy.testing.assert_allclose(predicted, logits, atol=1e-5)


class Inputs(Rows):
    """Rows without labels."""

    def __getitem__(self, row):
        return {"input_ids": super().__getitem__(row)["input_ids"]}


def predict(mesh, directory):
    return split_trainer(mesh, "llama", directory).predict(Inputs("llama", 11)).predictions


@pytest.mark.parametrize("layout", ["pp2.ddp2"])
def test_rows_without_labels_are_predicted_where_copies_fill_up_a_batch(on_ranks, tmp_path, layout):
    for predicted in on_ranks(predict, directory=str(tmp_path)):
        numpy.testing.assert_allclose(predicted, unsplit_evaluation("llama", 11)[2], atol=1e-5)


def by_transformers(mesh, directory):
    run = split_trainer(mesh, "llama", directory, beside={"token_weighted_eval": False})
    smoothed = split_trainer(mesh, "llama", directory, label_smoothing_factor=0.1)
    return run.evaluate(Rows("llama", 11))["eval_loss"], smoothed.evaluate(Rows("llama", 11))["eval_loss"]


def test_transformers_own_mean_is_one_argument_away(on_ranks, tmp_path):
    run = transformers.Trainer(build("llama"), arguments(tmp_path), eval_dataset=Rows("llama", 11))
    wanted, smoothed = run.evaluate()["eval_loss"], set()
    for layout in ("tp2", "fsdp2"):
        for found, with_smoothing in on_ranks(by_transformers, layout=layout, directory=str(tmp_path)):
            assert found == pytest.approx(wanted, abs=1e-6)
            smoothed.add(round(with_smoothing, 5))
    assert len(smoothed) == 1, "the same in every layout"


def generate(mesh, directory):
    options = {"predict_with_generate": True, "generation_max_length": 12}
    run = split_trainer(mesh, "t5", directory, beside={"compute_metrics": lambda prediction: {}}, **options)
    found = run.evaluate({"one": Rows("t5", 11), "two": Rows("t5", 3)})
    return run.predict(Rows("t5", 11)).predictions, found["eval_one_loss"], found["eval_two_loss"]


@functools.cache
def unsplit_generation():
    with tempfile.TemporaryDirectory() as directory:
        given = arguments(
            directory, kind=transformers.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=12
        )
        return transformers.Seq2SeqTrainer(build("t5"), given).predict(Rows("t5", 11)).predictions


@pytest.mark.parametrize("layout", ["fsdp2.tp2", "pp2", *["tp2", "fsdp2"] * FULL_PRODUCT])
def test_generated_tokens_are_those_of_one_process(on_ranks, tmp_path, layout):
    loss, *_ = unsplit_evaluation("t5", 11)
    for tokens, *losses in on_ranks(generate, directory=str(tmp_path)):
        assert numpy.array_equal(tokens, unsplit_generation())
        assert losses[0] == pytest.approx(loss, abs=1e-6)


@pytest.mark.single
@pytest.mark.parametrize(
    ("ours", "theirs"), [(Trainer, transformers.Trainer), (Seq2SeqTrainer, transformers.Seq2SeqTrainer)]
)
def test_an_unsplit_model_is_trained_by_transformers_alone(tmp_path, ours, theirs):
    states, logs = [], []
    kind = transformers.Seq2SeqTrainingArguments if "Seq2" in theirs.__name__ else transformers.TrainingArguments
    for each in (ours, theirs):
        given = arguments(tmp_path / each.__module__, kind=kind, max_steps=5, gradient_accumulation_steps=2)
        run = each(build("llama", dropout=0.1), given, train_dataset=Rows("llama", 13), eval_dataset=Rows("llama", 11))
        run.train()
        logs.append((run.evaluate()["eval_loss"], [step.get("loss") for step in run.state.log_history]))
        states.append(run.model.state_dict())
    assert logs[0] == logs[1]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
