"""Read what verl's bucketed sender says of a bucket without running anything of it.

verl sends it as a pickle (``send_pyobj``): names, shapes, dtypes and offsets, and of a buffer in device memory the
handle that torch's ``reduce_tensor`` makes. Whoever binds the socket's name first could send another one, so it is read
by an unpickler that knows these types alone.
"""

import io
import pickle
from typing import Any

import torch

__all__ = ["read_metadata"]

_KNOWN = {
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}


def read_metadata(message: bytes) -> Any:
    """Read what was pickled, without running any of it.

    Raises:
        pickle.UnpicklingError: it is no pickle, or holds other types than a bucket's.
    """
    try:
        return _Unpickler(io.BytesIO(message)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # what pickle raises for damaged data is not bounded
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it would call {module}.{name}")
