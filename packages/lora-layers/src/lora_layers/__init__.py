"""LoRA inside any torch.nn.Module, with many adapters in one forward pass."""
