"""The memory ledger, planned for a model without numbers and measured in a running server.

Both are put together from the same parts, so that they can be compared line by line.
"""
