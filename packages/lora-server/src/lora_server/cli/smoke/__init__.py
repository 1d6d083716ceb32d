"""`lora-server smoke`: keeps each adapter's answers as a baseline and compares after an update."""

from __future__ import annotations

from lora_server.cli.smoke.command import add_parser

__all__ = ["add_parser"]
