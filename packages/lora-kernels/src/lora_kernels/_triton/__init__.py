"""Kernels in Triton: imported by the operators when the backend is asked for, never before."""

from __future__ import annotations
