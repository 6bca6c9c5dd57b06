"""TRL's trainers on split models: what `adapt` overrides beside transformers' own.

# [Note: what TRL touches]
TRL's trainers multiply by `lm_head.weight`, add adapters to a model and load the reference model whole, all in their
`__init__`. So the model and its reference are split before, with their adapters, and TRL's fused head is replaced
after. Their metrics are gathered without the copies of rows that fill up a batch.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
import trl
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trl.trainer.callbacks import SyncRefModelCallback
from typing_extensions import override

from shardwise.accelerate.overrides import check_overridden
from shardwise.accelerate.rows import Rows
from shardwise.api.building import load, parallelize
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.lora.inject import inject
from shardwise.mesh import Mesh
from shardwise.parameters.registry import is_split, registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.pipeline.scores import StagedScores
from shardwise.plan.options import ParallelSpec
from shardwise.trainer.adapted import SplitTrainer, split_model
from shardwise.trainer.losses import SharesLosses
from shardwise.trainer.overrides import on_split_models
from shardwise.trainer.trl import fuse_head, is_fused, replace_fused_head

_KINDS = (trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer, trl.GRPOTrainer)
_REFUSED = {
    "activation_offloading": ("it is not tried on split models", "use recompute=Recompute(...)"),
    "cast_lm_head_to_fp32": ("it multiplies by the whole head", "load the model in float32"),
    "log_completions": ("its table repeats completions of tp ranks", "log them in a reward function"),
    "precompute_ref_log_probs": ("it hashes full parameters", "leave it out: the reference model is split, too"),
    "use_transformers_continuous_batching": ("it reads full parameters", "leave it out"),
    "use_vllm": ("it reads full parameters", "leave it out: the training ranks generate"),
}


def mixin_for(trainer: type[Any]) -> type[SplitTrainer]:
    """Returns the mixin for a trainer of TRL. Raises if what the trainer does with a model is not known."""
    if issubclass(trainer, trl.GRPOTrainer):
        check_overridden(SplitGrpoTrainer, trl.GRPOTrainer)
        return SplitGrpoTrainer
    if not issubclass(trainer, _KINDS):
        raise UnsupportedError(
            f"trl's {trainer.__name__} on split models",
            why="what it does with a model is not known",
            fix=f"use one of {', '.join(each.__name__ for each in _KINDS)}",
        )
    return SplitTrlTrainer


class SplitTrlTrainer(SplitTrainer):
    """Mixin before a TRL trainer, for models that Shardwise splits; see `adapt` and `SplitTrainer`.

    Args:
        peft_config: with `layout`, of an adapter that the model gets before it is split.
        ref_model: of DPO and KTO; split, or an unsplit one that is split like the model. Default: the model's
            directory is loaded again and split. With adapters the reference is the model without them.
    """

    def __init__(
        self, model: Any = None, *others: Any, layout: str | None = None, auto_class: Any = None, **options: Any
    ) -> None:
        if layout is None and not (isinstance(model, nn.Module) and is_split(model)):
            super().__init__(model, *others, auto_class=auto_class, **options)
            return
        signature = inspect.signature(super(SplitTrainer, self).__init__)
        if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):  # of a subclass
            kind: Any = next(each for each in type(self).__mro__ if each in _KINDS)
            signature = inspect.signature(functools.partial(kind.__init__, self))
        given = {**signature.bind_partial(model, *others).arguments, **options}
        args, adapter, asked = given.get("args"), given.pop("peft_config", None), {}
        if layout is not None:
            asked = {name: given.pop(name) for name in list(given) if name in ParallelSpec.__dataclass_fields__}
            model = self._load(model, Mesh.open(layout), auto_class, adapter, asked, args)
        elif adapter is not None:
            raise ConfigError(
                "peft_config= with a split model",
                why="an adapter is split with its model",
                fix="load the model with shardwise.load(..., adapter=peft_config), or give its directory and layout=",
            )
        mesh = registry_of(model).mesh
        _check_arguments(args, mesh)
        refer = functools.partial(self._reference, model, given, asked, auto_class, is_new=adapter is not None)
        given |= {"model": model, **self._made_for(given, mesh, refer)}
        super().__init__(**given, auto_class=auto_class if layout is None else None)
        if (reference := getattr(self, "ref_model", None)) is not None and not is_split(reference):
            self.ref_model = reference = None
        if reference is not None:  # around whose fused head accelerate has put autocast
            self.accelerator._models.remove(reference)
            reference.forward = vars(reference).pop("_original_forward", reference.forward)
            replace_fused_head(reference)
            self.accelerator.prepare_model(reference, evaluation_mode=True)
        replace_fused_head(self.model)
        if self._num_microbatches is not None and (runner := runner_of(self.model)) is not None:
            runner.num_microbatches = self._num_microbatches

    # The model and its reference

    def _load(
        self, model: Any, mesh: Mesh, auto_class: Any, adapter: Any, asked: Mapping[str, Any], args: Any
    ) -> nn.Module:
        """Loads or splits the model, with its adapter; files are read as TRL reads them."""
        options = _options_of(args)
        if isinstance(model, nn.Module):
            if adapter is not None:
                transformers.set_seed(options["seed"])
                model = inject(model, adapter, on_meta=False)
        elif isinstance(self, trl.RewardTrainer):  # a head of one score, which a language model's files lack
            auto_class = auto_class or transformers.AutoModelForSequenceClassification
            head = {"num_labels": 1, "allow_missing": ["score.*", "classifier.*"], "allow_unused": ["lm_head.*"]}
            options = {**head, **options}
        if "precision" not in asked:
            options.setdefault("dtype", "float32")
        options["adapter"] = adapter
        return split_model(model, mesh=mesh, auto_class=auto_class, asked=asked, args=args, options=options)

    def _reference(
        self, model: Any, given: Mapping[str, Any], asked: Mapping[str, Any], auto_class: Any, *, is_new: bool
    ) -> Any:
        """Returns the reference, split like the model; or an empty module, where it is the model without adapters."""
        mesh, reference = registry_of(model).mesh, given.get("ref_model")
        if isinstance(reference, nn.Module):
            return reference if is_split(reference) else parallelize(reference, mesh, **asked)
        if reference is None and hasattr(model, "peft_config"):
            if not is_new and not _adds_nothing(model, mesh):
                raise UnsupportedError(
                    f"{type(self).__name__} on a split model whose adapter is trained",
                    why="TRL copies the adapter as its reference, and adapters are split with their model",
                    fix="merge it and train a new one; DPO and KTO also take ref_model=, with the adapter merged",
                )
            empty = nn.Module()  # TRL adds a reference adapter where it is given nothing
            empty.config = model.config
            return empty
        if not (source := reference or model.config._name_or_path):
            raise ConfigError("a reference model without a directory", fix="pass ref_model=, split or unsplit")
        options = {"dtype": next(model.parameters()).dtype, "attn_implementation": model.config._attn_implementation}
        if reference is None:  # the model's own files
            options |= _options_of(given.get("args")) | {"auto_class": auto_class}
        return load(source, mesh, **options, **asked)

    def _made_for(self, given: Mapping[str, Any], mesh: Mesh, refer: Callable[[], nn.Module]) -> dict[str, Any]:
        """Returns arguments of TRL that depend on the split model: the reference, of trainers that take one."""
        return {"ref_model": refer()} if isinstance(self, (trl.DPOTrainer, trl.KTOTrainer)) else {}

    # Rows, losses and metrics

    _is_over_targets = False  # TRL's own methods add to what the fused head makes

    @override
    def _target_count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the number of this rank's targets: tokens where there are labels of tokens, else rows."""
        labels = inputs.get("labels")
        if labels is None or (self._rows is not None and self._rows.own == 0):
            return super()._target_count(inputs)
        return (labels[..., 1:] != -100).sum().float()

    @on_split_models
    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Returns the loss as this rank's share; metrics are those of one copy of each row.

        Communicates: as `SplitTrainer.compute_loss`, and a gather over the data ranks for each metric.
        """
        mesh = self._mesh
        rows = self._rows if mesh.data_size > 1 else None
        self.accelerator.gathered = rows or Rows((1,) * mesh.data_size, mesh.data_rank, fills=False)
        try:
            return super().compute_loss(model, inputs, *args, **options)
        finally:
            self.accelerator.gathered = None

    @on_split_models
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves a checkpoint, and writes TRL's model card first, as TRL does."""
        with raise_on_all_ranks(self._mesh.group(), "writing the model card"):
            self.create_model_card(model_name=Path(self.args.hub_model_id or self.args.output_dir).name)
        super()._save_checkpoint(model, trial)

    # Pipelines

    @override
    def _check_pipeline(self) -> None:
        """Raises in a pipeline, unless the loss is made of the scores of a fused head."""
        makes_scores = is_fused(self.model) and not isinstance(self, trl.GRPOTrainer)
        if not makes_scores or self.compute_loss_func is not None or self.label_smoother is not None:
            super()._check_pipeline()

    @override
    def _step_through_stages(self, inputs: dict[str, Any], num_items: Any) -> Tensor:
        scores = StagedScores(self.model)
        loss: Tensor = self.compute_loss(scores, inputs, num_items_in_batch=num_items)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs and num_items is not None
        loss = loss if is_scaled else loss / self.current_gradient_accumulation_steps
        scores.backward(loss)
        return loss.detach()


class SplitGrpoTrainer(SplitTrlTrainer):
    """`SplitTrlTrainer` for GRPO, which generates on the ranks of training: tp ranks alike, data ranks differently."""

    _reference_model: nn.Module | None = None
    _asked: dict[str, Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self._is_split:
            return
        mesh = self._mesh
        self.args.__dict__.update(self._asked)
        self.beta = self.args.beta
        if (reference := self._reference_model) is not None and is_split(reference):
            fuse_head(reference, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
            if self.args.sync_ref_model:
                self.add_callback(SyncRefModelCallback(self.ref_model, self.accelerator))
        transformers.set_seed(self.args.seed + mesh.data_rank)
        # Data ranks gather parameters together, so each runs as many forwards as the one that writes most.
        self.model.generate = functools.partial(self.model.generate, synced_gpus=mesh.data_size > 1)
        ranks = all_gather_objects(mesh.data_rank, mesh.group())
        self._ranks_of_rewards = [ranks.index(each) for each in range(mesh.data_size)]

    def _made_for(self, given: Mapping[str, Any], mesh: Mesh, refer: Callable[[], nn.Module]) -> dict[str, Any]:
        """Returns a copy of the arguments whose generation batch is that of the data ranks, not of all ranks.

        Its `beta` is 0, by which TRL loads no reference; the reference is made here.
        """
        args = copy.copy(given.get("args"))
        if args is None:
            raise ConfigError("GRPO on a split model without args=", fix="pass args=GRPOConfig(...)")
        self._asked = {"beta": args.beta}
        if args.beta:
            self._reference_model = refer()
            if args.sync_ref_model and not is_split(self._reference_model):
                raise UnsupportedError(
                    "sync_ref_model=True with an adapter",
                    why="the reference is the model without it, which does not change",
                    fix="leave it out",
                )
            self._asked["sync_ref_model"], args.beta, args.sync_ref_model = args.sync_ref_model, 0.0, False
        args.generation_batch_size = args.per_device_train_batch_size * mesh.data_size * args.steps_per_generation
        if args.generation_batch_size % args.num_generations:
            raise ConfigError(
                f"generation batches of {args.generation_batch_size} rows in groups of {args.num_generations}",
                why=f"{mesh.data_size} of the ranks have rows of their own",
                fix="raise per_device_train_batch_size, or lower num_generations",
            )
        return {"args": args}

    @on_split_models
    def _calculate_rewards(self, *args: Any) -> Tensor:
        """Returns the rewards of all data ranks' completions, which GRPO gathers over all ranks."""
        rewards: Tensor = super()._calculate_rewards(*args)
        return rewards.unflatten(0, (self._mesh.shape.world_size, -1))[self._ranks_of_rewards].flatten(0, 1)

    @on_split_models
    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        """Returns the loss of a batch of evaluation, which is a list of prompts; see `SplitTrainer.prediction_step`."""
        step = super(SharesLosses, self).prediction_step
        self._rows = self.accelerator.rows = self.accelerator.take_rows(inputs)
        size = self._mesh.data_size
        num_rows = len(inputs) * size if self._rows is None or size == 1 else sum(self._rows.counts)
        if num_rows % size or num_rows % self.num_generations_eval:
            raise UnsupportedError(
                f"a batch of {num_rows} completions in groups of {self.num_generations_eval} over {size} data ranks",
                why="the rewards of a group are compared, and every data rank writes as many completions",
                fix="evaluate a number of prompts, and per_device_eval_batch_size of completions, that divide",
            )
        loss, *others = step(model, inputs, *args, **options)
        return (self._mean_over_ranks(loss, {}), *others)


def _check_arguments(args: Any, mesh: Mesh) -> None:
    """Raises for arguments of TRL that a split model cannot follow."""
    refused = dict(_REFUSED)
    template = getattr(args, "chat_template_path", None)
    if template is not None and not str(template).endswith((".jinja", ".j2")):
        refused["chat_template_path"] = ("it changes the number of embeddings", "give a .jinja file")
    for name, (why, fix) in refused.items():
        if getattr(args, name, None):
            raise UnsupportedError(f"{name}={getattr(args, name)!r} over {mesh.shape}", why=why, fix=fix)


def _options_of(args: Any) -> dict[str, Any]:
    """Returns the options with which TRL reads the files of a model."""
    options = {"seed": getattr(args, "seed", 42), "trust_remote_code": getattr(args, "trust_remote_code", False)}
    return options | (getattr(args, "model_init_kwargs", None) or {})


def _adds_nothing(model: nn.Module, mesh: Mesh) -> bool:
    """Returns whether the model's adapters are LoRA's as they begin. Communicates: an all-gather of two flags."""
    factors = [each for name, each in model.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in factors]
    found = all_gather_objects((bool(held), any(bool(each.any()) for each in held)), mesh.group())
    return any(is_lora for is_lora, _ in found) and not any(is_trained for _, is_trained in found)
