"""The part of ``torchvision.transforms.v2.functional`` that transformers' image processors call, in torch."""

from enum import Enum

import numpy as np
import torch

__all__ = ["InterpolationMode", "normalize", "pil_to_tensor", "resize"]


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image) -> torch.Tensor:
    """``(C, H, W)``, uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resize(image: torch.Tensor, size, interpolation=None, antialias=True) -> torch.Tensor:
    """A uint8 image ``(..., C, H, W)`` to another height and width, bicubic."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    resized = torch.nn.functional.interpolate(image.float(), tuple(size), mode="bicubic", antialias=antialias)
    return resized.round().clamp(0, 255).to(image.dtype)


def normalize(image: torch.Tensor, mean, std, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(v, dtype=image.dtype).view(-1, 1, 1) for v in (mean, std))
    return (image - mean) / std
