"""Smoke baselines: what adapters answered, kept, and the rule by which later answers are judged.

Knows nothing of HTTP, of the command line or of engines: `lora-server smoke` and the gate of an
in-place update use the same files and the same rule.
"""
