"""NxD's Lightning classes on top of `shardwise.lightning`; needs the extra `lightning`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningModule

from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
from shardwise.compat.neuronx_distributed.trainer import trainer as nxd_trainer
from shardwise.compat.warned import warn_idle
from shardwise.lightning.models import ShardwiseTensorBoardLogger, ShardwiseTQDMProgressBar, note_spec
from shardwise.lightning.precision import ShardwisePrecision
from shardwise.lightning.strategy import ShardwiseStrategy
from shardwise.optim.summing import multiply_gradients
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.topology.shape import MeshShape

_NONE: Mapping[str, Any] = MappingProxyType({})


class NeuronLTModule(LightningModule):
    """Builds, splits and trains a model by an NxD config.

    Args:
        model_fn, model_args, model_kwargs: see `initialize_parallel_model`.
        opt_cls, opt_args, opt_kwargs: class and arguments of the optimizer; it clips as the config says.
        scheduler_cls, scheduler_args, scheduler_kwargs: class and arguments of the scheduler; None: none.
        grad_accum_steps: batches per step with `manual_opt`; else use `Trainer(accumulate_grad_batches=...)`.
        log_rank0: no effect: rank 0 knows the loss of all ranks.
        manual_opt: whether `training_step` steps the optimizer itself, or the Trainer does.
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
    ) -> None:
        super().__init__()
        warn_idle("NeuronLTModule", "rank 0 logs the loss of all ranks", log_rank0=log_rank0)
        self.model_fn, self.nxd_config, self.grad_accum_steps = model_fn, nxd_config, grad_accum_steps
        self.model_args, self.model_kwargs = model_args, model_kwargs
        self.opt_cls, self.opt_args, self.opt_kwargs = opt_cls, opt_args, opt_kwargs
        self.scheduler_cls, self.scheduler_args, self.scheduler_kwargs = scheduler_cls, scheduler_args, scheduler_kwargs
        self.automatic_optimization = not manual_opt
        self.model: Any = None

    def configure_model(self) -> None:
        """Builds the model, once."""
        if self.model is None:
            build = self.model_fn, *self.model_args
            self.model = nxd_trainer.initialize_parallel_model(self.nxd_config, *build, **self.model_kwargs)
        if "model" in self._modules:  # names are those of the split model
            self.__dict__["model"] = model = self._modules.pop("model")
            self.local_model = model.local_module()
            note_spec(self.local_model, self.trainer.strategy.spec)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.model(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, and the scheduler, which advances every step."""
        build = lambda groups, **options: self.opt_cls(groups, *self.opt_args, **options)  # noqa: E731
        parameters = self.model.parameters()
        optimizer = nxd_trainer.initialize_parallel_optimizer(self.nxd_config, build, parameters, **self.opt_kwargs)
        if self.scheduler_cls is None:
            return optimizer
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss of all ranks; with `manual_opt` also steps the optimizer."""
        if self.automatic_optimization:
            loss = self.model(**batch).loss
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
    """`ShardwiseStrategy` with the sizes of a config; the Trainer's other devices are data ranks.

    Args:
        tensor_parallel_size, pipeline_parallel_size: only without a config.
        save_load_xser: no effect: checkpoints are directories that any layout loads.

    Raises:
        MeshError: the sizes do not divide the Trainer's devices (raised by the Trainer).
    """

    def __init__(
        self,
        nxd_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        save_load_xser: bool = True,
        **options: Any,
    ) -> None:
        warn_idle("NeuronXLAStrategy", "checkpoints are those of shardwise", save_load_xser=not save_load_xser)
        config = nxd_config or {}
        tp_size = config.get("tensor_parallel_size", tensor_parallel_size)
        pp_size = config.get("pipeline_parallel_size", pipeline_parallel_size)
        self._shards = bool(config.get("optimizer_config", {}).get("zero_one_enabled"))
        super().__init__(MeshShape(tp_size=tp_size, pp_size=pp_size), fsdp=FsdpPolicy(zero_stage=1), **options)

    def _configure_launcher(self) -> None:
        sizes = {"tp_size": self.shape.tp_size, "pp_size": self.shape.pp_size}
        self.shape = MeshShape.filling(self.num_processes * self.num_nodes, **sizes, shards=self._shards)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Opens the mesh, or takes over an open one, and initializes `parallel_state`."""
        mesh = parallel_state.opened_mesh()
        if mesh is not None and mesh.shape.world_size == self.shape.world_size:
            self._mesh = mesh
        super().setup_environment()
        parallel_state.adopt(self.mesh)


class NeuronXLAPrecisionPlugin(ShardwisePrecision):
    """Computes in the model's dtype, or in bfloat16 with float32 weights (`mixed_precision_enabled`)."""

    def __init__(self, mixed_precision_enabled: bool = False) -> None:
        super().__init__(Precision() if mixed_precision_enabled else None)


NeuronTQDMProgressBar, NeuronTensorBoardLogger = ShardwiseTQDMProgressBar, ShardwiseTensorBoardLogger
"""Lightning's, shown and written by rank 0, with the loss of all ranks."""
