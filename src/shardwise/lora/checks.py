"""Checks of PEFT features that cannot be split: adapters with shared parameters, and prompts."""

from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.decision import SplitPlan
from shardwise.runtime.adapters import find_model, is_adapter, is_saved_copy, unwrapped
from shardwise.topology.shape import MeshShape

_OF_HEADS = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of prompts, in PEFT's words, that are keys and values of every head."""


def check_adapters(model: nn.Module, shape: MeshShape) -> None:
    """Checks that adapters of different weights share no parameters, because stages and FSDP2 units hold their own.

    Raises:
        PlanError: some do, and there are several ranks.
    """
    owners: dict[int, tuple[str, set[int]]] = {}
    for fqn, module in model.named_modules() if shape.world_size > 1 else ():
        if not is_adapter(module) or is_saved_copy(module):
            continue
        wrapper: Any = module
        base = {id(value) for value in unwrapped(module).parameters()}
        own = [id(value) for value in module.parameters() if id(value) not in base]
        other = next((owners[each][0] for each in own if each in owners and not base & owners[each][1]), None)
        if other is not None or getattr(wrapper, "kwargs", {}).get("tied_adapter"):
            raise PlanError(
                f"the adapter on {fqn} cannot be divided over {shape}",
                why=f"its parameters are those of the adapter on {other or 'the embedding'} too",
                fix="use adapters that have their own (LoraConfig without ensure_weight_tying), or one process",
            )
        owners |= dict.fromkeys(own, (fqn, base))


def check_prompts(model: nn.Module, plan: SplitPlan) -> None:
    """Checks that every rank can compute alike what PEFT's wrapper computes before the model.

    Raises:
        PlanError: it cannot.
    """
    configs = getattr(model, "peft_config", {}).values() if find_model(model) is not model else ()
    kinds = [str(getattr(each.peft_type, "value", each.peft_type)) for each in configs if each.is_prompt_learning]
    if kinds and plan.pipeline is not None:
        raise PlanError(
            f"a model with prompts of PEFT's ({kinds[0]}) cannot be cut into stages",
            why="they are computed before the model, from its embedding, and their stage is unknown",
            fix="use tp or fsdp instead of pp",
        )
    if plan.num_parts > 1 and plan.heads and (found := [each for each in kinds if each in _OF_HEADS]):
        raise PlanError(
            f"a model with prompts of PEFT's ({found[0]}) cannot be split over tp={plan.num_parts}",
            why="they are keys and values of all heads, of which a rank has some",
            fix="use fsdp instead of tp, or prompts that are embeddings (PromptTuningConfig)",
        )
