"""The reduce ops."""
