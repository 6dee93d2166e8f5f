"""Inference: load a trained model from a run or a checkpoint and apply it to images."""
