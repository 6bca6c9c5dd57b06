"""NxD's Lightning classes over `shardwise.lightning`; needs the extra `lightning`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningModule

from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.neuronx_distributed.trainer.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
)
from shardwise.lightning.accumulation import multiply_gradients
from shardwise.lightning.models import note_spec
from shardwise.lightning.precision import ShardwisePrecision
from shardwise.lightning.reporting import ShardwiseTensorBoardLogger, ShardwiseTQDMProgressBar
from shardwise.lightning.strategy import ShardwiseStrategy
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.topology.shape import MeshShape

__all__ = [
    "NeuronLTModule", "NeuronTQDMProgressBar", "NeuronTensorBoardLogger", "NeuronXLAPrecisionPlugin",
    "NeuronXLAStrategy",
]  # fmt: skip

_NONE: Mapping[str, Any] = MappingProxyType({})


class NeuronLTModule(LightningModule):
    """Builds, splits and trains a model as an NxD config says.

    Args:
        model_fn, model_args, model_kwargs: as of `initialize_parallel_model`.
        opt_cls, opt_args, opt_kwargs: of the optimizer; it clips as the config says.
        scheduler_cls, scheduler_args, scheduler_kwargs: of the scheduler of learning rates; None has none.
        grad_accum_steps: batches a step is made of, with `manual_opt`; else `Trainer(accumulate_grad_batches=...)`.
        log_rank0, train_batch_size, logging_interval: change nothing: rank 0 knows the loss of all ranks.
        manual_opt: whether `training_step` steps by itself, or the Trainer (which theirs cannot).

    Attributes:
        model: the `NxDModel`, from `configure_model` on.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        nxd_config: Mapping[str, Any],
        opt_cls: Callable[..., Any],
        scheduler_cls: Callable[..., Any] | None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: Mapping[str, Any] = _NONE,
        opt_args: tuple[Any, ...] = (),
        opt_kwargs: Mapping[str, Any] = _NONE,
        scheduler_args: tuple[Any, ...] = (),
        scheduler_kwargs: Mapping[str, Any] = _NONE,
        grad_accum_steps: int = 1,
        log_rank0: bool = False,
        manual_opt: bool = True,
        train_batch_size: int = 16,
        logging_interval: int = 1,
    ) -> None:
        super().__init__()
        self.nxd_config, self.grad_accum_steps = nxd_config, grad_accum_steps
        self.model: Any = None
        self._build = lambda: initialize_parallel_model(nxd_config, model_fn, *model_args, **model_kwargs)
        self._opt = lambda groups, **options: opt_cls(groups, *opt_args, **options)
        self._opt_kwargs = opt_kwargs
        self._schedule = scheduler_cls and (lambda opt: scheduler_cls(opt, *scheduler_args, **scheduler_kwargs))
        self.automatic_optimization = not manual_opt

    def configure_model(self) -> None:
        """Builds the model, once."""
        if self.model is None:
            model = self.__dict__["model"] = self._build()
            self.local_model = model.local_module()
            note_spec(self.local_model, self.trainer.strategy.spec)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.local_model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the scheduler, which goes on with every step."""
        optimizer = initialize_parallel_optimizer(
            self.nxd_config, self._opt, self.local_model.parameters(), **self._opt_kwargs
        )
        if self._schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self._schedule(optimizer), "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss of all ranks; with `manual_opt` also the step that it is for."""
        if self.automatic_optimization:
            loss = self.local_model(**batch).loss
        else:
            loss = self.model.run_train(batch)
            if (batch_idx + 1) % self.grad_accum_steps == 0 or self.trainer.is_last_batch:
                self._step((batch_idx % self.grad_accum_steps) + 1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def _step(self, num_batches: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        multiply_gradients([each for group in optimizer.param_groups for each in group["params"]], 1 / num_batches)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


class NeuronXLAStrategy(ShardwiseStrategy):
    """`ShardwiseStrategy` in the sizes of a config; the Trainer's other devices are data ranks.

    Args:
        tensor_parallel_size, pipeline_parallel_size: only without a config.
        save_load_xser: changes nothing: checkpoints are directories that any layout loads.
        options: of `ShardwiseStrategy`; theirs that change nothing (`debug`, `sync_module_states`) are dropped.

    Raises:
        MeshError: the sizes do not divide the Trainer's devices (from the Trainer).
    """

    def __init__(
        self,
        nxd_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        save_load_xser: bool = True,
        **options: Any,
    ) -> None:
        config = nxd_config or {}
        tp_size = config.get("tensor_parallel_size", tensor_parallel_size)
        pp_size = config.get("pipeline_parallel_size", pipeline_parallel_size)
        self._shards = bool(config.get("optimizer_config", {}).get("zero_one_enabled"))
        options = {name: value for name, value in options.items() if name not in ("debug", "sync_module_states")}
        super().__init__(MeshShape(tp_size=tp_size, pp_size=pp_size), fsdp=FsdpPolicy(zero_stage=1), **options)

    def _configure_launcher(self) -> None:
        sizes = {"tp_size": self.shape.tp_size, "pp_size": self.shape.pp_size}
        self.shape = MeshShape.filling(self.num_processes * self.num_nodes, **sizes, shards=self._shards)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Has the ranks meet, or takes over those that have met, for `parallel_state`, too."""
        if parallel_state.model_parallel_is_initialized():
            self._mesh = parallel_state.current_mesh()
        super().setup_environment()
        parallel_state.adopt(self.mesh)


class NeuronXLAPrecisionPlugin(ShardwisePrecision):
    """Computes in the model's own dtype, or in bfloat16 with float32 weights (`mixed_precision_enabled`)."""

    def __init__(self, mixed_precision_enabled: bool = False) -> None:
        super().__init__(Precision() if mixed_precision_enabled else None)


class NeuronTQDMProgressBar(ShardwiseTQDMProgressBar):
    """Lightning's, shown by rank 0, with the loss of all ranks."""


class NeuronTensorBoardLogger(ShardwiseTensorBoardLogger):
    """Lightning's, which rank 0 alone writes; theirs wrote nothing until user code set `print_step`."""

    def __init__(self, save_dir: str, log_rank0: bool = False, **options: Any) -> None:
        super().__init__(save_dir, **options)
