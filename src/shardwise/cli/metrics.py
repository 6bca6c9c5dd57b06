"""Metrics of held-out examples, computed by torchmetrics."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import all_gather_objects
from shardwise.data.batch import IGNORED
from shardwise.data.corpus import Record
from shardwise.data.tables import import_package
from shardwise.data.tasks import Task, Tools, encode_answers
from shardwise.errors import ConfigError, did_you_mean
from shardwise.mesh import Mesh
from shardwise.runtime.adapter_facts import find_model
from shardwise.topology.shape import DATA_AXES
from shardwise.train.run_config import TrainConfig

LOWER_IS_BETTER = ("loss", "perplexity", "wer", "mse")


_NAMES = {
    "": ("perplexity",),
    "classes": ("accuracy", "f1", "mse"),
    "spans": ("exact_match", "f1"),
    "summaries": ("rouge1", "rouge2", "rougeL"),
    "words": ("wer",),
    "frames": ("wer",),
}


def check_metrics(config: TrainConfig, task: Task, tools: Tools | None) -> None:
    """Raises `ConfigError` if the metrics of held-out examples cannot be computed, or `evaluation.metric` is none.

    Args:
        tools: of the run; None where its labels are not known yet.
    """
    if config.evaluation.path is None:
        return
    if task.metrics:
        import_torchmetrics()
    own = _NAMES[task.metrics]
    if task.metrics == "classes" and tools is not None:
        own = ("accuracy", "f1") if tools.labels else ("mse",)
    known, chosen = ("loss", *own), config.evaluation.metric
    if chosen not in known:
        raise ConfigError(
            f"evaluation.metric is {chosen!r}, which is not measured{did_you_mean(chosen, known)}",
            why=f"measured are {', '.join(known)}",
        )


def import_torchmetrics() -> Any:
    """Returns torchmetrics' functions. Raises `ConfigError` if the package is not installed."""
    return import_package("torchmetrics", "a metric of held-out examples", fix="pip install torchmetrics").functional


class ExampleMetrics:
    """Metrics of a task, from what the model says about held-out batches.

    Args:
        max_new_tokens: tokens generated for each row where texts are compared.
        records: of the rows that are seen, with every answer to a question.
    """

    def __init__(
        self,
        task: Task,
        tools: Tools,
        model: nn.Module,
        mesh: Mesh,
        *,
        max_new_tokens: int,
        records: Sequence[Record] = (),
    ) -> None:
        self._kind, self._tools, self._model, self._mesh = task.metrics, tools, model, mesh
        self._max_new_tokens, self._records = max_new_tokens, records
        self._seen: list[tuple[Any, Any]] = []

    def see(self, outputs: Any, batch: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        """Notes what the model says about a batch of these rows. Rows whose targets are all ignored are left out.

        Communicates: what `generate` does where texts are compared.
        """
        if self._kind == "classes":
            self._see_classes(outputs.logits, batch["labels"])
        elif self._kind == "spans":
            self._see_spans(outputs, batch, rows)
        elif self._kind == "frames":
            self._see_frames(outputs.logits, batch["labels"])
        else:
            self._see_texts(batch)

    def results(self) -> dict[str, float]:
        """Returns the metrics of all data ranks' batches by name, and forgets them.

        Communicates: over the data axes, a gather of what was noted.
        """
        seen = [pair for own in all_gather_objects(self._seen, self._mesh.group(*DATA_AXES)) for pair in own]
        self._seen = []
        functional = import_torchmetrics()
        if self._kind == "classes":
            chosen, labels = (torch.cat([pair[side] for pair in seen]) for side in (0, 1))
            if labels.is_floating_point():
                return {"mse": float(functional.mean_squared_error(chosen, labels))}
            number = max(2, len(self._tools.labels))
            accuracy = functional.classification.multiclass_accuracy(chosen, labels, number, average="micro")
            f1 = functional.classification.multiclass_f1_score(chosen, labels, number, average="macro")
            return {"accuracy": float(accuracy), "f1": float(f1)}
        said, meant = [pair[0] for pair in seen], [pair[1] for pair in seen]
        text = functional.text
        if self._kind == "spans":
            answers = [
                {"answers": {"answer_start": [0] * len(each), "text": each}, "id": str(n)}
                for n, each in enumerate(meant)
            ]
            found = text.squad([{"prediction_text": each, "id": str(n)} for n, each in enumerate(said)], answers)
            return {name: float(value) for name, value in found.items()}
        if self._kind in ("words", "frames"):
            return {"wer": float(text.word_error_rate(said, meant))}
        found = text.rouge_score(said, meant, rouge_keys=("rouge1", "rouge2", "rougeL"))
        return {name.partition("_")[0]: float(value) for name, value in found.items() if name.endswith("_fmeasure")}

    def _see_classes(self, logits: Tensor, labels: Tensor) -> None:
        if labels.is_floating_point():
            self._seen.append((logits.float().squeeze(-1).cpu(), labels.cpu()))
            return
        is_kept = labels != IGNORED
        self._seen.append((logits.argmax(-1)[is_kept].cpu(), labels[is_kept].cpu()))

    def _see_spans(self, outputs: Any, batch: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        starts, ends = outputs.start_logits.argmax(-1).tolist(), outputs.end_logits.argmax(-1).tolist()
        for row, ids, start, end, target in zip(
            rows, batch["input_ids"], starts, ends, batch["start_positions"].tolist(), strict=True
        ):
            if target < len(ids):
                _, meant = encode_answers(self._records[row], self._tools)
                texts = [self._tools.tokenizer.decode(ids[a : b + 1]) for a, b in ((start, end), *meant)]
                self._seen.append((texts[0], texts[1:]))

    def _see_frames(self, logits: Tensor, labels: Tensor) -> None:
        """Like CTC: of frames with the same token one is kept, and then no blank ones."""
        tokenizer = self._tools.tokenizer
        for ids, target in zip(logits.argmax(-1).tolist(), labels.tolist(), strict=True):
            kept = [token for token, _ in itertools.groupby(ids) if token != tokenizer.pad_token_id]
            meant = [token for token in target if token != IGNORED]
            if meant:
                # The tokenizer of CTC would take equal letters for one again.
                ungrouped = {"group_tokens": False} if hasattr(tokenizer, "word_delimiter_token") else {}
                said, text = (tokenizer.decode(each, skip_special_tokens=True, **ungrouped) for each in (kept, meant))
                self._seen.append((said, text))

    def _see_texts(self, batch: Mapping[str, Tensor]) -> None:
        """Every row generates as many tokens, so that data ranks take equally many steps; they are cut afterwards."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        inner: Any = find_model(self._model)
        own = inner.generation_config  # whose end token would stand in for one that is None
        inner.generation_config = copy.deepcopy(own)
        inner.generation_config.update(max_new_tokens=self._max_new_tokens, max_length=None, min_new_tokens=None)
        inner.generation_config.update(min_length=0, do_sample=False, num_beams=1, eos_token_id=None)
        try:
            generated: Tensor = self._model.generate(**inputs)  # type: ignore[operator]
        finally:
            inner.generation_config = own
        tokenizer = self._tools.tokenizer
        for ids, labels in zip(generated.tolist(), batch["labels"].tolist(), strict=True):
            target = [token for token in labels if token != IGNORED]
            ends = [place for place, token in enumerate(ids) if place and token == tokenizer.eos_token_id]
            if target:
                said = tokenizer.decode(ids[: ends[0]] if ends else ids, skip_special_tokens=True)
                self._seen.append((said, tokenizer.decode(target, skip_special_tokens=True)))
