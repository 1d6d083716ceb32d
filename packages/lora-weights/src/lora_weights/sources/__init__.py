"""A source -> local files. Knows the names of an adapter's files, and nothing of its tensors."""

from __future__ import annotations
