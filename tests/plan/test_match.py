"""Patterns over FQNs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.spec import Matcher, match

pytestmark = pytest.mark.pure

NAMES = [
    "",
    "model",
    *(
        f"model.layers.{layer}{rest}"
        for layer in range(3)
        for rest in ("", ".attn", ".attn.q_proj", ".attn.q_proj.weight", ".attn.q_proj.bias", ".attn.sinks")
    ),
    "lm_head",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("pattern", "fqn", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("**.c", "c", True),
        ("**.c", "a.b.c", True),
        ("**.c", "a.c.b", False),
        ("a.**.c", "a.c", True),
        ("a.**.*.c", "a.c", False),
        ("**.a.**", "x.a.y", True),
        ("**", "", True),
        ("*", "", False),
    ],
)
def test_stars(pattern, fqn, matches):
    assert match(pattern, fqn) is matches


letters = st.sampled_from("ab01")
fqns = st.lists(letters, min_size=1, max_size=5).map(".".join)
patterns = st.lists(st.sampled_from(["a", "b", "0", "*", "**"]), min_size=1, max_size=4).map(".".join)


@given(patterns, st.lists(fqns, max_size=8))
def test_matching_one_by_one_as_a_regex_and_as_a_tree_agree(pattern, names):
    parts = {"*": r"[^.]+\.", "**": r"([^.]+\.)*"}
    regex = "".join(parts.get(part, part + r"\.") for part in pattern.split("."))
    expected = {name for name in names if re.fullmatch(regex, name + ".")}
    assert {name for name in names if match(pattern, name)} == expected
    assert Matcher(names).governed(pattern) == expected


def test_a_rule_on_a_module_governs_its_weight_and_bias():
    assert Matcher(NAMES).governed("model.layers.1.attn.q_proj") == {
        f"model.layers.1.attn.q_proj{leaf}" for leaf in ("", ".weight", ".bias")
    }
    assert Matcher(["lm_head.weight"]).governed("lm_head") == {"lm_head.weight"}
    assert Matcher(NAMES).governed("model.layers.*.attn") == {f"model.layers.{layer}.attn" for layer in range(3)}


def test_a_hundred_thousand_names_are_matched_by_what_they_have_in_common():
    names = [f"model.layers.{n}.mlp.experts.{e}.{w}.weight" for n in range(100) for e in range(334) for w in "abc"]
    matcher = Matcher(names)
    assert len(matcher._alike) == 3
    for pattern in (*(f"model.layers.*.mlp.experts.*.{w}" for w in "abc"), "**.c"):
        assert len(matcher.governed(pattern)) == 33_400
    assert len(matcher.governed("model.layers.7.mlp.experts.*.a.weight")) == 334
