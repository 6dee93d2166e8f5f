"""Mistakes of a port that no config can say: the expected outputs come from a model that computes something else."""

from collections.abc import Callable, Iterator
from typing import Any

from parity.comparison.diagnosis import attention_variants as attention
from parity.comparison.diagnosis import patches, roundings, variants
from parity.comparison.diagnosis.low_precision import HALVES, low_precision
from parity.comparison.diagnosis.patches import Patch
from parity.comparison.diagnosis.trial import CURE, Hypothesis
from vit_spec import ViTConfig


def ports(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield what another implementation of a model may compute in its place."""
    for kind in (_blocks, _norms, _activations, _attention, _rotary, _tokens, _pooling, _outputs, low_precision):
        yield from kind(c)


def _port(name: str, family: str, patch: Patch, *, tail: bool = False, by_block: bool = False) -> Hypothesis:
    return Hypothesis(name, family, patch=patch, tail=tail, cure=CURE, by_block=by_block)


def _blocks(c: ViTConfig) -> Iterator[Hypothesis]:
    forwards = {
        "norms come after the sums (post-norm)": variants.post_norm,
        "norms come after attention and MLP, ahead of the sums (res-post-norm)": variants.res_post_norm,
        "attention and MLP read the same input": variants.parallel,
        "the MLP comes ahead of attention": variants.swapped_halves,
        "the MLP comes ahead of attention, each with its own norm": variants.swapped_halves_with_norms,
        "attention is added to the normalised tokens": variants.residual("norm", "x"),
        "the MLP is added to the normalised tokens": variants.residual("x", "norm"),
        "both halves are added to the normalised tokens": variants.residual("norm", "norm"),
        "attention is added to nothing": variants.residual("none", "x"),
        "the MLP is added to nothing": variants.residual("x", "none"),
        "both halves are added to nothing": variants.residual("none", "none"),
        "the MLP is added to what entered the block": variants.residual("x", "start"),
        "attention is added to twice the tokens": variants.residual("double", "x"),
        "the MLP is added to twice the tokens": variants.residual("x", "double"),
        "attention is left out": variants.skipped(first=True, second=False),
        "the MLP is left out": variants.skipped(first=False, second=True),
        "the block is left out": variants.skipped(first=True, second=True),
        "attention reads tokens without a norm": variants.without_norm(first=True),
        "the MLP reads tokens without a norm": variants.without_norm(first=False),
    }
    for name, forward in forwards.items():
        family = "norms of a block" if "norm" in name and "added" not in name else "sums of a block"
        yield _port(name, family, variants.blocks(forward), by_block=True)


def _norms(c: ViTConfig) -> Iterator[Hypothesis]:
    forwards = {
        "the variance is divided by n - 1": variants.unbiased,
        "eps is added to the standard deviation": variants.eps_outside,
        "the variance is divided by n - 1, and eps added to its root": variants.unbiased_eps_outside,
        "norms do not subtract the mean (RMSNorm)": variants.no_mean,
        "the variance is E[x^2] - E[x]^2 in float32": variants.fast_variance,
        "norms do not divide by the standard deviation": variants.no_variance,
    }
    whole = {
        "norms do not subtract the mean and have no bias (RMSNorm)": variants.rms_norm,
        "the weights of norms count from zero": variants.weight_plus_one,
        "the bias of norms is added ahead of the weight": variants.bias_scaled,
    }
    patches = {name: variants.norms(forward) for name, forward in forwards.items()}
    patches |= {name: variants.whole_norms(forward) for name, forward in whole.items()}
    for name, patch in patches.items():
        yield _port(name, "LayerNorm formula", patch, by_block=True)
    if c.attention.qk_norm:
        places = {"q_norm and k_norm are": ("q_norm", "k_norm"), "q_norm is": ("q_norm",), "k_norm is": ("k_norm",)}
        for what, ends in places.items():
            plain, bare = variants.norms(variants.no_mean, ends), variants.whole_norms(variants.rms_norm, ends)
            yield _port(f"{what} RMSNorm", "formula of q_norm and k_norm", plain, by_block=True)
            yield _port(f"{what} RMSNorm without bias", "formula of q_norm and k_norm", bare, by_block=True)
    where = [name for name, there in {"norm": c.norms.after_blocks, "fc_norm": c.norms.after_pool}.items() if there]
    for place in where:
        for name, forward in {**forwards, **whole}.items():
            make = variants.norms if name in forwards else variants.whole_norms
            told = f"{place} alone differs: {name.replace('norms do', 'it does').replace('norms', 'it')}"
            yield _port(told, "LayerNorm formula of one norm", _final(make, forward, place), tail=True)
        for eps in (1e-5, 1e-6, 1e-12):
            if eps != c.norms.eps:
                yield _port(f"eps of {place} alone is {eps:g}", "eps of one norm", variants.one_eps(place, eps), tail=True)
        yield _port(f"{place} is applied twice", "norm around the pooling", variants.twice(place), tail=True)
    if c.norms.after_blocks and c.head.pool in ("token", "mean"):
        name = "the final norm is applied to the pooled feature again"
        yield _port(name, "norm around the pooling", variants.normed_again, tail=True)


def _final(make: Callable[..., Patch], forward: Callable[..., Any], place: str) -> Patch:
    def patch(model: Any) -> None:
        make(forward)(_Named(model, place))

    return patch


class _Named:
    """One module in the place of a whole model, as far as a patch of norms looks at it."""

    def __init__(self, model: Any, name: str) -> None:
        self._module, self._name = patches.there(getattr(model, name), name), name

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield self._name, self._module


def _of(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a function of torch.nn.functional, which is imported when it is called."""

    def function(x: Any) -> Any:
        import torch.nn.functional as F

        return getattr(F, name)(x, *arguments, **options)

    return function


NAMED: dict[str, Callable[[Any], Any]] = {  # as `Mlp.activation` names them
    "gelu": _of("gelu"),
    "gelu_tanh": _of("gelu", approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": _of("relu"),
    "none": lambda x: x,
}
UNNAMED: dict[str, Callable[[Any], Any]] = {
    "silu": _of("silu"),
    "mish": _of("mish"),
    "sigmoid": _of("sigmoid"),
    "tanh": _of("tanh"),
    "elu": _of("elu"),
    "selu": _of("selu"),
    "leaky_relu": _of("leaky_relu"),
    "softplus": _of("softplus"),
    "hardswish": _of("hardswish"),
    "relu squared": lambda x: x.relu().square(),
}


def _activations(c: ViTConfig) -> Iterator[Hypothesis]:
    """Activations; of a gated MLP those of the gate."""
    gated = c.mlp.activation == "swiglu"
    what = "the gate's activation" if gated else "activation"
    for name, function in {**(NAMED if gated else {}), **UNNAMED}.items():
        if not (gated and name == "silu"):
            yield _port(f"{what} is {name}", "activation", variants.activation(function), by_block=True)


def one_block(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield what a field of the config says of all blocks, as patches that one block alone may have."""
    if c.mlp.activation != "swiglu":
        for name, function in NAMED.items():
            if name != c.mlp.activation:
                yield _port(f"activation is {name}", "activation", variants.activation(function), by_block=True)
    for eps in (1e-5, 1e-6, 1e-12, 1e-3):
        if eps != c.norms.eps:
            yield _port(f"LayerNorm eps is {eps:g}", "LayerNorm eps", _eps(eps), by_block=True)


def _eps(eps: float) -> Patch:
    def patch(model: Any) -> None:
        for where in ("norm1", "norm2"):
            variants.one_eps(where, eps)(model)

    return patch


def _attention(c: ViTConfig) -> Iterator[Hypothesis]:
    weights: dict[str, Callable[..., Any]] = {
        "softmax runs over queries": lambda scores: scores.softmax(-2),
        "softmax runs over heads": lambda scores: scores.softmax(1),
        "softmax runs over all pairs of tokens": lambda scores: scores.flatten(2).softmax(-1).view(scores.shape),
        "softmax is left out": lambda scores: scores,
        "softmax is a sigmoid": lambda scores: scores.sigmoid(),
        "softmax has one more zero in its sum": lambda scores: scores.exp() / (1 + scores.exp().sum(-1, keepdim=True)),
        "tokens do not see those after them": attention.causal,
        "attention weights are transposed": lambda scores: scores.softmax(-1).transpose(-1, -2),
    }
    for name, function in weights.items():
        yield _port(name, "softmax", attention.mixing(function), by_block=True)
    merged = patches.at("blocks.*.attn.heads", attention.joined_without_turning)
    yield _port("heads are merged without turning tokens and heads", "merged heads", merged)


def _rotary(c: ViTConfig) -> Iterator[Hypothesis]:
    if c.positions.rotary == "none":
        return
    axial, family = c.positions.rotary == "axial", "rotary angles"
    patches: dict[str, Patch] = {
        "queries and keys turn the other way": attention.changed(lambda c, angles: -angles),
        "rows and columns are swapped in rotary positions": attention.rotary(attention.turned_axes),
        "rotary positions run column by column": attention.placed(attention.column_by_column),
        "height and width of the grid are swapped in rotary positions": attention.placed(attention.swapped_grid),
        "rotary positions are counted from the first prefix token": attention.rotary(attention.counted_from_the_prefix),
        "keys are not turned": attention.turned_again(attention.turning("q")),
        "queries are not turned": attention.turned_again(attention.turning("k")),
        "values are turned too": attention.turned_again(attention.turning("qkv")),
        "other pairs are turned, neighbours or halves": attention.turned_again(attention.other_pairs),
    }
    if axial:
        patches["rotary positions count from 0"] = attention.placed(lambda y, x, grid: (y - 1, x - 1))
        patches["rotary positions count from 2"] = attention.placed(lambda y, x, grid: (y + 1, x + 1))
        patches["the fastest rotary pair turns by one radian a patch"] = attention.rotary(attention.roformer)
    else:
        patches["rotary positions are scaled by the larger side"] = attention.rotary(attention.scaled_by(max))
        patches["rotary positions are scaled by the smaller side"] = attention.rotary(attention.scaled_by(min))
        patches["rotary angles lack their factor of 2 pi"] = attention.changed(lambda c, angles: angles / 6.283185307179586)
        patches["rotary angles have half their size"] = attention.changed(lambda c, angles: angles / 2)
        patches["rotary positions are the corners of patches"] = attention.placed(lambda y, x, grid: (y - 0.5, x - 0.5))
    for name, patch in patches.items():
        yield _port(name, family, patch)
    if c.num_prefix:
        own = {"the first patch": (0, 0), "a patch ahead of the first": (-1, -1), "a patch left of the first": (0, -1)}
        for what, (y, x) in own.items():
            if not axial or (y, x) != (-1, -1):  # which does not turn there
                name = f"prefix tokens have a rotary phase of their own, that of {what}"
                yield _port(name, "rotary phase of prefix tokens", attention.prefix_at(y, x))


def _tokens(c: ViTConfig) -> Iterator[Hypothesis]:
    import torch

    if c.positions.kind == "fixed":
        for steps, what in ((1, "late"), (-1, "early")):
            yield _port(f"positions are all one place {what}", "rows of positions", variants.rolled(steps))
    if c.positions.kind != "none":
        yield _port("positions are added twice", "positions", patches.at("positions", lambda table: 2 * table))
        yield _port("positions are not added", "positions", patches.at("positions", lambda table: 0 * table))
    yield _port("patches are cut column by column", "order of patches", variants.patches_by_columns)
    cls, registers, prefix = int(c.tokens.class_token), c.tokens.registers, c.num_prefix
    if prefix and c.head.pool != "none":
        last = variants.embedded(lambda x, n: torch.cat([x[:, n:], x[:, :n]], 1))
        yield _port("prefix tokens come after the patches", "order of tokens", last)
    if cls and registers:
        first = variants.embedded(lambda x, n: torch.cat([x[:, n - registers : n], x[:, : n - registers], x[:, n:]], 1))
        name = "registers come ahead of the class token, and the first token is taken for it"
        yield _port(name, "order of tokens", first)
        reverse = variants.embedded(
            lambda x, n: torch.cat([x[:, : n - registers], x[:, n - registers : n].flip(1), x[:, n:]], 1)
        )
        yield _port("registers are in reverse", "order of tokens", reverse)


def _pooling(c: ViTConfig) -> Iterator[Hypothesis]:
    if c.head.pool in ("attention", "none", "token_mean") or c.tokens.distillation:
        return
    pools: dict[str, Callable[..., Any]] = {
        "all tokens": lambda x, n: x.mean(1),
        "all tokens but the first": lambda x, n: x[:, 1:].mean(1),
        "the largest of each channel": lambda x, n: x[:, n:].amax(1),
        "the largest of each channel, prefix tokens included": lambda x, n: x.amax(1),
        "the mean of mean and largest (avgmax)": lambda x, n: (x[:, n:].mean(1) + x[:, n:].amax(1)) / 2,
        "the mean of mean and largest, prefix tokens included": lambda x, n: (x.mean(1) + x.amax(1)) / 2,
        "the last token": lambda x, n: x[:, -1],
        "the second token": lambda x, n: x[:, 1],
        "the first patch": lambda x, n: x[:, n],
        "the sum of the patches": lambda x, n: x[:, n:].sum(1),
        "the prefix tokens alone": lambda x, n: x[:, :n].mean(1),
        "the mean of the class token and the patches' mean (pooled twice)": lambda x, n: (x[:, 0] + x[:, n:].mean(1)) / 2,
        "the sum of the class token and the patches' mean": lambda x, n: x[:, 0] + x[:, n:].mean(1),
    }
    if c.head.pool == "mean":
        pools["the patches' mean, divided by their number again (pooled twice)"] = lambda x, n: (
            x[:, n:].mean(1) / x[:, n:].shape[1]
        )
        pools["the patches' sum divided by the number of all tokens"] = lambda x, n: x[:, n:].sum(1) / x.shape[1]
    alone = {"the mean of the class", "the sum of the class", "the prefix tokens"}
    for what, function in pools.items():
        if c.num_prefix or not what.startswith(tuple(alone)):
            yield _port(f"pooling takes {what}", "pooling", variants.pool(function), tail=True)


def _outputs(c: ViTConfig) -> Iterator[Hypothesis]:
    changes: dict[str, Callable[..., Any]] = {
        "probabilities": lambda logits: logits.softmax(-1),
        "logarithms of probabilities": lambda logits: logits.log_softmax(-1),
        "sigmoids": lambda logits: logits.sigmoid(),
    }
    for kind in HALVES:
        low = roundings.rounded(kind)
        changes[f"probabilities of logits rounded to {kind}"] = lambda logits, low=low: low(logits).softmax(-1)
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
        plain = variants.hidden(lambda x: x)
        yield _port("the hidden layer of the head has no tanh", "hidden layer", plain, tail=True)
        for name in ("relu", "sigmoid"):
            other = variants.hidden(_of(name))
            yield _port(f"the hidden layer of the head has {name} for tanh", "hidden layer", other, tail=True)
