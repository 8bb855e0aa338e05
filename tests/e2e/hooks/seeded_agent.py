"""verl's agent loop of one turn with a seed for each answer, so that a step's samples do not depend on timing.

vLLM draws from one generator in the order in which requests come, which differs from run to run. The seed is made of
the prompt, the step and the answer's number; ``seeded_agent.yaml`` names this class for verl.
"""

import zlib

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        answer = f"{list(kwargs['raw_prompt'])} {kwargs['global_steps']} {kwargs['session_id']}"
        return await super().run({**sampling_params, "seed": zlib.crc32(answer.encode())}, **kwargs)
