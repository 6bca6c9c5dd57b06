"""transformers' `Trainer` on split models: what `adapt` overrides, and why.

# [Note: one override for each touch]
Trainer touches a model in some twenty places. Each of the methods below overrides one of them, and calls transformers'
own where the model is not split. `adapt` checks that the methods that are overridden still exist with the same
arguments. Nothing of transformers or accelerate is changed for other trainers of the process.

# [Note: losses of a Trainer]
transformers gives the model the number of all targets of the accumulated batches (`num_items_in_batch`), by which many
losses divide their sum, and multiplies what comes out by the number of processes, because DDP averages gradients. A
loss that ignores the number (BERT's, T5's, that of a decoder that classifies) is then too large by the number of
processes. So with several data ranks the model is not told: its loss is the mean over this rank's targets, and is
weighted by their share. In one process a loss that ignores the number is a mean for each accumulated batch, and the
batches' losses are summed; so it is here.
"""

import ast
import functools
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import BatchRebalanceSampler
from typing_extensions import override

from shardwise.api.building import load, parallelize
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import all_reduce_, broadcast_object
from shardwise.data.batch import (
    check_divides,
    counts_rows,
    drop_targets,
    flops_of,
    make_up_targets,
    target_names,
    targets_of,
)
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.loss.label_use import check_model_divides
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.optimizer import build_optimizer
from shardwise.optim.summing import multiply_gradients
from shardwise.parameters.registry import is_split, registry_of, reshard
from shardwise.pipeline.runner import runner_of
from shardwise.plan.options import Compile, ParallelSpec, Recompute
from shardwise.runtime.adapter_facts import find_model
from shardwise.topology.shape import DATA_AXES, MeshShape
from shardwise.train.step import TrainStep
from shardwise.trainer.accelerator import follow, full_tensor
from shardwise.trainer.checkpoint import SavesSplitModels
from shardwise.trainer.rows import Rows, num_rows, without_copies

_SEVERAL_LABELS = "multi_label_classification"


class SplitTrainer(SavesSplitModels):
    """Mixin before a `transformers.Trainer` class, for models that Shardwise splits; see `adapt`.

    Args:
        model: a model from `shardwise.load` or `shardwise.parallelize`; with `layout`, also a directory, a hub id, a
            config or an unsplit model.
        layout: such as `"fsdp2.tp2"`; opens the mesh, and loads or splits the model.
        auto_class: see `shardwise.load`.
        num_microbatches: of the rows of a batch in a pipeline; by default, as many as stages where they divide them.
        token_weighted_eval: `eval_loss` is the mean over all targets, the same in every layout. False: transformers'
            own mean over batches.
        options: the Trainer's own arguments, and with `layout` those of `shardwise.parallelize` (`plan`,
            `sequence_parallel`, `fsdp`, `precision`, `recompute`, `compilation`, `pipeline`).

    Raises:
        UnsupportedError: the arguments ask for parallelism of another kind, or for what split models cannot do.
    """

    _mesh: Mesh | None = None
    _split: Callable[[Any], nn.Module] | None = None
    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        *others: Any,
        layout: str | None = None,
        auto_class: Any = None,
        num_microbatches: int | None = None,
        token_weighted_eval: bool = True,
        **options: Any,
    ) -> None:
        asked = {name: options.pop(name) for name in list(options) if name in ParallelSpec.__dataclass_fields__}
        # The position of `args` differs: TRL's DPOTrainer takes the reference model before it.
        beside = (*others, *options.values())
        args = next((each for each in beside if isinstance(each, transformers.TrainingArguments)), None)
        if layout is not None:
            self._mesh = mesh = Mesh.open(layout)
            self._split = functools.partial(split_model, mesh=mesh, auto_class=auto_class, asked=asked, args=args)
            model = model if model is None else self._split(model)
        elif asked or auto_class is not None:
            raise ConfigError(f"{next(iter(asked), 'auto_class')}= without a layout", fix='add layout="fsdp2.tp2"')
        elif isinstance(model, nn.Module) and is_split(model):
            self._mesh = registry_of(model).mesh
        self._weighs_targets, self._num_microbatches = token_weighted_eval, num_microbatches
        self._shares: deque[Rows | None] = deque()
        self._rows: Rows | None = None
        self._num_targets: Any = None
        self._eval_sums: Tensor | None = None
        self._steps: dict[int, TrainStep] = {}
        if self._mesh is not None:
            _check_arguments(args, self._mesh.shape)
        super().__init__(model, *others, **options)
        if self._mesh is not None:
            self._check_pipeline()
            self.accelerator.fills = self._is_pipeline and self._is_default_loss

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses subclasses whose loss or steps would hide those of this class."""
        super().__init_subclass__(**options)
        hidden = {"compute_loss", "training_step", "prediction_step", "evaluation_loop", "get_batch_samples"} & {
            *vars(cls)
        }
        if hidden and not cls.__module__.startswith("shardwise."):
            raise TypeError(
                f"{cls.__name__} overrides {min(hidden)}, as the Trainer of shardwise.trainer does: derive it from "
                f"transformers.Trainer, and use shardwise.trainer.adapt({cls.__name__})"
            )

    # The model and its processes

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator, whose processes are the data ranks."""
        super().create_accelerator_and_postprocess()
        if self._mesh is not None:
            follow(self.accelerator, self._mesh)
            self._note_data_seed()

    def _note_data_seed(self) -> None:
        if self.args.data_seed is None:  # a resumed run deals the same rows, whatever its random states
            self.accelerator.dataloader_config.data_seed = torch.random.initial_seed()

    @override
    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a fresh model of `model_init`, split as `layout` says."""
        model: nn.Module = super().call_model_init(trial)
        self._steps.clear()
        if self._mesh is not None:
            self._note_data_seed()  # which training has just set
        if self._split is None and is_split(model):
            raise UnsupportedError(
                "model_init= that returns a split model",
                why="the Trainer opens its processes before it calls model_init",
                fix='return the model unsplit, and add layout="fsdp2.tp2"',
            )
        return model if self._split is None else self._split(model)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves a split model, which is on its device."""
        if not is_split(model):
            super()._move_model_to_device(model, device)

    @override
    def get_tp_size(self) -> int:
        """Returns 1: the accelerator's processes are data ranks, which have rows of their own."""
        return super().get_tp_size() if self._mesh is None else 1

    @override
    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the rows of an optimizer step over all data ranks."""
        if self._mesh is None:
            return super().get_total_train_batch_size(args)
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._mesh.data_size)

    @override
    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Returns this rank's part of the operations of a batch; see `StepResult.flops`."""
        if self._mesh is None or not isinstance(inputs, Mapping):
            return super().floating_point_ops(inputs)
        copies = self._mesh.shape.world_size // self._mesh.data_size
        return flops_of(inputs, registry_of(self.model).plan.work) / copies

    # Rows

    @override
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns transformers' sampler."""
        sampler = super()._get_train_sampler(train_dataset)
        if self._mesh is not None and isinstance(sampler, BatchRebalanceSampler):
            raise UnsupportedError(
                'train_sampling_strategy="batch_rebalance" with a split model',
                why="it deals rows to ranks by itself",
                fix='use "group_by_length"',
            )
        return sampler

    @override
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Returns the batches of a step, in which copies of rows have no targets, and the number of targets."""
        if self._mesh is not None:
            self._shares.clear()
            epoch_iterator = self._without_copies(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _without_copies(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._shares.append(rows := self.accelerator.rows_of_last_batch())
            yield without_copies(batch, rows, self.model)

    @override
    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Counts the tokens of all data ranks' rows, without copies."""
        if (rows := self._rows) is not None and rows.own < rows.held:
            inputs = {name: value[: rows.own] for name, value in inputs.items() if isinstance(value, Tensor)}
        super()._track_num_input_tokens(inputs)

    # Losses and gradients

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a batch; in a pipeline, through a `TrainStep`.

        Communicates: as the model's forward and backward, or as `TrainStep`.
        """
        if self._mesh is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._rows = self._shares.popleft() if self._shares else None
        if not self._is_pipeline:
            self._mesh.note_step()
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return self._step_through_stages(inputs, num_items_in_batch)

    def _step_through_stages(self, inputs: dict[str, Any], num_items: Any) -> Tensor:
        assert self._mesh is not None
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

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss as this rank's share of the loss over all data ranks' rows; see [Note: losses of a Trainer].

        Communicates: as the model's forward; with several data ranks, where the loss takes no `num_items_in_batch`, one
        all-reduce of a number.
        """
        compute, mesh = super().compute_loss, self._mesh
        if mesh is None:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        is_counted = num_items_in_batch is not None and self._takes_num_items(inputs)
        own = self._target_count(inputs)
        if mesh.data_size == 1 or (is_counted and not self._is_default_loss):
            self._num_targets = num_items_in_batch if is_counted else own
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        self._num_targets = total = torch.as_tensor(num_items_in_batch) if is_counted else self._sum_over_data(own)
        if self._is_default_loss:
            made_up = make_up_targets(inputs)
            self._check_divides(inputs)
            inputs = {**inputs, **{name: torch.where(own > 0, inputs[name], made_up[name]) for name in made_up}}
        # Without the number of targets every loss is a mean over this rank's.
        result = compute(model, inputs, return_outputs=return_outputs)
        loss = result[0] if return_outputs else result
        loss = loss * (own / total.clamp(min=1.0) * mesh.data_size)
        return (loss, *result[1:]) if return_outputs else loss

    def _check_divides(self, inputs: Mapping[str, Any]) -> None:
        """Raises where the loss of data ranks' rows cannot be put together; the same on every rank."""
        assert self._mesh is not None
        if self.model.training:
            check_model_divides(self.model, self._mesh.data_size)
        with (
            raise_on_all_ranks(self._mesh.group(*DATA_AXES), "counting its targets")
            if self._has_several
            else nullcontext()
        ):
            check_divides(self.model, inputs, [inputs], self._mesh.data_size)

    @functools.cached_property
    def _has_several(self) -> bool:
        return len(target_names(self.model)) > 1

    def _target_count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the number of this rank's targets, float32 scalar: tokens or rows."""
        if self._rows is not None and self._rows.own == 0:
            return torch.zeros((), device=self.args.device)
        count = targets_of(self.model, inputs) if self._is_default_loss else None
        return torch.as_tensor(
            num_rows(inputs) if count is None else count, dtype=torch.float32, device=self.args.device
        )

    def _sum_over_data(self, value: Tensor) -> Tensor:
        assert self._mesh is not None
        total = value.clone()
        if (group := self._mesh.group(*DATA_AXES)) is not None:
            all_reduce_(total, group)
        return total

    @property
    def _is_default_loss(self) -> bool:
        """Whether the loss is what the model returns, and not a function's or a subclass's."""
        is_plain = self.compute_loss_func is None and self.label_smoother is None
        beside = super().compute_loss
        return is_plain and getattr(beside, "__func__", beside) is transformers.Trainer.compute_loss

    def _takes_num_items(self, inputs: Mapping[str, Any]) -> bool:
        """Returns whether the loss is a sum divided by `num_items_in_batch`, and not a mean."""
        if not self._is_default_loss:
            return bool(self.compute_loss_func or self.label_smoother or self.model_accepts_loss_kwargs)
        model, labels = find_model(self.model), inputs.get("labels")
        is_mean = isinstance(labels, Tensor) and labels.is_floating_point()
        is_mean = is_mean or counts_rows(model) or getattr(model.config, "problem_type", None) == _SEVERAL_LABELS
        return bool(self.model_accepts_loss_kwargs) and not is_mean and _passes_numbers_on(type(model).forward)

    @override
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Builds the optimizer of `args.optim` over this rank's parts, with transformers' rule for weight decay.

        Raises:
            UnsupportedError: the optimizer is no torch optimizer class over groups of parameters (GaLore, LOMO, Muon).
        """
        if self._mesh is None:
            return super().create_optimizer(model)
        if self.optimizer is not None:
            held = {id(each) for each in self.model.parameters()}
            if any(id(each) not in held for group in self.optimizer.param_groups for each in group["params"]):
                raise ConfigError(
                    "optimizers= of parameters that are not the split model's",
                    why="the model was split after the optimizer was built",
                    fix="pass optimizer_cls_and_kwargs=, or split the model first: shardwise.load(path, mesh)",
                )
            return super().create_optimizer(model)
        reshard(self.model)
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        own = {"params", "model", "optimizer_dict"} & options.keys()
        if own or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise UnsupportedError(
                f"optim={str(self.args.optim.value if hasattr(self.args.optim, 'value') else self.args.optim)!r}",
                why="it reads full parameters or steps inside of backward, and this rank holds parts",
                fix='use an elementwise one, such as "adamw_torch" or "sgd"',
            )
        names = set(self.get_decay_parameter_names(self.model))
        named = self.model.named_parameters(remove_duplicate=False)  # a stage may know a tied weight by another name
        decayed = {id(parameter) for name, parameter in named if name in names}

        def group_of(name: str, parameter: Tensor) -> dict[str, float]:
            return {"weight_decay": self.args.weight_decay if id(parameter) in decayed else 0.0}

        self.optimizer = built = build_optimizer(self.model, kind, groups=group_of, **options)
        return built

    @override
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips the gradients to a norm over all ranks; returns the norm."""
        if self._mesh is None:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model, self.args.max_grad_norm)

    @override
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Returns the norm over all ranks."""
        if self._mesh is None:
            return super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            self.accelerator.unscale_gradients()
            return clip_grad_norm_(self.model, float("inf"))
        return grad_norm

    # Evaluation

    @override
    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluates one copy of each row; `eval_loss` is the mean over all targets.

        Communicates: as the model's forward and the gathers of what metrics ask for; for each batch, an all-reduce of a
        number or two; a broadcast of the metrics.
        """
        if self._mesh is None:
            return super().evaluation_loop(*args, **options)
        gather = self.accelerator.gather_for_metrics  # Seq2SeqTrainer would keep the rows that fill up the last batch
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)
        self._eval_sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **options)
        sums, self._eval_sums = self._eval_sums, None
        name = f"{options.get('metric_key_prefix', 'eval')}_loss"
        if self._weighs_targets and name in output.metrics and float(sums[1]):
            output.metrics[name] = float(sums[0] / sums[1])
        # One answer on all ranks, which decide by it what is best and when to stop.
        return output._replace(metrics=broadcast_object(output.metrics, self._mesh.group()))

    @override
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
        **options: Any,
    ) -> Any:
        """Returns loss, logits and labels of a batch; rows that fill up the last one have no part in the loss."""
        step = super().prediction_step
        if self._mesh is None:
            return step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **options)
        self._rows, self._num_targets = self.accelerator.rows_of_last_batch(), None
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
            assert self._mesh is not None
            mean = self._sum_over_data(loss) / self._mesh.data_size
        if self._eval_sums is not None:
            self._eval_sums += torch.stack([torch.where(total > 0, mean.double() * total, 0.0), total.double()])
        return mean

    # Pipelines

    @property
    def _is_pipeline(self) -> bool:
        return self._mesh is not None and self._mesh.size("pp") > 1

    def _check_pipeline(self) -> None:
        if self._is_pipeline and not self._is_default_loss:
            raise UnsupportedError(
                f"a loss of {type(self).__name__}'s own over {registry_of(self.model).mesh.shape}",
                why="the last stage alone has the logits, and computes the loss that the model defines",
                fix="use a layout without pp",
            )


def split_model(
    model: Any, *, mesh: Mesh, auto_class: Any, asked: Mapping[str, Any], args: Any, options: Mapping[str, Any] = {}
) -> nn.Module:
    """Loads the model with further `options` of `load`, or splits the given one."""
    asked = dict(asked)
    if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
        asked.setdefault("recompute", Recompute(mode="full"))
    if getattr(args, "torch_compile", False):
        asked.setdefault("compilation", Compile())
    if isinstance(model, nn.Module):
        return parallelize(model, mesh, **asked)
    loaded: nn.Module = load(model, mesh, auto_class=auto_class, **asked, **options)
    return loaded


def _check_arguments(args: Any, shape: MeshShape) -> None:
    """Raises for arguments of a Trainer that a split model cannot follow."""
    asked = {
        "deepspeed": ("the layout says how the model is split", 'use a layout such as "fsdp2.tp2"'),
        "fsdp": ("the layout says how the model is split", 'use a layout such as "fsdp2"'),
        "parallelism_config": ("the layout says how the model is split", "leave it out"),
        "auto_find_batch_size": (
            "a rank that runs out of memory leaves the others waiting in a collective",
            "`shardwise plan` says what fits",
        ),
        "use_liger_kernel": ("its kernels compute with full parameters", "leave it out"),
        "debug": ("its hooks compare full values", "leave it out"),
    }
    if shape.world_size == 1:
        del asked["auto_find_batch_size"]
    if shape.pp_size > 1:
        asked["fp16"] = ("a step of a pipeline has no loss scale of accelerate's", "use bf16=True")
    if shape.data_size > 1 and not getattr(args, "average_tokens_across_devices", True):
        raise UnsupportedError(
            f"average_tokens_across_devices=False over {shape}",
            why="the loss is the mean over the targets of all data ranks, as in one process",
            fix="leave it out",
        )
    for name, (why, fix) in asked.items():
        if getattr(args, name, None):
            raise UnsupportedError(f"{name}={getattr(args, name)!r} with a split model", why=why, fix=fix)


def _refuse_numbers(num_rows: int, parts: int) -> UnsupportedError:
    return UnsupportedError(
        f"a batch of {num_rows} rows in {parts} parts of a pipeline, without labels of classes or tokens",
        why="copies of rows fill it up, and would count in the loss",
        fix="use dataloader_drop_last=True, and batches that divide",
    )


@functools.cache
def _passes_numbers_on(forward: Callable[..., Any]) -> bool:
    """Returns whether a forward gives its loss function the arguments that it does not name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError):  # of a class made on the way
        return True
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    given = [each.keywords for each in calls if getattr(each.func, "attr", None) == "loss_function"]
    return any(keyword.arg is None for keywords in given for keyword in keywords)


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
