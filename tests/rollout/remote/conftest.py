"""Members of one group that tests share."""

import pytest

from tests.support.rollout.remote.peers import three_members


@pytest.fixture
def together():
    """The members in threads, with a time-out of 3 s, and a ``map`` over them."""
    with three_members(3.0) as members:
        yield members
