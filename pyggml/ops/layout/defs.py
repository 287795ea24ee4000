"""The layout ops."""
