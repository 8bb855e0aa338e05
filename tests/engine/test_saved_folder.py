"""A save and its export serve as the base did: its small files byte for byte, its config but for the run's own."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Fast
from verl.workers.config import HFModelConfig

from epfsdp2.engine.checkpoint.stored_shards import HF
from epfsdp2.engine.config import EPFSDP2EngineConfig
from epfsdp2.engine.integration.checkpoints import WritesCheckpoints
from epfsdp2.recipes.export import export
from tests.support.models.tiny import VOCAB, save_glm4_moe, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.trainer.verl_worker import training_worker

# transformers refuses to save the first: sampling is off, and there is a temperature.
GENERATION = {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [5, 17, 40], "pad_token_id": 0}
SERVED = {
    "generation_config.json": json.dumps(GENERATION),
    "chat_template.jinja": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "modeling_own.py": "raise AssertionError('nothing runs this')",
    **dict.fromkeys(("tokenizer.model", "tokenizer.model.v3", "merges.txt", "own.tiktoken", "LICENSE"), "the base's"),
    **dict.fromkeys(("tekken.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"), "{}"),
    **dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), "{}"),
}
NOT_SERVED = ("pytorch_model.bin", "model.gguf", "original/params.json", "hf_quant_config.json", "training_args.bin")
NOT_SERVED += ("README.md", ".gitattributes")


def _publish(folder):
    """Add files to a folder, and to its config what published ones have; its tokenizer is not of transformers."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for name, content in {**SERVED, **dict.fromkeys(NOT_SERVED, "{}")}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields |= {"torch_dtype": "bfloat16", "eos_token_id": [5, 17, 40], "auto_map": {"AutoModel": "modeling_own.Own"}}
    fields.pop("dtype", None)
    path.write_text(json.dumps({**fields, "transformers_version": "4.51.0"}))
    return folder


def _tokenizer(folder):
    vocab = {f"t{i}": i for i in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Fast(tokenizer_object=words, eos_token="t5", pad_token="t0", chat_template="other").save_pretrained(folder)
    return folder


def _saves(root, kinds):
    """Save a run of each kind and, without a run, the small files on each rank of two meshes."""
    for kind in kinds:
        folder = root / f"trained-{kind}"
        engine = EPFSDP2EngineConfig(ep_size=2, mixed_precision={"param_dtype": "fp32"})
        worker = training_worker(folder, kind, engine, None, ("model", "hf_model"))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)  # the base may be gone when a save comes
        dist.barrier()
        worker.save_checkpoint(str(root / f"saved-{kind}"), global_step=1)
    for name, settings in (("sharded", {}), ("replicated", {"fsdp_size": 1})):
        engine = training_worker(root / "base", kinds[0], EPFSDP2EngineConfig(**settings), None).engine
        engine._save_hf_config(root / name / str(dist.get_rank()))


def _run(root, save, *kinds):
    base = _publish(save(root / "base"))
    for kind in kinds:
        shutil.copytree(base, root / f"trained-{kind}")
    run_ranks(_saves, 2, root, kinds)
    for kind in kinds:
        export(root / f"saved-{kind}", root / f"exported-{kind}")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("runs"), save_qwen3_moe, "language_model", "value_model")


def _folders(root, kind):
    """Return the base, and what a run has saved and exported."""
    return root / "base", root / f"saved-{kind}" / HF, root / f"exported-{kind}"


def _files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_save_and_export_have_the_bases_small_files_and_its_config_but_for_another_dtype(root, tmp_path):
    base, *written = _folders(root, "language_model")
    wanted = {name: content.encode() for name, content in SERVED.items()}
    fields = json.loads((base / "config.json").read_text())
    export(written[0].parent, tmp_path / "float32", torch.float32)
    for folder, own in zip((*written, tmp_path / "float32"), ({}, {}, {"torch_dtype": "float32"}), strict=True):
        files = {name: content for name, content in _files(folder).items() if "safetensors" not in name}
        assert json.loads(files.pop("config.json")) == {**fields, **own}
        assert files == wanted
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (written[1], base))
    ids = torch.arange(1, 4)[None]
    assert model.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(model.generate(ids, max_new_tokens=20), plain.generate(ids, max_new_tokens=20))
    assert model.generation_config.eos_token_id == GENERATION["eos_token_id"]


@pytest.mark.long
def test_save_and_export_have_the_same_defaults_in_vllm_as_the_base(root):
    from vllm.config import ModelConfig

    folders = _folders(root, "language_model")
    found = [ModelConfig(model=str(folder), skip_tokenizer_init=True) for folder in folders]
    base, *written = [(of.try_get_generation_config(), of.get_diff_sampling_param(), of.dtype) for of in found]
    assert base[0]["eos_token_id"] == GENERATION["eos_token_id"] and base[1]["top_p"] == GENERATION["top_p"]
    assert written == [base, base]


def test_export_of_a_critic_names_the_class_that_loads_it(root):
    base, *written = _folders(root, "value_model")
    for folder in written:
        config = AutoConfig.from_pretrained(folder)
        assert config.architectures == ["Qwen3MoeForTokenClassification"] and config.num_labels == 1
        model, info = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and model.score.weight.shape[0] == 1
        wanted = {name: content for name, content in _files(base).items() if name in SERVED}
        assert {name: content for name, content in _files(folder).items() if name in SERVED} == wanted


def _loads_value(folder):
    """The engine's own critic loads a critic of a family without a class."""
    worker = training_worker(folder, "value_model", EPFSDP2EngineConfig(ep_size=2), None)
    head = worker.engine.module.lm_head.weight.full_tensor()
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert head.shape[0] == 1 and torch.equal(head, stored["lm_head.weight"])


@pytest.mark.long
def test_export_of_a_critic_without_a_class_is_a_critic_again(tmp_path):
    *_, exported = _folders(_run(tmp_path, save_glm4_moe, "value_model"), "value_model")
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Glm4MoeForCausalLM"]
    run_ranks(_loads_value, 2, exported)


def test_small_files_are_read_by_the_first_rank_of_each_replica(root):
    """After a failure any of these may write."""
    written = {path.relative_to(root).parent.as_posix() for path in root.glob("*/[01]/config.json")}
    assert written == {"sharded/0", "replicated/0", "replicated/1"}


def _written(base, out, **model):
    """Return what a run with these settings of the model saves, without its ranks."""
    saves = WritesCheckpoints.__new__(WritesCheckpoints)
    saves.model_config = HFModelConfig(path=str(base), override_config={"attn_implementation": "sdpa"}, **model)
    saves.module = SimpleNamespace(config=saves.model_config.hf_config)
    saves._model_files = saves._files_of(base)
    saves._save_hf_config(out)
    return _files(out)


def test_save_with_a_tokenizer_config_or_template_of_its_own_has_that_one_alone(tmp_path):
    base, other = _publish(save_qwen3_moe(tmp_path / "base")), _tokenizer(tmp_path / "other")
    files = _written(base, tmp_path / "tokenizer", tokenizer_path=str(other))
    own = {name: SERVED[name].encode() for name in ("generation_config.json", "modeling_own.py")}
    assert files == {**_files(other), **own, "config.json": (base / "config.json").read_bytes()}

    other = Path(shutil.copytree(base, tmp_path / "another"))
    (other / "config.json").write_text((base / "config.json").read_text().replace("4.51.0", "4.52.0"))
    (other / "modeling_own.py").write_text("other")
    (other / "generation_config.json").unlink()
    files = _written(base, tmp_path / "config", hf_config_path=str(other), load_tokenizer=False)
    wanted = {name: content.encode() for name, content in SERVED.items()}
    assert files == {**wanted, "modeling_own.py": b"other", "config.json": (other / "config.json").read_bytes()}

    files = _written(_tokenizer(base), tmp_path / "template", custom_chat_template="{{ 'the run' }}")
    assert AutoTokenizer.from_pretrained(tmp_path / "template").chat_template == "{{ 'the run' }}"
    assert not [name for name in files if name.startswith("additional_chat_templates/")]
