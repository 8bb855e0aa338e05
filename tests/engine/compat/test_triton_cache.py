"""Processes that share Triton's cache compile each kernel once."""

import importlib.util
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager, get_cache_manager

from epfsdp2.engine import build
from epfsdp2.engine.compat import triton_cache
from epfsdp2.engine.compat.triton_cache import compile_once_per_node
from epfsdp2.engine.fsdp.options import ShardingOptions

KEY = "00" * 32


@triton.jit
def _product(x, y, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + index, tl.dot(tl.load(x + index), tl.load(y + index)))


@triton.jit
def _refused(out, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0)


def _compile(kernel, size, **pointers):
    source = ASTSource(kernel, {**pointers, "SIZE": "constexpr"}, {"SIZE": size})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with triton.knobs.cache.scope():
        compile_once_per_node()
        yield tmp_path


def _together(folder):
    found = []
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
        compile_once_per_node()
        for size in (64, 128):
            dist.barrier()
            kernel = _compile(_product, size, x="*bf16", y="*bf16", out="*fp32")
            assert "wgmma" in kernel.asm["ptx"]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    assert [sorted(hits) for hits in zip(*everyones, strict=True)] == [[False, True, True]] * 2, everyones


def test_kernel_that_all_ranks_need_at_once_is_compiled_by_one_of_them(tmp_path):
    run_ranks(_together, 3, str(tmp_path))


def test_kernel_that_does_not_compile_releases_its_lock(cache):
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(triton.compiler.errors.CompileTimeAssertionFailure):
            _compile(_refused, 16, out="*fp32")
        assert time.monotonic() - began < 60  # the limit is 300
    assert len(list(cache.glob("*/lock"))) == 1


def test_wait_for_a_compile_that_does_not_end_ends_itself_with_a_line(cache, monkeypatch, caplog):
    monkeypatch.setattr(triton_cache, "_MOST_SECONDS", 0.1)
    first, second = get_cache_manager(KEY), get_cache_manager(KEY)
    assert first.get_file("launcher.so") is None and not caplog.records
    assert second.get_file("launcher.so") is None
    assert "compiled here too, because another process did not finish in time" in caplog.text
    put = first.put(b"code", "launcher.so")
    assert second.get_file("launcher.so") == get_cache_manager(KEY).get_file("launcher.so") == put


def test_file_system_without_locks_compiles_everywhere(cache, monkeypatch):
    monkeypatch.setattr(triton_cache.fcntl, "flock", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    assert all(get_cache_manager(KEY).get_group("kernel.json") is None for _ in range(2))


def test_users_own_cache_and_a_user_who_wants_no_cache_are_left_alone(cache, monkeypatch):
    triton.knobs.cache.manager_class = FileCacheManager
    compile_once_per_node()
    assert triton.knobs.cache.manager_class is FileCacheManager
    triton.knobs.cache.manager_class = None
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    compile_once_per_node()
    assert triton.knobs.cache.manager_class is None
    assert Path(get_cache_manager(KEY).cache_dir).parent == cache


def test_model_on_a_gpu_has_its_kernels_compiled_once_per_node(cache, monkeypatch):
    triton.knobs.cache.manager_class = None
    monkeypatch.setattr(build, "parallelize", mock.Mock(side_effect=InterruptedError))
    for device in ("cpu", "cuda"):
        with pytest.raises(InterruptedError):
            build.shard_and_load(None, None, None, ShardingOptions(), device=device, device_id=None)
        assert (triton.knobs.cache.manager_class is not None) == (device == "cuda")
