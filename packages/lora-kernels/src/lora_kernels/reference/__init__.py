"""The specification: every operator as plain loops over entries in float32."""

from __future__ import annotations
