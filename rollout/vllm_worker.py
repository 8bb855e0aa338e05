"""The worker extension under the name that configs have; ``vllm/worker.py`` has it."""

from .vllm.worker import WeightSyncExtension as WeightSyncExtension
