"""transformers' `Trainer` on split models: what `adapt` overrides, and why.

# [Note: one override for each touch]
Trainer touches a model in some twenty places. Each of the methods below overrides one of them for split models. `adapt`
checks that the methods that are overridden still exist with the same arguments. Nothing of transformers or accelerate
is changed for other trainers of the process.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import BatchRebalanceSampler

from shardwise.accelerate.accelerator import follow
from shardwise.api.building import load, parallelize
from shardwise.data.batch import flops_of
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.optimizer import build_optimizer
from shardwise.parameters.registry import is_split, registry_of, reshard
from shardwise.plan.options import Compile, ParallelSpec, Recompute
from shardwise.topology.shape import MeshShape
from shardwise.trainer.checkpoint import SavesSplitModels
from shardwise.trainer.losses import SharesLosses
from shardwise.trainer.overrides import on_split_models

_REPLACED = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save",
    "_save_checkpoint",
)


class SplitTrainer(SharesLosses, SavesSplitModels):
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

    _split: Callable[[Any], nn.Module] | None = None
    optimizer: Any

    def __init__(
        self, model: Any = None, *others: Any, layout: str | None = None, auto_class: Any = None, **options: Any
    ) -> None:
        asked = {name: options.pop(name) for name in list(options) if name in ParallelSpec.__dataclass_fields__}
        # The position of `args` differs: TRL's DPOTrainer takes the reference model before it.
        beside = (*others, *options.values())
        args = next((each for each in beside if isinstance(each, transformers.TrainingArguments)), None)
        if layout is not None:
            self._use_mesh(mesh := Mesh.open(layout))
            self._split = functools.partial(split_model, mesh=mesh, auto_class=auto_class, asked=asked, args=args)
            model = model if model is None else self._split(model)
        elif asked or auto_class is not None:
            raise ConfigError(f"{next(iter(asked), 'auto_class')}= without a layout", fix='add layout="fsdp2.tp2"')
        elif isinstance(model, nn.Module) and is_split(model):
            self._use_mesh(registry_of(model).mesh)
        if self._is_split:
            _check_arguments(args, self._mesh.shape)
            self._check_methods()
        super().__init__(model, *others, **options)

    def _check_methods(self) -> None:
        """Raises for methods of the user's that the adapter replaces, and does not call."""
        kinds = type(self).__mro__
        for kind in kinds[kinds.index(SavesSplitModels) + 1 :]:
            found = [name for name in _REPLACED if name in vars(kind)]
            if found and kind.__module__.partition(".")[0] not in ("transformers", "trl"):
                raise UnsupportedError(
                    f"{kind.__name__}.{found[0]} with a split model",
                    why="the adapter does this for all ranks together, and would not call it",
                    fix="use a callback, such as on_save, or leave it out",
                )

    # The model and its processes

    @on_split_models
    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator, whose processes are the data ranks."""
        super().create_accelerator_and_postprocess()
        follow(self.accelerator, self._mesh)
        self._note_data_seed()

    def _note_data_seed(self) -> None:
        if self.args.data_seed is None:  # a resumed run deals the same rows, whatever its random states
            self.accelerator.dataloader_config.data_seed = torch.random.initial_seed()

    @on_split_models
    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a fresh model of `model_init`, split as `layout` says."""
        model: nn.Module = super().call_model_init(trial)
        self._steps.clear()
        self._note_data_seed()  # which training has just set
        return model if self._split is None else self._split(model)

    @on_split_models
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves a model that is not split: a split one is on its device."""
        if not is_split(model):
            super()._move_model_to_device(model, device)

    @on_split_models
    def get_tp_size(self) -> int:
        """Returns 1: the accelerator's processes are data ranks, which have rows of their own."""
        return 1

    @on_split_models
    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the rows of an optimizer step over all data ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._mesh.data_size)

    @on_split_models
    def floating_point_ops(self, inputs: Any) -> float:
        """Returns this rank's part of the operations of a batch; see `StepResult.flops`."""
        if not isinstance(inputs, Mapping):
            return super().floating_point_ops(inputs)
        copies = self._mesh.shape.world_size // self._mesh.data_size
        return flops_of(inputs, registry_of(self.model).plan.work) / copies

    # Rows

    @on_split_models
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns transformers' sampler."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, BatchRebalanceSampler):
            raise UnsupportedError(
                'train_sampling_strategy="batch_rebalance" with a split model',
                why="it deals rows to ranks by itself",
                fix='use "group_by_length"',
            )
        return sampler

    @on_split_models
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Builds the optimizer of `args.optim` over this rank's parts, with transformers' rule for weight decay.

        Raises:
            UnsupportedError: the optimizer is no torch optimizer class over groups of parameters (GaLore, LOMO, Muon).
        """
        reshard(self.model)
        if not self._is_own("create_optimizer"):
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

    @on_split_models
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips the gradients to a norm over all ranks; returns the norm."""
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model, self.args.max_grad_norm)

    @on_split_models
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Returns the norm over all ranks."""
        if grad_norm is None:
            self.accelerator.unscale_gradients()
            return clip_grad_norm_(self.model, float("inf"))
        return grad_norm


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
