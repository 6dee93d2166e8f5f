"""Every architecture of a library, one after the other: is what it saved read as its own function, or refused?"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.peers import float64, seeded  # noqa: I001  # first: it mends torchvision, which timm imports
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import parity
import vit_torch
from tests.peers.proof import relrms
from vit_spec import InputError

MODULES = ("vision_transformer", "eva", "deit", "beit", "naflexvit")
NEIGHBOURS = ("vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam")
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Outcome:
    name: str
    kind: str
    verdict: str  # right, refused, assumed, WRONG
    format: str = ""
    distance: float = 0.0
    told: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.name} | {self.kind} | {self.format} | {self.distance:.2g} | {self.told}"


def perturb(model: nn.Module, name: str) -> None:
    """Fill every parameter with noise of float64, so that no zero, no one and no symmetry hides a difference."""
    rng = seeded(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            noise = rng.standard_normal(shape)
            if parameter.ndim == 1 and key.endswith("weight") or "gamma" in key or "lambda1" in key:
                noise = 1 + 0.25 * noise
            elif key.endswith(("weight", "proj")) and len(shape) > 1:
                noise *= 1.2 * float(np.prod(shape[1:])) ** -0.5
            else:
                noise *= 0.5
            parameter.copy_(torch.from_numpy(noise))


def build(name: str, **options: Any) -> nn.Module:
    with float64():
        model = timm.create_model(name, **{"depth": 1, **options}).eval()
        perturb(model, name)
    return model


def images_for(model: nn.Module, size: tuple[int, int]) -> np.ndarray:
    return seeded(f"{size}").standard_normal((1, model.in_chans, *size))


def read(name: str, kind: str, path: Path, images: np.ndarray, expected: np.ndarray, given: dict[str, Any] | None = None) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = parity.load(path, given=given)
    except InputError as error:
        text = str(error).replace(str(path), "FILE")
        return Outcome(name, kind, "refused" if "\n" not in text else "WRONG", told=text[:160])
    except Exception as error:  # the finding itself
        return Outcome(name, kind, "WRONG", told=f"TRACEBACK {type(error).__name__}: {error}")
    assumed = ", ".join(f"{a.field}={a.value}" for a in checkpoint.assumed if not a.field.startswith(("pixels", "resampling", "norms.layer")))
    try:
        model = vit_torch.ViT(checkpoint.config).double().eval()
        model.load_state_dict({k: v.double() for k, v in parity.to_torch(checkpoint).items()})
        with torch.no_grad():
            found = model(torch.from_numpy(images)).numpy()
    except InputError as error:
        return Outcome(name, kind, "WRONG", checkpoint.format, told=f"forward refuses: {error} [{assumed}]")
    except Exception as error:
        return Outcome(name, kind, "WRONG", checkpoint.format, told=f"TRACEBACK {type(error).__name__}: {error}")
    if found.shape != expected.shape:
        return Outcome(name, kind, "WRONG", checkpoint.format, float("inf"), f"shape {found.shape} for {expected.shape} [{assumed}]")
    distance = relrms(found, expected)
    verdict = "right" if distance <= TOLERANCE else "assumed" if "bare" in kind and assumed else "WRONG"
    return Outcome(name, kind, verdict, checkpoint.format, distance, f"[{assumed}]")


def timm_size(model: nn.Module) -> tuple[int, int]:
    cfg = model.pretrained_cfg
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(size or cfg["input_size"][1:])


def specimens(only: str = "") -> Iterator[str]:
    from timm.models import list_models

    for module in (*MODULES, *NEIGHBOURS):
        for name in list_models(module=module):
            if only in name and not re.search("5b_|1b_|7b_|enormous|3b_|huge|giant|gigantic", name):
                yield name


def outcomes(name: str, folder: Path, **options: Any) -> Iterator[Outcome]:
    try:
        model = build(name, **options)
    except Exception as error:
        yield Outcome(name, "build", "skipped", told=f"{type(error).__name__}: {error}")
        return
    label = name + (f" {options}" if options else "")
    images = images_for(model, timm_size(model))
    try:
        with float64():
            expected = model(torch.from_numpy(images)).numpy()
    except Exception as error:
        yield Outcome(label, "forward", "skipped", told=f"{type(error).__name__}: {error}"[:120])
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    saved = folder / "saved"
    try:
        save_for_hf(model, saved, safe_serialization=True)
        yield read(label, "folder", saved, images, expected)
    except Exception as error:
        yield Outcome(label, "folder", "skipped", told=f"{type(error).__name__}: {error}"[:200])
    bare = folder / "bare.pth"
    torch.save(model.state_dict(), bare)
    yield read(label, "bare", bare, images, expected)
    bare.unlink()
