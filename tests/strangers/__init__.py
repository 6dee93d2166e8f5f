"""Vision Transformers as other people write them, which no code of the project knows."""
