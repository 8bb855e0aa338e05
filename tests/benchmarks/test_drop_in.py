"""What makes two runs of a trainer comparable, and what compares them; the runs themselves need SGLang."""

import pytest
import torch

from benchmarks.training.drop_in.__main__ import ABSOLUTE, RELATIVE, compare
from benchmarks.training.drop_in.seeds import gumbel_argmax


def test_seeded_samples_do_not_depend_on_what_is_sampled_beside_them_and_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds, positions = torch.arange(4000), torch.arange(4000) % 7
    found = gumbel_argmax(probabilities.log().expand(4000, 4), seeds, positions)
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    again = gumbel_argmax(probabilities.log().expand(4000, 4), seeds[order], positions[order])
    assert torch.equal(found[order], again)
    shares = torch.bincount(found.view(-1), minlength=4) / 4000
    torch.testing.assert_close(shares, probabilities, atol=0.03, rtol=0)  # four standard errors
    assert not torch.equal(found, gumbel_argmax(probabilities.log().expand(4000, 4), seeds, positions + 1))


def test_runs_are_compared_figure_by_figure_and_step_by_step():
    norm, loss = RELATIVE[0], ABSOLUTE[0]
    stock = [{norm: 2.0, loss: 0.0}, {norm: 4.0, loss: -1.0}]
    ours = [{norm: 2.0, loss: 1e-6}, {norm: 4.4, loss: -1.0}]
    assert compare(stock, ours) == {norm: [0.0, pytest.approx(0.1)], loss: [1e-6, 0.0]}
    with pytest.raises(ValueError, match=loss):
        compare(stock, [ours[0], {norm: 4.4}])
