"""The JAX trainer."""
