"""Data of a run: sources, splits, augmentation and batches."""
