"""Google's ViT and MLP-Mixer (google-research/vision_transformer, big_vision) and their counterparts in timm.

`--source vision_transformer=CLONE --source big_vision=CLONE`.  Both clones have a package of their own: `vit_jax` is also
the name of a package of this project, so its files are imported one by one.
"""

import importlib
import importlib.util
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ports.declaration import Built, Pairs, floats, of_linen

PAIRS = Pairs("google", (), ("timm", "torchvision"), needs=("vision_transformer", "big_vision"))
AXES = {"input_axes": "b y x c <-> b c y x"}
IMAGES = floats(2, 16, 16, 3)


def load(package: str, name: str) -> Any:
    """Import one file of a clone, which is on sys.path, under a name of its own."""
    for folder in sys.path:
        file = Path(folder) / package / f"{name}.py"
        if file.exists() and (file.parents[1] / "LICENSE").exists() and (file.parents[1] / ".git").exists():
            if package == "vit_jax" and not (file.parent / "models_mixer.py").exists():
                continue
            spec = importlib.util.spec_from_file_location(f"google_{name.replace('/', '_')}", file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(f"{package}/{name}.py")


def big_vision(name: str) -> Any:
    """Import a module of big_vision's models.

    `big_vision.utils` needs TensorFlow, and the models use it only to read checkpoints: an empty module takes its place.
    """
    sys.modules.setdefault("big_vision.utils", types.ModuleType("big_vision.utils"))
    return importlib.import_module(f"big_vision.models.{name}")


def timm_vit(**options: Any) -> Any:
    """Return a ViT of timm."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(16, 4, 3, 5, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, **options)


def tanh_gelu() -> Any:
    """Return the GELU by tanh, as the class that builds it."""
    import torch

    return partial(torch.nn.GELU, approximate="tanh")


def _models_vit() -> Any:
    resnet = load("vit_jax", "models_resnet")
    package = sys.modules["vit_jax"] = types.ModuleType("vit_jax")
    package.models_resnet = resnet  # type: ignore[attr-defined]
    return load("vit_jax", "models_vit")


def _google_vit(classifier: str, head: int | None, **options: Any) -> Built:
    models = _models_vit()
    transformer = {"mlp_dim": 48, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    patches = type("Patches", (), {"size": (4, 4)})
    model = models.VisionTransformer(
        num_classes=5,
        patches=patches,
        transformer=transformer,
        hidden_size=32,
        representation_size=head,
        classifier=classifier,
    )
    return of_linen(model, timm_vit(act_layer=tanh_gelu(), **options), IMAGES, call_options={"train": False}, **AXES)


OF_GOOGLE = {"jax_code": ("google_models_vit",)}
PAIRS.add(
    "vision_transformer_vit",
    "google-research/vision_transformer VisionTransformer",
    "timm VisionTransformer, tanh GELU",
    lambda: _google_vit("token", None),
    **OF_GOOGLE,
)
PAIRS.add(
    "vision_transformer_vit_gap",
    "google-research/vision_transformer VisionTransformer, classifier gap",
    "timm VisionTransformer, mean pooling, tanh GELU",
    lambda: _google_vit("gap", None, global_pool="avg", class_token=False, fc_norm=False),
    **OF_GOOGLE,
)


@PAIRS.pair(
    "vision_transformer_mixer",
    "google-research/vision_transformer MlpMixer",
    "timm MlpMixer, tanh GELU",
    jax_code=("google_models_mixer",),
)
def _() -> Built:
    from timm.models.mlp_mixer import MlpMixer

    mixer = load("vit_jax", "models_mixer")
    patches = type("Patches", (), {"size": (4, 4)})
    model = mixer.MlpMixer(
        patches=patches, num_classes=5, num_blocks=2, hidden_dim=32, tokens_mlp_dim=16, channels_mlp_dim=128
    )
    module = MlpMixer(5, 16, patch_size=4, num_blocks=2, embed_dim=32, act_layer=tanh_gelu())
    return of_linen(model, module, IMAGES, call_options={"train": False}, **AXES)


def _big_vision(options: dict[str, Any], **theirs: Any) -> Built:
    vit = big_vision("vit")
    sizes = {"patch_size": (4, 4), "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4, "dtype_mm": "float64"}
    model = vit.Model(5, **{**sizes, **options})
    built = of_linen(model, timm_vit(act_layer=tanh_gelu(), **theirs), IMAGES, call_options={"train": False}, **AXES)
    return built._replace(flax_apply=lambda variables, x: built.flax_apply(variables, x)[0])


BIG = {"jax_code": ("big_vision.models",)}
PAIRS.add(
    "big_vision_vit",
    "big_vision ViT, pool_type gap",
    "timm VisionTransformer, mean pooling, tanh GELU",
    lambda: _big_vision({}, global_pool="avg", class_token=False, fc_norm=False),
    **BIG,
)
PAIRS.add(
    "big_vision_vit_token",
    "big_vision ViT, pool_type tok",
    "timm VisionTransformer without a class position, tanh GELU",
    lambda: _big_vision({"pool_type": "tok"}, no_embed_class=True),
    **BIG,
)
PAIRS.add(
    "big_vision_vit_map",
    "big_vision ViT, pool_type map",
    "timm VisionTransformer, attention pooling, tanh GELU",
    lambda: _big_vision({"pool_type": "map"}, global_pool="map", class_token=False),
    **BIG,
)
PAIRS.add(
    "big_vision_vit_scan",
    "big_vision ViT, scan",
    "timm VisionTransformer, mean pooling, tanh GELU",
    lambda: _big_vision({"scan": True}, global_pool="avg", class_token=False, fc_norm=False),
    **BIG,
)


@PAIRS.pair("big_vision_mixer", "big_vision MlpMixer", "timm MlpMixer, tanh GELU", **BIG)
def _() -> Built:
    from timm.models.mlp_mixer import MlpMixer

    mixer = big_vision("mlp_mixer")
    model = mixer.Model(
        num_classes=5, patch_size=(4, 4), num_blocks=2, hidden_dim=32, tokens_mlp_dim=16, channels_mlp_dim=128
    )
    module = MlpMixer(5, 16, patch_size=4, num_blocks=2, embed_dim=32, act_layer=tanh_gelu())
    built = of_linen(model, module, IMAGES, call_options={"train": False}, **AXES)
    return built._replace(flax_apply=lambda variables, x: built.flax_apply(variables, x)[0])


def _bit(stem: str) -> Built:
    from timm.layers import GroupNormAct, StdConv2d
    from timm.models.resnetv2 import ResNetV2

    bit = big_vision("bit_paper")
    model = bit.Model(num_classes=5, depth=[1, 1, 1, 1], width=1)
    module = ResNetV2(
        [1, 1, 1, 1],
        num_classes=5,
        stem_type=stem,
        norm_layer=partial(GroupNormAct, num_groups=32),
        conv_layer=partial(StdConv2d, eps=1e-10),
    )
    built = of_linen(model, module, floats(2, 32, 32, 3), call_options={"train": False}, **AXES)
    return built._replace(flax_apply=lambda variables, x: built.flax_apply(variables, x)[0])


BIT = "big_vision BiT ResNet (bit_paper)"
PAIRS.add("big_vision_bit", BIT, "timm ResNetV2, stem without zeros around it", lambda: _bit(""), **BIG)
PAIRS.add(
    "big_vision_bit_as_published",
    BIT,
    "timm ResNetV2, fixed stem (BiT)",
    lambda: _bit("fixed"),
    disagreement="before the max pooling, timm pads by zeros (timm/models/resnetv2.py, create_resnetv2_stem), and "
    "bit_paper by negative infinity, as nn.max_pool does (big_vision/models/bit_paper.py:78)",
    **BIG,
)
