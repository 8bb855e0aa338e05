"""GRPO with an agent: verl's agent loop, its parser of calls, a tool that answers from a table, and a real rollout.

The rollout is SGLang on its stack, and vLLM on the others.
"""

import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.agents import agent_task
from tests.e2e.runs import SERVER, overrides, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 8
_ROLLOUT = "actor_rollout_ref.rollout"
AGENT = [
    f"data.max_prompt_length={agent_task.PROMPT}",
    f"data.max_response_length={agent_task.RESPONSE}",
    f"reward.custom_reward_function.path={agent_task.__file__}",
    f"{_ROLLOUT}.multi_turn.enable=True",
    f"{_ROLLOUT}.multi_turn.format=hermes",
    f"{_ROLLOUT}.multi_turn.function_tool_path={agent_task.__file__}",
    "actor_rollout_ref.model.external_lib=batches",
]
DYNAMIC = [
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz=True",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu=300",
]
REPLAY = ["engine.router_replay.mode=R3", f"{_ROLLOUT}.enable_rollout_routing_replay=True"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    model, data = agent_task.write_task(folder, steps=250)
    files = [f"data.train_files={data}", f"data.val_files={data}"]
    options = [*SERVER, "--model", str(model), "--steps", str(STEPS), *overrides(*files, *AGENT, *DYNAMIC, *REPLAY)]
    environment = {"EPFSDP2_TEST_BATCHES": str(folder / "batches")}
    with running(folder / "run", *options, environment=environment) as run:
        run.wait()
    assert len(run.steps()) == STEPS, run.text()[-3000:]
    run.tokenizer = AutoTokenizer.from_pretrained(model)
    run.batches = [torch.load(file) for file in sorted((folder / "batches").iterdir())]
    return run


def test_agent_that_calls_a_tool_raises_its_reward(run):
    steps = run.steps()
    rewards = [step["critic/rewards/mean"] for step in steps]
    turns = [step["num_turns/mean"] for step in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4, rewards
    # A question, a call, the tool's answer, an answer; without a call there are two.
    assert turns[-1] > turns[0] + 0.4, turns
    # In float32 trainer and rollout agree on every token of every turn.
    assert all(step["training/rollout_probs_diff_mean"] < 1e-5 for step in steps)
    assert all(step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0 for step in steps)
    # The rollout's experts are those that the trainer's routers would choose.
    assert all(step["actor/router_replay_differing"] < 1e-3 for step in steps)


def test_agent_loop_with_a_tool_records_routes_of_its_answers_and_masks_them_in_the_loss(run):
    answer, end = run.tokenizer.convert_tokens_to_ids(["<|tool|>", "<|im_end|>"])
    with_tool = cut_off = 0
    for batch in run.batches:
        for i, response in enumerate(batch["responses"]):
            mask, routes = batch["response_mask"][i].bool(), batch["routed_experts"][i]
            # The rollout has computed all tokens but the last, and that one too where verl cut the answer.
            chosen = routes[: len(batch["input_ids"][i]) - 1].sort(-1).values
            assert (chosen[..., 1:] != chosen[..., :-1]).all()
            assert mask[0] and mask[-1] and len(response) <= agent_task.RESPONSE
            # The loop writes the tokens after a policy's turn. A policy can write the opening of a tool's turn, too.
            turns = [int(at) for at in (response == answer).nonzero() if at > 1 and response[at - 2] == end]
            wanted = torch.ones_like(mask)
            for first in turns:  # the newline after a call, the tool's turn, and the opening of the next
                length = int((response[first:] == end).nonzero()[0]) + 3
                wanted[first - 1 : first + length] = False
            assert torch.equal(mask, wanted), (response, mask)
            with_tool += bool(turns)
            cut_off += bool(turns) and len(response) == agent_task.RESPONSE and bool(response[-1] != end)
    assert with_tool > 100 and cut_off > 10, (with_tool, cut_off)
