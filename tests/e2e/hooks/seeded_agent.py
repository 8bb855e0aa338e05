"""verl's agent loop of one turn with a seed for each answer, so that a step's samples do not depend on timing.

vLLM draws from one generator in the order in which requests come, which differs from run to run. The seed is made of
the prompt, the step and the answer's number; ``seeded_agent.yaml`` names this class for verl. Its older trainer gives
neither, and how often the prompt was there before stands for both.
"""

import zlib
from collections import Counter

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_SEEN = Counter()


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        prompt = str(list(kwargs["raw_prompt"]))
        answer = f"{prompt} {kwargs.get('global_steps')} {kwargs.get('session_id', _SEEN[prompt])}"
        _SEEN[prompt] += 1
        return await super().run({**sampling_params, "seed": zlib.crc32(answer.encode())}, **kwargs)
