"""Recognizes PEFT's modules by their structure.

# [Note: adapters are recognised by structure]
PEFT is optional, so code that computes does not import it. A tuner layer holds the wrapped module as `base_layer`. A
trained copy of a module lies next to the original in `modules_to_save`. Both list their own containers in
`adapter_layer_names`. `shardwise.plan.adapters` decides how these parameters are split.
"""

from torch import nn


def is_adapter(module: nn.Module) -> bool:
    """Whether `module` is a PEFT layer that wraps another module and adds to its output."""
    return _is_tuner(module) and not is_saved_copy(module) and base_of(module) is not None


def is_saved_copy(module: nn.Module) -> bool:
    """Whether `module` is a PEFT wrapper that runs a trained copy of a module (`modules_to_save`)."""
    return _is_tuner(module) and {"original_module", "modules_to_save"} <= module._modules.keys()


def base_of(module: nn.Module) -> nn.Module | None:
    """The module that a PEFT module wraps, which may be a wrapper too; None if it wraps nothing."""
    inner = module._modules.get("base_layer") or module._modules.get("original_module")
    return inner or next((each for each in module._modules.values() if each is not None and _is_tuner(each)), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """The base module inside all PEFT wrappers around it."""
    while _is_tuner(module) and (base := base_of(module)) is not None:
        module = base
    return module


def has_adapters(model: nn.Module) -> bool:
    """Whether any module of the model belongs to PEFT."""
    return any(map(_is_tuner, model.modules()))


def find_model(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's two outer wrappers; `model` itself if there are none."""
    tuner = model._modules.get("base_model")
    if tuner is None or not hasattr(model, "peft_config"):
        return model
    if hasattr(type(tuner), "base_model_prefix"):  # transformers' own: prompts are put before it, nothing into it
        return tuner
    return tuner._modules.get("model") or model


def _is_tuner(module: nn.Module) -> bool:
    return hasattr(type(module), "adapter_layer_names")
