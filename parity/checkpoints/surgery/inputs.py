"""Another resolution, another patch, another number of channels."""

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.surgery.edit import Changed, Float64, changed, float64
from parity.checkpoints.weights import Checkpoint, parameter, rounded
from vit_spec import InputError, Pixels, Resampling, ViTConfig, nearest, resample, resampling_matrices

Size = int | tuple[int, int]  # (height, width), or the side of a square

PROJECTION, TABLE = "patch_embed.proj.weight", "pos_embed"

# How others carry learned positions to another grid, by who does it.
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
PATCHES = MODES["timm"]  # resample_patch_embed, whatever the model


def resize(
    checkpoint: Checkpoint,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    resampling: str | None = None,
) -> Changed:
    """Carry a model to another resolution, another patch, or both.

    A size that is not given stays.  So another patch alone makes another grid, as in timm's `set_input_size`; who wants
    to keep the grid gives the image size that goes with it.

    Learned positions are resampled once, from grid to grid, by the config's rule or the one that is given; what prefix
    tokens have is not touched.  Images of the new size then give what they gave before, when a twin resampled at each
    call.  Fixed tables and rotary angles follow from the config.

    The patch projection goes through the pseudo-inverse of the matrix that resizes a patch (FlexiViT, arXiv 2212.08013,
    section 3.4): enlarged, it finds in enlarged patches exactly what it found before.  Patches are resized as timm's
    `resample_patch_embed` does, bicubic with antialias; a rule that is given sets kernel and antialias here too.

    Args:
        image_size, patch_size: in pixels.
        resampling: one of MODES, from now on the config's.

    Raises:
        InputError: no change asked for, an unknown rule, or an image that is no multiple of the patch.
    """
    before, rule = checkpoint.config, PATCHES if resampling is None else _mode(resampling)
    told = {"image_size": image_size, "patch_size": patch_size, "resampling": None if resampling is None else rule}
    told = {name: value for name, value in told.items() if value is not None}
    if not told:
        raise InputError("no size to resize to: give image_size, patch_size or resampling")
    config, changes = before.replace(**told), {}
    done = [f"{name} {_said(old)} -> {_said(new)}" for name, old, new in _differences(before, config, told)]
    if config.patch_size != before.patch_size:
        changes[PROJECTION] = _other_patch(parameter(checkpoint, PROJECTION), config.patch_size, rule)
        done.append(f"{PROJECTION} by the pseudo-inverse of {_said(rule)}")
    if config.grid != before.grid and config.positions.kind == "learned":
        matrices = resampling_matrices(before.replace(resampling=config.resampling), config.grid)
        changes[TABLE] = _other_grid(parameter(checkpoint, TABLE), before, *matrices)
        done.append(f"{TABLE} {_said(before.grid)} -> {_said(config.grid)}, {_said(config.resampling)}")
    after = changed(checkpoint, config, changes, told)
    if after.preprocessing != checkpoint.preprocessing:
        done.append(f"images: {after.preprocessing}")
    return after, "; ".join(done) or f"{', '.join(told)}: as before"


def _mode(name: str) -> Resampling:
    if name not in MODES:
        hint = nearest(name, MODES) or f": give one of {', '.join(MODES)}"
        raise InputError(f"unknown resampling {name!r}{hint}")
    return MODES[name]


def _differences(before: Any, after: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield name, old, new


def _said(value: tuple[int, int] | Resampling) -> str:
    """Return "14x24" or "bicubic antialias"."""
    if isinstance(value, tuple):
        return f"{value[0]}x{value[1]}"
    flags = [name for name in ("antialias", "align_corners") if getattr(value, name)]
    return " ".join([value.kernel, *flags, *([f"offset {value.offset}"] if value.offset else [])])


def _other_patch(weight: Array, size: tuple[int, int], rule: Resampling) -> Array:
    """(width, rgb, ph, pw) -> (width, rgb, *size).

    Resizing is a Kronecker product of rows and columns, and so its pseudo-inverse is one of theirs.
    """
    vertical, horizontal = (
        np.linalg.pinv(
            resample.matrix(*lengths, kernel=rule.kernel, antialias=rule.antialias, align_corners=False, offset=0)
        )
        for lengths in zip(weight.shape[2:], size, strict=True)
    )  # (ph, new ph), (pw, new pw)
    return rounded(np.einsum("dchw,hy,wx->dcyx", float64(weight), vertical, horizontal, optimize=True), weight.dtype)


def _other_grid(table: Array, before: ViTConfig, vertical: Float64, horizontal: Float64) -> Array:
    """(token, width) of one grid -> (token, width) of another."""
    covered = before.num_covered
    body = float64(table[covered:]).reshape(*before.grid, before.width)
    body = np.einsum("yh,xw,hwd->yxd", vertical, horizontal, body, optimize=True).reshape(-1, before.width)
    return np.concatenate([table[:covered], rounded(body, table.dtype)])


def adapt_channels(checkpoint: Checkpoint, in_channels: int) -> Changed:
    """Let a model see another number of channels, by the rule of timm's `adapt_input_conv`.

    For one channel, those of the projection are summed.  For others they are repeated in turn, and scaled by old / new.
    So a grey image gives what its copy in every channel gave, and an image over and over in a multiple of its channels
    what it gave alone.

    The pixels' mean and std follow where there is one a channel: they too are repeated in turn, and for one channel
    averaged.  A grey image is then normalised as its copies were only if they were alike: the rule is not exact.

    Raises:
        InputError: no positive number.
    """
    before = checkpoint.config
    config, old = before.replace(in_channels=in_channels, pixels=Pixels()), before.in_channels
    pixels = {name: _per_channel(getattr(before.pixels, name), in_channels) for name in ("mean", "std")}
    config = config.replace(pixels=pixels)
    if config == before:
        return checkpoint, f"in_channels {old}: as before"
    weight = parameter(checkpoint, PROJECTION)  # (width, rgb, ph, pw)
    values = float64(weight)
    if in_channels == 1:
        values, how = values.sum(axis=1, keepdims=True), "summed"
    else:
        values, how = values[:, np.arange(in_channels) % old] * (old / in_channels), f"repeated, times {old}/{in_channels}"
    done = [f"in_channels {old} -> {in_channels}", f"{PROJECTION} {how}"]
    done += [f"pixels.{name} {old} -> {new}" for name, old, new in _differences(before.pixels, config.pixels, pixels)]
    return changed(checkpoint, config, {PROJECTION: rounded(values, weight.dtype)}, ()), "; ".join(done)


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == 1:
        return values
    return (fmean(values),) if channels == 1 else tuple(values[n % len(values)] for n in range(channels))
