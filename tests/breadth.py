"""Wide tables of cases: quick cases run for every change, the others with `make test-slow`."""

import pytest

from tests.portable import pairwise


def quick(cases, chosen):
    """Marks the cases outside `chosen` as slow.

    Args:
        cases: All cases: values, tuples of values, or `pytest.param(...)`.
        chosen: Cases for `make test`: at least one for each mechanism.
    """
    cases, chosen = list(cases), list(chosen)
    assert not [case for case in chosen if case not in cases]
    return [case if case in chosen else slow(case) for case in cases]


def pairs(*columns):
    """Combines columns: every pair of values occurs, in fewer cases than the full product."""
    settings = pairwise({place: range(len(column)) for place, column in enumerate(columns)})
    return [tuple(column[setting[place]] for place, column in enumerate(columns)) for setting in settings]


def slow(case):
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
