"""A source -> local files. Knows nothing of what is in them."""

from __future__ import annotations
