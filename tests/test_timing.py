"""What is timed of an operator class, and the coefficients that come out."""

import pytest

from autopar.timing import DTYPES, NOT_TIMED, Sample, cases, fitted
from costmodels.operators import OperatorClass


def sample(fixed: int, flop: float, tail: float, moved: float) -> Sample:
    return Sample(fixed, flop, tail, moved, fixed * 1e-5 + flop / 1e12 + tail / 5e11 + moved / 1e11)


def test_coefficients_are_found_again() -> None:
    made = [sample(n, 10.0**f, t * 10.0**f, 10.0**m) for n in (1, 2) for f in (8, 10) for t in (0.1, 2) for m in (5, 9)]
    assert fitted(made) == pytest.approx((1e-5, 1e-12, 2e-12, 1e-11), rel=1e-6)


def test_no_coefficient_is_negative() -> None:
    """More bytes in less time would be explained by bytes that give time back."""
    made = [Sample(1, 1e9, 0, 1e6, 2e-3), Sample(1, 2e9, 0, 5e6, 2.5e-3), Sample(1, 4e9, 0, 5e7, 3e-3)]
    found = fitted(made)
    assert min(found) >= 0 and max(found) > 0


def test_what_never_occurs_costs_nothing() -> None:
    made = [Sample(n, 0.0, 0.0, m, n * 2e-6 + m / 1e10) for n in (1, 2) for m in (1e3, 1e6, 1e8)]
    assert fitted(made) == pytest.approx((2e-6, 0, 0, 1e-10), abs=1e-18)


def test_each_operator_has_cases_that_a_cpu_can_time() -> None:
    for kind in OperatorClass:
        if kind not in NOT_TIMED:
            moved = [sum(case.moved(DTYPES["bf16"])) for case in cases(kind)]
            assert max(moved) / min(moved) > 100, kind
