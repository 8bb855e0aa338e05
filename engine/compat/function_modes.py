"""Switch torch's function modes (``TorchFunctionMode``) off for some calls; torch has no public name for it."""

import contextlib

import torch

__all__ = ["without_function_modes"]

# A context manager. In a torch without it the modes stay on, which changes no result.
without_function_modes = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)
