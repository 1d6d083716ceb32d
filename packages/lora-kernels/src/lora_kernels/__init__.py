"""Punica operators over tensors: the LoRA part of a step whose tokens use different adapters."""
