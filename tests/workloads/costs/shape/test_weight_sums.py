"""What adding a gradient to its sum costs, by format."""

from __future__ import annotations

from workloads.costs.shape.weight_sums import SLOWED_DENSE, SLOWED_EXPERTS, added_bytes


def test_a_sum_of_one_format_is_as_fast_as_memory() -> None:
    assert added_bytes(2, 2) == (6, 6)
    assert added_bytes(4, 4) == (12, 12)


def test_a_sum_of_two_formats_is_slower_than_memory() -> None:
    # a bf16 gradient is read, its fp32 sum read and written: 10 bytes
    assert added_bytes(2, 4) == (round(10 * SLOWED_DENSE), round(10 * SLOWED_EXPERTS)) == (20, 16)


def test_the_only_gradient_is_cast_to_its_sum_unless_it_is_one() -> None:
    assert added_bytes(2, 4, only=True) == (round(6 * SLOWED_DENSE), round(6 * SLOWED_EXPERTS))
    assert added_bytes(2, 2, only=True) == (0, 0)
