"""Errors: how they read, what they are kin to, and that they survive a process boundary."""

import pickle

import pytest

from shardwise import errors
from shardwise.errors import PlanError, ShardwiseError, counted, did_you_mean, sized

pytestmark = pytest.mark.pure

KIN = {
    "MeshError": ValueError,
    "PlanError": ValueError,
    "LayoutError": ValueError,
    "ConfigError": ValueError,
    "BatchError": ValueError,
    "GradientError": ArithmeticError,
    "LoadError": OSError,
    "UnsupportedError": NotImplementedError,
    "VerificationError": ArithmeticError,
    "RankError": RuntimeError,
}


def test_the_docstring_draws_every_class():
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes == {"ShardwiseError", *KIN}
    for name, kin in KIN.items():
        drawn = [line.split() for line in errors.__doc__.splitlines() if name in line]
        assert drawn[0][1:3] == [name, f"({kin.__name__})"]


@pytest.mark.parametrize(("name", "kin"), KIN.items())
def test_each_class_is_kin_to_a_builtin(name, kin):
    error = getattr(errors, name)("what happened", at="here", why="this rule", fix="do that")
    assert isinstance(error, ShardwiseError) and isinstance(error, kin)
    assert str(error) == "what happened\n  at:  here\n  why: this rule\n  fix: do that"


def test_further_lines_of_a_part_are_indented_below_it():
    assert str(PlanError("what happened", fix="do that")) == "what happened\n  fix: do that"
    assert str(PlanError("two problems", why="one\ntwo")) == "two problems\n  why: one\n       two"


@pytest.mark.parametrize("name", ["ShardwiseError", *KIN])
def test_pickling_keeps_every_part(name):
    error = getattr(errors, name)("what happened", at="here", why="this rule", fix="do that")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.at, back.why, back.fix) == (str(error), "here", "this rule", "do that")


def test_did_you_mean():
    assert did_you_mean("colwize", ["colwise", "rowwise"]) == " (did you mean 'colwise'?)"
    assert did_you_mean("zzz", ["colwise", "rowwise"]) == ""


def test_numbers_are_counted_as_they_are_read():
    found = [counted(1, "rank"), counted(0, "rank"), counted(2, "batch"), counted(1000, "process")]
    assert found == ["1 rank", "0 ranks", "2 batches", "1,000 processes"]


def test_sizes_read_well_at_any_scale():
    found = [sized(each) for each in (0, 362_388_275, 2**30 - 10**6, 2**30, 30_570_499_276)]
    assert found == ["0.0 MiB", "345.6 MiB", "1,023.0 MiB", "1.00 GiB", "28.47 GiB"]
