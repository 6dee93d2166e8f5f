"""Hypotheses about the implementation: the reference model computes something that no field of the config describes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parity.comparison.diagnosis import attention_variants as attention
from parity.comparison.diagnosis import patches, roundings, variants
from parity.comparison.diagnosis.config_hypotheses import NORM_ORDERS
from parity.comparison.diagnosis.hypothesis import FIX_REFERENCE_CODE, Hypothesis
from parity.comparison.diagnosis.patches import Patch
from parity.comparison.diagnosis.precision_hypotheses import HALF_DTYPES, precision_hypotheses
from vit_spec import ViTConfig


def implementation_hypotheses(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield hypotheses about formulas that the implementation of the reference model may compute differently."""
    for kind in (_blocks, _norms, _activations, _attention, _rotary, _tokens, _pooling, _outputs, precision_hypotheses):
        yield from kind(c)


def _hypothesis(
    name: str,
    family: str,
    patch: Patch,
    *,
    blocks_unchanged: bool = False,
    per_block: bool = False,
    rare: bool = False,
) -> Hypothesis:
    return Hypothesis(
        name,
        family,
        patch=patch,
        blocks_unchanged=blocks_unchanged,
        manual_fix=FIX_REFERENCE_CODE,
        per_block=per_block,
        rare=rare,
    )


def _blocks(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield blocks with other norms or residual additions, in another order, or with a part left out."""
    if c.norms.order != "pre":
        return
    forwards = {
        "attention and MLP read the same input": variants.parallel,
        "the MLP comes before attention": variants.swapped_halves,
        "attention is added to the normalized tokens": variants.residual("norm", "x"),
        "the MLP is added to the normalized tokens": variants.residual("x", "norm"),
        "both halves are added to the normalized tokens": variants.residual("norm", "norm"),
        "attention has no residual connection": variants.residual("none", "x"),
        "the MLP has no residual connection": variants.residual("x", "none"),
        "the MLP is added to the input of the block": variants.residual("x", "start"),
        "attention reads tokens without a norm": variants.without_norm(first=True),
        "the MLP reads tokens without a norm": variants.without_norm(first=False),
    }
    rare_forwards = {
        "the MLP comes before attention, each with its own norm": variants.swapped_halves_with_norms,
        "neither half has a residual connection": variants.residual("none", "none"),
        "attention is added to twice the tokens": variants.residual("double", "x"),
        "the MLP is added to twice the tokens": variants.residual("x", "double"),
        "attention is left out": variants.skip_halves(first=True, second=False),
        "the MLP is left out": variants.skip_halves(first=False, second=True),
        "the block is left out": variants.skip_halves(first=True, second=True),
    }
    for name, forward in {**forwards, **rare_forwards}.items():
        family = "norms of a block" if "norm" in name and "added" not in name else "sums of a block"
        yield _hypothesis(name, family, variants.replace_blocks(forward), per_block=True, rare=name in rare_forwards)


_NormFormula = tuple[Callable[..., Patch], Callable[..., Any]]  # a function that makes a patch from the next, a formula


def _norms(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other formulas of all norms, of the norms of queries and keys, and of single norms."""
    if c.norms.kind != "layer":
        return
    forwards = {
        "the variance is divided by n - 1": variants.unbiased_variance,
        "eps is added to the standard deviation": variants.std_plus_eps,
        "the variance is divided by n - 1, and eps is added to the standard deviation": variants.unbiased_std_plus_eps,
        "norms do not subtract the mean (RMSNorm)": variants.no_mean_subtraction,
        "the variance is E[x^2] - E[x]^2 in float32": variants.fast_variance,
        "norms do not divide by the standard deviation": variants.no_std_division,
    }
    full_forwards = {
        "norms do not subtract the mean and have no bias (RMSNorm)": variants.rms_norm,
        "the weights of norms are zero-centred: 1 is added to them": variants.weight_plus_one,
        "the bias of norms is added before the weight is applied": variants.bias_before_weight,
    }
    rare = (variants.no_std_division, variants.weight_plus_one, variants.bias_before_weight)
    formulas: dict[str, _NormFormula] = {
        **{name: (variants.replace_norm_statistics, forward) for name, forward in forwards.items()},
        **{name: (variants.replace_norm_forward, forward) for name, forward in full_forwards.items()},
    }
    for name, (make_patch, forward) in formulas.items():
        yield _hypothesis(name, "LayerNorm formula", make_patch(forward), per_block=True, rare=forward in rare)
    yield from _qk_norms(c)
    for norm in ("norm1", "norm2") if c.norms.has_second else ("norm1",):
        for eps in _other_eps(c):
            yield _eps_of(norm, eps, per_block=True)
    yield from _final_norms(c, formulas)


def _qk_norms(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other formulas of the norms of queries and keys."""
    if c.attention.qk_norm:
        qk_norms = {"q_norm and k_norm are": ("q_norm", "k_norm"), "q_norm is": ("q_norm",), "k_norm is": ("k_norm",)}
        for subject, suffixes in qk_norms.items():
            no_mean, rms = (
                variants.replace_norm_statistics(variants.no_mean_subtraction, suffixes),
                variants.replace_norm_forward(variants.rms_norm, suffixes),
            )
            for what, patch in {"RMSNorm": no_mean, "RMSNorm without bias": rms}.items():
                family = "formula of q_norm and k_norm"
                yield _hypothesis(f"{subject} {what}", family, patch, per_block=True, rare=True)


def _final_norms(c: ViTConfig, formulas: Mapping[str, _NormFormula]) -> Iterator[Hypothesis]:
    """Yield other formulas of the norms after the blocks, each alone, and other uses of them."""
    is_present = {"norm": c.norms.after_blocks, "fc_norm": c.norms.after_pool}
    for norm in (name for name in is_present if is_present[name]):
        for name, (make_patch, forward) in formulas.items():
            cause_name = f"{norm} alone differs: {name.replace('norms do', 'it does').replace('norms', 'it')}"
            yield _hypothesis(
                cause_name,
                "LayerNorm formula of one norm",
                _patch_one_norm(make_patch, forward, norm),
                blocks_unchanged=True,
                rare=True,
            )
        for eps in _other_eps(c):
            yield _eps_of(norm, eps, blocks_unchanged=True)
        name, patch = f"{norm} is applied twice", variants.apply_twice(norm)
        yield _hypothesis(name, "norm around the pooling", patch, blocks_unchanged=True, rare=True)
    if c.norms.after_blocks and c.head.pool in ("token", "mean"):
        name = "the final norm is applied to the pooled feature again"
        yield _hypothesis(name, "norm around the pooling", variants.norm_pooled_feature, blocks_unchanged=True, rare=True)


def _eps_of(norm: str, eps: float, **options: bool) -> Hypothesis:
    """Return the hypothesis that a norm, or the norm of this name in every block, has another eps than the other norms."""
    return _hypothesis(f"eps of {norm} alone is {eps:g}", "eps of one norm", variants.set_norm_eps(norm, eps), **options)


def _other_eps(c: ViTConfig) -> Iterator[float]:
    """Yield usual values of eps that the config does not have."""
    return (eps for eps in (1e-5, 1e-6, 1e-12, 1e-3) if eps != c.norms.eps)


def _patch_one_norm(make_patch: Callable[..., Patch], forward: Callable[..., Any], norm: str) -> Patch:
    """Return the patch make_patch(forward), confined to the norm with this name."""

    def patch(model: Any) -> None:
        make_patch(forward)(_SingleModule(model, norm))

    return patch


class _SingleModule:
    """One module of a model, with the part of the model's interface that patches of norms use."""

    def __init__(self, model: Any, name: str) -> None:
        self._module, self._name = patches.require(getattr(model, name), name), name

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield self._name, self._module


def _functional(name: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a function that calls torch.nn.functional.<name>; torch is imported at the first call."""

    def function(x: Any) -> Any:
        import torch.nn.functional as F

        return getattr(F, name)(x, *arguments, **options)

    return function


CONFIG_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {  # by their names in `Mlp.activation`
    "gelu": _functional("gelu"),
    "gelu_tanh": _functional("gelu", approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": _functional("relu"),
    "silu": _functional("silu"),
    "mish": _functional("mish"),
    "none": lambda x: x,
}
OTHER_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": _functional("sigmoid"),
    "tanh": _functional("tanh"),
    "elu": _functional("elu"),
    "selu": _functional("selu"),
    "leaky_relu": _functional("leaky_relu"),
    "softplus": _functional("softplus"),
    "hardswish": _functional("hardswish"),
    "relu squared": lambda x: x.relu().square(),
}


def _activations(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other activations of the MLP; for a gated MLP, other activations of the gate."""
    gated = c.mlp.is_gated
    subject = "the gate's activation" if gated else "activation"
    for name, function in {**(CONFIG_ACTIVATIONS if gated else {}), **OTHER_ACTIVATIONS}.items():
        if not (gated and name == "silu"):
            patch = variants.replace_activation(function)
            yield _hypothesis(f"{subject} is {name}", "activation", patch, per_block=True, rare=name in OTHER_ACTIVATIONS)


def block_field_hypotheses(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other values of fields of the config that apply to all blocks, as patches that can be confined to one block."""
    if not c.mlp.is_gated:
        for name, function in CONFIG_ACTIVATIONS.items():
            if name != c.mlp.activation:
                yield _hypothesis(
                    f"activation is {name}", "activation", variants.replace_activation(function), per_block=True
                )
    for eps in _other_eps(c):
        yield _hypothesis(f"LayerNorm eps is {eps:g}", "LayerNorm eps", _block_eps(eps), per_block=True)
    for order, forward in {"post": variants.post_norm, "res_post": variants.res_post_norm}.items():
        if order != c.norms.order and c.norms.order != "parallel":
            patch = variants.replace_blocks(forward)
            yield _hypothesis(NORM_ORDERS[order], "norms of a block", patch, per_block=True)


def _block_eps(eps: float) -> Patch:
    def patch(model: Any) -> None:
        for norm in ("norm1", "norm2"):
            variants.set_norm_eps(norm, eps)(model)

    return patch


def _attention(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other softmaxes of the attention scores, and heads that are merged in the wrong order."""
    softmaxes: dict[str, Callable[..., Any]] = {
        "softmax runs over queries": lambda scores: scores.softmax(-2),
        "softmax runs over heads": lambda scores: scores.softmax(1),
        "softmax is left out": lambda scores: scores,
        "no token attends to later tokens (causal mask)": attention.causal_softmax,
    }
    rare_softmaxes: dict[str, Callable[..., Any]] = {
        "softmax runs over all pairs of tokens": lambda scores: scores.flatten(2).softmax(-1).view(scores.shape),
        "softmax is a sigmoid": lambda scores: scores.sigmoid(),
        "softmax has one more term exp(0) in its denominator": lambda scores: (
            scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
        ),
        "attention weights are transposed": lambda scores: scores.softmax(-1).transpose(-1, -2),
    }
    for name, function in {**softmaxes, **rare_softmaxes}.items():
        patch = attention.replace_softmax(function)
        yield _hypothesis(name, "softmax", patch, per_block=True, rare=name in rare_softmaxes)
    merge = patches.patch_intermediate("blocks.*.attn.heads", attention.merge_heads_untransposed)
    yield _hypothesis("heads are merged without transposing tokens and heads", "merged heads", merge, rare=True)


def _rotary(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other angles and pairs of rotary positions."""
    if c.positions.rotary in ("none", "mixed"):  # learned frequencies are parameters
        return
    is_axial, family = c.positions.rotary == "axial", "rotary angles"
    patch_by_name: dict[str, Patch] = {
        "queries and keys are rotated in the opposite direction": attention.change_rotary_angles(lambda c, angles: -angles),
        "rows and columns are swapped in rotary positions": attention.replace_rotary_angles(attention.swapped_axes_angles),
        "rotary positions run column by column": attention.replace_coordinates(attention.column_major),
        "height and width of the grid are swapped in rotary positions": attention.replace_coordinates(
            attention.transposed_grid
        ),
        "rotary positions are counted from the first prefix token": attention.replace_rotary_angles(
            attention.angles_from_first_token
        ),
        "keys are not rotated": attention.replace_rotation(attention.rotate_only("q")),
        "queries are not rotated": attention.replace_rotation(attention.rotate_only("k")),
        "values are rotated too": attention.replace_rotation(attention.rotate_only("qkv")),
        "rotary pairs are neighbours instead of halves, or halves instead of neighbours": attention.replace_rotation(
            attention.rotate_other_pairs
        ),
    }
    if is_axial:
        patch_by_name["rotary positions count from 0"] = attention.replace_coordinates(lambda y, x, grid: (y - 1, x - 1))
        patch_by_name["rotary positions count from 2"] = attention.replace_coordinates(lambda y, x, grid: (y + 1, x + 1))
        patch_by_name["the fastest rotary pair rotates by one radian per patch"] = attention.replace_rotary_angles(
            attention.roformer_angles
        )
    elif c.positions.rotary == "dinov3":
        patch_by_name["rotary positions are scaled by the larger side"] = attention.replace_rotary_angles(
            attention.angles_scaled_by(max)
        )
        patch_by_name["rotary positions are scaled by the smaller side"] = attention.replace_rotary_angles(
            attention.angles_scaled_by(min)
        )
        patch_by_name["rotary angles lack their factor of 2 pi"] = attention.change_rotary_angles(
            lambda c, angles: angles / 6.283185307179586
        )
        patch_by_name["rotary angles are half as large"] = attention.change_rotary_angles(lambda c, angles: angles / 2)
        patch_by_name["rotary positions are the corners of patches"] = attention.replace_coordinates(
            lambda y, x, grid: (y - 0.5, x - 0.5)
        )
    for name, patch in patch_by_name.items():
        yield _hypothesis(name, family, patch)
    if c.num_prefix:
        phases = {
            "the first patch": (0, 0),
            "a patch diagonally before the first": (-1, -1),
            "a patch left of the first": (0, -1),
        }
        for position, (y, x) in phases.items():
            if not is_axial or (y, x) != (-1, -1):  # there the axial angle is 0, as it is for prefix tokens already
                name = f"prefix tokens are rotated like {position}"
                yield _hypothesis(name, "rotary phase of prefix tokens", attention.prefix_rotated_as(y, x), rare=True)


def _tokens(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the tokens, and mistakes in the positions that are added to them."""
    import torch

    if c.positions.kind == "fixed":
        for steps, direction in ((1, "late"), (-1, "early")):
            yield _hypothesis(
                f"positions are all one place {direction}", "rows of positions", variants.roll_positions(steps)
            )
    if c.positions.kind != "none":
        twice = patches.patch_intermediate("positions", lambda table: 2 * table)
        yield _hypothesis("positions are added twice", "positions", twice, rare=True)
        zero = patches.patch_intermediate("positions", lambda table: 0 * table)
        yield _hypothesis("positions are not added", "positions", zero, rare=True)
    yield _hypothesis("patches are cut column by column", "order of patches", variants.column_major_patches, rare=True)
    cls, registers, prefix = int(c.tokens.class_token), c.tokens.registers, c.num_prefix
    if prefix and c.head.pool != "none":
        last = variants.change_tokens(lambda x, n: torch.cat([x[:, n:], x[:, :n]], 1))
        yield _hypothesis("prefix tokens come after the patches", "order of tokens", last, rare=True)
    if cls and registers:
        first = variants.change_tokens(
            lambda x, n: torch.cat([x[:, n - registers : n], x[:, : n - registers], x[:, n:]], 1)
        )
        name = "registers come before the class token, and the first token is used as the class token"
        yield _hypothesis(name, "order of tokens", first, rare=True)
        reverse = variants.change_tokens(
            lambda x, n: torch.cat([x[:, : n - registers], x[:, n - registers : n].flip(1), x[:, n:]], 1)
        )
        yield _hypothesis("registers are in reverse", "order of tokens", reverse, rare=True)


def _pooling(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other poolings of the tokens."""
    if c.head.pool in ("attention", "none", "token_mean") or c.tokens.distillation:
        return
    pools: dict[str, Callable[..., Any]] = {
        "all tokens but the first": lambda x, n: x[:, 1:].mean(1),
        "the maximum of each channel": lambda x, n: x[:, n:].amax(1),
        "the last token": lambda x, n: x[:, -1],
        "the second token": lambda x, n: x[:, 1],
        "the sum of the patches": lambda x, n: x[:, n:].sum(1),
    }
    rare_pools: dict[str, Callable[..., Any]] = {
        "the maximum of each channel, prefix tokens included": lambda x, n: x.amax(1),
        "the mean of mean and maximum (avgmax)": lambda x, n: (x[:, n:].mean(1) + x[:, n:].amax(1)) / 2,
        "the mean of mean and maximum, prefix tokens included": lambda x, n: (x.mean(1) + x.amax(1)) / 2,
        "the first patch": lambda x, n: x[:, n],
    }
    if c.num_prefix:
        rare_pools |= {
            "the prefix tokens alone": lambda x, n: x[:, :n].mean(1),
            "the mean of the class token and the patches' mean (pooled twice)": lambda x, n: (
                (x[:, 0] + x[:, n:].mean(1)) / 2
            ),
            "the sum of the class token and the patches' mean": lambda x, n: x[:, 0] + x[:, n:].mean(1),
        }
    if c.head.pool == "mean":
        rare_pools |= {
            "the patches' mean, divided by their number again (pooled twice)": lambda x, n: (
                x[:, n:].mean(1) / x[:, n:].shape[1]
            ),
            "the patches' sum divided by the number of all tokens": lambda x, n: x[:, n:].sum(1) / x.shape[1],
        }
    for name, function in {**pools, **rare_pools}.items():
        patch = variants.replace_pooling(function)
        yield _hypothesis(f"pooling takes {name}", "pooling", patch, blocks_unchanged=True, rare=name in rare_pools)


def _outputs(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield outputs that are not logits, other combinations of two heads, and other hidden layers of the head."""
    changes: dict[str, Callable[..., Any]] = {
        "probabilities": lambda logits: logits.softmax(-1),
        "logarithms of probabilities": lambda logits: logits.log_softmax(-1),
        "sigmoids": lambda logits: logits.sigmoid(),
    }
    rare_changes: dict[str, Callable[..., Any]] = {}
    for dtype in HALF_DTYPES:
        cast = roundings.round_to(dtype)
        rare_changes[f"probabilities of logits rounded to {dtype}"] = lambda logits, cast=cast: cast(logits).softmax(-1)
    for name, change in {**changes, **rare_changes}.items() if c.num_classes else ():
        yield _hypothesis(
            f"the expected outputs are {name}",
            "kind of outputs",
            variants.change_outputs(change),
            blocks_unchanged=True,
            rare=name in rare_changes,
        )
    if c.tokens.distillation:
        combinations: dict[str, Callable[..., Any]] = {
            "the class token's head alone": lambda first, second: first,
            "the distillation token's head alone": lambda first, second: second,
            "the sum of both heads": lambda first, second: first + second,
        }
        for name, function in combinations.items():
            yield _hypothesis(
                f"outputs are {name}", "distillation head", variants.combine_heads(function), blocks_unchanged=True
            )
    if c.head.hidden is not None:
        no_tanh = variants.replace_hidden_activation(lambda x: x)
        yield _hypothesis("the hidden layer of the head has no tanh", "hidden layer", no_tanh, blocks_unchanged=True)
        for name in ("relu", "sigmoid"):
            patch = variants.replace_hidden_activation(_functional(name))
            what = f"the hidden layer of the head has {name} instead of tanh"
            yield _hypothesis(what, "hidden layer", patch, blocks_unchanged=True, rare=True)
