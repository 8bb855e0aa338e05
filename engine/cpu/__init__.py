"""Runs verl and vLLM without a GPU: verl's platform and process groups, vLLM's CPU build. GPU machines import nothing.

All of it can go once verl has a CPU platform and vLLM's CPU build has the tested fixes.
"""

import os

__all__ = ["install", "install_in_vllm"]


def install() -> None:
    """Register the CPU platform with verl, if verl is to run on the CPU; called at ``import verl``."""
    if not _is_chosen():
        return
    from . import platform, vllm

    platform.install()
    vllm.install_distribution()


def install_in_vllm() -> None:
    """Install the shims of experts in a worker of vLLM's CPU build."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from . import vllm

        vllm.install()


def _is_chosen() -> bool:
    """Whether ``VERL_PLATFORM`` is cpu, or unset and torch is built without an accelerator.

    A node without GPUs in a GPU cluster (a head node, a CPU-only Ray actor) has a CUDA build, and keeps verl's choice.
    """
    if chosen := os.environ.get("VERL_PLATFORM", "").strip().lower():
        return chosen == "cpu"
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    return not any(hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "xpu", "mps"))
