"""The PyTorch twin: dropout, dtypes, attention kernels, activation checkpointing, torch.compile, intermediates, errors."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import vit_spec
import vit_torch
from tests.twins import random_images, small_config
from vit_spec import InputError, ViTConfig

PLAIN = small_config(vit_spec.get("vit_s16"))
RICH = small_config(vit_spec.get("dinov3_s16plus")).replace(head={"pool": "attention", "hidden": 6}, num_classes=5)
TABLE = small_config(vit_spec.get("beit_b16")).replace(tokens={"registers": 1})
MLP = TABLE.replace(positions={"relative": "mlp", "relative_dim": 4})
LEARNED_AND_ROTARY = RICH.replace(depth=1, positions={"kind": "learned"})  # compilers trace every block alike
RELATIVE = {
    "table": TABLE,
    "shared table": TABLE.replace(positions={"relative_shared": True}),
    "mlp": MLP,
    "shared mlp": MLP.replace(positions={"relative_shared": True}),
}
DROPOUT = ("pos_drop", "attn_drop", "mlp_drop", "patch_drop", "drop_path")


def images(config: ViTConfig, size: tuple[int, int] | None = None) -> Any:
    """Return two images, (2, C, H, W), in float32."""
    return torch.tensor(random_images(config, size)).permute(0, 3, 1, 2)


def pair_of_models(config: ViTConfig, execution: vit_torch.Execution) -> tuple[Any, Any]:
    """Return two models with the same weights: one with default execution, the other with `execution`."""
    torch.manual_seed(0)
    plain, other = vit_torch.ViT(config).eval(), vit_torch.ViT(config, execution).eval()
    other.load_state_dict(plain.state_dict())
    return plain, other


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_acts_only_in_training(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = vit_torch.ViT(PLAIN), images(PLAIN).repeat(16, 1, 1, 1)  # for few images, two draws of masks can be equal
    with_dropout = vit_torch.ViT(PLAIN.replace(regularisation={kind: 0.5}))
    with_dropout.load_state_dict(plain.state_dict())
    assert not torch.equal(with_dropout.train()(x), with_dropout.train()(x))
    assert torch.equal(with_dropout.eval()(x), plain.eval()(x))


def test_patch_dropout_keeps_the_prefix_and_a_fraction_of_the_patches() -> None:
    config = RICH.replace(regularisation={"patch_drop": 0.5})
    _, found = vit_torch.intermediates(vit_torch.ViT(config).train(), images(config, (64, 64)))
    assert found["embed"].shape[1] == config.num_prefix + 8


def test_drop_path_keeps_the_first_block_and_drops_whole_images() -> None:
    config = PLAIN.replace(regularisation={"drop_path": 0.9})
    model, x = vit_torch.ViT(config).train(), images(config).repeat(64, 1, 1, 1)
    _, found = vit_torch.intermediates(model, x)
    skipped = [(found[f"blocks.{i}"] == before).all((1, 2)) for i, before in enumerate((found["embed"], found["blocks.0"]))]
    assert not skipped[0].any()
    assert 0.5 < skipped[1].float().mean() < 0.95  # attention and MLP: 0.81


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_bfloat16_is_computed_in_bfloat16_within_its_rounding_error(config: ViTConfig) -> None:
    plain, half = pair_of_models(config, vit_torch.Execution(dtype=torch.bfloat16))
    rounded, exact = half(images(config)), plain.bfloat16().double()(images(config).bfloat16().double())
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded - exact) < 10 * 2**-9 * torch.linalg.norm(exact)  # ten rounding errors


def test_a_model_cast_to_bfloat16_computes_in_bfloat16() -> None:
    assert vit_torch.ViT(RICH).to(torch.bfloat16)(images(RICH)).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_the_explicit_kernel_is_the_same_function(config: ViTConfig) -> None:
    plain, other = pair_of_models(config, vit_torch.Execution(attention="explicit"))
    x = images(config).double()
    torch.testing.assert_close(plain.double()(x), other.double()(x), rtol=1e-12, atol=1e-13)


class OperationCounter(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function._opname] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_activation_checkpointing_gives_the_same_gradients(remat: Any) -> None:
    plain, other = pair_of_models(RICH, vit_torch.Execution(remat=remat))
    counts = []
    for model in (plain, other):
        with OperationCounter() as counter:
            model(images(RICH)).square().sum().backward()
        counts.append(counter.counts)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    products, again = (each["mm"] + each["addmm"] for each in counts)
    assert (again == products) == (remat == "dots") and sum(counts[1].values()) > 1.1 * sum(counts[0].values())


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)  # from the inductor of torch 2.13, in 2026-11
def test_the_model_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    model, x = vit_torch.ViT(LEARNED_AND_ROTARY).eval(), images(LEARNED_AND_ROTARY, (64, 48))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_model_compiles_at_any_image_size(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    config = LEARNED_AND_ROTARY
    model = vit_torch.ViT(config).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="eager")
    for size in ((64, 48), (96, 80), (32, 64)):  # from the second size on, the compiler makes sizes symbolic
        with torch.no_grad():
            assert torch.equal(compiled(x := images(config, size)), model(x))


def test_a_model_is_exported_for_any_batch_but_one_image_size() -> None:
    config = LEARNED_AND_ROTARY
    model, x = vit_torch.ViT(config).eval(), images(config)
    batch, patches = torch.export.Dim("batch"), torch.export.Dim("patches")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    assert torch.equal(program(x.repeat(3, 1, 1, 1)), model(x.repeat(3, 1, 1, 1)))
    for axis in (2, 3):
        with pytest.raises(InputError, match="is symbolic: export at one image size; only the batch may be dynamic"):
            torch.export.export(model, (x,), dynamic_shapes=({axis: config.patch_size[axis - 2] * patches},))


@pytest.mark.parametrize("seed", [None, 3])
def test_training_with_dropout_and_activation_checkpointing_is_one_graph(seed: int | None) -> None:
    torch._dynamo.reset()
    config = RICH.replace(depth=1, regularisation=dict.fromkeys(DROPOUT, 0.1))
    model = torch.compile(vit_torch.ViT(config, vit_torch.Execution(remat="full")), fullgraph=True, backend="aot_eager")
    model(images(config), None if seed is None else vit_torch.Key(vit_torch.random_key(seed))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo, of the input of a block
@pytest.mark.parametrize("seed", [None, 3])
def test_blocks_with_other_rates_are_compiled_once(seed: int | None) -> None:
    """With a rate as a number, each block would be a graph of its own, and a recomputed block might run as another one."""
    torch._dynamo.reset()
    config = PLAIN.replace(depth=9, regularisation={"drop_path": 0.3, "attn_drop": 0.1, "mlp_drop": 0.1})
    model, backend = (
        vit_torch.ViT(config, vit_torch.Execution(remat="full")).train(),
        CompileCounterWithBackend("aot_eager"),
    )
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    key = None if seed is None else vit_torch.Key(vit_torch.random_key(seed))
    model(images(config), key).sum().backward()
    assert backend.frame_count == 1


# Name of a case -> config, and size of the images if it is not the size in the config.
META_CASES = {
    "plain": (PLAIN, None),
    "rich": (RICH, None),
    "distilled": (small_config(vit_spec.get("deit_s16_distilled")), None),
    "fixed table": (small_config(vit_spec.get("vit_s16_plain")), None),
    "resampled": (PLAIN, (80, 16)),
}


@pytest.mark.parametrize("case", META_CASES)
def test_all_tensors_are_on_the_device_of_the_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors track a device that need not exist, and raise an error if tensors of two devices are combined."""
    from torch._functorch import config as functorch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The rejection sampling of the initialisation does not end with fake tensors.
    monkeypatch.setattr(vit_torch.model, "initialise", lambda model: None)
    (config, size), rates = META_CASES[case], dict.fromkeys(DROPOUT, 0.1)
    with functorch.patch(fake_tensor_allow_meta=True), FakeTensorMode():
        with torch.device("meta"):
            model = vit_torch.ViT(config.replace(regularisation=rates))
            x = torch.empty(2, config.in_channels, *(size or config.image_size))
        logits, found = vit_torch.intermediates(model, x)
        logits.sum().backward()
    assert {tensor.device.type for tensor in found.values()} == {"meta"}


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_products_of_queries_and_keys_beyond_the_range_of_float16_are_scaled_first(attention: Any) -> None:
    model = vit_torch.ViT(PLAIN, vit_torch.Execution(dtype=torch.float16, attention=attention)).eval()
    with torch.no_grad():
        for block in model.blocks:
            q, k, _ = block.attn.qkv.bias.view(3, -1)
            q[:] = k[:] = (1.2 * 65504 / PLAIN.head_dim) ** 0.5  # all products are about 1.2 * 65504
        assert model(images(PLAIN)).isfinite().all()
        assert vit_torch.attention_maps(model, images(PLAIN)).isfinite().all()


@pytest.mark.parametrize("config", [RICH, *RELATIVE.values()], ids=["rotary", *RELATIVE])
def test_attention_maps_are_the_weights_of_the_heads(config: ViTConfig) -> None:
    model, x = vit_torch.ViT(config).double().eval(), images(config).double()
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            torch.nn.init.normal_(parameter)  # an initial table is zero
    _, found = vit_torch.intermediates(model, x)
    maps = vit_torch.attention_maps(model, x)
    assert maps.shape == (2, config.num_heads, config.num_tokens, config.num_tokens)
    heads = torch.einsum("bhts,bshd->bthd", maps, found["blocks.1.attn.v"])
    torch.testing.assert_close(heads, found["blocks.1.attn.heads"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_activation_checkpointing_gives_the_same_gradients_with_fed_values(remat: Any) -> None:
    fed = {f"blocks.{i}.sum": torch.randn(2, PLAIN.num_tokens, PLAIN.width) for i in range(PLAIN.depth)}
    models = pair_of_models(PLAIN, vit_torch.Execution(remat=remat))
    for model in models:
        logits, _ = vit_torch.intermediates(model, images(PLAIN), fed)
        logits.square().sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    assert models[0].blocks[1].mlp.fc1.weight.grad.any()


def test_fed_values_that_replace_nothing_are_refused() -> None:
    model, value = vit_torch.ViT(PLAIN, vit_torch.Execution(attention="explicit")).eval(), torch.zeros(1)
    with pytest.raises(InputError, match=r"^fed names 'norms', 'poll', which .*; did you mean 'norm'\?$"):
        vit_torch.intermediates(model, images(PLAIN), {"norms": value, "poll": value})
    with pytest.raises(InputError, match=r"^fed names 'weights', which no later operation reads: "):
        vit_torch.intermediates(model, images(PLAIN), {"blocks.0.attn.weights": value})
    assert not any(module._forward_hooks or getattr(module, "on_intermediate", None) for module in model.modules())
    with pytest.raises(InputError, match=r"^fed names 'blocks\.0\.attn\.scores', which this forward pass does not compute"):
        vit_torch.intermediates(vit_torch.ViT(PLAIN).eval(), images(PLAIN), {"blocks.0.attn.scores": value})


def test_reading_intermediates_leaves_the_model_unchanged() -> None:
    model, x = vit_torch.ViT(PLAIN).eval(), images(PLAIN)
    before = model(x)
    vit_torch.intermediates(model, x)
    assert torch.equal(model(x), before)
    assert not any(module._forward_hooks or getattr(module, "on_intermediate", None) for module in model.modules())


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), torch.nn.DataParallel], ids=["compile", "parallel"]
)
@pytest.mark.parametrize("read", [vit_torch.intermediates, vit_torch.attention_maps])
def test_intermediates_of_a_wrapped_model_are_refused(read: Any, wrap: Any) -> None:
    with pytest.raises(InputError, match=r"expected a vit_torch\.ViT; give the model that it wraps$"):
        read(wrap(vit_torch.ViT(PLAIN)), images(PLAIN))


def test_a_model_built_on_the_meta_device_is_initialized_as_any_other() -> None:
    with torch.device("meta"):
        model = vit_torch.ViT(RICH)
    model.to_empty(device="cpu")
    other = vit_torch.ViT(RICH)
    for each in (model, other):
        torch.manual_seed(0)
        each.reset_parameters()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_without_classes_the_output_is_the_pooled_feature() -> None:
    model = vit_torch.ViT(PLAIN.replace(num_classes=0)).eval()
    logits, found = vit_torch.intermediates(model, images(PLAIN))
    assert torch.equal(logits, found["pool"])
    assert logits.shape == (2, PLAIN.width)


def test_distilled_logits_are_the_mean_of_both_heads() -> None:
    config = small_config(vit_spec.get("deit_s16_distilled"))
    logits, found = vit_torch.intermediates(vit_torch.ViT(config).eval(), images(config))
    torch.testing.assert_close(logits, (found["head"] + found["head_dist"]) / 2)


INVALID_IMAGES = {
    "a single image": (lambda x: x[0], "a single image is images[None]"),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), "use images.permute(0, 3, 1, 2)"),
    "another number of channels": (lambda x: x[:, :2], "with 3 channels"),
    "uint8": (lambda x: x.to(torch.uint8), "normalize them first"),
    "a size that is not a multiple of the patch size": (lambda x: x[..., :-1], "resize images to 32x48"),
}


@pytest.mark.parametrize("what", INVALID_IMAGES)
def test_the_error_for_invalid_images_is_one_line(what: str) -> None:
    change, message = INVALID_IMAGES[what]
    with pytest.raises(InputError) as error:
        vit_torch.ViT(PLAIN)(change(images(PLAIN)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_a_batch_without_images_gives_no_logits(attention: Any) -> None:
    logits = vit_torch.ViT(PLAIN, vit_torch.Execution(attention=attention))(images(PLAIN)[:0])
    assert logits.shape == (0, PLAIN.num_classes)


def test_a_batch_without_images_trains_with_a_key() -> None:
    config = RICH.replace(regularisation=dict.fromkeys(DROPOUT, 0.2))
    logits = vit_torch.ViT(config).train()(images(config)[:0], vit_torch.Key(vit_torch.random_key(0)))
    assert logits.shape == (0, config.num_classes)


def test_a_key_that_is_a_tensor_is_refused() -> None:
    model = vit_torch.ViT(PLAIN.replace(regularisation={"mlp_drop": 0.2})).train()
    with pytest.raises(InputError, match=r"^key is a Tensor: give vit_torch.Key\(vit_torch.random_key\(seed\)\)$"):
        model(images(PLAIN), vit_torch.random_key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "auto"}, "execution.attention is 'auto': give one of fused, explicit"),
        ({"remat": "Full"}, "execution.remat is 'Full': give one of none, dots, full; did you mean 'full'?"),
        ({"dtype": "bfloat16"}, "execution.dtype is 'bfloat16': give a floating-point dtype of 16 bits"),
        ({"dtype": torch.int32}, "execution.dtype is torch.int32: give a floating-point dtype of 16 bits"),
        ({"dtype": torch.float8_e4m3fn}, "execution.dtype is torch.float8_e4m3fn: give a floating-point dtype of 16 bits"),
    ],
)
def test_unknown_execution_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        vit_torch.Execution(**options)
    assert str(error.value).startswith(message)


def test_every_named_model_at_full_width_has_the_parameter_count_of_its_rows() -> None:
    configs = {name: replace(vit_spec.get(name), depth=2) for name in vit_spec.names()}
    counts = {}
    for name, config in configs.items():
        with torch.device("meta"):
            model = vit_torch.ViT(config)
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    assert counts == {name: vit_spec.count(config) for name, config in configs.items()}


def test_parameters_are_in_the_order_of_computation() -> None:
    names = [name for name, _ in vit_torch.ViT(PLAIN).named_parameters()]
    order = [names.index(name) for name in ("cls_token", "blocks.0.norm1.weight", "norm.weight", "head.weight")]
    assert order == sorted(order)
