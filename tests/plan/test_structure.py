"""What counts as a stack of layers, told by the tree of modules alone."""

from __future__ import annotations

import pytest

from shardwise.plan.structure import LayerStack, ModelFacts, ModuleFacts, outermost_layers

pytestmark = pytest.mark.pure

LIST, LINEAR = ModuleFacts(kind="list"), ModuleFacts(kind="linear", parameters={"weight": (8, 8)})
NORM = ModuleFacts(kind="other", class_name="Norm", parameters={"weight": (8,)})
OPERATIONS = {
    "linear": LINEAR,
    "transposed": ModuleFacts(kind="transposed", parameters={"weight": (8, 8)}),
    "embedding": ModuleFacts(kind="embedding", parameters={"weight": (99, 8)}),
    "conv": ModuleFacts(kind="conv", parameters={"weight": (8, 8, 3)}),
    "norm": NORM,
    "dict": ModuleFacts(kind="dict"),
}


def block(name, class_name="Block", **parts):
    """A layer with a linear in it, or with the parts named."""
    held = parts or {"proj": LINEAR}
    return {name: ModuleFacts(kind="other", class_name=class_name)} | {
        f"{name}.{own}": each for own, each in held.items()
    }


def facts(*modules):
    return ModelFacts(
        model_type="any", modules={"": ModuleFacts(kind="other")} | {k: v for m in modules for k, v in m.items()}
    )


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_list_of_single_operations_holds_no_layers(kind):
    assert facts({"heads": LIST, "heads.0": OPERATIONS[kind], "heads.1": OPERATIONS[kind]}).stacks == ()


def test_layers_of_several_classes_are_one_stack():
    hybrid = facts(
        {"layers": LIST}, block("layers.0", "Mamba"), block("layers.1", "Attention"), block("layers.2", "Mamba")
    )
    items = ("layers.0", "layers.1", "layers.2")
    assert hybrid.stacks == (LayerStack(fqn="layers", items=items, classes=("Mamba", "Attention")),)


def test_what_holds_no_matrix_is_no_layer():
    assert outermost_layers(facts({"layers": LIST}, block("layers.0"), block("layers.1", gate=NORM)).stacks) == (
        "layers.0",
    )


def test_lists_of_lists_are_looked_into():
    nested = facts({"blocks": LIST, "blocks.0": LIST}, block("blocks.0.0"), {"blocks.1": LIST}, block("blocks.1.0"))
    assert [stack.fqn for stack in nested.stacks] == ["blocks.0", "blocks.1"]
    assert outermost_layers(nested.stacks) == ("blocks.0.0", "blocks.1.0")


def test_a_list_in_a_layer_is_a_stack_of_its_own_within_it():
    stages = facts(
        {"stages": LIST}, block("stages.0", "Stage", blocks=LIST), block("stages.0.blocks.0"), block("stages.1")
    )
    assert [(stack.fqn, stack.within) for stack in stages.stacks] == [("stages", ""), ("stages.0.blocks", "stages.0")]
    assert outermost_layers(stages.stacks) == ("stages.0", "stages.1")
    assert stages.layer_of("stages.0.blocks.0.proj.weight") == stages.layer_of("stages.0") == "stages.0"
    assert stages.layer_of("stages") is None
