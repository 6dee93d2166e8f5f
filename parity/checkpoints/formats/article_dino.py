"""The names of the article on DINO's backbone: those of timm, from which a file alone cannot be told."""

import vit_spec
from parity.checkpoints.formats import torch
from parity.checkpoints.formats.article import article

PARAMETERS = vit_spec.rows(vit_spec.get("article_dino", num_classes=1))  # with a head, which some files have
LINES = [line for line in torch.TABLE.splitlines() if line.partition("|")[0].strip() in PARAMETERS and "glu" not in line]

FORMAT = article("article_dino", "the article on DINO's backbone", {"": "\n".join(LINES)})
