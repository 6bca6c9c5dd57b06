"""`ShardwiseStrategy`: the interface between a Lightning Trainer and the ranks of a layout.

# [Note: weights known later]
Lightning divides the loss of every batch of a window by the number of batches, so all have the same weight, and a
window cut short by the end of an epoch counts less. In `TrainStep` a step's loss is the mean over all of its targets.
The number of targets of a window is known only at its end. So every batch is weighted relative to the window's first
batch, and the accumulated gradient is multiplied by one factor before the step. If all batches have equally many
targets, both are 1.
"""

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from shardwise.api.building import load
from shardwise.comm.agree import all_reduce_int
from shardwise.comm.collectives import all_gather_objects, broadcast_object, gather_to_region
from shardwise.errors import BatchError, MeshError, counted
from shardwise.lightning.checkpoint import SavesParts
from shardwise.lightning.models import SplitModels, check_callbacks, note_spec
from shardwise.lightning.precision import ShardwisePrecision, read_precision
from shardwise.mesh import Mesh
from shardwise.optim.summing import multiply_gradients, time_reduction
from shardwise.plan.options import Compile, FsdpPolicy, ParallelSpec, Pipeline, Precision, Recompute
from shardwise.plan.spec import Plan
from shardwise.topology.shape import DATA_AXES, MeshShape

_BEGUN: list[MeshShape] = []
"""Of the meshes by which strategies have had the ranks of this job meet: what runs later in them is theirs, too."""


def open_mesh(shape: MeshShape, cluster: Any, device: torch.device, **options: Any) -> Mesh:
    """Runs `Mesh.open` in a job whose ranks meet through Lightning's `ClusterEnvironment`."""
    if shape.world_size == 1 or dist.is_initialized():
        mesh = Mesh.open(shape, device=device, **options)
        if _BEGUN and shape.world_size > 1:
            mesh.take_over()
        return mesh
    _BEGUN.append(shape)
    said = {
        "RANK": cluster.global_rank(),
        "WORLD_SIZE": cluster.world_size(),
        "LOCAL_RANK": cluster.local_rank(),
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": cluster.main_port,
    }
    os.environ.update({name: str(value) for name, value in said.items()})
    return Mesh.open(shape, device=device, **options)


def end_together(loader: Any, mesh: Mesh, *, predicts: bool) -> Any:
    """Makes sure that no data rank waits for batches that another does not have.

    An `IterableDataset` may have another length than it says, so its loader is replaced by a copy that ends on all
    ranks as soon as it ends on one.

    Args:
        predicts: whether leaving batches out is an error.

    Communicates: over all ranks, one gather of lengths; for an `IterableDataset` also one all-reduce of a number per
    batch.
    """
    group = mesh.group()
    if mesh.data_size == 1 or group is None:
        return loader
    lengths = all_gather_objects((mesh.data_rank, sized_len(loader)), group)
    if len({length for _, length in lengths}) > 1:
        found = {rank: "an unknown number" if length is None else length for rank, length in lengths}
        raise BatchError(
            "data ranks have different numbers of batches",
            why=", ".join(f"data rank {rank}: {length}" for rank, length in sorted(found.items()))
            + "\nforwards communicate, and some ranks would wait forever",
            fix=f"give each of {mesh.data_size} data ranks as many batches, or use a layout without fsdp and ddp",
        )
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    own_class = type(loader)
    ended: Any = object.__new__(type(own_class.__name__, (_EndsTogether, own_class), {}))
    ended.__dict__.update(vars(loader), _mesh=mesh, _predicts=predicts)
    return ended


class _EndsTogether:
    """Mixin of a loader whose number of batches is unknown."""

    _mesh: Mesh
    _predicts: bool

    def __iter__(self) -> Iterator[Any]:
        mesh, none, number = self._mesh, object(), 0
        batches = super().__iter__()  # type: ignore[misc]
        while True:
            batch = next(batches, none)
            num_ranks = all_reduce_int(int(batch is not none), mesh.group(), mesh.device)
            if num_ranks < mesh.shape.world_size:
                if num_ranks:
                    self._say_uneven(number)
                return
            yield batch
            number += 1

    def _say_uneven(self, number: int) -> None:
        what = f"a data rank has {counted(number, 'batch')} and another more"
        if self._predicts:
            raise BatchError(
                f"predictions of which {what}",
                why="forwards communicate, so the rank with more cannot predict the rest by itself",
                fix="give every data rank as many batches, or use a layout without fsdp and ddp",
            )
        if self._mesh.rank == 0:
            warnings.warn(f"{what}, which is left out: forwards communicate, so all end together", stacklevel=2)


class Window:
    """The batches whose gradients one step of automatic optimization uses."""

    def __init__(self) -> None:
        self._counts: list[Tensor | None] = []  # targets of each batch, over all data ranks

    def weigh(self, loss: Tensor, num_targets: Tensor | None) -> Tensor:
        """Multiplies the loss by the batch's weight relative to the window's first batch.

        Args:
            loss: loss of the next batch, divided by the number of batches.
            num_targets: number of targets of all data ranks' rows; None: all batches weigh the same.
        """
        self._counts.append(num_targets)
        first = self._counts[0]
        if num_targets is None or first is None or any(each is None for each in self._counts):
            return loss
        return loss * (num_targets / first.clamp(min=1.0))

    def close(self, parameters: Iterable[Tensor], num_batches: int) -> None:
        """Ends the window: scales gradients to the mean over all targets of the window."""
        counts = [each for each in self._counts if each is not None]
        if counts and len(counts) == len(self._counts):
            total = torch.stack(counts).sum()
            multiply_gradients(parameters, num_batches * counts[0].clamp(min=1.0) / total.clamp(min=1.0))
        self._counts = []


class ShardwiseStrategy(SavesParts):
    """Trains, validates, tests and predicts a LightningModule over the ranks of a layout.

        class Model(LightningModule):
            def configure_model(self):
                if self.model is None:
                    self.model = self.trainer.strategy.load("Qwen/Qwen3-0.6B")

            def training_step(self, batch, batch_idx):
                return self.model(**batch).loss

        Trainer(accelerator="cpu", devices=4, strategy=ShardwiseStrategy("fsdp2.tp2")).fit(Model(), loader)

    A transformers model in the module that is not split yet is split with these options before the run.
    docs/lightning.md describes the division of work with Lightning.

    Args:
        layout: `"fsdp2.tp2"` or a `MeshShape`, with as many ranks as the Trainer has devices.
        plan, sequence_parallel, fsdp, precision, recompute, compilation, pipeline: see `shardwise.parallelize`; for
            `load` below and for models that are not split. `Trainer(precision=...)` may replace `precision`.
        timeout_seconds: timeout of collectives.
        process_group_backend: `backend` of `Mesh.open`.
        options: options of Lightning's `ParallelStrategy` (`cluster_environment`, `checkpoint_io`, …).

    Attributes:
        last_loss: loss of the last training step, over all data ranks; None before the first.

    Raises:
        MeshError: the layout is invalid, or the Trainer has another number of devices (raised by the Trainer).
    """

    def __init__(  # noqa: PLR0913 - as `load`; LightningCLI reads names and types here
        self,
        layout: str | MeshShape,
        *,
        plan: str | Plan | Mapping[str, str] = "auto",
        sequence_parallel: bool = False,
        fsdp: FsdpPolicy | None = None,
        precision: Precision | None = None,
        recompute: Recompute | None = None,
        compilation: Compile | None = None,
        pipeline: Pipeline | None = None,
        timeout_seconds: float = 600.0,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        self.spec, _ = ParallelSpec.take(locals())
        self.shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
        super().__init__(**options)
        self.num_nodes = 1
        self.last_loss: Tensor | None = None
        self._open = {"timeout_seconds": timeout_seconds, "backend": process_group_backend}
        self._mesh: Mesh | None = None
        self._models: SplitModels | None = None
        self._window = Window()
        self._num_targets: Tensor | None = None

    # Models

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout, available from the module's `setup` and `configure_model` on."""
        if self._mesh is None:
            raise MeshError(
                "there is no mesh yet",
                why="ranks meet when the Trainer begins to fit, validate, test or predict",
                fix="use it in configure_model, setup or later",
            )
        return self._mesh

    def load(self, source: Any, **options: Any) -> nn.Module:
        """Runs `shardwise.load` over this mesh with this strategy's options; for `configure_model`.

        Args:
            source: a directory, a hub id or a config.
            options: options of `shardwise.load` besides those of the strategy: `auto_class`, `dtype`, `seed`, …
        """
        asked, others = ParallelSpec.take(options)
        chosen = {name: getattr(asked if name in options else self.spec, name) for name in vars(self.spec)}
        model = load(source, self.mesh, **chosen, **others)
        note_spec(model, self.spec)
        return model

    # Processes

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """True: rows are chosen by data rank, in every layout."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments by data rank: ranks that differ only in tp or pp read the same rows."""
        return {"num_replicas": self.mesh.data_size, "rank": self.mesh.data_rank}

    def set_world_ranks(self) -> None:
        """Tells Lightning this process's rank."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        size, ranks = self.shape.world_size, self.num_processes * self.num_nodes
        if size != ranks:
            nodes = self.num_nodes if size % self.num_nodes == 0 else 1
            raise MeshError(
                f"the layout {self.shape} has {counted(size, 'rank')}, and the Trainer {ranks}",
                why=f"devices={self.num_processes} on num_nodes={self.num_nodes}",
                fix=f"use Trainer(devices={size // nodes}, num_nodes={nodes}), or a layout of {ranks}",
            )
        if not self.cluster_environment.creates_processes_externally and size > 1:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Opens the mesh, the first time; communicates like `Mesh.open`."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self._mesh is None:
            self._mesh = open_mesh(self.shape, self.cluster_environment, self.root_device, **self._open)

    # Communication that Lightning or a module asks for

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor, in place, over the data ranks or `group`.

        Args:
            reduce_op: "mean", "sum", "max", "min", "product" or a `ReduceOp`; None is "sum".

        Communicates: one all-reduce.
        """
        if not isinstance(tensor, Tensor) or (group := self._group(group)) is None:
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op or "sum"
        is_mean = name in ("mean", "avg")
        operation = getattr(dist.ReduceOp, "SUM" if is_mean else name.upper()) if isinstance(name, str) else name
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor.copy_(tensor / group.size()) if is_mean else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Returns the tensors of all data ranks, or of `group`, `[ranks, …]`; the tensor itself with one rank.

        Args:
            sync_grads: whether gradients flow back to the ranks that the parts came from.

        Communicates: one all-gather.
        """
        if (group := self._group(group)) is None:
            return tensor
        return gather_to_region((tensor if sync_grads else tensor.detach()).unsqueeze(0), group, dim=0)

    def _group(self, group: Any) -> Any:
        is_all = group is None or group is dist.GroupMember.WORLD
        return self.mesh.group(*DATA_AXES) if is_all else group

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the rank `src`'s picklable object."""
        return broadcast_object(obj, self._mesh.group() if self._mesh is not None else None, source=src)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        self.reduce_boolean_decision(decision=True)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, FBT001, FBT002
        """Returns whether `decision` is true on all ranks, or on any."""
        if self._mesh is None:
            return bool(decision)
        count = all_reduce_int(int(decision), self._mesh.group(), self._mesh.device)
        return count == self._mesh.shape.world_size if all else count > 0

    # A run

    @property
    def precision_plugin(self) -> ShardwisePrecision:
        """Ours, whatever `Trainer(precision=...)` made Lightning choose."""
        return self._precision_plugin or ShardwisePrecision(self.spec.precision)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else read_precision(plugin, self.spec.precision)
        if self._precision_plugin is not None:
            self.spec = replace(self.spec, precision=self._precision_plugin.dtypes)

    def setup(self, trainer: Any) -> None:
        """Prepares the module: splits its models, hooks their losses, and builds optimizers over their parts.

        Communicates: like `SplitModels`.
        """
        assert self.accelerator is not None and self.lightning_module is not None
        check_callbacks(trainer.callbacks, self.shape)
        self.accelerator.setup(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        self._models = SplitModels(self.lightning_module, self.mesh, self.spec, trains=trains)
        self._window = Window()
        self.last_loss = None
        self._reset_optimizers_and_schedulers()
        if trains:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Does nothing: split models are on their device, and `setup` moves the rest of the module."""

    def process_dataloader(self, dataloader: object) -> object:
        """Makes loaders draw and end alike on ranks that must agree.

        Communicates: like `end_together`.
        """
        seeds = os.environ.get("PL_SEED_WORKERS", "0") != "0"  # by `seed_everything(workers=True)`
        if seeds and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            # By data rank: tp and pp ranks read the same.
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.mesh.data_rank)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        predicts = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
        return end_together(dataloader, self.mesh, predicts=predicts)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step. With automatic optimization it must not change gradients."""
        assert self._models is not None
        self.mesh.note_step()
        self._models.take_targets()
        output = super().training_step(*args, **kwargs)
        self._num_targets = self._models.take_targets()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            self.last_loss = loss.detach()
        return output

    # No tensors of inference mode, which FSDP2 could not train with later.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().validation_step(*args, **kwargs)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*args, **kwargs)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs)

    # Gradients

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager: delays the reduction of gradients to the last accumulated batch."""
        assert self._models is not None
        gradients = self._models.gradients
        if gradients.registry.stages is not None:
            yield  # a forward through a pipeline has summed already
            return
        gradients.is_deferred = True
        time_reduction(gradients.registry, is_last=False)
        try:
            yield
        finally:
            gradients.is_deferred = False
            time_reduction(gradients.registry, is_last=True)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Computes gradients, complete when it returns, unless `block_backward_sync` delays their reduction.

        Communicates: like the model's backward, and the gradient phase.
        """
        assert self._models is not None and self.lightning_module is not None
        if optimizer is not None and self.lightning_module.trainer.accumulate_grad_batches > 1:
            closure_loss = self._window.weigh(closure_loss, self._num_targets)
        loss_scale = self._models.gradients.loss_scale
        if loss_scale is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        scale = loss_scale.factor
        multiply_gradients(self._stepped(), scale)  # those of earlier batches, which this one's are added to
        try:
            return super().backward(closure_loss * scale, optimizer, *args, **kwargs) / scale
        finally:
            multiply_gradients(self._stepped(), 1 / scale)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps with gradients of the mean over all targets of the accumulated batches."""

        def closed() -> Any:
            result = closure()
            module = self.lightning_module
            if module is not None and module.automatic_optimization:
                self._window.close(self._stepped(), module.trainer.accumulate_grad_batches)
            return result

        return super().optimizer_step(optimizer, closed, model, **kwargs)

    def _stepped(self) -> list[Tensor]:
        """Returns the parameters of all optimizers."""
        return [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Notifies the other ranks, so that none waits for this one. Raises a `RankError` if another one caused it."""
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            mesh.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Ends the run. Models stay on their device, split; the mesh stays for the next run."""
        if self._models is not None:
            self._models.release()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
