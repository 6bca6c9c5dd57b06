"""From a twin's plan to the model's: rules found on a few layers, for all layers of their kind."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardwise.plan.spec import Plan, Rule
from shardwise.plan.split_style import is_split_style
from shardwise.split.trace import layers_of

__all__ = ["generalize"]


def generalize(plan: Plan, twin: nn.Module, model: nn.Module) -> Plan:
    """`plan`, found on `twin`, for `model`: each of its layers gets the rules of the twin's first layer of its kind.

    Rules that all layers of a stack share are written once, with `*` for the number. Rules on inputs are those of all
    layers of the kind: an input that only some are given is None in the others.
    """
    own = {*(name for name, _ in twin.named_modules()), *(name for name, _ in twin.named_parameters())}
    examples: dict[tuple[str, frozenset[str]], str] = {}
    for layer in layers_of(twin):
        examples.setdefault(_kind(twin, layer), layer)
    layers = layers_of(model)
    inside: dict[str, list[Rule]] = {}
    outside: list[Rule] = []
    for rule in plan.rules:
        owner = next((layer for layer in layers_of(twin) if f"{rule.pattern}.".startswith(f"{layer}.")), None)
        if owner is None:
            outside.append(rule)
        else:
            inside.setdefault(owner, []).append(rule)
    for layer, rules in list(inside.items()):
        example = examples[_kind(twin, layer)]
        known = {rule.pattern[len(example) :] for rule in inside.get(example, [])}
        for rule in rules if layer != example else ():
            rest = rule.pattern[len(layer) :]
            if rule.pattern not in own and _is_of_input(rule) and rest not in known:
                inside.setdefault(example, []).append(replace(rule, pattern=example + rest))
                known.add(rest)
    found: list[Rule] = []
    for layer in layers:
        likeness = examples.get(_kind(model, layer))
        for rule in inside.get(likeness, []) if likeness else []:
            found.append(replace(rule, pattern=layer + rule.pattern[len(likeness or "") :]))
    return Plan((*outside, *_folded(found, layers)))


def _is_of_input(rule: Rule) -> bool:
    return is_split_style(rule.style) or rule.style in ("aside", "sequence")


def _kind(model: nn.Module, layer: str) -> tuple[str, frozenset[str]]:
    """What makes layers alike: their stack and the names of their parameters."""
    names = frozenset(name for name, _ in model.get_submodule(layer).named_parameters(remove_duplicate=False))
    return layer.rpartition(".")[0], names


def _folded(rules: list[Rule], layers: list[str]) -> list[Rule]:
    """Writes rules that every layer of a stack has alike once, in the order of their first layer."""
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    by_shape: dict[tuple[str, str, str], list[Rule]] = {}
    for rule in rules:
        layer = next(each for each in layers if f"{rule.pattern}.".startswith(f"{each}."))
        key = (layer.rpartition(".")[0], rule.pattern[len(layer) :], rule.style)
        by_shape.setdefault(key, []).append(rule)
    folded = []
    for (stack, rest, style), same in by_shape.items():
        if len(same) == len(stacks[stack]) > 1:
            folded.append(Rule(f"{stack}.*{rest}", style, same[0].source, same[0].reason))
        else:
            folded += same
    return folded
