from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.shared.jobs.teacher_layers import kept_layers


@pytest.mark.parametrize(
    ("wanted", "num_layers", "layers"),
    [
        (3, 12, [3, 7, 11]),
        (6, 12, [1, 3, 5, 7, 9, 11]),
        (4, 6, [0, 2, 3, 5]),
        (1, 4, [3]),
        ([0, 5], 6, [0, 5]),
        ([2], 6, [2]),
    ],
)
def test_a_number_counts_the_kept_layers_and_a_list_names_them(
    wanted: int | list[int], num_layers: int, layers: list[int]
) -> None:
    assert kept_layers(wanted, num_layers=num_layers) == layers


@given(st.integers(2, 200).flatmap(lambda n: st.tuples(st.integers(1, n - 1), st.just(n))))
def test_kept_layers_are_as_many_as_asked_for_spread_evenly_up_to_the_last(
    sizes: tuple[int, int],
) -> None:
    wanted, num_layers = sizes
    layers = kept_layers(wanted, num_layers=num_layers)
    assert len(layers) == wanted
    assert layers[-1] == num_layers - 1
    gaps = {after - before for before, after in zip([-1, *layers], layers, strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert min(gaps) >= 1


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (4, "the teacher has only 4; keep at most 3"),
        (5, "the teacher has only 4"),
        ([1, 4], "no layer 4: its 4 layers are numbered 0 to 3"),
        ([0, 1, 2, 3], "names all 4 layers"),
    ],
)
def test_layers_that_the_teacher_lacks_and_all_of_them_are_refused(
    wanted: int | list[int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        kept_layers(wanted, num_layers=4)
