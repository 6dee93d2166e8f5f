"""The parameter names of the article on DINO's backbone.

They are timm's names, so files are read as this format only if it is given.
"""

import vit_spec
from parity.checkpoints.formats import torch
from parity.checkpoints.formats.article import article_format

PARAMETERS = vit_spec.rows(vit_spec.get("article_dino", num_classes=1))  # with a head, because some files have one
LINES = [line for line in torch.TABLE.splitlines() if line.partition("|")[0].strip() in PARAMETERS and "glu" not in line]

FORMAT = article_format(
    "article_dino", "the article on DINO's backbone", {"": "\n".join(LINES)}, assumed_behaviour=torch.assumed_behaviour
)
