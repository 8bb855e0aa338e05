"""Exports the worker extension of ``vllm/worker.py`` under its name in configs."""

from .vllm.worker import WeightSyncExtension as WeightSyncExtension
