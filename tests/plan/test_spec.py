"""Plans: text and JSON both ways, merging, what is no rule."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.rule import SECTIONS, STYLES, AttributeRule, InputRule, ParameterRule, Rule
from shardwise.plan.spec import Plan

pytestmark = pytest.mark.pure

components = st.sampled_from(["*", "**", "0", "model", "q_proj"]) | st.text(
    st.characters(exclude_characters=".:#*", exclude_categories=["Z", "C"]), min_size=1, max_size=5
)
patterns = st.lists(components, min_size=1, max_size=4).map(".".join)
examples = {
    "split(DIM)": "split(1)",
    "rowwise_into(NAME)": "rowwise_into(mlp.down)",
    "region_output_into(NAME)": "region_output_into(mlp)",
    "divided(N)": "divided(3/2)",
}
rules = st.sampled_from(SECTIONS).flatmap(
    lambda kind: st.builds(
        kind,
        pattern=patterns,
        style=st.sampled_from([examples.get(style, style) for style in sorted(kind.styles)]),
        source=st.sampled_from(["user", "hf", "derived", "family/llama"]),
        reason=st.text(max_size=20),
    )
)
plans = st.lists(rules, unique_by=lambda rule: (type(rule), rule.pattern), max_size=6).map(
    lambda items: Plan(tuple(items))
)


@settings(deadline=None)
@given(plans)
def test_text_reads_back(plan):
    assert Plan.parse(str(plan)) == plan


@settings(deadline=None)
@given(plans)
def test_json_reads_back(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@settings(deadline=None)
@given(plans, plans)
def test_merging_lets_the_other_win_per_section_and_pattern(plan, other):
    merged = plan | other
    styles = {(type(rule), rule.pattern): rule for rule in (*plan.rules, *other.rules)}
    assert {(type(rule), rule.pattern): rule for rule in merged.rules} == styles
    for kind in SECTIONS:
        own = other.section(kind)
        assert merged.section(kind)[len(merged.section(kind)) - len(own) :] == own
    assert plan | Plan() == plan == Plan() | plan


def test_text_keeps_where_a_rule_comes_from():
    text = """
    # attention
    model.layers.*.self_attn.q_proj: colwise

    lm_head:colwise_gather_output   # derived:  the head: rows # of the vocabulary
    model.norm: replicate  # hf
    """
    plan = Plan.parse(text)
    assert plan.rules == (
        ParameterRule("model.layers.*.self_attn.q_proj", "colwise"),
        ParameterRule("lm_head", "colwise_gather_output", "derived", "the head: rows # of the vocabulary"),
        ParameterRule("model.norm", "replicate", "hf"),
    )
    assert str(plan).splitlines() == [
        "[parameters]",
        "model.layers.*.self_attn.q_proj: colwise",
        "lm_head: colwise_gather_output  # derived: the head: rows # of the vocabulary",
        "model.norm: replicate  # hf",
    ]


def test_sections_have_names_in_text():
    text = "a: region\nb: split(0)\n[inputs]\nc: split(1)\nd: sequence\n[attributes]\ne: divided"
    plan = Plan.parse(text)
    assert plan.section(InputRule) == (InputRule("c", "split(1)"), InputRule("d", "sequence"))
    assert plan.section(AttributeRule) == (AttributeRule("e", "divided"),)
    printed = "[parameters]\nb: split(0)\n\n[regions]\na: region\n\n[attributes]\ne: divided\n\n"
    assert str(plan) == printed + "[inputs]\nc: split(1)\nd: sequence"
    with pytest.raises(PlanError) as caught:
        Plan.parse("[input]\na: aside\n[regions]\nb: colwise")
    assert "line 1: a plan has no section 'input' (did you mean 'inputs'?)" in caught.value.why
    assert "line 4: unknown style 'colwise'" in caught.value.why


def test_a_dictionary_tells_sections_by_styles():
    styles = {
        "a": "colwise",
        "b": "all_reduce",
        "c": "divided(2)",
        "d": "aside",
        "e": "whole_sequence",
        "f": "split(1)",
    }
    sections = [rule.section for rule in Plan.of(styles, source="hf").rules]
    assert sections == ["parameters", "parameters", "regions", "attributes", "sequence", "inputs"]
    assert Plan.of({"a": "colwise"}, source="hf").rules == (ParameterRule("a", "colwise", "hf"),)


def test_every_style_of_transformers_is_read():
    """Those of tensor parallelism; `sequence_parallel` is refused with a word of its own."""
    names = {
        **{name: name for name in ("embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise")},
        **{name: name for name in ("rowwise", "rowwise_split_input", "packed_colwise", "packed_rowwise")},
        **{name: name for name in ("replicated_with_grad_allreduce", "all_reduce", "moe_tp_experts", "replicate")},
        "moe_identity_expert": "moe_identity_expert",
        "colwise_rep": "colwise_gather_output",
        "rowwise_rep": "rowwise_split_input",
    }
    for name, style in names.items():
        assert [rule.style for rule in Plan.of({"a": name}).rules] == [style]
    assert Plan.of({"a": "local_params", "b": "mla_kv_a_proj"}) == Plan(), "they say nothing that is not seen"


def test_every_style_has_one_line_of_meaning():
    assert all(meaning and "\n" not in meaning for styles in STYLES.values() for meaning in styles.values())
    assert list(STYLES) == ["parameters", "regions", "attributes", "sequence", "inputs"]
    assert ParameterRule("a", "replicate").meaning == "every rank keeps all of it; a module is no region then"
    assert ParameterRule("a", "replicate", reason="so").meaning == "so"


@pytest.mark.parametrize(
    ("pattern", "style", "says"),
    [
        ("a", "colwize", "unknown style 'colwize' (did you mean 'colwise'?)"),
        ("a", "rowwise_into(b*)", "unknown style 'rowwise_into(b*)' (did you mean 'rowwise_into(NAME)'?)"),
        ("a", "region_output_into(NAME", "unknown style"),
        ("a", "divided(0)", "unknown style 'divided(0)' (did you mean 'divided(N)'?)"),
        ("a.q_*", "colwise", "'q_*' is not a name"),
        ("a..b", "colwise", "'' is not a name"),
        ("", "colwise", "'' is not a name"),
        ("a.***", "colwise", "'***' is not a name"),
        ("a b", "colwise", "'a b' is not a name"),
    ],
)
def test_what_is_no_rule(pattern, style, says):
    with pytest.raises(PlanError) as caught:
        Rule.of(pattern, style)
    assert says in str(caught.value)
    assert caught.value.at == f'rule "{pattern}: {style}"'


def test_all_lines_that_are_no_rules_are_told_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.parse("a: colwise\nb: colwize\nq_proj colwise\n")
    assert "line 2: unknown style 'colwize'" in caught.value.why
    assert "line 3: 'q_proj colwise' is not a rule" in caught.value.why


def test_one_rule_per_pattern():
    with pytest.raises(PlanError, match="two rules for 'a'") as caught:
        Plan.parse("a: colwise\na: rowwise")
    assert '"a: colwise" and "a: rowwise"' in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"rules": [{}]}, "a plan has no section 'rules'"),
        ({"parameters": [{"pattern": "a", "stile": "colwise"}]}, "unexpected keyword argument 'stile'"),
        ({"parameters": [{"pattern": "a"}]}, "missing 1 required positional argument: 'style'"),
        ({"parameters": [{"pattern": "a", "style": 1}]}, "not a plan"),
        ({"regions": [{"pattern": "a", "style": "colwise"}]}, "unknown style 'colwise'"),
        ({"parameters": ["a: colwise"]}, "not a plan"),
        ([], "not a plan"),
    ],
)
def test_what_is_no_json_plan(data, says):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert says in str(caught.value)
