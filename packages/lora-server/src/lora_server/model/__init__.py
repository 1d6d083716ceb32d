"""The base model: loading, attention over paged keys and values, families as data."""
