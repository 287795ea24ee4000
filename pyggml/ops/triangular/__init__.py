"""The triangular ops."""
