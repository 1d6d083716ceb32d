"""Serves one base model and many LoRA adapters over an OpenAI-compatible API."""
