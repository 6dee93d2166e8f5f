"""The checkpoints of both trainers without a framework: who wrote them, whether they are intact, and what they hold."""
