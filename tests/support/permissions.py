"""Enforce file permissions for root, by dropping its capabilities to override them."""

import ctypes
import os

__all__ = ["obey_permissions"]

_VERSION_3 = 0x20080522  # linux/capability.h: two words for each set
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def obey_permissions() -> None:
    """Make this process, even as root, obey the modes of files until it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    sets[0].effective &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    if libc.capset(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
