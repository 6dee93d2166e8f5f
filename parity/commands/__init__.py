"""The commands of `python -m parity`; `parity.__main__` parses their arguments."""
