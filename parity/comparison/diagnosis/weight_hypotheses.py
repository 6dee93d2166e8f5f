"""Hypotheses about the weights: stored in another axis order, transposed, swapped, missing or changed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from parity.comparison.diagnosis.hypothesis import Edit, Hypothesis
from vit_spec import ViTConfig, rows

QKV, QKV_BIAS = "blocks.attn.qkv.weight", "blocks.attn.qkv.bias"
PROJ, FC1, FC2 = "blocks.attn.proj.weight", "blocks.mlp.fc1.weight", "blocks.mlp.fc2.weight"
FACTORS = ("pos_embed_y", "pos_embed_x")
PATCH_KERNEL, POSITIONS, CLASS_TOKEN, DISTILLATION_TOKEN = "patch_embed.proj.weight", "pos_embed", "cls_token", "dist_token"
AFTER_BLOCKS = ("norm.", "fc_norm.", "attn_pool.", "pre_logits.", "head.", "head_dist.")


def weight_hypotheses(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield possible mistakes in the weights of a model, the likeliest of each kind first."""
    for kind in (
        _qkv_order,
        _head_split,
        _transposed,
        _patch_order,
        _tokens,
        _position_rows,
        _layer_scale_and_norms,
        _swiglu_halves,
        _missing_biases,
        _block_order,
    ):
        yield from kind(c)


def edit_from_axes(c: ViTConfig, name: str, stored: str) -> Edit:
    """Return the edit for a parameter whose entries are stored in the axis order `stored`."""
    return Edit(name, _to_row_axes(rows(c)[name].axes, stored.split(), c.sizes))


def _to_row_axes(axes: Sequence[str], stored: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Return the code that transposes a parameter from the axis order `stored` to `axes`."""
    shape = ", ".join(str(sizes[word]) for word in stored)
    return f"{{w}}.reshape({shape}).transpose({', '.join(str(stored.index(word)) for word in axes)})"


def _edit_to_axes(c: ViTConfig, name: str, stored: str) -> Edit:
    """Return the edit for a parameter that was wrongly rearranged from its correct axis order to the order `stored`."""
    axes, words = rows(c)[name].axes, stored.split()
    shape = ", ".join(map(str, rows(c)[name].shape))
    return Edit(name, f"{{w}}.transpose({', '.join(str(axes.index(word)) for word in words)}).reshape({shape})")


def _qkv_order(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield queries, keys and values in another order."""
    present = [name for name in (QKV, QKV_BIAS) if name in rows(c)]
    for order in permutations(range(3)):
        if order == (0, 1, 2):
            continue
        stored = " ".join("qkv"[order.index(index)] for index in range(3))
        for names, what in (present, "lie"), (present[:1], "weights lie"):
            if what == "lie" or len(present) > 1:
                edits = tuple(Edit(name, f"{{w}}[:, {list(order)}]") for name in names)
                yield Hypothesis(f"queries, keys and values {what} in the order {stored}", "order of q, k, v", edits=edits)
        if "blocks.attn.q_bias" in rows(c) and order == (2, 1, 0):
            biases = (
                Edit("blocks.attn.q_bias", "p('blocks.attn.v_bias')"),
                Edit("blocks.attn.v_bias", "p('blocks.attn.q_bias')"),
            )
            edits = (Edit(QKV, f"{{w}}[:, {list(order)}]"), *biases)
            yield Hypothesis("queries and values are swapped, biases too", "order of q, k, v", edits=edits)
    if "attn_pool.kv.weight" in rows(c):
        edits = tuple(Edit(f"attn_pool.kv.{kind}", "{w}[::-1]") for kind in ("weight", "bias"))
        yield Hypothesis(
            "keys and values of the pooling are swapped", "order of k, v in pooling", edits=edits, blocks_unchanged=True
        )


def _head_split(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other axis orders of the heads, and other orders of the rotary pairs."""
    proj = [edit_from_axes(c, PROJ, "block width dim head")] if PROJ in rows(c) else []
    for words in ("qkv dim head", "head qkv dim", "head dim qkv", "dim head qkv", "dim qkv head"):
        edits = _qkv_edits(c, words)
        yield Hypothesis(f"rows of qkv lie as ({words})", "head split of qkv", edits=edits)
        back = tuple(_edit_to_axes(c, edit.parameter, f"block {words}{_input_axis(edit.parameter)}") for edit in edits)
        yield Hypothesis(f"rows of qkv were rearranged to ({words})", "head split of qkv", edits=back)
    if proj:
        yield Hypothesis("columns of proj lie as (dim head)", "head split of proj", edits=tuple(proj))
        both = (*_qkv_edits(c, "qkv dim head"), *proj)
        yield Hypothesis("heads are split as (dim head) in qkv and proj", "head split", edits=both)
        back = (_edit_to_axes(c, PROJ, "block width dim head"),)
        yield Hypothesis("columns of proj were rearranged to (dim head)", "head split of proj", edits=back)
    if c.positions.rotary != "none":
        yield from rotary_orders(c)


def rotary_orders(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the entries of each head that a rotary embedding rotates in pairs."""
    d = c.head_dim
    orders = {
        "as halves, not as neighbours": [n // 2 + d // 2 * (n % 2) for n in range(d)],
        "as neighbours, not as halves": [2 * n if n < d // 2 else 2 * (n - d // 2) + 1 for n in range(d)],
        "with columns and rows of the image swapped": [(n + d // 2) % d for n in range(d)],
    }
    norms = [f"{norm}_norm.{kind}" for norm in "qk" for kind in ("weight", "bias")]
    of_one = [f"blocks.attn.{name}" for name in ("q_bias", *norms)]  # of queries or keys alone
    for what, order in orders.items():
        code = f"np.concatenate([{{w}}[:, :2][:, :, :, {order}], {{w}}[:, 2:]], 1)"
        edits = [Edit(name, code) for name in (QKV, QKV_BIAS) if name in rows(c)]
        edits += [Edit(name, f"{{w}}[..., {order}]") for name in of_one if name in rows(c)]
        yield Hypothesis(f"rotary pairs of queries and keys lie {what}", "rotary layout", edits=tuple(edits))


def _qkv_edits(c: ViTConfig, words: str) -> tuple[Edit, ...]:
    names = [name for name in (QKV, QKV_BIAS) if name in rows(c)]
    return tuple(edit_from_axes(c, name, f"block {words}{_input_axis(name)}") for name in names)


def _input_axis(name: str) -> str:
    return " width" if name == QKV else ""


def _transposed(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield weights that are stored as (inputs, outputs) but were read as (outputs, inputs)."""
    stored = {
        QKV: "block qkv width head dim",
        PROJ: "block head dim width",
        FC1: "block width glu ff" if "glu" in rows(c)[FC1].axes else "block width ff",
        FC2: "block ff width",
        "pre_logits.weight": "pooled feature",
        "head.weight": "feature label",
        "head_dist.weight": "feature label",
        "attn_pool.q.weight": "width pool_head pool_dim",
        "attn_pool.proj.weight": "pool_head pool_dim width",
        PATCH_KERNEL: "rgb ph pw width",
    }
    for name, axes in stored.items():
        if name in rows(c):
            what = name.removesuffix(".weight").removeprefix("blocks.")
            yield _one_edit(c, f"{what} lies as (inputs outputs)", f"transposed {what}", edit_from_axes(c, name, axes))
    square = c.num_heads * c.head_dim == c.width
    for index, which in enumerate("qkv" if square else ""):
        shape = (c.depth, c.width, c.width)
        heads = (c.depth, c.num_heads, c.head_dim, c.width)
        parts = [f"{{w}}[:, {n}]" for n in range(3)]
        parts[index] += f".reshape{shape}.swapaxes(1, 2).reshape{heads}"
        code = f"np.stack([{', '.join(parts)}], 1)"
        yield Hypothesis(f"{which} lies as (inputs outputs)", "transposed attn.qkv", edits=(Edit(QKV, code),))
    whole = edit_from_axes(c, QKV, "block width qkv head dim")
    yield Hypothesis("qkv lies as (inputs outputs), reshaped", "transposed attn.qkv", edits=(whole,))


def _one_edit(c: ViTConfig, name: str, family: str, edit: Edit) -> Hypothesis:
    return Hypothesis(name, family, edits=(edit,), blocks_unchanged=edit.parameter.startswith(AFTER_BLOCKS))


def _patch_order(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the pixels in a patch, and of the color channels."""
    for words in ("ph pw rgb", "rgb pw ph", "pw ph rgb", "pw rgb ph", "ph rgb pw"):
        edit = edit_from_axes(c, PATCH_KERNEL, f"width {words}")
        yield Hypothesis(f"pixels of a patch lie as ({words})", "order in a patch", edits=(edit,))
        edit_back = _edit_to_axes(c, PATCH_KERNEL, f"width {words}")
        yield Hypothesis(f"pixels of a patch were rearranged to ({words})", "order in a patch", edits=(edit_back,))
    if c.in_channels < 2:
        return
    reverse = Edit(PATCH_KERNEL, "{w}[:, ::-1]")
    yield Hypothesis("channels come in reverse, BGR", "channel order", edits=(reverse,))
    reversed_pixels = {f"pixels.{name}": getattr(c.pixels, name)[::-1] for name in ("mean", "std")}
    if reversed_pixels != {"pixels.mean": c.pixels.mean, "pixels.std": c.pixels.std}:
        name = "channels come in reverse, BGR, before the normalization"
        yield Hypothesis(name, "channel order", fields=reversed_pixels, edits=(reverse,))


def _tokens(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield swapped or missing prefix tokens, and mistakes in their position embeddings."""
    covered, learned = c.num_covered, c.positions.kind == "learned"
    if learned and covered:
        zero = Edit(POSITIONS, f"np.concatenate([0 * {{w}}[:{covered}], {{w}}[{covered}:]])")
        yield Hypothesis("the class token has its position already", "class position", edits=(zero,))
    if learned and covered and c.tokens.class_token:
        edit = Edit(CLASS_TOKEN, "{w} + p('pos_embed')[0]")
        yield Hypothesis("the position of the class token is added twice", "class position", edits=(edit,))
    if c.tokens.class_token:
        yield Hypothesis("the class token is zero", "class token", edits=(Edit(CLASS_TOKEN, "0 * {w}"),))
    if c.tokens.class_token and c.head.pool not in ("token", "token_mean"):
        fields = {"tokens.class_token": False, "positions.covers": "none"}
        table = (Edit(POSITIONS, "{w}[1:]"),) if learned and covered else ()
        yield Hypothesis("there is no class token", "class token", fields=fields, edits=table)
    if c.tokens.registers and not (learned and c.positions.covers == "all"):
        yield Hypothesis("there are no registers", "registers", fields={"tokens.registers": 0})
    if c.tokens.distillation:
        swapped = (Edit(CLASS_TOKEN, f"p('{DISTILLATION_TOKEN}')"), Edit(DISTILLATION_TOKEN, f"p('{CLASS_TOKEN}')"))
        yield Hypothesis("class and distillation tokens are swapped", "distillation token", edits=swapped)
        if c.num_classes:
            pairs = [(f"head.{kind}", f"head_dist.{kind}") for kind in ("weight", *(["bias"] if c.head.bias else []))]
            edits = tuple(Edit(a, f"p('{b}')") for pair in pairs for a, b in (pair, pair[::-1]))
            yield Hypothesis(
                "the heads of the two tokens are swapped", "distillation head", edits=edits, blocks_unchanged=True
            )


def _position_rows(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the rows of a learned position table."""
    if c.positions.kind != "learned":
        return
    if c.positions.factorized:
        zeros = tuple(Edit(name, "0 * {w}") for name in FACTORS)
        yield Hypothesis("positions are not added", "rows of positions", edits=zeros)
        if c.grid[0] == c.grid[1]:
            swapped = _swap(*FACTORS)
            yield Hypothesis("positions of rows and columns are swapped", "rows of positions", edits=swapped)
        return
    n, (height, width) = c.num_covered, c.grid
    codes = {"are not added": "0 * {w}"}
    if n:
        codes["lie with the class row last"] = "np.roll({w}, 1, 0)"
        codes["are all one place early"] = "np.roll({w}, -1, 0)"
    head, body = f"{{w}}[:{n}]", f"{{w}}[{n}:]"
    codes["of patches are one place late"] = f"np.concatenate([{head}, np.roll({body}, 1, 0)])"
    codes["of patches are one place early"] = f"np.concatenate([{head}, np.roll({body}, -1, 0)])"
    transposed = f"{body}.reshape({width}, {height}, -1).swapaxes(0, 1).reshape(-1, {c.width})"
    codes["of patches lie column by column"] = f"np.concatenate([{head}, {transposed}])"
    for what, code in codes.items():
        yield Hypothesis(f"positions {what}", "rows of positions", edits=(Edit(POSITIONS, code),))


def _layer_scale_and_norms(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield missing or squared layer scale, and swapped norms."""
    if c.norms.layer_scale is not None:
        names = ("blocks.ls1.gamma", "blocks.ls2.gamma")
        for code, what in (("0 * {w} + 1", "left out"), ("{w} ** 2", "applied twice")):
            for chosen, scope in ((names, "in both halves"), (names[:1], "after attention"), (names[1:], "after the MLP")):
                edits = tuple(Edit(name, code) for name in chosen)
                yield Hypothesis(f"layer scale is {what} {scope}", "layer scale", edits=edits)
        yield Hypothesis("layer scales of the halves are swapped", "layer scale", edits=_swap(*names))
    pairs = [("norm1", "norm2"), ("attn.q_norm", "attn.k_norm")]
    for a, b in pairs:
        if f"blocks.{a}.weight" in rows(c) and f"blocks.{b}.weight" in rows(c):
            kinds = [
                (f"blocks.{a}.{kind}", f"blocks.{b}.{kind}") for kind in ("weight", *(["bias"] if c.norms.bias else []))
            ]
            edits = tuple(edit for pair in kinds for edit in _swap(*pair))
            yield Hypothesis(f"{a} and {b} are swapped", f"{a} and {b}", edits=edits)


def _swap(a: str, b: str) -> tuple[Edit, Edit]:
    return Edit(a, f"p('{b}')"), Edit(b, f"p('{a}')")


def _swiglu_halves(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the gate and the value of a gated MLP."""
    if not c.mlp.is_gated:
        return
    names = (FC1, FC1.replace("weight", "bias")) if c.mlp.bias else (FC1,)
    swapped = tuple(Edit(name, "{w}[:, ::-1]") for name in names)
    yield Hypothesis("gate and value of the MLP are swapped", "halves of swiglu", edits=swapped)
    for make_edit, what in ((edit_from_axes, "are interleaved"), (_edit_to_axes, "were rearranged to be interleaved")):
        edits = tuple(make_edit(c, name, f"block ff glu{' width' if name == FC1 else ''}") for name in names)
        yield Hypothesis(f"gate and value of the MLP {what}", "halves of swiglu", edits=edits)


def _missing_biases(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield biases and norm weights that the reference model lacks."""
    for name in rows(c):
        what = name.removesuffix(".bias").removeprefix("blocks.")
        if name.endswith("bias"):
            edit = Edit(name, "0 * {w}")
            yield _one_edit(c, f"{what} has no bias", f"bias of {what}", edit)
        if name == QKV_BIAS:
            for index, which in enumerate("qkv"):
                code = f"{{w}} * np.array({[int(n != index) for n in range(3)]})[:, None, None]"
                yield Hypothesis(f"{which} has no bias", f"bias of {what}", edits=(Edit(name, code),))
        if "norm" in name and name.endswith(".weight"):
            what = what.removesuffix(".weight")
            yield _one_edit(c, f"{what} has no weight", f"weight of {what}", Edit(name, "0 * {w} + 1"))


def _block_order(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of the blocks, and one block fewer."""
    names = [name for name in rows(c) if name.startswith("blocks.")]
    text = sorted(range(c.depth), key=str)
    orders = {"are in the order of their names as text": [text.index(n) for n in range(c.depth)]}
    orders["are in reverse"] = list(range(c.depth))[::-1]
    for what, order in orders.items():
        edits = tuple(Edit(name, f"{{w}}[{order}]") for name in names)
        yield Hypothesis(f"blocks {what}", "order of blocks", edits=edits, moves_blocks=True)
    for what, part in (("last", ":-1"), ("first", "1:")):
        edits = tuple(Edit(name, f"{{w}}[{part}]") for name in names)
        fields = {"depth": c.depth - 1}
        yield Hypothesis(f"the {what} block is left out", "order of blocks", fields=fields, edits=edits, moves_blocks=True)
