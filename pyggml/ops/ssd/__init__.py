"""The chunked state-space product as one op."""
