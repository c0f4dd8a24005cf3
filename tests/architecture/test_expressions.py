"""Expressions of rows: arithmetic over names and nothing else, worth what is printed of them."""

import pytest

from vramprobe.architecture.expressions import FUNCTIONS, ExpressionError, between, evaluate, expression

NAMES = {"a": 2, "b": 3.5, "none": 0, "kind": "full", "cell.peak": 1_000}
TEXTS = {"a": "2", "b": "3.5", "none": "0", "kind": "full", "cell.peak": "1_000"}


@pytest.mark.parametrize(
    ("line", "value", "written"),
    [
        ("a + b * 2", 9.0, "2 + 3.5 * 2"),
        ("(a + b) * 1e3", 5500.0, "(2 + 3.5) * 1e3"),
        ("1 - a / cell.peak", 0.998, "1 - 2 / 1_000"),
        ("-a ** 2 // 3", -2, "-2 ** 2 // 3"),
        ("a * 2 if kind == 'full' else b", 4, "2 * 2"),
        ("(a + none * b) / 2", 1.0, "(2) / 2"),
        ("a + none * b + a * b", 9.0, "2 + 2 * 3.5"),
        ("max(a, b, 1) + min(a, 1)", 4.5, "max(2, 3.5, 1) + min(2, 1)"),
        ("between(a, (1, 2, 4), (10, 20, 40)) if a > 9 else ceil(b)", 4, "ceil(3.5)"),
    ],
)
def test_a_line_is_worth_what_is_written_of_it(line: str, value: float, written: str) -> None:
    found = expression(line)
    assert found.value(NAMES.__getitem__) == pytest.approx(value)
    assert found.written(NAMES.__getitem__, TEXTS.__getitem__) == written
    assert evaluate(written) == pytest.approx(value)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("kind == 'full' and a < b <= 3.5", True),
        ("not (a > 1 or b)", False),
        ("none or 'why not ' + kind", "why not full"),
        ("kind in ('full', 'lora')", True),
        ("None if a else 1", None),
    ],
)
def test_conditions_and_texts(line: str, value: object) -> None:
    assert expression(line).value(NAMES.__getitem__) == value


def test_only_the_part_that_counts_is_asked_for() -> None:
    asked: list[str] = []

    def value(name: str) -> float:
        asked.append(name)
        return {"a": 0, "b": 1, "c": 2}[name]

    assert expression("b if a else c").value(value) == 2
    assert expression("a and b").value(value) == 0
    assert asked == ["a", "c", "a"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("__import__('os').system('true')", "not read"),
        ("open('x')", "has no function 'open'; there are between, ceil"),
        ("a.b.c", "not read"),
        ("[n for n in a]", "not read"),
        ("lambda: 1", "not read"),
        ("max(*a)", "not read"),
        ("max(a, key=b)", "not read"),
        ("a[0]", "not read"),
        ("a +", "no expression"),
        ("a = 1", "no expression"),
        ("a << 2", "not read"),
        ("1 if a", "no expression"),
    ],
)
def test_nothing_else_is_read(line: str, said: str) -> None:
    with pytest.raises(ExpressionError, match=said):
        expression(line)


def test_numbers_alone_are_evaluated() -> None:
    assert evaluate("2 * (1_000 - 1) / 1e9") == 2 * 999 / 1e9
    with pytest.raises(ExpressionError, match="'params' is no number"):
        evaluate("2 * params")


def test_between_is_on_straight_lines_and_says_nothing_outside() -> None:
    assert between(1.5, (1, 2), (10, 20)) == 15
    assert between(2.1, (1, 2), (10, 20)) is None
    assert FUNCTIONS["between"] is between
