"""Exports the worker extension under the name that stands in configs; it is defined in ``vllm/worker.py``."""

from .vllm.worker import WeightSyncExtension as WeightSyncExtension
