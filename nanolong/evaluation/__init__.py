"""Measuring a model: the loss of its tokens."""
