"""Wide tables of cases: the ones that every change is tried on, and the others, which `make test-slow` runs."""

import pytest


def quick(cases, chosen):
    """The cases of a parametrised test; those that are not chosen are marked slow.

    Args:
        cases: All of them: values, tuples of values, or `pytest.param(...)`.
        chosen: Those that stay in `make test`: at least one of each mechanism.
    """
    cases, chosen = list(cases), list(chosen)
    assert not [case for case in chosen if case not in cases]
    return [case if case in chosen else slow(case) for case in cases]


def slow(case):
    """A case that `make test-slow` runs."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
