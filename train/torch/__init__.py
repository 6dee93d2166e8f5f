"""The PyTorch side of the trainer."""
