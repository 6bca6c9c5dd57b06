"""accelerate on a split model: an `Accelerator` whose processes are the data ranks.

Ranks that differ only in tp or pp read the same rows. So `num_processes` is the number of data ranks, gathers run over
them, and nothing is wrapped around the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from accelerate.utils.dataclasses import DynamoBackend
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardwise.comm.collectives import all_gather_list, all_gather_objects, all_reduce_, broadcast_object
from shardwise.errors import UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.gradients import gradients_of
from shardwise.optim.summing import time_reduction
from shardwise.parameters.registry import is_split, registry_of
from shardwise.topology.shape import DATA_AXES
from shardwise.trainer.rows import deal_rows, rows_of_last_batch


class SplitAccelerator(Accelerator):
    """An `Accelerator` for a split model; `follow` turns an existing one into it.

    Attributes:
        mesh: the mesh of the split model.
    """

    mesh: Mesh

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
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Adds autocast to a split model, and wraps nothing around it. Other models are moved to the device."""
        # In evaluation mode accelerate adds autocast alone.
        moves = False if is_split(model) else device_placement
        prepared: nn.Module = super().prepare_model(model, device_placement=moves, evaluation_mode=True)
        return prepared

    @override
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wraps the optimizer, whose state is already on the parameters' device."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Returns a loader of this data rank's rows, equal on tp and pp ranks; see `deal_rows`.

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
            deal_rows(data_loader, self.mesh, splits=self.split_batches),
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
        self._dataloaders.append(prepared)
        return prepared

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context manager: delays the reduction of gradients to a later backward."""
        if not is_split(model) or registry_of(model).stages is not None:  # a pipeline's forward has summed already
            yield
            return
        gradients = gradients_of(model)
        gradients.is_deferred = True
        time_reduction(gradients.registry, is_last=False)
        try:
            yield
        finally:
            gradients.is_deferred = False
            time_reduction(gradients.registry, is_last=True)

    @override
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the gradients to a norm over all ranks; see `shardwise.clip_grad_norm_`."""
        self.unscale_gradients()
        model = next((each for each in self._models if is_split(each)), None)
        return clip_grad_norm_(list(parameters), max_norm, norm_type, model=model)

    @override
    def gather(self, tensor: Any) -> Any:
        """Returns tensors of all data ranks, concatenated along the first dim.

        Communicates: one all-gather of each tensor over the data ranks.
        """
        group = self.mesh.group(*DATA_AXES)

        def gather_one(value: Tensor) -> Tensor:
            whole = full_tensor(value)
            whole = whole[None] if whole.ndim == 0 else whole
            return torch.cat(all_gather_list(whole.contiguous(), group)) if group is not None else whole

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns values of all data ranks without the rows that fill the last batch up."""
        if use_gather_object or not _is_all_tensors(input_data):
            lists = all_gather_objects(input_data, self.mesh.group(*DATA_AXES))
            data = [row for rows in lists for row in rows]
        else:
            data = self.gather(input_data)
        num_rows = self.rows_of_last_batch()
        if num_rows is None:
            return data
        return data[:num_rows] if isinstance(data, list) else recursively_apply(lambda value: value[:num_rows], data)

    def rows_of_last_batch(self) -> int | None:
        """Returns the rows of all data ranks in the batch of the loader that is read, if it is the last; else None."""
        state = self.gradient_state
        return rows_of_last_batch(state.active_dataloader) if state.end_of_dataloader else None

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
        group = self.mesh.group(*DATA_AXES)

        def pad_one(value: Tensor) -> Tensor:
            whole = full_tensor(value)
            if group is None or dim >= whole.ndim:
                return whole
            size = torch.tensor(whole.shape[dim], device=self.mesh.device)
            all_reduce_(size, group, largest=True)
            missing = int(size) - whole.shape[dim]
            if not missing:
                return whole
            filled = whole.new_full((*whole.shape[:dim], missing, *whole.shape[dim + 1 :]), pad_index)
            return torch.cat([filled, whole] if pad_first else [whole, filled], dim=dim)

        return recursively_apply(pad_one, tensor, error_on_other_type=True)


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


def full_tensor(value: Tensor) -> Tensor:
    """Returns a tensor whole: with tp, logits are split over the vocabulary. Communicates: for those, an all-gather."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda value: value, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
