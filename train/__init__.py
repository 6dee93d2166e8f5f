"""Training runs: recipes, data, and a loop that either twin's engine can turn."""
