"""PEFT's methods besides LoRA, each turned into an exact pair or an output gain.

One file a method: which tensors it stores, their shapes, and the formula that PEFT applies.
"""
