"""The stages of the search: states of a model in which parts of it are off, and what is decided in each.

A model is a function of its weights, so parts of it can be switched off: with weights of zero, attention and MLP add
nothing.  What is left is decided first, then one block, then all:

1. blocks off: pooling, norms, epsilon, positions, tokens, classifier
2. the MLP of the first block: activation, layouts
3. the sum of attention, which is a bias alone, or a bias and the values, and the MLP: few hypotheses, before the many of
   the next stage
4. attention of the first block: heads, layouts of queries, keys and values, scale, rotary embeddings
5. the order of the entries of a patch
6. all blocks
7. attention pooling: heads, layouts

All pixels of a patch are equal until the fifth stage, so that the order of its entries has no effect.  That stage needs
attention, because a class token sees the patches through it alone.

Every stage must agree in float64 on random weights before the next one begins.  In this way the number of hypotheses is
the sum over the stages, and not the product; and a failure says where the models part.
"""

from dataclasses import dataclass, replace

import numpy as np

REMEDY = (
    "state what is known with --set FIELD=VALUE, or, if ViTConfig has what the class computes, write a table by hand, "
    "such as the one that `python -m parity formats --show torch` prints"
)
HEADS_REMEDY = "give --set num_heads=N"
GROUPED_REMEDY = "in a copy of the class and of the checkpoint, repeat keys and values for all queries that share them"
SOFTMAX_REMEDY = "ViTConfig has softmax alone: only a model with it can be converted"
PARALLEL_REMEDY = (
    "parallel blocks of ViTConfig have one norm: in a copy of the class and of the checkpoint, multiply the weights of "
    "both norms into the layers that read them, likewise the biases, and leave one norm"
)
_ATTENTION = ("blocks.attn.qkv.", "blocks.attn.proj.", "blocks.attn.q_bias", "blocks.attn.v_bias")
_MLP = ("blocks.mlp.fc",)
_NORM_BIASES = ("blocks.norm1.bias", "blocks.norm2.bias", "blocks.attn.norm.bias", "blocks.mlp.norm.bias")


@dataclass(frozen=True)
class Stage:
    """A state of the model in which some rows of the first block and of the other blocks are zero.

    what: the part that it adds to the stage before, for messages.
    flat: whether all pixels of a patch are equal.
    """

    what: str
    off_in_first: tuple[str, ...]
    off_in_others: tuple[str, ...]
    flat: bool = True

    def without(self, *names: str) -> "Stage":
        """Return the stage with further rows off in all blocks."""
        return replace(self, off_in_first=(*self.off_in_first, *names), off_in_others=(*self.off_in_others, *names))


POOL = ("attn_pool.q", "attn_pool.mlp.fc")  # without them, attention pooling is a linear layer of the mean
ALL = (*_ATTENTION, *_MLP, *_NORM_BIASES, *POOL)
STEM = Stage("the parts outside of the blocks (positions of the pooled tokens, norms, pooling, classifier)", ALL, ALL)
MLP = Stage("the MLP of the first block", (*_ATTENTION, "blocks.attn.norm.bias", *POOL), ALL)
SUM = Stage("the sum of attention and MLP", ("blocks.attn.proj.weight", *POOL), ALL)
ATTENTION = Stage("attention of the first block", POOL, ALL)
PATCHES = Stage("the projection of patches", POOL, ALL, flat=False)
EVERYTHING = Stage("the blocks together", POOL, POOL, flat=False)
POOLING = Stage("attention pooling", (), (), flat=False)
STAGES = (STEM, MLP, SUM, ATTENTION, PATCHES, EVERYTHING, POOLING)


@dataclass(frozen=True)
class Failure:
    """The nearest hypothesis that did not agree.

    Attributes:
        stage: the number of the stage at which it failed.
        difference: the relRMS of the outputs; infinity if every hypothesis contradicts itself.
        tried: the number of hypotheses tried at this stage.
        detail: further facts for the message.
        remedy: what to do.
    """

    stage: int
    difference: float
    tried: int
    detail: str = ""
    remedy: str = REMEDY

    @property
    def progress(self) -> tuple[int, bool, float]:
        """How far the hypothesis came: of two failures, the one with the larger value tells more."""
        return self.stage, bool(self.detail), -self.difference

    def __str__(self) -> str:
        agree = [each.what for each in STAGES[: self.stage] if each is not SUM]  # which needs a bias
        before = f"{', '.join(agree)} agree, but " if agree else ""
        what = STAGES[self.stage].what
        if self.difference == np.inf:
            return f"{before}{what} cannot be expressed: {self.detail}; {self.remedy}"
        differ = "differ" if what.endswith((")", "together")) else "differs"
        noun = "hypothesis" if self.tried == 1 else "hypotheses"
        detail = f": {self.detail}" if self.detail else ""
        measured = f"{self.difference:.1e} (relRMS in float64, {self.tried} {noun} tried)"
        return f"{before}{what} {differ} by {measured}{detail}; {self.remedy}"
