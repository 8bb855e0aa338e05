"""The shims for vLLM's CPU build: its distribution's name, and its experts on vLLM's classes without an engine."""

import contextlib
import importlib
import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from epfsdp2.engine import cpu
from epfsdp2.engine.cpu import vllm as vllm_cpu

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
PLACES = (f"{FUSED_MOE}.cpu_fused_moe", f"{FUSED_MOE}.experts.cpu_moe")


def _fake_distribution(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def test_distribution_of_a_cpu_build_answers_for_vllm_and_a_real_one_wins(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    vllm_cpu.install_distribution()
    vllm_cpu.install_distribution()
    assert [type(finder) for finder in sys.meta_path].count(vllm_cpu._VllmCpuFinder) == 1
    monkeypatch.syspath_prepend(_fake_distribution(tmp_path / "cpu", "vllm-cpu", "8.8.8"))
    if not any(Path(p).glob("vllm-[0-9]*.dist-info") for p in sys.path if Path(p).is_dir()):
        assert importlib.metadata.version("vllm") == "8.8.8+cpu"
    monkeypatch.syspath_prepend(_fake_distribution(tmp_path / "real", "vllm", "9.9.9"))
    assert importlib.metadata.version("vllm") == "9.9.9"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-distribution")


@pytest.mark.e2e
@pytest.mark.parametrize("present", [(True, False), (False, True), (False, False)], ids=["0.24", "0.29", "none"])
def test_experts_module_is_found_in_either_place_and_nothing_changes_without_it(monkeypatch, present):
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner")
    modules = {place: ModuleType(place) if there else None for place, there in zip(PLACES, present, strict=True)}
    for place, module in modules.items():
        monkeypatch.setitem(sys.modules, place, module)  # None: importing it fails
    expected = next((module for module in modules.values() if module is not None), None)
    assert vllm_cpu.cpu_experts_module() is expected
    if expected is None:
        before = vars(runner).copy(), vars(runner.GPUModelRunner).copy()
        vllm_cpu.install()
        assert before == (vars(runner), vars(runner.GPUModelRunner))


@pytest.mark.e2e
def test_install_in_vllm_acts_on_its_cpu_build_only(monkeypatch):
    platforms = pytest.importorskip("vllm.platforms")
    called = []
    monkeypatch.setattr(vllm_cpu, "install", lambda: called.append(1))
    for is_cpu in (False, True):
        monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda answer=is_cpu: answer))
        cpu.install_in_vllm()
        assert bool(called) is is_cpu


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("dtype", "rows", "answer"),
    [
        (torch.float32, 64, (True, "vec")),
        (torch.float32, 48, (False, "none")),
        (torch.bfloat16, 64, (True, "amx")),
        (torch.bfloat16, 48, None),
    ],
)
def test_amx_shim_lets_float32_experts_run_on_a_cpu_with_amx(monkeypatch, dtype, rows, answer):
    pytest.importorskip("vllm.platforms.cpu").CpuPlatform.import_kernels()
    kind = getattr(vllm_cpu.cpu_experts_module(), "CPUFusedMOE", None)
    if kind is None:
        vllm_cpu.install()
        pytest.skip("this vLLM chooses its CPU kernel by another class, which takes float32 beside AMX")
    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("not vLLM's CPU build for x86")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    kernel = object.__new__(kind)
    layer = SimpleNamespace(
        w13_weight=torch.empty(1, rows, 32, dtype=dtype), w2_weight=torch.empty(1, 32, rows // 2, dtype=dtype)
    )
    stock = getattr(kind.check_grouped_gemm, "__wrapped__", kind.check_grouped_gemm)
    refuses = hasattr(kind, "_grouped_gemm_alignment_error")  # before 0.27: a loop over experts, which fails
    if dtype == torch.float32 and refuses:
        with pytest.raises(RuntimeError):  # the day it does not, the shim can go
            stock(kernel, layer)
    elif dtype == torch.float32:
        assert stock(kernel, layer) == (False, "none")
    vllm_cpu.install()
    if answer is None and refuses:
        with pytest.raises(RuntimeError):
            kernel.check_grouped_gemm(layer)
    else:
        assert kernel.check_grouped_gemm(layer) == (answer or (False, "none"))
    silu = next(
        function for kind, function in vllm_cpu.cpu_experts_module()._CPU_MOE_ACT_FN.items() if "SILU" in kind.name
    )
    rows = torch.randn(3, 8)  # outside of a vLLM config
    assert torch.equal(silu(rows), torch.nn.functional.silu(rows[:, :4]) * rows[:, 4:])


@pytest.mark.e2e
def test_routes_shim_captures_what_the_cpu_kernel_chooses_itself(monkeypatch):
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.v1.worker import gpu_model_runner

    experts = vllm_cpu.cpu_experts_module()
    if not hasattr(experts, "select_experts"):
        pytest.skip("this vLLM's CPU kernels are given their experts")
    monkeypatch.setattr(experts, "select_experts", inspect.unwrap(experts.select_experts))
    in_class = hasattr(gpu_model_runner.GPUModelRunner, "_bind_routed_experts_capturer")
    owner = gpu_model_runner.GPUModelRunner if in_class else gpu_model_runner
    name = "_bind_routed_experts_capturer" if in_class else "bind_routed_experts_capturer"
    monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))

    class Layer(MoERunner):
        layer_id = 3
        _quant_method = None
        router = None

        def __init__(self):
            torch.nn.Module.__init__(self)

    def apply(hidden, logits):
        return experts.select_experts(hidden, logits, 2, False, True)

    layer = Layer()
    layer._quant_method = SimpleNamespace(is_monolithic=True, apply_monolithic=apply, moe_kernel=None)
    model = torch.nn.ModuleList([layer])
    held = SimpleNamespace(model=model, compilation_config=SimpleNamespace(static_forward_context={"experts": layer}))
    captured = []
    capturer = SimpleNamespace(capture=lambda number, ids: captured.append((number, ids)))
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [5.0, 0.0, 1.0, 6.0]])

    def bind():
        getattr(owner, name)(held if in_class else model, capturer)

    with contextlib.suppress(ValueError):  # before 0.27 no refusal, and zeros
        bind()
    layer._quant_method.apply_monolithic(torch.zeros(2, 4), logits)
    assert not captured  # the day that it is not empty, the shim can go
    vllm_cpu.install()
    bind()
    layer._quant_method.apply_monolithic(torch.zeros(2, 4), logits)
    apply(torch.zeros(2, 4), logits)  # of another layer, without a capturer
    ((number, ids),) = captured
    assert number == 3 and [set(row) for row in ids.tolist()] == [{1, 2}, {0, 3}]


@pytest.mark.e2e
def test_values_of_sequences_are_repeated_for_their_drafts_where_vllms_kernel_drops_floats():
    kernels = pytest.importorskip("vllm.utils.cpu_triton_utils")
    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 3])
    dropped = torch.full((3,), 7.0)
    kernels._expand_kernel_impl(dropped, temperatures, ends, 0, 1)
    assert dropped.tolist() == [7.0] * 3, "vLLM's CPU build is mended: the shim can go"
    assert vllm_cpu._expand(temperatures, ends, 3, 0, 1).tolist() == [0.5, 0.5, 1.0]
    assert vllm_cpu._expand(torch.tensor([4, 5]), torch.tensor([1, 2]), 2).tolist() == [4, 5]
