"""Checkpoints: formats, containers, recognition, reading, writing and surgery."""
