"""accelerate on a split model: an `Accelerator` whose processes are the data ranks.

Ranks that differ only in tp or pp read the same rows. So `num_processes` is the number of data ranks, gathers run over
them, and nothing is wrapped around the model. Functions of `accelerate.utils` know nothing of this: they count and
gather over all ranks.

# [Note: a loop of accelerate's]
The loss of the model is the mean over the targets of all data ranks ([Note: one loss for all]). A loss that the loop
computes from logits, or a sum divided by `num_items_in_batch`, is this rank's, and data ranks are averaged, as in DDP.
Schedules are written for one process, and step once for each data rank (once with `split_batches`), as ever. The last
batch is filled up with rows without targets (labels of -100), which `gather_for_metrics` cuts off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply, set_seed
from accelerate.utils.dataclasses import DynamoBackend
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardwise.accelerate.overrides import check_overridden
from shardwise.accelerate.prepared import SplitLoader, SplitScheduler
from shardwise.accelerate.rows import Rows, deal_rows, rows_of_last_batch, take_rows
from shardwise.accelerate.state import SavesState
from shardwise.api.checkpoints import full_state_dict
from shardwise.comm.collectives import all_gather_list, all_gather_objects, all_reduce_, broadcast_object
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of
from shardwise.optim.summing import time_reduction
from shardwise.parameters.registry import is_split, registry_of
from shardwise.topology.shape import DATA_AXES
from shardwise.train.one_loss import share_loss


class SplitAccelerator(SavesState):
    """An `Accelerator` for a split model; `follow` turns an existing one into it.

    Attributes:
        mesh: the mesh of the split model.
        has_one_loss: whether models that are prepared return the loss of all data ranks; see `prepare`.
        fills: whether every data rank holds as many rows of the last batch; see [Note: uneven ends].
        rows: of the batch at hand; None: all ranks have as many.
        gathered: the rows of which gathered tensors are made, several entries of each perhaps; None: of all ranks' as
            many.
    """

    mesh: Mesh
    has_one_loss = False
    fills = False
    rows: Rows | None = None
    gathered: Rows | None = None
    flag_tensor: Any

    @override
    @property
    def num_processes(self) -> int:
        """Number of data ranks."""
        return self.mesh.data_size

    @override
    @property
    def process_index(self) -> int:
        """This rank's data rank."""
        return self.mesh.data_rank

    @override
    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all ranks."""
        return bool(self.state.is_last_process)

    @override
    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager: this data rank's part of `inputs`, equal on tp and pp ranks."""
        split: Any = PartialState.split_between_processes  # reads num_processes and process_index, which are ours
        with split(self, inputs, apply_padding) as part:
            yield part

    @override
    def check_trigger(self) -> bool:
        """Returns whether any rank has called `set_trigger`. Communicates: a gather of numbers."""
        flags = all_gather_objects(int(self.flag_tensor or 0), self.mesh.group())
        self.flag_tensor = None
        return any(flags)

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Adds autocast to a split model, and wraps nothing around it. Other models are moved to the device.

        Raises:
            UnsupportedError: a model that is not split would be trained in a loop of the user's.
        """
        if self.has_one_loss and is_split(model):
            share_loss(model)
        elif self.has_one_loss and not evaluation_mode and any(each.requires_grad for each in model.parameters()):
            raise UnsupportedError(
                f"training a {type(model).__name__} that is not split, beside a model that is",
                why="nothing would sum its gradients over ranks",
                fix="split it too, or freeze it: requires_grad_(False)",
            )
        # In evaluation mode accelerate adds autocast alone.
        moves = False if is_split(model) else device_placement
        prepared: nn.Module = super().prepare_model(model, device_placement=moves, evaluation_mode=True)
        return prepared

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wraps the optimizer, whose state is already on the parameters' device."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wraps the scheduler, which steps once for each data rank, or once if loaders split batches."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__ = SplitScheduler
        prepared.steps, prepared.split_batches = 1 if self.split_batches else self.num_processes, True
        return prepared

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Returns a loader of this data rank's rows, equal on tp and pp ranks; see `deal_rows` and `SplitLoader`.

        Raises:
            UnsupportedError: `dispatch_batches=True`, by which rank 0 alone would read.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise UnsupportedError(
                "dispatch_batches=True with a split model",
                why="every rank reads the rows of its data rank by itself",
                fix="leave it out",
            )
        places = self.device_placement if device_placement is None else device_placement
        seed = self.dataloader_config.data_seed
        prepared = prepare_data_loader(
            deal_rows(data_loader, self.mesh, splits=self.split_batches, fills=self.fills),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=places,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=broadcast_object(torch.random.initial_seed() if seed is None else seed, self.mesh.group()),
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared = SplitLoader.of(prepared, self) if self.has_one_loss else prepared
        self._dataloaders.append(prepared)
        return prepared

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader that begins with a later batch."""
        loader = super().skip_first_batches(dataloader, num_batches)
        return SplitLoader.of(loader, self) if self.has_one_loss else loader

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context manager: delays the reduction of gradients to a later backward."""
        with _deferred(model, is_deferred=True):
            yield

    @override
    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Context manager: gradients are reduced by the next backward, also inside of `no_sync`."""
        with _deferred(model, is_deferred=False):
            yield

    @override
    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Context manager that does nothing: every data rank reads as many batches, and copies count nothing."""
        yield

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the state dict of the unsplit model on every rank. Communicates: as `shardwise.full_state_dict`."""
        return full_state_dict(model) if is_split(model) else super().get_state_dict(model, unwrap)

    @override
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the gradients to a norm over all ranks; see `shardwise.clip_grad_norm_`."""
        self.unscale_gradients()
        return clip_grad_norm_(list(parameters), max_norm, norm_type, model=self._complete_gradients())

    @override
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips every entry of the gradients. Communicates: what completes them, between accumulated batches."""
        self._complete_gradients()
        super().clip_grad_value_(parameters, clip_value)

    def _complete_gradients(self) -> nn.Module | None:
        """Returns the trained model, with gradients that are summed over ranks."""
        models = [each for each in self._models if is_split(each)]
        model = next((each for each in models if any(value.requires_grad for value in each.parameters())), None)
        if model is not None:
            gradients, registry = gradients_of(model), registry_of(model)
            is_accumulating = registry.stages is None and (gradients.is_deferred or not self.sync_gradients)
            if is_accumulating and (self.mesh.size("ddp") > 1 or registry.policy.zero_stage == 1):
                raise UnsupportedError(
                    f"clipping gradients that are not reduced yet, over {self.mesh.shape}",
                    why="those of accumulated batches are reduced with the last one's",
                    fix="clip if accelerator.sync_gradients",
                )
            gradients.complete()
        return model if model is not None else next(iter(models), None)

    @override
    def gather(self, tensor: Any) -> Any:
        """Returns tensors of all data ranks, concatenated along the first dim.

        Communicates: one all-gather of each tensor over the data ranks.
        """
        return self._gather(tensor, self.gathered)

    def _gather(self, tensor: Any, rows: Rows | None) -> Any:
        group, rank = self.mesh.group(*DATA_AXES), self.mesh.data_rank

        def gather_one(value: Tensor) -> Tensor:
            whole = full_tensor(value)
            whole = whole[None] if whole.ndim == 0 else whole
            if rows is None:
                return whole if group is None else torch.cat(all_gather_list(whole.contiguous(), group))
            if rows.fills or group is None or value.ndim == 0:
                most = [whole.shape[0]] * len(rows.counts)
            else:
                most = [
                    int(each) for each in all_gather_list(whole.new_tensor(whole.shape[0], dtype=torch.int64), group)
                ]
            per_row = max(1, whole.shape[0] // rows.held) if self.gathered is not None else 1
            sizes = [min(count * per_row, each) for count, each in zip(rows.counts, most, strict=True)]
            own = whole[: sizes[rank]]
            filled = whole.new_zeros(max(sizes), *whole.shape[1:])
            filled[: len(own)] = own
            parts = filled[None] if group is None else all_gather_list(filled, group)
            return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns values of all data ranks' rows, without copies."""
        rows = self.rows if self.gathered is None else self.gathered
        if not use_gather_object and _is_all_tensors(input_data):
            return self._gather(input_data, rows)
        own = [*input_data]
        own = own[: rows.own] if rows is not None and len(own) == rows.held else own
        return [row for part in all_gather_objects(own, self.mesh.group(*DATA_AXES)) for row in part]

    def take_rows(self, batch: Any, loader: Any = None) -> Rows | None:
        """Takes the rows of the batch that was just read out of it, or finds them; None if all ranks have as many.

        Args:
            loader: which was read. Default: the one that began last.
        """
        loader = self.gradient_state.active_dataloader if loader is None else loader
        if (rows := take_rows(batch)) is not None or not getattr(loader, "end_of_dataloader", False):
            return rows
        if self.mesh.data_size == 1 and loader.remainder > 0:  # of a loader that is not dealt
            return Rows((loader.remainder,), 0, fills=True)
        return rows_of_last_batch(loader)

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces tensors over the data ranks: "sum", "mean", "max", or "none"."""
        group, size = self.mesh.group(*DATA_AXES), self.mesh.data_size

        def reduce_one(value: Tensor) -> Tensor:
            whole = full_tensor(value).clone()
            if group is not None and reduction != "none":
                all_reduce_(whole, group, largest=reduction == "max")
            return (whole / size if reduction == "mean" else whole) * scale

        return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    @override
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors along `dim` to the largest size on any data rank."""
        whole = recursively_apply(full_tensor, tensor, error_on_other_type=True)
        return super().pad_across_processes(whole, dim, pad_index, pad_first)  # over all ranks, of which some are alike


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepares split models with their optimizers, loaders and schedulers, as `accelerator.prepare` does for others.

    Turns the accelerator, in place, into one for split models, whose own methods serve from then on. See [Note: a loop
    of accelerate's].

    Args:
        accelerator: one that has prepared nothing yet.
        objects: a model from `shardwise.load`, and optimizers, loaders and schedulers, in any order.
        device_placement: for each object, whether it is moved to the device.

    Raises:
        ConfigError: no model is split, or the accelerator has prepared something else.
        UnsupportedError: the accelerator or an object asks for what split models cannot do.

    Communicates: a gather of numbers, and for each loader a broadcast of two.
    """
    registry = next((registry_of(each) for each in objects if isinstance(each, nn.Module) and is_split(each)), None)
    if registry is None:
        raise ConfigError("prepare without a split model", fix="pass one, or call accelerator.prepare")
    held = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
    mesh = getattr(accelerator, "mesh", None if any(held) else registry.mesh)
    if mesh is not registry.mesh:
        raise ConfigError(
            "an accelerator that is used already",
            why="what it has prepared was for other processes than the data ranks of this model",
            fix="prepare the split model first, with all that belongs to it",
        )
    split = follow(accelerator, mesh)
    split.has_one_loss = split.fills = True
    seeds = all_gather_objects(torch.random.initial_seed(), mesh.group("tp", "pp"))
    if len({*seeds}) > 1:  # set_seed(seed, device_specific=True), which counts all ranks: copies would drift apart
        set_seed(seeds[0] % 2**32)
    return split.prepare(*objects, device_placement=device_placement)


def follow(accelerator: Accelerator, mesh: Mesh) -> SplitAccelerator:
    """Turns an accelerator, in place, into one for models that are split over `mesh`.

    Raises:
        UnsupportedError: it was made for DeepSpeed, FSDP or Megatron-LM, or for parallelism of its own.
    """
    plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    found = [name for name in plugins if getattr(accelerator.state, name, None) is not None]
    found += ["parallelism_config"] if accelerator.parallelism_config is not None else []
    if found:
        raise UnsupportedError(
            f"accelerate's {found[0]} with a split model",
            why="the layout says how the model is split, and nothing else may split it again",
            fix='leave it out, and use a layout such as "fsdp2.tp2"',
        )
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # blocks are compiled by the option `compilation`
    accelerator.__class__ = SplitAccelerator
    assert isinstance(accelerator, SplitAccelerator)
    accelerator.mesh = mesh
    return accelerator


@contextmanager
def _deferred(model: nn.Module, *, is_deferred: bool) -> Iterator[None]:
    if not is_split(model) or registry_of(model).stages is not None:  # a pipeline's forward has summed already
        yield
        return
    gradients = gradients_of(model)
    before, gradients.is_deferred = gradients.is_deferred, is_deferred
    time_reduction(gradients.registry, is_last=not is_deferred)
    try:
        yield
    finally:
        gradients.is_deferred = before
        time_reduction(gradients.registry, is_last=not before)


def full_tensor(value: Tensor) -> Tensor:
    """Returns a tensor whole: with tp, logits are split over the vocabulary. Communicates: for those, an all-gather."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda value: value, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


for _own, _overridden in (
    (SplitAccelerator, Accelerator),
    (SavesState, Accelerator),
    (SplitScheduler, AcceleratedScheduler),
    (SplitLoader, DataLoaderShard),
):
    check_overridden(_own, _overridden)
