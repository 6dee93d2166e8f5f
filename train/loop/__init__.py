"""The training loop: the engine's protocol, run folder, metrics, progress and interruption."""
