"""Dequantised checkpoints have the values that the quantising libraries compute."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from epfsdp2.recipes import dequantise
from tests.support.engine.memory import peak_of

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors compiles its packing for half a minute
        yield


def _save(folder, tensors, quantisation, files=1, **config):
    """Save a checkpoint of these tensors, spread over files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("the quantised weights once more")
    names = sorted(tensors, reverse=True)  # scales may be in other files than their weights
    parts = [names[i::files] for i in range(files)]
    of = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    for i, part in enumerate(parts):
        save_file({name: tensors[name].contiguous() for name in part}, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    return folder


def _converted(tmp_path, tensors, quantisation, files=2):
    out = tmp_path / "out"
    assert dequantise.main([str(_save(tmp_path / "in", tensors, quantisation, files)), str(out)]) == 0
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _exponents(*shape):
    return torch.randint(117, 133, shape, dtype=torch.uint8)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_dequantise_of_fp8_blocks_as_deepseek_v3_has_them_equals_transformers(tmp_path, scale_dtype):
    """Include a shape that blocks do not divide, and a plain tensor."""
    weight, scales = _fp8(200, 576), (torch.rand(2, 5) + 0.1).to(scale_dtype)
    bias = torch.randn(8)
    found = _converted(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales, "gate.bias": bias}, FP8)
    assert found.keys() == {"a.weight", "gate.bias"}
    expected = FP8BlockDequantizer(targets=["a"])._create_dequantized_weight(weight, scales)
    assert found["a.weight"].dtype == torch.bfloat16
    assert torch.equal(found["a.weight"], expected)
    assert torch.equal(found["gate.bias"], bias)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {}
    assert (tmp_path / "out/tokenizer.json").is_file() and not (tmp_path / "out/pytorch_model.bin").exists()


def test_dequantise_of_fp4_experts_beside_fp8_linears_as_deepseek_v4_has_them_is_exact(tmp_path):
    experts, of_experts = _bytes(64, 64).view(torch.int8), _exponents(64, 4).view(torch.float8_e8m0fnu)
    linear, of_linear = _fp8(256, 128), _exponents(2, 1).view(torch.float8_e8m0fnu)
    stored = {"e.weight": experts, "e.scale": of_experts, "l.weight": linear, "l.scale": of_linear}
    found = _converted(tmp_path, stored, FP8)
    library = Fp8Dequantize(None)
    assert torch.equal(found["e.weight"], library._dequantize_one(experts, of_experts))
    assert torch.equal(found["l.weight"], library._dequantize_one(linear, of_linear))


def _group(bits, kind, strategy, **more):
    return QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, symmetric=True, **more)


COMPRESSED = {
    "nvfp4-pack-quantized": (_group(4, "float", "tensor_group", group_size=16), (64, 4), torch.bfloat16),
    "mxfp4-pack-quantized": (_group(4, "float", "group", group_size=32), (64, 2), torch.bfloat16),
    "pack-quantized": (_group(4, "int", "group", group_size=32), (64, 2), torch.bfloat16),
    "float-quantized": (_group(8, "float", "channel"), (64, 1), torch.float32),
    "int-quantized": (_group(8, "int", "channel"), (64, 1), torch.bfloat16),
    "naive-quantized": (_group(8, "float", "tensor"), (1,), torch.float32),
}


@pytest.mark.parametrize("form", COMPRESSED)
def test_dequantise_of_compressed_tensors_equals_its_decompressor(tmp_path, form):
    args, grid, scale_dtype = COMPRESSED[form]
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    weight = torch.randn(64, 64).bfloat16()
    scale = (torch.rand(grid) / 8 + 0.05).to(scale_dtype)
    if form.startswith("mxfp4"):
        scale = torch.exp2(torch.randint(-4, 1, grid)).to(scale_dtype)
    state = {"weight": weight, "weight_scale": scale}
    if form.startswith("nvfp4"):
        state |= {"weight_scale": (scale * 100).bfloat16(), "weight_global_scale": torch.tensor([100.0])}
    stored = compressor.compress(state, scheme)
    group = {"weights": json.loads(args.model_dump_json()), "format": form, "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    more = {"a.input_global_scale": torch.ones(1), "a.k_scale": torch.ones(1)}
    found = _converted(tmp_path, {f"a.{name}": tensor for name, tensor in stored.items()} | more, config)
    assert found.keys() == {"a.weight"}
    expected = compressor.decompress(dict(stored), scheme)["weight"].bfloat16()
    assert torch.equal(found["a.weight"], expected)
    assert (expected.float() - weight.float()).abs().mean() < 0.5


def test_dequantise_of_nvfp4_as_modelopt_has_it_equals_compressed_tensors(tmp_path):
    """ModelOpt stores the inverse of compressed-tensors' scale of a whole tensor."""
    packed, scales, whole = _bytes(64, 32), (torch.rand(64, 4) * 9).to(torch.float8_e4m3fn), torch.tensor(0.0078125)
    stored = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": whole, "a.input_scale": torch.ones(1)}
    found = _converted(tmp_path, stored, {"quant_method": "modelopt"})
    scheme = QuantizationScheme(targets=["Linear"], weights=COMPRESSED["nvfp4-pack-quantized"][0])
    state = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": 1 / whole.reshape(1)}
    expected = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(state, scheme)["weight"]
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], expected)


def test_dequantise_of_a_gpt_oss_equals_what_transformers_makes_of_it(tmp_path):
    folder = tmp_path / "in"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 64, **heads}
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = _bytes(experts, outputs, inner // 32, 16)
        tensors[f"{name}_scales"] = _exponents(experts, outputs, inner // 32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    _save(folder, tensors, {"quant_method": "mxfp4"}, 3, **config)
    assert dequantise.main([str(folder), str(tmp_path / "out"), "--file-gigabytes", "0.0002"]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    kernels = {"quantization_config": Mxfp4Config(dequantize=True), "device_map": "cpu"}
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kernels)
    wanted = dict(wanted.named_parameters())
    assert wanted.keys() == dict(found.named_parameters()).keys()
    for name, param in found.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, wanted[name].to(torch.bfloat16)), name


def _peak(tmp_path, tensors):
    """Return the peak of torch's allocated bytes while a checkpoint of ``tensors`` weights is converted."""
    stored = {}
    for i in range(tensors):
        stored |= {f"{i}.weight": _fp8(1024, 1024), f"{i}.weight_scale_inv": torch.rand(8, 8)}
    folder = _save(tmp_path / f"{tensors}", stored, FP8, files=4)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("convert"):
        dequantise.dequantise(folder, tmp_path / f"{tensors}-out")
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return peak_of(profiler, "convert", files)[0]


def test_dequantise_of_a_larger_checkpoint_takes_no_more_memory(tmp_path):
    few, many = _peak(tmp_path, 4), _peak(tmp_path, 24)
    assert many <= 1.05 * few


@pytest.mark.parametrize(
    ("tensors", "quantisation", "words"),
    [
        ({"a.weight": _fp8(4, 4)}, None, "no quantization_config: its weights are not quantised"),
        ({"a.qweight": torch.ones(2, dtype=torch.int32)}, {"quant_method": "awq"}, "quant_method=awq; known are fp8, "),
        ({"a.weight": _fp8(4, 4)}, FP8, "quantised tensors without scales: a.weight"),
        ({"a.weight": _fp8(4, 4), "a.weight_scale": torch.ones(3, 3)}, FP8, r"a.weight is \[4, 4\], and its scales"),
        (
            {"a.weight": torch.ones(4, 4), "a.weight_packed": _bytes(4, 2), "a.weight_scale": torch.ones(4, 1)},
            {"quant_method": "compressed-tensors"},
            "twice, quantised and plain: a.weight",
        ),
        ({"a.weight": _fp8(4, 4), "a.weight_zero_point": torch.ones(4)}, FP8, "not understood: a.weight_zero_point"),
        ({"a.weight": _fp8(4, 4)}, {**FP8, "transform_config": {"R1": 1}}, "has weights that were rotated"),
    ],
)
def test_dequantise_of_an_unknown_format_names_it(tmp_path, tensors, quantisation, words):
    with pytest.raises(dequantise.QuantisationError, match=words):
        dequantise.dequantise(_save(tmp_path / "in", tensors, quantisation), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dequantise_command_names_what_it_leaves_out_and_bad_input(tmp_path, capsys):
    scales = {f"layers.{i}.{name}": torch.ones(1) for i in range(2) for name in ("a.input_scale", "attn.k_scale")}
    weights = {"layers.0.a.weight": _fp8(4, 4), "layers.0.a.weight_scale": torch.ones(1)}
    folder = _save(tmp_path / "in", weights | scales, {"quant_method": "fp8"})
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert dequantise.main([str(folder), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err.splitlines()
    named = ["consolidated.safetensors", "pytorch_model.bin", "layers.*.a.input_scale", "layers.*.attn.k_scale"]
    assert [line for line in said if line.startswith("left out")] == [f"left out: {name}" for name in named]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"layers.0.a.weight"}
    assert dequantise.main([str(tmp_path / "none"), str(tmp_path / "other")]) == 1
    assert "is not a folder" in capsys.readouterr().err
