"""The twins compute the same function (G0, float64), equally well (G1, float32); the gates are `parity.comparison`'s."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("jax")
pytest.importorskip("torch")

import vit_spec
import vit_torch
from parity.comparison import _Error, _measures, compare
from tests.twins import FUSION, perturbed, pictures, small, small_models
from vit_spec import (
    Attention,
    Head,
    InputError,
    Mlp,
    Norms,
    Positions,
    Resampling,
    Tokens,
    ViTConfig,
)


@pytest.mark.parametrize("fusion", FUSION)
@pytest.mark.parametrize("names", small_models())
def test_a_named_model_passes_both_gates(names: str, fusion: str) -> None:
    config = small_models()[names]
    report = compare(config, perturbed(config), images=pictures(config), xla_options=FUSION[fusion])
    assert report.passed, report.verdict


PLAIN = small(vit_spec.get("vit_s16"))
RESAMPLING: dict[str, dict[str, Any]] = {
    "timm": {"kernel": "bicubic", "antialias": True},
    "timm npz, flexivit": {"kernel": "bilinear", "antialias": False},
    "Hugging Face, MAE, DeiT": {"kernel": "bicubic", "antialias": False},
    "DINO, DINOv2": {"kernel": "bicubic", "antialias": False, "offset": 0.1},
    "SigLIP 2 naflex": {"kernel": "bilinear", "antialias": True},
    "torchvision": {"kernel": "bicubic", "antialias": False, "align_corners": True},
    "big_vision": {"kernel": "bilinear", "antialias": False, "align_corners": True},
}


@pytest.mark.parametrize("mode", RESAMPLING)
def test_another_input_size_passes_both_gates(mode: str) -> None:
    config = PLAIN.replace(resampling=RESAMPLING[mode])
    report = compare(config, perturbed(config), images=pictures(config, (80, 16)))
    assert report.passed, report.verdict


def test_a_padded_image_passes_both_gates() -> None:
    config = PLAIN.replace(tokens={"pad": True})
    report = compare(config, perturbed(config), images=pictures(config, (37, 50)))
    assert report.passed, report.verdict


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    """Any config of a few thousand parameters."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    flag = partial(one, True, False)
    heads, dim, patch, class_token = one(1, 2, 3), one(4, 8), (one(2, 3), one(2, 4)), flag()
    pool = one("mean", "attention", "none", *(["token", "token_mean"] if class_token else []))
    kind, proj, value_skip = one("learned", "fixed", "none"), flag(), flag()
    free = proj and not value_skip and flag()  # the heads together need not be as wide as the stream
    return ViTConfig(
        image_size=(patch[0] * one(1, 3), patch[1] * one(2, 3)),
        patch_size=patch,
        in_channels=one(1, 3, 5),
        width=one(8, 12) if free else heads * dim,
        depth=one(1, 2, 3),
        num_heads=heads,
        mlp_dim=one(5, 16),
        num_classes=one(0, 1, 7),
        tokens=Tokens(
            class_token=class_token,
            registers=one(0, 2),
            distillation=class_token and pool == "token" and flag(),
            patch_bias=flag(),
            pad=flag(),
        ),
        positions=Positions(
            kind=kind,
            table=one("sincos_1d", *(("normal(0.02)", "uniform(0, 1)") if kind == "learned" else ())),
            covers=one("all", "none", *(["class"] if class_token else [])),
            rotary=one("none", "axial", "dinov3"),
        ),
        resampling=Resampling(**RESAMPLING[one(*RESAMPLING)]),
        attention=Attention(
            head_dim=dim if free else None,
            qkv_bias=one("qkv", "qv", "none"),
            proj=proj,
            proj_bias=flag(),
            scale=one(None, 0.3),
            qk_norm=flag(),
            value_skip=value_skip,
        ),
        mlp=Mlp(activation=one("gelu", "gelu_tanh", "quick_gelu", "relu", "none", "swiglu")),
        norms=Norms(
            eps=one(1e-12, 1e-6, 1e-5),
            before_blocks=flag(),
            after_blocks=flag(),
            after_pool=flag(),
            shared_norm=flag(),
            layer_scale=one(None, 0.1),
        ),
        head=Head(pool=pool, hidden=one(None, 6), bias=flag()),
    )


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.integers(0, 2**16))
def test_a_random_config_is_the_same_function_in_both_twins(config: ViTConfig, seed: int) -> None:
    size = (config.patch_size[0] * 4, config.patch_size[1] * 2)
    quick = {"xla_backend_optimization_level": 0}  # each example is compiled anew
    report = compare(config, perturbed(config, seed), images=pictures(config, size, seed), xla_options=quick)
    wrong = [measure for measure in report.measures if not measure.same_function]
    assert not wrong, wrong[0]


FAULTS = {  # a change of one twin alone: the first part that it makes differ
    "eps": ({"norms": {"eps": 1e-5}}, "blocks.0.norm1"),
    "gelu": ({"mlp": {"activation": "gelu_tanh"}}, "blocks.0.mlp.fc2"),
    "scale": ({"attention": {"scale": 0.36}}, "blocks.0.attn.heads"),
    "value skip": ({"attention": {"value_skip": True}}, "blocks.0.attn"),
    "pool": ({"head": {"pool": "mean"}}, "pool"),
    "resampling": ({"resampling": {"antialias": False}}, "embed"),
    "rotary": ({"positions": {"rotary": "axial"}}, "blocks.0.attn.q"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_twin_fails_at_the_part_it_is_in(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, part = FAULTS[fault]
    right = vit_torch.ViT
    monkeypatch.setattr(vit_torch, "ViT", lambda config: right(config.replace(**change)))
    report = compare(PLAIN, perturbed(PLAIN), images=pictures(PLAIN, (64, 48)))
    assert report.first is not None
    assert (report.first.name, report.first.same_function) == (part, False)
    assert part in report.verdict


def test_an_imprecise_twin_fails_the_second_gate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vit_torch.ViT

    class Imprecise(right):  # type: ignore[misc, valid-type]
        def encode(self, x, tables):
            noise = 1 + (3e-6 * (x > 0) if x.dtype.itemsize == 4 else 0)
            return super().encode(x * noise, tables)

    monkeypatch.setattr(vit_torch, "ViT", Imprecise)
    report = compare(PLAIN, perturbed(PLAIN), images=pictures(PLAIN))
    assert report.first is not None
    assert all(measure.same_function for measure in report.measures)
    assert not report.first.same_precision


@pytest.mark.parametrize(("in_float64", "passes"), [(1e-15, False), (3e-14, True)])
def test_float32_may_be_as_far_as_float64_says_that_the_function_amplifies(in_float64: float, passes: bool) -> None:
    exact = np.random.default_rng(0).standard_normal(10_000)
    far = {"logits": exact * (1 + 8e-6)}
    logits, _ = _measures({"logits": exact}, {"logits": exact * (1 + in_float64)}, far, far)
    assert (logits.same_function, logits.same_precision) == (True, passes)


def test_a_report_prints_a_table_and_its_verdict_last() -> None:
    text = str(compare(PLAIN, perturbed(PLAIN), images=pictures(PLAIN)))
    assert "blocks.*.attn.q" in text
    assert text.splitlines()[-1].startswith("PASS: ")


def test_nan_in_one_twin_alone_is_a_difference() -> None:
    broken = _Error.of(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert broken.relative_rms(0) == np.inf


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(InputError, match="not the config's"):
        compare(PLAIN.replace(depth=3), perturbed(PLAIN))
