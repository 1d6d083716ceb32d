"""What the integration tests share: tiny models, PEFT adapters, the PEFT oracle, a server."""
