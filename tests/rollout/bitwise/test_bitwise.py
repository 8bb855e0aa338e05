"""``engine.rollout_bitwise``: vLLM's log-probs of prompts and of samples have the bits of the trainer's."""

import pytest
import torch

from epfsdp2.engine.compat import versions
from tests.support.models.tiny import VOCAB, save_qwen3, save_qwen3_moe
from tests.support.ranks import run_ranks
from tests.support.rollout.verls_transport import send
from tests.support.trainer.ppo import of_this_rank, ppo_batch, ppo_samples, ppo_worker

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not versions.vllm_in("==0.27.1"), reason="rollout_bitwise was shown with vLLM 0.27.1 alone"),
]

VLLM = {
    "distributed_executor_backend": "uni",
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 256,
    "max_num_seqs": 16,
}
BITWISE = VLLM | {"additional_config": {"epfsdp2_bitwise": True}}
SIZES = {"head_dim": 32}  # vLLM's CPU backend has heads of 32 and more
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
TEMPERATURE = 0.7
LONGEST, SAMPLED = 130, 20  # tokens of a prompt, and of each answer


def _prompts():
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 2, 5, 17, 33, 70, 64, 9, 40, LONGEST)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def _sampled(engine, prompts, **sampling):
    """Return ids, length, and log-probs of the prompt's tokens and of the sampled ones, of each prompt."""
    settings = {"temperature": TEMPERATURE, "max_tokens": SAMPLED, "seed": 3, "ignore_eos": True}
    settings |= {"logprobs": 0, "prompt_logprobs": 0}
    answers = engine.generating(prompts, **settings | sampling).result()
    found = []
    for prompt, (ids, rows, of_prompt) in zip(prompts, answers, strict=True):
        before = [row[token] for row, token in zip(of_prompt, prompt[1:], strict=False)]
        found.append((prompt + ids, len(prompt), before, [row[token] for row, token in zip(rows, ids, strict=True)]))
    return found


def _worker(folder, dtype, ep, tp=1, micro_batch=5):
    precision = {"param_dtype": DTYPES[dtype], "reduce_dtype": "fp32"}
    settings = {"batch_invariant": True, "rollout_bitwise": True, "mixed_precision": precision, "model_dtype": "fp32"}
    return ppo_worker(folder, ep, micro_batch=micro_batch, _rollout_tp=tp, **settings)


def _different(worker, sampled):
    """Return, for each temperature and sample, how many log-probs differ, if some do."""
    from verl.utils import tensordict_utils as tu

    sampled, wrong = of_this_rank(worker, sampled), []
    nothing = torch.zeros(SAMPLED)
    samples = [(torch.tensor(ids), before, nothing, nothing) for ids, before, *_ in sampled]
    for temperature in (1.0, TEMPERATURE):
        batch = ppo_batch(samples, prompt=LONGEST, response=SAMPLED)
        tu.assign_non_tensor(batch, compute_loss=False, temperature=temperature)
        for own, (_, length, *log_probs) in zip(worker.infer_batch(batch)["log_probs"].unbind(), sampled, strict=True):
            wanted = torch.tensor(log_probs[temperature != 1.0])
            part = own[: len(wanted)] if temperature == 1.0 else own[length - 1 : -1]
            if not torch.equal(part, wanted):
                wrong.append((temperature, length, int((part != wanted).sum()), (part - wanted).abs().max().item()))
    return wrong


def _same_bits(folder, dtype, ep, batches, tp=1):
    worker = _worker(folder, dtype, ep, tp)
    wrong = [_different(worker, sampled) for sampled in batches]
    assert not any(wrong), wrong


@pytest.mark.parametrize(
    "save, dtype",
    [
        (save_qwen3, "float32"),
        (save_qwen3_moe, "bfloat16"),
        pytest.param(save_qwen3, "bfloat16", marks=pytest.mark.long),
        pytest.param(save_qwen3_moe, "float32", marks=pytest.mark.long),
    ],
)
def test_log_probs_of_prompts_and_samples_have_the_trainers_bits(start_engine, tmp_path, save, dtype):
    folder, prompts = save(tmp_path, **SIZES), _prompts()
    engine = start_engine(str(folder), dtype=dtype, **BITWISE)
    together = _sampled(engine, prompts)
    alone = [answer for prompt in prompts for answer in _sampled(engine, [prompt])]
    assert together == alone
    cut = _sampled(engine, prompts, top_p=0.8, top_k=20)
    run_ranks(_same_bits, 2, folder, dtype, 1 if save is save_qwen3 else 2, [together, cut])


@pytest.mark.parametrize(
    "save, dtype",
    [
        (save_qwen3_moe, "float32"),
        pytest.param(save_qwen3_moe, "bfloat16", marks=pytest.mark.long),
        pytest.param(save_qwen3, "float32", marks=pytest.mark.long),
        pytest.param(save_qwen3, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_log_probs_of_two_workers_have_the_trainers_bits(start_engine, tmp_path, save, dtype):
    folder, vllm = save(tmp_path, **SIZES), BITWISE | {"distributed_executor_backend": "mp"}
    sampled = _sampled(start_engine(str(folder), tp_size=2, dtype=dtype, **vllm), _prompts())
    run_ranks(_same_bits, 2, folder, dtype, 1 if save is save_qwen3 else 2, [sampled], 2)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_chunks_of_a_prompt_and_a_cached_prefix_have_the_trainers_bits(start_engine, tmp_path, dtype):
    folder, prompts = save_qwen3_moe(tmp_path, **SIZES), _prompts()
    cache = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 48}
    engine = start_engine(str(folder), dtype=dtype, **BITWISE, **cache)
    chunked = _sampled(engine, prompts, seed=None)  # vLLM has no seeds for chunks on a CPU
    again = _sampled(engine, prompts, seed=None, prompt_logprobs=None)
    assert max(engine.call("cached").result()) >= 96
    run_ranks(_same_bits, 1, folder, dtype, 1, [chunked, again])


def _trained(folder, dtype):
    worker = _worker(folder, dtype, 1, micro_batch=2)
    worker.train_batch(ppo_batch(ppo_samples()))
    return worker


def _send(folder, dtype, mode, handles):
    from epfsdp2.rollout.layout.specs import Rollout

    weights = _trained(folder, dtype).engine.rollout_sync.weights()
    send(weights.for_worker(mode, Rollout(1)).tensors(), handles)


def _same_bits_when_trained(folder, dtype, batches):
    worker = _trained(folder, dtype)  # the same update gives the same parameters
    wrong = [_different(worker, sampled) for sampled in batches]
    assert not any(wrong), wrong


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_log_probs_after_syncs_of_each_mode_have_the_trainers_bits(start_engine, tmp_path, dtype):
    folder, prompts = save_qwen3_moe(tmp_path, **SIZES), _prompts()
    engine = start_engine(str(folder), dtype=dtype, **BITWISE)
    before, after = _sampled(engine, prompts), []
    for mode in ("full", "sliced"):
        answer = engine.call("update_weights_from_ipc", timeout=120.0, use_shm=True, sync_timeout_seconds=100.0)
        run_ranks(_send, 1, folder, dtype, mode, [engine.handle(0)])
        answer.result()
        after.append(_sampled(engine, prompts))
    assert before != after[0] == after[1]
    run_ranks(_same_bits_when_trained, 1, folder, dtype, after)


@pytest.mark.long
def test_log_probs_of_stock_vllm_have_other_bits(start_engine, tmp_path):
    folder = save_qwen3(tmp_path, **SIZES)
    sampled = _sampled(start_engine(str(folder), dtype="float32", **VLLM), _prompts())
    with pytest.raises(Exception, match=r"AssertionError: \[\[\(1.0, "):
        run_ranks(_same_bits, 1, folder, "float32", 1, [sampled])


def test_vllms_sampler_can_not_be_replaced_by_an_extension():
    """Fails once vLLM no longer needs the shim of ``rollout/bitwise/sampler.py``."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer
    from vllm.v1.sample.sampler import Sampler

    assert not issubclass(Sampler, CustomOp | PluggableLayer)
