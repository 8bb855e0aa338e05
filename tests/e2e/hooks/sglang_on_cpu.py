"""verl's own engine sends SGLang tensors on a CPU, with the shim that ``engine=epfsdp2`` installs there."""

from epfsdp2.rollout.sglang import cpu_shim

cpu_shim.install()
