"""The attention ops."""
