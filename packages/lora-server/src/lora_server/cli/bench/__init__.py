"""`lora-server bench`: how fast an OpenAI-compatible server answers for a base and its adapters."""

from __future__ import annotations

from lora_server.cli.bench.command import add_parser, run

__all__ = ["add_parser", "run"]
