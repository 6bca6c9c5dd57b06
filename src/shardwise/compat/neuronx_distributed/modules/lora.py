"""`modules.lora`: NxD's LoRA on top of PEFT's. Adapters are split like their base."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.api.checkpoints import export_pretrained
from shardwise.checkpoint.store import find_tag
from shardwise.errors import ConfigError
from shardwise.lora.inject import inject, named_targets, peft, read_adapter_config
from shardwise.parallel.apply import check_unsplit
from shardwise.plan.options import check_choice, check_kind

_INITS = {"default": True, "gaussian": "gaussian"}
_PEFTS = ("lora_alpha", "lora_dropout", "bias", "target_modules", "use_rslora", "modules_to_save")  # named as there


@dataclass
class LoraConfig:
    """Configuration of LoRA adapters and their checkpoints.

    Attributes:
        target_modules: keywords; a module whose name contains one is adapted. A string is a pattern of full names; None
            uses PEFT's default for the architecture.
        save_lora_base, merge_lora: write the base with the adapter beside it (`base/` in the checkpoint), or with the
            adapter added (`merged/`), as Hugging Face directories; default: save only the adapter.
        save_lora_config_adapter: keep the config in the checkpoint; else in `lora_save_dir/adapter_config.json`, below
            the directory of checkpoints, where PEFT also finds the adapter.
        load_lora_from_ckpt: start from the adapter of the checkpoint `lora_load_tag` in `lora_save_dir`, whose
            configuration then applies.

    Raises:
        ConfigError: a value is not documented.
    """

    enable_lora: bool = True
    lora_rank: int = 16
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    bias: str = "none"
    target_modules: Sequence[str] | str | None = None
    use_rslora: bool = False
    init_lora_weights: str = "default"
    modules_to_save: Sequence[str] | None = None
    save_lora_base: bool = False
    merge_lora: bool = False
    save_lora_config_adapter: bool = False
    load_lora_from_ckpt: bool = False
    lora_save_dir: str | os.PathLike[str] = "lora_adapter"
    lora_load_tag: str | None = None

    def __post_init__(self) -> None:
        check_choice("LoraConfig bias", self.bias, ("none", "all", "lora_only"))
        check_choice("LoraConfig init_lora_weights", self.init_lora_weights, tuple(_INITS))
        if self.merge_lora and not self.save_lora_base:
            raise ConfigError("LoraConfig merge_lora without save_lora_base", why="it is the base that it is merged in")

    def as_saved(self) -> "LoraConfig":
        """Returns the config of the adapter to load, else this config. Raises `LoadError` if it is missing."""
        if not self.load_lora_from_ckpt:
            return self
        saved = read_adapter_config(find_tag(Path(self.lora_save_dir), self.lora_load_tag))
        return replace(self, lora_rank=saved.r, **{name: getattr(saved, name) for name in _PEFTS})

    def for_peft(self, model: nn.Module) -> Any:
        """Returns the equivalent PEFT config."""
        same = {name: getattr(self, name) for name in _PEFTS}
        same["target_modules"] = named_targets(model, self.target_modules)
        same["modules_to_save"] = list(self.modules_to_save) if self.modules_to_save else None
        return peft().LoraConfig(r=self.lora_rank, init_lora_weights=_INITS[self.init_lora_weights], **same)

    def packed(self, user_content: Any) -> Any:
        """Returns the user content of a checkpoint, with this config if it is saved there."""
        config = {**asdict(self), "lora_save_dir": os.fspath(self.lora_save_dir)}
        return {"user_content": user_content, "lora_config": config} if self.save_lora_config_adapter else user_content

    def export(self, model: nn.Module, path: str | os.PathLike[str], tag: str) -> None:
        """Writes the exports that the config requests beside the checkpoint `tag`.

        Communicates: like `shardwise.export_pretrained`.
        """
        if not self.save_lora_config_adapter:
            export_pretrained(model, Path(path) / self.lora_save_dir, adapter="only")
        if self.save_lora_base:
            name, mode = ("merged", "merged") if self.merge_lora else ("base", "with_base")
            export_pretrained(model, Path(path) / tag / name, adapter=mode)


def LoRAModel(module: nn.Module, LoraConfig: LoraConfig) -> nn.Module:  # noqa: N802, N803 - so the document
    """Adds adapters to an unsplit model and freezes the base; returns PEFT's model around it.

    Raises:
        ConfigError: no module's name contains a keyword, PEFT cannot adapt a module, or `merge_lora` could not merge.
        PlanError: the model is already split.
    """
    check_kind("the model of a LoRAModel", module, nn.Module, fix="pass the model, then a LoraConfig")
    if not hasattr(LoraConfig, "for_peft"):
        raise ConfigError(f"the config of a LoRAModel is {LoraConfig!r}", fix="pass a LoraConfig")
    check_unsplit(module)
    config = LoraConfig.for_peft(module)
    adapters = importlib.import_module("shardwise.compat.layers.adapters")  # needs PEFT
    adapters.register_split_layers(module, config)
    model = inject(module, config, on_meta=False)
    adapted = (each.get_base_layer() for each in model.modules() if isinstance(each, adapters.ColumnLora))
    if LoraConfig.merge_lora and not all(getattr(layer, "fused", True) for layer in adapted):
        raise ConfigError(
            "merge_lora of a layer with fuse_qkv=False",
            why="its three weights share one adapter",
            fix="build the layer with fuse_qkv=True, or save the adapter alone",
        )
    model.__dict__["lora_config"] = LoraConfig
    return model


LoraModel = LoRAModel
