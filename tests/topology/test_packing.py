"""The linear program: right where the answer is known, and never overfull."""

import numpy as np
import pytest

from flagcx.topology import packing


def listed(columns):
    def cheapest(prices):
        place = int((columns @ prices).argmin())
        return place, columns[place]

    return cheapest


@pytest.mark.parametrize("seed", range(20))
def test_the_simplex_method_finds_the_optimum(seed):
    """Weak duality both ways: the packing fits, and the prices prove that none is greater."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, 3, (12, 8)).astype(float)
    columns[:, 0] = 1.0
    capacity = rng.integers(1, 10, 8).astype(float)
    found = packing.pack(capacity, listed(columns), gap=1e-9)
    load = sum(columns[key] * weight for key, weight in found.columns)
    assert (load <= capacity * (1 + 1e-9)).all()
    assert found.value == pytest.approx(found.limit, rel=1e-3)
    for key, weight in found.columns:
        assert weight > 0 and 0 <= key < 12


def test_a_packing_of_one_column_is_its_narrowest_link():
    found = packing.pack(np.array([6.0, 4.0]), listed(np.array([[1.0, 2.0]])))
    assert found.columns == ((0, pytest.approx(2.0)),)
