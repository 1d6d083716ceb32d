"""Reads, checks, packs and converts LoRA adapters."""
