"""Converts torch's parallel styles and style strings to rules, and rules to styles."""

import fnmatch
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from shardwise.comm.collectives import copy_to_region
from shardwise.errors import ConfigError, PlanError, UnsupportedError, did_you_mean
from shardwise.plan.options import check_kind
from shardwise.plan.rule import STYLES, Rule
from shardwise.plan.spec import Plan, match
from shardwise.runtime.reading import read_in_forward
from shardwise.search.planning import AUTOMATIC

_PREPARED = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
_OF_TORCH: dict[str, tuple[type[ParallelStyle], dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "rowwise": (RowwiseParallel, {}),
    "colwise_rep": (ColwiseParallel, {"output_layouts": Replicate()}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "embedding_colwise": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise_rep": (RowwiseParallel, {"input_layouts": Replicate()}),
    "rowwise_split_input": (RowwiseParallel, {"input_layouts": Replicate()}),
    "embedding_rowwise": (RowwiseParallel, {"input_layouts": Replicate()}),
    "sequence_parallel": (SequenceParallel, {}),
}


class RuleStyle(ParallelStyle):
    """A style without a torch class. It carries the equivalent rules.

    Attributes:
        styles: one style for each section of a plan that has a rule for the module.
    """

    def __init__(self, *styles: str) -> None:
        super().__init__()
        self.styles = styles

    def __repr__(self) -> str:
        return f"RuleStyle({', '.join(self.styles)})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by torch's own `parallelize_module`: keeps the module's parameters replicated; sums gradients."""
        if self.styles == ("replicated_with_grad_allreduce",):
            group = device_mesh.get_group()

            def read(parameter: Tensor) -> Tensor:  # no hook on the parameter, in whose place FSDP2 puts another
                return copy_to_region(parameter, group)

            for owner in module.modules():
                read_in_forward(owner, [name for name, _ in owner.named_parameters(recurse=False)], read)
            return module
        raise UnsupportedError(
            f"{self} in torch's parallelize_module",
            why="it divides what DTensor cannot, so torch has no such style",
            fix="pass the plan to fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize or shardwise.parallelize",
        )


def style_of(style: str) -> ParallelStyle:
    """Style object for a style string of transformers or Shardwise.

    Raises:
        PlanError: the argument is no string, or no style.
    """
    if not isinstance(style, str):
        raise PlanError(
            f"Unsupported parallel style type: {type(style).__name__}", fix='use a string such as "colwise"'
        )
    if style in _OF_TORCH:
        build, options = _OF_TORCH[style]
        return build(**options)
    if style not in ("local_params", "mla_kv_a_proj"):
        try:
            Rule.of("*", style)
        except PlanError as error:
            known = {*_OF_TORCH, *(name for own in STYLES.values() for name in own)}
            raise PlanError(
                f"Unknown parallel style: {style}{did_you_mean(style, known)}",
                fix=f"use one of {', '.join(sorted(known))}",
            ) from error
    return RuleStyle(style)


def hf_plan(plan: Plan) -> dict[str, ParallelStyle]:
    """The plan as patterns to style objects."""
    styles: dict[str, list[str]] = {}
    for rule in plan.rules:
        styles.setdefault(rule.pattern, []).append(rule.style)
    return {pattern: style_of(own[0]) if len(own) == 1 else RuleStyle(*own) for pattern, own in styles.items()}


def import_from_path(path: str) -> Any:
    """The object at a dotted path such as `package.module.Name`.

    Raises:
        ConfigError: `path` is malformed, or there is no such object.
    """
    try:
        if "." not in path:
            raise ValueError("it names a module and an object in it")
        return pkgutil.resolve_name(path)
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        hint = did_you_mean(error.name, dir(error.obj)) if isinstance(error, AttributeError) and error.name else ""
        raise ConfigError(f"cannot import {path!r}{hint}", why=str(error), fix="use package.module.Name") from error


def read_plan(plan: Any, model: nn.Module) -> tuple[str | Plan, bool]:
    """Converts a plan of torch's styles to rules. Also returns whether it uses sequence parallelism.

    Args:
        plan: patterns to torch's styles or style strings; the import path of such a dictionary, or of a function that
            returns one (of the model, if it takes an argument); "auto", "declared" or "derived"; None for "auto".

    Raises:
        PlanError: the plan is none of these.
    """
    check_kind("the model", model, nn.Module, fix="pass the model itself, first")
    if isinstance(plan, str) and plan not in AUTOMATIC:
        plan = import_from_path(plan)
    if callable(plan) and not isinstance(plan, Mapping):
        plan = plan(model) if inspect.signature(plan).parameters else plan()
    if plan is None or isinstance(plan, Plan) or (isinstance(plan, str) and plan in AUTOMATIC):
        return plan or "auto", False
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"a tp_shard_plan cannot be a {type(plan).__name__}",
            fix='use a dict such as {"model.layers.*.mlp.up_proj": ColwiseParallel()}, or the import path of one',
        )
    rules: list[Rule] = []
    for pattern, style in plan.items():
        names = [name for name, _ in model.named_modules() if _matches(str(pattern), name)]
        for each in _styles(pattern, style, model, names):
            rules += [Rule.of(target, each) for target in ([pattern] if _is_ours(pattern) else names)]
    is_sequence = any(
        isinstance(style, SequenceParallel)
        or style == "sequence_parallel"
        or (isinstance(style, RowwiseParallel) and style.output_layouts[0] == Shard(1))
        for style in plan.values()
    )
    return Plan(tuple({(type(rule), rule.pattern): rule for rule in rules}.values())), is_sequence


def _is_ours(pattern: str) -> bool:
    """Whether a pattern means the same for `fnmatch`, which torch uses, and for us."""
    return all(part in ("*", "**") or not set(part) & set("*?[") for part in pattern.split("."))


def _matches(pattern: str, name: str) -> bool:
    if _is_ours(pattern):
        return match(pattern, name)
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(map(fnmatch.fnmatch, own, parts))


def _styles(pattern: str, style: Any, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Our styles for the user's style of a pattern; empty if sequence parallelism itself covers it."""
    if isinstance(style, str):
        style = style_of(style)
    if isinstance(style, RuleStyle):
        return tuple(each for each in style.styles if each not in ("local_params", "mla_kv_a_proj"))
    if isinstance(style, (SequenceParallel, *_PREPARED)):
        return ()
    modules = [model.get_submodule(name) for name in names]
    is_embedding = bool(modules) and all(isinstance(module, nn.Embedding) for module in modules)
    if isinstance(style, ColwiseParallel):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        gathers = style.output_layouts[0].is_replicate() or any(module is head for module in modules)
        return ("embedding_colwise",) if is_embedding else ("colwise_gather_output" if gathers else "colwise",)
    if isinstance(style, RowwiseParallel):
        if is_embedding:
            return ("embedding_rowwise",)
        return ("rowwise_split_input" if style.input_layouts[0].is_replicate() else "rowwise",)
    raise PlanError(
        f"the plan has a {type(style).__name__} for {pattern!r}",
        fix="use ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, a style "
        'string such as "colwise", or what get_hf_tp_shard_plan gives',
    )
