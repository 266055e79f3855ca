"""Wide tables of cases: the ones that every change is tried on, and the others, which `make test-slow` runs."""

import pytest


def quick(cases, chosen):
    """The cases of a parametrised test; those that are not chosen are marked slow.

    Args:
        cases: All of them, names or tuples.
        chosen: Those that stay in `make test`: at least one of each mechanism.
    """
    cases = list(cases)
    assert not [case for case in chosen if case not in cases]
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
