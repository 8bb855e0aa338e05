"""A vision-language model is updated on images and synced to two vLLM workers, whose outputs equal a fresh engine's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from epfsdp2.engine.checkpoint.stored_shards import HF
from tests.rollout.served.served_family import VOCAB
from tests.rollout.served_families import SERVED, build, randomise
from tests.support.models.tiny import publish
from tests.support.models.vlm import IMAGE_TOKENS, save_processor
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import send

pytestmark = [pytest.mark.e2e, pytest.mark.long]

_PATCH = 16


def _settings(family: str) -> dict:
    served = SERVED[family]
    seeing = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_tokenizer_init": False}
    return {"tp_size": 2, "dtype": served.dtype, "environment": served.environment, **served.settings, **seeing}


def _train_and_send(folder: str, export: str, handles: list[str], mode: str, dtype: str) -> None:
    from epfsdp2.rollout.layout.specs import Rollout
    from tests.support.engine.checkpoints import save_checkpoint
    from tests.support.models.vlm import plain_vlm, vlm_batch, vlm_samples
    from tests.support.trainer.ppo import ppo_worker

    rank = dist.get_rank()
    samples = vlm_samples(plain_vlm(Path(folder)), without=range(8, 16))  # the second rank has no image
    precision = {"param_dtype": dtype, "reduce_dtype": "float32"}
    worker = ppo_worker(Path(folder), ep=2, mixed_precision=precision)
    worker.train_batch(vlm_batch(samples[8 * rank : 8 * rank + 8]))
    describe = AutoConfig.from_pretrained(folder).save_pretrained
    save_checkpoint(Path(export).parent, worker.engine.module, None, None, {"hf_model"}, 1, describe)
    weights, _ = worker.engine.get_per_tensor_param()
    send(weights.sync.weights().for_worker(mode, Rollout(2)).tensors(), handles)


def _prompts() -> list[dict]:
    """One image, two of its colours, and text alone."""
    start, end, image = (IMAGE_TOKENS[f"{kind}_token_id"] for kind in ("vision_start", "vision_end", "image"))
    ids = [1, 5, start, image, end, 7, 8, 9]
    seen = [Image.new("RGB", (4 * _PATCH, 2 * _PATCH), colour) for colour in ("red", "blue")]
    return [
        *({"prompt_token_ids": ids, "multi_modal_data": {"image": one}} for one in seen),
        {"prompt_token_ids": [1, 5]},
    ]


@pytest.mark.parametrize("mode", ["full", "sliced"])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe_vl"])
def test_vllm_sees_an_image_as_a_fresh_engine_on_the_export_does(start_engine, tmp_path, family, mode):
    SERVED[family].skip_where_broken()
    settings, folder, export = _settings(family), tmp_path / "model", tmp_path / "trained" / HF
    model = build(family)
    randomise(model, 1)
    model.save_pretrained(folder)
    publish(folder)
    save_processor(folder, VOCAB, _PATCH)

    engine = start_engine(str(folder), **settings)
    before = [engine.digests(), engine.generating(_prompts()).result()]
    engine.call("update_weights_from_ipc", timeout=200.0, use_shm=True, sync_timeout_seconds=150.0)
    engine.call("clear")
    answers = engine.call("epfsdp2_digests"), engine.generating(_prompts())
    handles = [engine.handle(rank) for rank in range(2)]
    run_ranks(_train_and_send, 2, str(folder), str(export), handles, mode, settings["dtype"])
    synced = [[answer["digests"] for answer in answers[0].result()], answers[1].result()]
    assert engine.leftovers() == []

    for file in export.glob("*.safetensors"):  # vLLM keeps some in float32; a sync sends what computed
        rounded = {name: tensor.to(getattr(torch, settings["dtype"])) for name, tensor in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    save_processor(export, VOCAB, _PATCH)
    fresh = start_engine(str(export), **settings)
    assert [fresh.digests(), fresh.generating(_prompts()).result()] == synced
    assert before[0] != synced[0] and before[1] != synced[1]
    assert synced[1][0] != synced[1][1]  # it does see the image
