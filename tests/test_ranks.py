"""Ranks of a test report the failures of all ranks."""

import pytest
import torch.distributed as dist

from tests.support.ranks import each_case, run_ranks


def _some_fail():
    def check(name, failing):
        assert dist.get_rank() != failing, "planted"

    each_case([("first", 1), ("second", None), ("third", 0)], check)


def test_run_ranks_each_case_with_failures_names_every_case_and_rank():
    with pytest.raises(Exception, match="planted") as caught:
        run_ranks(_some_fail, 2)
    assert "first, 1, rank 1: AssertionError: planted" in str(caught.value)
    assert "third, 0, rank 0: AssertionError: planted" in str(caught.value)
    assert "second, None" not in str(caught.value)
