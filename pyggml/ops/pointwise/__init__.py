"""The pointwise ops."""
