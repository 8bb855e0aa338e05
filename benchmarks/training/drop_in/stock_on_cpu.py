"""Lets verl's SGLang adapter run without a GPU beside its fsdp2 engine; verl's workers take it as ``external_lib``."""

from epfsdp2.rollout.sglang import cpu_shim

cpu_shim.install()
