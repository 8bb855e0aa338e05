"""verl's agent loop, one request at a time in the order of the batch: the same rollouts from the same weights.

``one_by_one.yaml`` names it to verl.
"""

import asyncio
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class OneByOne(SingleTurnAgentLoop):
    _turn = asyncio.Lock()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        async with self._turn:
            return await super().run(sampling_params, **kwargs)
