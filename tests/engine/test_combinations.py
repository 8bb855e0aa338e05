"""Random combinations of settings: an update is the plain model's, or the engine's own checks refuse it.

``DRAW=17 pytest tests/engine/test_combinations.py -m "not long"`` repeats one.
"""

import contextlib
import itertools
import os
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epfsdp2.engine import parallelize
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.fsdp.compile import compile_dense_parts
from tests.parity.float64 import float64
from tests.support.ranks import run_ranks
from tests.support.trainer.drawn_updates import check_draw
from tests.support.trainer.draws import FOUR_RANKS, drawn, ranks_of, save_family

IN_FLOAT64 = {133}  # the gradient of a gpt-oss router's bias nearly cancels: 1.7e-5 off in float32
LONG = 100  # numbers of `make test` are below


def _compiled(layers, experts):
    # Without Inductor, which needs half a minute per draw.
    return compile_dense_parts(layers, experts, "aot_eager")


def _check(folder, first, count):
    """Check ``count`` draws that are not refused, and report all failures."""
    checked, refused, failures = [], [], []
    for number in itertools.count(first):
        if len(checked) == count:
            break
        draw = drawn(number)
        torch._dynamo.reset()
        failure = None
        try:
            with float64() if number in IN_FLOAT64 else contextlib.nullcontext():
                if dist.get_rank() == 0:
                    save_family(draw.family, folder / draw.family)
                dist.barrier()
                check_draw(draw, folder / draw.family, folder / f"saved {number}")
        except SettingError as error:
            refused.append(f"{draw}: {error}")
            continue
        except Exception:
            failure = f"{draw}, rank {dist.get_rank()}: {traceback.format_exc()}"
        checked.append(number)
        everyone = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(everyone, failure)
        except RuntimeError as error:  # the other ranks are still in the update
            raise AssertionError("\n".join([*failures, str(failure)])) from error
        failures += [each for each in everyone if each is not None]
    if dist.get_rank() == 0:
        print(f"checked {checked}; refused {len(refused)}:", *refused, sep="\n  ", flush=True)
    assert not failures, "\n".join(failures)
    assert len(refused) <= max(count, 2), refused


def _check_on_ranks(*arguments):
    with mock.patch.object(parallelize, "compile_dense_parts", _compiled):
        _check(*arguments)


def test_updates_of_random_combinations_equal_the_plain_model(tmp_path):
    first, count = (int(os.environ["DRAW"]), 1) if "DRAW" in os.environ else (0, 4)
    run_ranks(_check_on_ranks, ranks_of(first), tmp_path, first, count, timeout=400)


@pytest.mark.long
@pytest.mark.parametrize("first", [LONG, FOUR_RANKS])
def test_updates_of_a_hundred_random_combinations_equal_the_plain_model(tmp_path, first):
    run_ranks(_check_on_ranks, ranks_of(first), tmp_path, first, 50, timeout=3000)
