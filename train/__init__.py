"""Training: recipes, data, the training loop, inference, and a trainer for each framework."""
