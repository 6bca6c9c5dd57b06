"""Losses of an adapted Trainer: rows of data ranks, their share of the loss, pipelines, and evaluation.

# [Note: losses of a Trainer]
transformers gives the model the number of all targets of the accumulated batches (`num_items_in_batch`), by which many
losses divide their sum, and multiplies what comes out by the number of processes, because DDP averages gradients. A
loss that ignores the number (BERT's, T5's, that of a decoder that classifies) is then too large by the number of
processes. So with several data ranks the model is not told: its loss is the mean over this rank's targets, and is
weighted by their share. In one process a loss that ignores the number is a mean for each accumulated batch, and the
batches' losses are summed; so it is here.
"""

import ast
import copy
import dis
import functools
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from shardwise.accelerate.accelerator import full_tensor
from shardwise.accelerate.rows import Rows, num_rows, without_copies
from shardwise.comm.collectives import all_reduce_, broadcast_object
from shardwise.data.batch import counts_rows, drop_targets, make_up_targets, targets_of
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.loss.label_use import check_model_divides
from shardwise.mesh import Mesh
from shardwise.optim.summing import multiply_gradients
from shardwise.parameters.registry import is_split, registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.runtime.adapter_facts import find_model
from shardwise.stages.model import StagedModel
from shardwise.topology.shape import DATA_AXES
from shardwise.train.one_loss import check_parts
from shardwise.train.step import TrainStep
from shardwise.trainer.overrides import on_split_models

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class beside a mixin has the methods that it overrides

_SEVERAL_LABELS = "multi_label_classification"


class SharesLosses(_Trainer):
    """The part of `SplitTrainer` that computes losses.

    Args:
        num_microbatches: see `SplitTrainer`.
        token_weighted_eval: see `SplitTrainer`.
    """

    _is_split = False
    _mesh: Mesh

    def __init__(
        self, *args: Any, num_microbatches: int | None = None, token_weighted_eval: bool = True, **options: Any
    ) -> None:
        self._weighs_targets, self._num_microbatches = token_weighted_eval, num_microbatches
        self._shares: deque[Rows | None] = deque()
        self._rows: Rows | None = None
        self._num_targets: Any = None
        self._eval_sums: Tensor | None = None
        self._steps: dict[int, TrainStep] = {}
        super().__init__(*args, **options)
        if not self._is_split and is_split(self.model):
            raise ConfigError(
                "a split model that is not the first argument",
                fix='pass it as model=; of model_init=, return it unsplit, and add layout="fsdp2.tp2"',
            )
        if self._is_split:
            self._check_pipeline()
            self.accelerator.fills = self._is_pipeline and self._is_default_loss

    def _use_mesh(self, mesh: Mesh) -> None:
        self._is_split, self._mesh = True, mesh

    @on_split_models
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Returns the batches of a step, in which copies of rows have no targets, and the number of targets."""
        self._shares.clear()
        return super().get_batch_samples(self._without_copies(epoch_iterator), num_batches, device)

    def _without_copies(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._shares.append(rows := self.accelerator.take_rows(batch))
            yield without_copies(batch, rows, self.model)

    @on_split_models
    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts the tokens of all data ranks' rows, without copies."""
        if (rows := self._rows) is not None and rows.own < rows.held:
            tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
            inputs = {name: value[: rows.own] for name, value in tensors.items()}
        super()._track_num_input_tokens(inputs)

    @on_split_models
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a batch; in a pipeline, through a `TrainStep`.

        Communicates: as the model's forward and backward, or as `TrainStep`.
        """
        self._rows = self._shares.popleft() if self._shares else None
        if not self._is_pipeline:
            self._mesh.note_step()
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return self._step_through_stages(inputs, num_items_in_batch)

    def _step_through_stages(self, inputs: dict[str, Any], num_items: Any) -> Tensor:
        held = num_rows(inputs)
        number = self._num_microbatches or _fitting_microbatches(self.model, held)
        if number not in self._steps:
            self._steps[number] = TrainStep(self.model, self._mesh, num_microbatches=number)
        if missing := -held % number:
            if not make_up_targets(inputs) or counts_rows(find_model(self.model)):
                raise _refuse_numbers(held, number)
            refilled = {name: _refilled(each, held, held + missing) for name, each in inputs.items()}
            inputs = drop_targets(refilled, held)
        is_scaled = num_items is not None and self.model_accepts_loss_kwargs
        weight: Any = 1.0 if is_scaled else 1 / self.current_gradient_accumulation_steps
        if is_scaled and self._takes_num_items(inputs):
            weight = self._sum_over_data(self._target_count(inputs)) / num_items
        # A batch without targets has a loss of 0, so that any weight is right.
        weight = torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight
        multiply_gradients(self.model.parameters(), 1 / weight)  # of earlier batches, to which the step adds its own
        result = self._steps[number](inputs)
        multiply_gradients(self.model.parameters(), weight)
        return result.loss * weight

    @on_split_models
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - transformers' signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the loss as this rank's share of the loss over all data ranks' rows; see [Note: losses of a Trainer].

        Communicates: as the model's forward; with several data ranks, where the loss takes no `num_items_in_batch`, one
        all-reduce of a number.
        """
        compute, mesh = super().compute_loss, self._mesh
        is_counted = num_items_in_batch is not None and self._takes_num_items(inputs)
        own = self._target_count(inputs)
        counted = {"num_items_in_batch": num_items_in_batch} if is_counted else {}
        self._num_targets = total = num_items_in_batch if is_counted else own
        if mesh.data_size == 1:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not is_counted:
            self._num_targets = total = self._sum_over_data(own)
        if self._is_default_loss or self._adds_to_loss:
            if self.model.training:
                check_model_divides(self.model, mesh.data_size)
            check_parts(self.model, inputs, mesh)
        if self._is_default_loss:
            counted = {}  # without the number of targets every loss is a mean over this rank's
        has_rows = self._rows is None or self._rows.own > 0
        if not has_rows or (self._is_over_targets and not counted):
            made_up = make_up_targets(inputs)  # the mean over no targets is 0/0
            inputs = copy.copy(inputs)
            inputs.update({name: torch.where(own > 0, inputs[name], made_up[name]) for name in made_up})
        if not has_rows and isinstance(labels := inputs.get("labels"), Tensor) and labels.is_floating_point():
            inputs["labels"] = torch.zeros_like(labels)
        result = compute(model, inputs, return_outputs=return_outputs, **counted)
        loss = result[0] if return_outputs else result
        loss = loss * (float(has_rows) if counted else own / torch.as_tensor(total).clamp(min=1.0) * mesh.data_size)
        return (loss, *result[1:]) if return_outputs else loss

    def _target_count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the number of this rank's targets, float32 scalar: tokens or rows."""
        count: Any = max(num_rows(inputs), 1) if self._rows is None else self._rows.own
        if count and self._is_over_targets:
            count = found if (found := targets_of(self.model, inputs)) is not None else count
        return torch.as_tensor(count, dtype=torch.float32, device=self.args.device)

    def _sum_over_data(self, value: Tensor) -> Tensor:
        total = value.clone()
        if (group := self._mesh.group(*DATA_AXES)) is not None:
            all_reduce_(total, group)
        return total

    @property
    def _is_default_loss(self) -> bool:
        """Whether the loss is what the model returns, and not a function's or a subclass's."""
        return self.compute_loss_func is None and self.label_smoother is None and self._is_own("compute_loss")

    @property
    def _is_over_targets(self) -> bool:
        """Whether the loss is what transformers' method computes, to which a subclass may add."""
        code = _code_of(super().compute_loss)
        calls = code is not None and "compute_loss" in code.co_names
        return self.compute_loss_func is None and (calls or self._is_own("compute_loss"))

    @property
    def _adds_to_loss(self) -> bool:
        """Whether a subclass adds to the model's loss."""
        return self._is_over_targets and self.label_smoother is None and not self._is_own("compute_loss")

    def _is_own(self, name: str) -> bool:
        """Returns whether the adapted class has a method as transformers has it, and not one of its own."""
        beside = getattr(super(), name)
        return getattr(beside, "__func__", beside) is getattr(transformers.Trainer, name)

    def _takes_num_items(self, inputs: Mapping[str, Any]) -> bool:
        """Returns whether the loss is a sum divided by `num_items_in_batch`, and not a mean."""
        if not self._is_default_loss:
            function = self.compute_loss_func or self.label_smoother or super().compute_loss
            is_given = bool(self.compute_loss_func or self.model_accepts_loss_kwargs)
            is_read = is_given and _reads_number(function) and _reads_number(super().compute_loss)
            if not is_read or not self._adds_to_loss:
                return is_read
        model, labels = find_model(self.model), inputs.get("labels")
        is_mean = isinstance(labels, Tensor) and labels.is_floating_point()
        is_mean = is_mean or counts_rows(model) or getattr(model.config, "problem_type", None) == _SEVERAL_LABELS
        return bool(self.model_accepts_loss_kwargs) and not is_mean and _passes_numbers_on(model)

    @on_split_models
    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluates one copy of each row; `eval_loss` is the mean over all targets.

        Communicates: as the model's forward and the gathers of what metrics ask for; for each batch, an all-reduce of a
        number or two; a broadcast of the metrics.
        """
        gather = self.accelerator.gather_for_metrics  # Seq2SeqTrainer would keep the rows that fill up the last batch
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)
        self._eval_sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **options)
        sums, self._eval_sums, self.accelerator.rows = self._eval_sums, None, None
        name = f"{options.get('metric_key_prefix', 'eval')}_loss"
        if self._weighs_targets and name in output.metrics and float(sums[1]):
            output.metrics[name] = float(sums[0] / sums[1])
        # One answer on all ranks, which decide by it what is best and when to stop.
        return output._replace(metrics=broadcast_object(output.metrics, self._mesh.group()))

    @on_split_models
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: FBT001 - transformers' signature
        ignore_keys: Any = None,
        **options: Any,
    ) -> Any:
        """Returns loss, logits and labels of a batch; rows that fill up the last one have no part in the loss."""
        step = super().prediction_step
        self._rows = self.accelerator.rows = self.accelerator.take_rows(inputs)
        self._num_targets = None
        own = without_copies(inputs, self._rows, self.model)
        loss, logits, labels = step(model, own, prediction_loss_only, ignore_keys=ignore_keys, **options)
        if loss is not None:
            loss = self._mean_over_ranks(loss.detach(), own)
        return loss, logits, labels

    def _mean_over_ranks(self, loss: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the loss of all data ranks' rows, and adds it to what evaluation sums."""
        if self._num_targets is None:  # Seq2SeqTrainer generates, and calls the model itself
            own = self._target_count(inputs)
            share, total = torch.where(own > 0, loss * own, 0.0), self._sum_over_data(own)
            mean = self._sum_over_data(share) / total.clamp(min=1.0)
        else:
            total = torch.as_tensor(self._num_targets, device=loss.device)
            mean = self._sum_over_data(loss) / self._mesh.data_size
        if self._eval_sums is not None:
            self._eval_sums += torch.stack([torch.where(total > 0, mean.double() * total, 0.0), total.double()])
        return mean

    @property
    def _is_pipeline(self) -> bool:
        return self._is_split and self._mesh.size("pp") > 1

    def _check_pipeline(self) -> None:
        if self._is_pipeline and not (self._is_default_loss and self._is_own("training_step")):
            raise UnsupportedError(
                f"a loss or a step of {type(self).__name__}'s own over {registry_of(self.model).mesh.shape}",
                why="the last stage alone has the logits, and computes the loss that the model defines",
                fix="use a layout without pp",
            )


def _refuse_numbers(num_rows: int, parts: int) -> UnsupportedError:
    return UnsupportedError(
        f"a batch of {num_rows} rows in {parts} parts of a pipeline, without labels of classes or tokens",
        why="copies of rows fill it up, and would count in the loss",
        fix="use dataloader_drop_last=True, and batches that divide",
    )


def _passes_numbers_on(model: nn.Module) -> bool:
    """Returns whether a loss function, of the model or of a module that it gives its labels, gets what is not named."""
    for kind in type(model).__mro__:
        if "forward" not in vars(kind) or issubclass(kind, StagedModel):
            continue
        calls = _open_calls(vars(kind)["forward"])
        if calls is None or any(name == "loss_function" for name, _ in calls):
            return True
        inner = (getattr(model, name, None) for name, keywords in calls if "labels" in keywords)
        if any(isinstance(each, nn.Module) and _passes_numbers_on(each) for each in inner):
            return True
        if all(name != "forward" for name, _ in calls):  # super().forward(**kwargs)
            break
    return False


@functools.cache
def _open_calls(forward: Callable[..., Any]) -> tuple[tuple[str, tuple[str | None, ...]], ...] | None:
    """Returns the names of methods that a forward gives the number of targets, or arguments that it does not name, with
    the keywords of each call; None if its code is not known.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError):  # of a class made on the way
        return None
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    named = ((each.func.attr, tuple(keyword.arg for keyword in each.keywords)) for each in calls)  # type: ignore[attr-defined]
    return tuple((name, keywords) for name, keywords in named if {None, "num_items_in_batch"} & {*keywords})


def _reads_number(function: Any) -> bool:
    """Returns whether a loss function reads `num_items_in_batch`, or arguments that it does not name."""
    if (code := _code_of(function)) is None:
        return True
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    wanted = {"num_items_in_batch", *code.co_varnames[named : named + bool(code.co_flags & inspect.CO_VARKEYWORDS)]}
    loads = [each for each in dis.get_instructions(code) if "LOAD" in each.opname and each.opname != "LOAD_CONST"]
    read = [each.argval for each in loads]
    return any(wanted & {*(value if isinstance(value, tuple) else (value,))} for value in read)


def _code_of(function: Any) -> CodeType | None:
    """Returns the code of a function, a method, a partial, a module or another callable; None if it is not known."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = function.forward if isinstance(function, nn.Module) else type(function).__call__
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code


def _refilled(value: Any, kept: int, held: int) -> Any:
    """Returns what has `kept` rows with `held` rows, by copies of the last one."""
    if isinstance(value, tuple | list):
        return type(value)(_refilled(each, kept, held) for each in value)
    if isinstance(value, Mapping):
        return {name: _refilled(each, kept, held) for name, each in value.items()}
    if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != kept:
        return value
    return full_tensor(value)[torch.arange(held, device=value.device).clamp(max=kept - 1)]


def _fitting_microbatches(model: nn.Module, num_rows: int) -> int:
    """Returns a number of microbatches that the schedule supports, and that divides the rows where one does."""
    runner = runner_of(model)
    assert runner is not None
    fewest = runner.plan.num_stages
    taken = [number for number in range(fewest, 4 * fewest + 1) if runner.takes(number)]
    return next((number for number in reversed(taken) if num_rows % number == 0), taken[0])
