"""Mistakes of a port that no config can say: the expected outputs come from a model that computes something else."""

from collections.abc import Callable, Iterator
from typing import Any

from parity.diagnosis import variants
from parity.diagnosis.trial import Hypothesis, Patch
from vit_spec import ViTConfig

CURE = "correct the code that made the expected outputs, then make them again"


def ports(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield what another implementation of a model may compute in its place."""
    for kind in (_blocks, _norms, _attention, _rotary, _tokens, _outputs, _roundings):
        yield from kind(c)


def _port(name: str, family: str, patch: Patch, tail: bool = False) -> Hypothesis:
    return Hypothesis(name, family, patch=patch, tail=tail, cure=CURE)


def _blocks(c: ViTConfig) -> Iterator[Hypothesis]:
    forwards = {
        "norms come after the sums (post-norm)": variants.post_norm,
        "attention and MLP read the same input": variants.parallel,
        "the MLP comes ahead of attention": variants.swapped_halves,
        "attention is added to the normalised tokens": variants.residual("norm", "x"),
        "the MLP is added to the normalised tokens": variants.residual("x", "norm"),
        "both halves are added to the normalised tokens": variants.residual("norm", "norm"),
        "attention is added to nothing": variants.residual("none", "x"),
        "the MLP is added to nothing": variants.residual("x", "none"),
        "the MLP is added to what entered the block": variants.residual("x", "start"),
        "attention reads tokens without a norm": variants.without_norm(first=True),
        "the MLP reads tokens without a norm": variants.without_norm(first=False),
    }
    for name, forward in forwards.items():
        family = "norms of a block" if "norm" in name and "added" not in name else "sums of a block"
        yield _port(name, family, variants.blocks(forward))


def _norms(c: ViTConfig) -> Iterator[Hypothesis]:
    forwards = {
        "the variance is divided by n - 1": variants.unbiased,
        "eps is added to the standard deviation": variants.eps_outside,
        "the variance is divided by n - 1, and eps added to its root": variants.unbiased_eps_outside,
        "norms do not subtract the mean (RMSNorm)": variants.no_mean,
        "the variance is E[x^2] - E[x]^2 in float32": variants.fast_variance,
    }
    for name, forward in forwards.items():
        yield _port(name, "LayerNorm formula", variants.norms(forward))
    where = [name for name, there in {"norm": c.norms.after_blocks, "fc_norm": c.norms.after_pool}.items() if there]
    for place in where:
        for eps in (1e-5, 1e-6, 1e-12):
            if eps != c.norms.eps:
                yield _port(f"eps of {place} alone is {eps:g}", "eps of one norm", variants.one_eps(place, eps), tail=True)


def _attention(c: ViTConfig) -> Iterator[Hypothesis]:
    weights: dict[str, Callable[..., Any]] = {
        "softmax runs over queries": lambda scores: scores.softmax(-2),
        "softmax runs over heads": lambda scores: scores.softmax(1),
        "softmax is left out": lambda scores: scores,
        "tokens do not see those after them": variants.causal,
    }
    for name, function in weights.items():
        yield _port(name, "softmax", variants.mixing(function))


def _rotary(c: ViTConfig) -> Iterator[Hypothesis]:
    if c.positions.rotary == "none":
        return
    yield _port("queries and keys turn the other way", "rotary angles", variants.tables(lambda cos, sin, _: (cos, -sin)))
    if c.positions.rotary == "axial":
        yield _port("rotary positions count from 0", "rotary angles", variants.tables(variants.shifted(-1)))
        yield _port("rotary positions count from 2", "rotary angles", variants.tables(variants.shifted(1)))


def _tokens(c: ViTConfig) -> Iterator[Hypothesis]:
    if c.positions.kind == "fixed":
        for steps, what in ((1, "late"), (-1, "early")):
            yield _port(f"positions are all one place {what}", "rows of positions", variants.rolled(steps))
    if c.head.pool == "attention" or c.head.pool == "none":
        return
    pools: dict[str, Callable[..., Any]] = {
        "all tokens": lambda x, n: x.mean(1),
        "all tokens but the first": lambda x, n: x[:, 1:].mean(1),
        "the largest of each channel": lambda x, n: x[:, n:].amax(1),
        "the last token": lambda x, n: x[:, -1],
        "the second token": lambda x, n: x[:, 1],
        "the sum of the patches": lambda x, n: x[:, n:].sum(1),
    }
    for what, function in pools.items():
        if c.head.pool != "token_mean" and not c.tokens.distillation:
            yield _port(f"pooling takes {what}", "pooling", variants.pool(function), tail=True)


def _outputs(c: ViTConfig) -> Iterator[Hypothesis]:
    changes: dict[str, Callable[..., Any]] = {
        "probabilities": lambda logits: logits.softmax(-1),
        "logarithms of probabilities": lambda logits: logits.log_softmax(-1),
        "sigmoids": lambda logits: logits.sigmoid(),
    }
    for what, change in changes.items() if c.num_classes else ():
        yield _port(f"the expected outputs are {what}", "kind of outputs", variants.outputs(change), tail=True)
    if c.tokens.distillation:
        both: dict[str, Callable[..., Any]] = {
            "the class token's head alone": lambda first, second: first,
            "the distillation token's head alone": lambda first, second: second,
            "the sum of both heads": lambda first, second: first + second,
        }
        for what, function in both.items():
            yield _port(f"outputs are {what}", "distillation head", variants.heads(function), tail=True)
    if c.head.hidden is not None:
        yield _port("the hidden layer of the head has no tanh", "hidden layer", variants.linear_hidden, tail=True)


def _roundings(c: ViTConfig) -> Iterator[Hypothesis]:
    for kind in ("bfloat16", "float16"):
        again = f"make the expected outputs in float32, or compare at {kind}'s bar"
        whats = {
            f"weights {kind}": f"weights are rounded to {kind}",
            kind: f"activations are {kind}",
            f"all {kind}": f"weights and activations are {kind}",
        }
        for rounding, what in whats.items():
            yield Hypothesis(what, "dtype rounding", rounding=rounding, cure=again)
    strict = "switch TF32 off (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), then compare again"
    units = {
        "the patch convolution alone": (False, False, True),
        "all products": (True, True, True),
        "all products but those of attention": (True, False, True),
        "all products but the patches'": (True, True, False),
        "linear layers alone": (True, False, False),
    }
    for what, where in units.items():
        yield Hypothesis(f"TF32 was used by {what}", "TF32", patch=variants.tf32(*where), cure=strict)
