"""PyTorch operators."""
