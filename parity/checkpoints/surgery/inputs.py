"""Operations on the input: change the image size, the patch size or the number of channels."""

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import numpy as np

from parity.checkpoints.conversion import parameter
from parity.checkpoints.layout import Array
from parity.checkpoints.surgery.edit import Changed, Float64, apply_changes, round_parameter, to_float64
from parity.checkpoints.weights import Checkpoint
from vit_spec import InputError, Pixels, Resampling, ViTConfig, nearest, resample, resampling_matrices

Size = int | tuple[int, int]  # (height, width), or the side of a square

PROJECTION, TABLE, FACTORS = "patch_embed.proj.weight", "pos_embed", ("pos_embed_y", "pos_embed_x")

# How libraries resample learned positions to another grid.
MODES: dict[str, Resampling] = {
    "timm": Resampling(antialias=True),  # loading, set_input_size, dynamic_img_size
    "dinov2-reg": Resampling(antialias=True),  # dinov2 with registers, and transformers
    "hf": Resampling(antialias=False),  # transformers: ViT, DeiT, CLIP, ViTMAE, and also Dinov2
    "mae": Resampling(antialias=False),  # util/pos_embed.py
    "deit": Resampling(antialias=False),  # main.py --finetune
    "dino": Resampling(antialias=False, offset=0.1),  # vision_transformer.py
    "dinov2": Resampling(antialias=False, offset=0.1),  # hub/backbones.py, without registers
    "torchvision": Resampling(antialias=False, align_corners=True),  # interpolate_embeddings
    "big_vision": Resampling(kernel="bilinear", antialias=False, align_corners=True),  # models/vit.py, scipy's zoom
    "google": Resampling(kernel="bilinear", antialias=False, align_corners=True),  # vit_jax/checkpoint.py, scipy's zoom
    "flexivit": Resampling(kernel="bilinear", antialias=False),  # and timm, of .npz files
    "naflex": Resampling(kernel="bilinear", antialias=True),  # SigLIP2 in transformers
}
_PATCH_RESAMPLING = MODES["timm"]  # the defaults of timm's resample_patch_embed


def resize(
    checkpoint: Checkpoint,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    resampling: str | None = None,
) -> Changed:
    """Change the image size, the patch size, or both.

    A size that is not given stays.  A new patch size alone therefore changes the grid, as in timm's `set_input_size`; to
    keep the grid, also give the image size that belongs to it.

    Learned positions are resampled once, from the old grid to the new one, by the given rule or else the config's.  Rows of
    prefix tokens do not change.  With the config's rule, the outputs for images of the new size do not change, because a
    twin resamples the positions in the same way at each call.  Fixed tables and rotary angles follow from the config.

    The patch projection is multiplied by the pseudo-inverse of the matrix that resizes a patch (FlexiViT, arXiv 2212.08013,
    section 3.4).  An enlarged projection of enlarged patches gives exactly the old embeddings.  The matrix has the
    kernel and antialiasing of the given rule.  Without one, it is that with which timm loads a model: bilinear without
    antialiasing if positions are resampled so ("flexivit"), otherwise bicubic with antialiasing.

    Args:
        checkpoint: the checkpoint.
        image_size: (height, width) in pixels, or the side of a square.
        patch_size: (height, width) in pixels, or the side of a square.
        resampling: the rule, one of `MODES`, which also goes into the config.

    Raises:
        InputError: no change is requested, the rule is unknown, the image size is not a multiple of the patch size, or the
            grid of a model with a table of relative positions would change.
    """
    before, mode = checkpoint.config, None if resampling is None else _find_mode(resampling)
    rule = mode or (before.resampling if before.resampling == MODES["flexivit"] else _PATCH_RESAMPLING)
    given = {"image_size": image_size, "patch_size": patch_size, "resampling": mode}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise InputError("no size to resize to: give image_size, patch_size or resampling")
    config, changes = before.replace(**given), {}
    done = [
        f"{name} {_format_value(old)} -> {_format_value(new)}" for name, old, new in _differences(before, config, given)
    ]
    if config.patch_size != before.patch_size:
        changes[PROJECTION] = _resample_patch(parameter(checkpoint, PROJECTION), config.patch_size, rule)
        done.append(f"{PROJECTION} by the pseudo-inverse of {_format_value(rule)}")
    if config.grid != before.grid and config.positions.relative == "table":
        raise InputError(
            f"the table of relative positions belongs to a grid of {_format_value(before.grid)} patches, and cannot be "
            f"resized: give an image size and a patch size that keep the grid"
        )
    if config.grid != before.grid and config.positions.kind == "learned":
        matrices = resampling_matrices(before.replace(resampling=config.resampling), config.grid)
        if before.positions.factorized:
            for name, matrix in zip(FACTORS, matrices, strict=True):
                table = parameter(checkpoint, name)
                changes[name] = round_parameter(name, matrix @ to_float64(table), table.dtype)
        else:
            changes[TABLE] = _resample_positions(parameter(checkpoint, TABLE), before, *matrices)
        done.append(
            f"{TABLE} {_format_value(before.grid)} -> {_format_value(config.grid)}, {_format_value(config.resampling)}"
        )
    after = apply_changes(checkpoint, config, changes, given)
    if after.preprocessing != checkpoint.preprocessing:
        done.append(f"images: {after.preprocessing}")
    return after, "; ".join(done) or f"{', '.join(given)}: as before"


def _find_mode(name: str) -> Resampling:
    if name not in MODES:
        hint = nearest(name, MODES) or f": give one of {', '.join(MODES)}"
        raise InputError(f"unknown resampling {name!r}{hint}")
    return MODES[name]


def _differences(before: Any, after: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes among `names` that differ: (name, old value, new value)."""
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield name, old, new


def _format_value(value: tuple[int, int] | Resampling) -> str:
    """Return "14x24" or "bicubic antialias"."""
    if isinstance(value, tuple):
        return f"{value[0]}x{value[1]}"
    flags = [name for name in ("antialias", "align_corners", "square") if getattr(value, name)]
    return " ".join([value.kernel, *flags, *([f"offset {value.offset}"] if value.offset else [])])


def _resample_patch(weight: Array, size: tuple[int, int], rule: Resampling) -> Array:
    """Return a patch projection for another patch size: (width, rgb, ph, pw) -> (width, rgb, *size).

    The matrix that resizes a patch is the Kronecker product of a matrix for rows and one for columns.  Its pseudo-inverse
    is the Kronecker product of their pseudo-inverses.
    """
    vertical, horizontal = (
        np.linalg.pinv(
            resample.matrix(*lengths, kernel=rule.kernel, antialias=rule.antialias, align_corners=False, offset=0)
        )
        for lengths in zip(weight.shape[2:], size, strict=True)
    )  # (ph, new ph), (pw, new pw)
    resized = np.einsum("dchw,hy,wx->dcyx", to_float64(weight), vertical, horizontal, optimize=True)
    return round_parameter(PROJECTION, resized, weight.dtype)


def _resample_positions(table: Array, before: ViTConfig, vertical: Float64, horizontal: Float64) -> Array:
    """Return the position table, (tokens, width), for the grid of the resampling matrices; rows of prefix tokens stay."""
    covered = before.num_covered
    patches = to_float64(table[covered:]).reshape(*before.grid, before.width)
    patches = np.einsum("yh,xw,hwd->yxd", vertical, horizontal, patches, optimize=True).reshape(-1, before.width)
    return np.concatenate([table[:covered], round_parameter(TABLE, patches, table.dtype)])


def adapt_channels(checkpoint: Checkpoint, in_channels: int) -> Changed:
    """Change the number of input channels, by the rule of timm's `adapt_input_conv`.

    For one channel, the channels of the projection are summed.  For other numbers they are repeated in turn and scaled by
    old / new.  A model with one channel therefore gives the output of the old model for the grey image copied to every
    channel.  If the new number is a multiple of the old one, an image with repeated channels gives the output of the old
    model for the original image.

    A mean and std per channel are also repeated in turn; for one channel they are averaged.  The normalization of a grey
    image is then that of its copies only if mean and std were the same for all channels: otherwise the rule is not exact.

    Args:
        checkpoint: the checkpoint.
        in_channels: the new number of channels.

    Raises:
        InputError: in_channels is not positive.
    """
    before = checkpoint.config
    config, old = before.replace(in_channels=in_channels, pixels=Pixels()), before.in_channels
    pixels = {name: _per_channel(getattr(before.pixels, name), in_channels) for name in ("mean", "std")}
    config = config.replace(pixels=pixels)
    if config == before:
        return checkpoint, f"in_channels {old}: as before"
    weight = parameter(checkpoint, PROJECTION)  # (width, rgb, ph, pw)
    values = to_float64(weight)
    if in_channels == 1:
        values, how = values.sum(axis=1, keepdims=True), "summed"
    else:
        values, how = values[:, np.arange(in_channels) % old] * (old / in_channels), f"repeated, times {old}/{in_channels}"
    done = [f"in_channels {old} -> {in_channels}", f"{PROJECTION} {how}"]
    done += [f"pixels.{name} {old} -> {new}" for name, old, new in _differences(before.pixels, config.pixels, pixels)]
    changes = {PROJECTION: round_parameter(PROJECTION, values, weight.dtype)}
    return apply_changes(checkpoint, config, changes, ()), "; ".join(done)


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return pixel statistics for another number of channels."""
    if len(values) == 1:
        return values
    return (fmean(values),) if channels == 1 else tuple(values[n % len(values)] for n in range(channels))
