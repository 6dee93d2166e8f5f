"""Mistakes in the modules of the JAX twin."""

from functools import partial

from tests.faults.planting import Fault

_fault = partial(Fault, file="vit_jax/model.py")

FAULTS = [
    _fault(
        name="queries and values swapped",
        old="q, k, v = jnp.unstack(qkv, axis=2)",
        new="v, k, q = jnp.unstack(qkv, axis=2)",
        part=r"blocks\.0\.attn: q",
        cause="queries, keys and values lie in the order v k q",
    ),
    _fault(
        name="biases of queries and keys, not values",
        old="bias = jnp.stack([self.q_bias, jnp.zeros_like(self.q_bias), self.v_bias])",
        new="bias = jnp.stack([self.q_bias, self.v_bias, jnp.zeros_like(self.q_bias)])",
        model="dinov3_s16",
        part=r"blocks\.0\.attn: [kv]",
    ),
    _fault(
        name="keys not rotated",
        old="k = apply_rotary(k, tables, config.positions.rotary)",
        new="pass",
        model="article_xray_rope",
        part=r"blocks\.0\.attn: k",
    ),
    _fault(
        name="norm of keys left out",
        old="k = self.k_norm(k)",
        new="pass",
        model="vit_22b14",
        part=r"blocks\.0\.attn\.k_norm",
    ),
    _fault(
        name="values added twice",
        old="return x + v.reshape(x.shape) if",
        new="return x + 2 * v.reshape(x.shape) if",
        model="article_rectangular",
        part=r"blocks\.0\.attn: output",
    ),
    _fault(
        name="MLP without its norm",
        old="y = self.mlp(norm2(x), train)",
        new="y = self.mlp(x, train)",
        part=r"blocks\.0\.norm2",
        cause="the MLP reads tokens without a norm",
    ),
    _fault(
        name="no residual around attention",
        old='x = self.intermediate("sum", x + y)',
        new='x = self.intermediate("sum", y)',
        part=r"blocks\.0: sum",
        cause="attention has no residual connection",
    ),
    _fault(
        name="residual stream detached",
        old="        x = x + y\n        return x, None\n",
        new="        x = __import__('jax').lax.stop_gradient(x) + y\n        return x, None\n",
        part=r"blocks\.1: output in the backward pass",
        ambiguity="the sum feeds both the norm and the residual stream; the check cannot tell which gradient is too small",
    ),
    _fault(
        name="norms after the sums",
        old="y = self.attn(self.norm1(x), tables, train)\n"
        "        y = self.ls1(y) if self.ls1 is not None else y\n"
        "        y = drop_path(self, y, rate, train) if noise.drop_path else y\n"
        '        x = self.intermediate("sum", x + y)\n'
        "        y = self.mlp(norm2(x), train)\n"
        "        y = self.ls2(y) if self.ls2 is not None else y\n"
        "        y = drop_path(self, y, rate, train) if noise.drop_path else y\n"
        "        x = x + y\n",
        new='x = self.intermediate("sum", self.norm1(x + self.attn(x, tables, train)))\n'
        "        x = norm2(x + self.mlp(x, train))\n",
        part=r"blocks\.0\.(norm1|attn\.qkv)",
        cause=r"norms come after the sums \(post-norm\)",
    ),
    _fault(
        name="layer scale applied twice",
        old='x = self.intermediate("sum", x + y)',
        new='x = self.intermediate("sum", x + (y if self.ls1 is None else self.ls1.gamma * y))',
        model="dinov2_s14",
        part=r"blocks\.0: sum",
        cause="layer scale is applied twice after attention",
    ),
    _fault(
        name="padding at the top and the left",
        old="((0, 0), (0, rows * ph - height), (0, columns * pw - width), (0, 0))",
        new="((0, 0), (rows * ph - height, 0), (columns * pw - width, 0), (0, 0))",
        changes={"tokens": {"pad": True}},
        size=(37, 50),
        part=r"patch_embed.*",
    ),
    _fault(
        name="class token scaled by two",
        old="*(token.astype(x.dtype) for token in prefix), x], axis=1)",
        new="*(2 * token.astype(x.dtype) for token in prefix), x], axis=1)",
        part="tokens",
    ),
    _fault(
        name="positions of patches one place late",
        old="head, body = table[:, :covered], table[:, covered:]",
        new="head, body = table[:, :covered], jnp.roll(table[:, covered:], 1, 1)",
        part="positions",
        cause="positions of patches are one place late",
    ),
    _fault(
        name="rows without a position before the class token",
        old="return jnp.concatenate([head, gap, body], axis=1).astype(x.dtype)",
        new="return jnp.concatenate([gap, head, body], axis=1).astype(x.dtype)",
        model="dinov2_s14_reg4",
        changes={"positions": {"covers": "class"}},
        part="positions",
    ),
    _fault(
        name="rows and columns of the table swapped",
        old="body = body.reshape(*config.grid, config.width)",
        new="body = body.reshape(*config.grid[::-1], config.width).swapaxes(0, 1)",
        size=(16, 80),
        part="positions",
    ),
    _fault(
        name="positions added twice",
        old='x = x + self.intermediate("positions", self.positions(x, grid))',
        new='x = x + 2 * self.intermediate("positions", self.positions(x, grid))',
        part="embed",
    ),
    _fault(
        name="rotary grid transposed",
        old="cos, sin = self.constants(rotary_tables, grid, x)",
        new="cos, sin = self.constants(rotary_tables, grid[::-1], x)",
        model="article_xray_rope",
        part="cosines",
    ),
    _fault(
        name="final norm applied twice",
        old="return self.norm(x) if self.norm is not None else x",
        new="return self.norm(self.norm(x)) if self.norm is not None else x",
        part=r"norm.*",
    ),
    _fault(
        name="max pooling for mean pooling",
        old="            x = patches.mean(1)\n",
        new="            x = patches.max(1)\n",
        changes={"head": {"pool": "mean"}},
        part="pool",
        cause="pooling takes the maximum of each channel",
    ),
    _fault(
        name="mean of the patches for the class token",
        old="            x = x[:, 0]\n",
        new="            x = patches.mean(1)\n",
        part="pool",
        cause="pooling is mean",
    ),
    _fault(
        name="class token and mean concatenated in the wrong order",
        old="x = jnp.concatenate([x[:, 0], patches.mean(1)], axis=-1)",
        new="x = jnp.concatenate([patches.mean(1), x[:, 0]], axis=-1)",
        changes={"head": {"pool": "token_mean"}},
        part="pool",
    ),
    _fault(
        name="one head for both tokens",
        old="second = self.output(x[:, 1], self.head_dist)",
        new="second = self.output(x[:, 1], self.head)",
        model="deit_s16_distilled",
        part=r"head_dist|second|head \(2\)",
    ),
    _fault(
        name="tanh replaced by clipping",
        old="jnp.tanh(self.pre_logits(x))",
        new="jnp.clip(self.pre_logits(x), -1, 1)",
        changes={"head": {"hidden": 12}},
        part="hidden",
    ),
    _fault(
        name="latent of the pooling detached",
        old="latent = jnp.broadcast_to(self.latent.astype(x.dtype),",
        new="latent = jnp.broadcast_to(__import__('jax').lax.stop_gradient(self.latent.astype(x.dtype)),",
        model="siglip_b16",
        part=r"attn_pool\.latent in the backward pass",
    ),
]
