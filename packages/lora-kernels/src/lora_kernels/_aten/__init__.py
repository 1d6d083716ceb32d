"""The operators as a few matrix products of torch, arranged for CPUs."""

from __future__ import annotations
