"""What the operators refuse, always before anything is written.

KernelError
    KernelArgumentError (ValueError)
    UnsupportedShapeError (ValueError)
    BackendUnavailableError (RuntimeError)
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error this package raises."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has a wrong value: an index out of range, a dtype or device that does not fit."""


class UnsupportedShapeError(KernelError, ValueError):
    """A tensor's shape does not match what the other arguments ask for."""


class BackendUnavailableError(KernelError, RuntimeError):
    """The chosen backend cannot run on the tensors' device."""
