"""Names, digests and paths of adapters, and their loading beside the running steps."""
