"""What the commands do once their arguments are read; see `parity.__main__`."""
