"""The specification of Vision Transformers: config, named models, parameters and constant tables.  It needs only numpy."""

from vit_spec.config import ViTConfig
from vit_spec.cost import Memory, count, flops, memory
from vit_spec.errors import InputError, nearest
from vit_spec.initialisation import Law
from vit_spec.models import get, names
from vit_spec.params import Row, rows
from vit_spec.parts import Attention, Head, Mlp, Norms, Pixels, Positions, Regularisation, Resampling, Tokens
from vit_spec.tables import position_table, relative_tables, resampling_matrices, rotary_tables

__all__ = [
    "Attention",
    "Head",
    "InputError",
    "Law",
    "Memory",
    "Mlp",
    "Norms",
    "Pixels",
    "Positions",
    "Regularisation",
    "Resampling",
    "Row",
    "Tokens",
    "ViTConfig",
    "count",
    "flops",
    "get",
    "memory",
    "names",
    "nearest",
    "position_table",
    "relative_tables",
    "resampling_matrices",
    "rotary_tables",
    "rows",
]
