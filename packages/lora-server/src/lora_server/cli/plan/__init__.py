"""`lora-server plan`: what a service would take of the memory, and how many slots it needs."""

from __future__ import annotations

from lora_server.cli.plan.command import add_parser

__all__ = ["add_parser"]
