"""The `lora-server` command. Nothing here loads torch before a command needs it."""
