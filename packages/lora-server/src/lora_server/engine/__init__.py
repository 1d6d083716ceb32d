"""The engine: schedule, lease, forward, sample, emit. Knows nothing of HTTP."""
