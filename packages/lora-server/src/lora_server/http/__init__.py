"""The OpenAI-compatible HTTP interface: routes, schemas, keys, text and streams.

Knows the engine and the adapters through the Protocols of `lora_server.http.service` only.
"""
