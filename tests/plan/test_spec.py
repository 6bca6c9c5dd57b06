"""Plans: text and JSON both ways, merging, what is no rule."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.spec import STYLES, Plan, Rule

pytestmark = pytest.mark.pure

components = st.sampled_from(["*", "**", "0", "model", "q_proj"]) | st.text(
    st.characters(exclude_characters=".:#*", exclude_categories=["Z", "C"]), min_size=1, max_size=5
)
patterns = st.lists(components, min_size=1, max_size=4).map(".".join)
rules = st.builds(
    Rule,
    pattern=patterns,
    style=st.sampled_from(sorted(STYLES)),
    source=st.sampled_from(["user", "hf", "derived", "family/llama"]),
    reason=st.text(max_size=20),
)
plans = st.lists(rules, unique_by=lambda rule: rule.pattern, max_size=6).map(lambda items: Plan(tuple(items)))


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
def test_merging_lets_the_other_win_per_pattern(plan, other):
    merged = plan | other
    styles = {rule.pattern: rule for rule in (*plan.rules, *other.rules)}
    assert {rule.pattern: rule for rule in merged.rules} == styles
    assert merged.rules[len(merged.rules) - len(other.rules) :] == other.rules
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
        Rule("model.layers.*.self_attn.q_proj", "colwise"),
        Rule("lm_head", "colwise_gather_output", "derived", "the head: rows # of the vocabulary"),
        Rule("model.norm", "replicate", "hf"),
    )
    assert str(plan).splitlines()[1:] == [
        "lm_head: colwise_gather_output  # derived: the head: rows # of the vocabulary",
        "model.norm: replicate  # hf",
    ]
    assert Plan.of({"a": "colwise"}, source="hf").rules == (Rule("a", "colwise", "hf"),)


def test_every_style_has_one_line_of_meaning():
    assert all(meaning and "\n" not in meaning for meaning in STYLES.values())
    assert {"qkv_colwise", "norm_split", "region", "colwise", "local_params"} <= STYLES.keys()


@pytest.mark.parametrize(
    ("pattern", "style", "says"),
    [
        ("a", "colwize", "unknown style 'colwize' (did you mean 'colwise'?)"),
        ("a.norm", "sequence_parallel", "pass sequence_parallel=True"),
        ("a.q_*", "colwise", "'q_*' is not a name"),
        ("a..b", "colwise", "'' is not a name"),
        ("", "colwise", "'' is not a name"),
        ("a.***", "colwise", "'***' is not a name"),
        ("a b", "colwise", "'a b' is not a name"),
    ],
)
def test_what_is_no_rule(pattern, style, says):
    with pytest.raises(PlanError) as caught:
        Rule(pattern, style)
    assert says in str(caught.value)
    assert caught.value.at == f'rule "{pattern}: {style}"'


def test_sources_are_one_word():
    with pytest.raises(PlanError, match="not one word"):
        Rule("a", "colwise", "two words")


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
        ({}, "not a plan"),
        ({"rules": [], "version": 1}, "not a plan"),
        ({"rules": [{"pattern": "a", "stile": "colwise"}]}, "unknown key 'stile' in a rule (did you mean 'style'?)"),
        ({"rules": [{"pattern": "a"}]}, "without pattern or style"),
        ({"rules": [{"pattern": "a", "style": 1}]}, "values are text"),
        ({"rules": ["a: colwise"]}, "not a rule"),
    ],
)
def test_what_is_no_json_plan(data, says):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert says in str(caught.value)
