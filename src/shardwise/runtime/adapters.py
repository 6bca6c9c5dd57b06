"""Adapters in a model: recognised by what PEFT's modules hold, split as their base is, and made to compute with that.

# [Note: adapters are recognised by structure]
PEFT is optional, and what computes need not import it. Its tuner layers hold what they wrap as `base_layer`, copies
that are trained in place of a module lie next to it as `modules_to_save`, and both say in `adapter_layer_names`
where they keep what is theirs. How these divide is decided in `shardwise.plan.adapters`.
"""

from __future__ import annotations

from torch import nn

__all__ = ["base_of", "find_model", "has_adapters", "is_adapter", "is_saved_copy", "unwrapped"]


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's around another one, to which it adds something."""
    return _is_tuner(module) and not is_saved_copy(module) and base_of(module) is not None


def is_saved_copy(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's that runs a trained copy in place of another one."""
    return _is_tuner(module) and {"original_module", "modules_to_save"} <= module._modules.keys()


def base_of(module: nn.Module) -> nn.Module | None:
    """What one of PEFT's modules wraps; it may be wrapped itself."""
    inner = module._modules.get("base_layer") or module._modules.get("original_module")
    return inner or next((each for each in module._modules.values() if each is not None and _is_tuner(each)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module of the base that is inside of all of PEFT's around it."""
    while _is_tuner(module) and (base := base_of(module)) is not None:
        module = base
    return module


def has_adapters(model: nn.Module) -> bool:
    """Whether any module of a model is one of PEFT's."""
    return any(map(_is_tuner, model.modules()))


def find_model(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's own two wrappers around it; `model` itself where it has none."""
    tuner = model._modules.get("base_model")
    if tuner is None or not hasattr(model, "peft_config"):
        return model
    if hasattr(type(tuner), "base_model_prefix"):  # transformers' own: prompts are put before it, nothing into it
        return tuner
    return tuner._modules.get("model") or model


def _is_tuner(module: nn.Module) -> bool:
    return hasattr(type(module), "adapter_layer_names")
