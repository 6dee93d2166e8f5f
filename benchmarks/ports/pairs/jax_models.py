"""jax-models (DarshanDeshpande/jax-models), `--source jax_models=CLONE`, and transformers."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, perturbed

PAIRS = Pairs("jax_models", ("jax_models",), ("transformers",), needs=("jax_models",))


def _swin(shift: bool, downsample: bool) -> Built:
    import jax
    import transformers
    from jax_models.models.swin_transformer import SwinLayer
    from transformers.models.swin.modeling_swin import SwinPatchMerging, SwinStage

    model = SwinLayer((8, 8), 16, 4, 4, 2, True, 0.0, 0.0, [0.0, 0.0], 2 if shift else 1, downsample, deterministic=True)
    config = transformers.SwinConfig(
        embed_dim=16, window_size=4, mlp_ratio=2.0, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5, drop_path_rate=0.0
    )
    config._attn_implementation = "eager"
    stage = SwinStage(config, 16, (8, 8), 2 if shift else 1, 4, [0.0, 0.0], SwinPatchMerging if downsample else None)
    module = TorchCall(stage, lambda module, x: module(x, (8, 8))[0])
    tokens = floats(2, 64, 16)
    variables = dict(model.init(jax.random.key(0), tokens))
    # The masks and the indices of positions are no parameters.
    constants = {name: value for name, value in variables.items() if name != "params"}

    def apply(variables: Any, x: Any) -> Any:
        return model.apply({**constants, **variables}, x)

    return Built(apply, {"params": perturbed(variables["params"])}, module, tokens)


OURS, THEIRS = "jax-models SwinLayer", "transformers SwinStage, tanh GELU"
PAIRS.add("swin_layer", f"{OURS}, depth 2", THEIRS, lambda: _swin(True, False))
PAIRS.add("swin_layer_merging", f"{OURS}, depth 2, with merging", THEIRS, lambda: _swin(True, True))
PAIRS.add("swin_layer_unshifted", f"{OURS}, depth 1", THEIRS, lambda: _swin(False, False))
