from __future__ import annotations

import pytest

from tidelog.replication.controller.decisions.topic_names import collision_key, may_collide, topic_name_problem


@pytest.mark.parametrize("name", ["a", "A-b_c.d9", "x" * 249, "...", "-"])
def test_a_good_name_has_no_problem(name):
    assert topic_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("", "the empty string"),
        (".", "'.' is not allowed"),
        ("..", "'..' is not allowed"),
        ("x" * 250, "longer than the max allowed length 249"),
        ("a b", "other than ASCII alphanumerics"),
        ("caf\u00e9", "other than ASCII alphanumerics"),
        ("a\n", "other than ASCII alphanumerics"),
    ],
)
def test_a_bad_name_is_refused_with_the_reason(name, what):
    problem = topic_name_problem(name)
    assert problem is not None
    assert what in problem


def test_dots_and_underscores_are_one_in_metric_names():
    assert may_collide("a.b")
    assert may_collide("a_b")
    assert not may_collide("a-b")
    assert collision_key("a.b_c") == collision_key("a_b.c")
