"""Find how a model class of the user corresponds to `ViTConfig`, and prove it: `parity.derive_table`."""

from parity.comparison.own_model.derive import DerivedTable, derive_table

__all__ = ["DerivedTable", "derive_table"]
