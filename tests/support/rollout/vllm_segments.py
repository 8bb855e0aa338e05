"""Shared-memory segments of vLLM in processes of a test, which are named by ``VLLM_DIST_IDENT``."""

import glob
import os

import pytest

__all__ = ["no_segments_are_left", "segments_identity"]


def segments_identity(folder):
    """What vLLM's segments are named by."""
    return str(folder).replace("/", ".")


@pytest.fixture(autouse=True)
def no_segments_are_left(tmp_path):
    """Remove the segments of ranks that could not, in each module that imports this."""
    yield
    for path in glob.glob(f"/dev/shm/{segments_identity(tmp_path)}-*"):
        os.unlink(path)
