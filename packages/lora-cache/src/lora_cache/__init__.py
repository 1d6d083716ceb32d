"""Decides which adapters are resident: a host tier, a slot table, pins and leases."""
