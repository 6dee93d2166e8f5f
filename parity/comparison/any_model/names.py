"""Words and numbers in the names of modules: words do not depend on a library's spelling, and numbers give an order."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from urllib.parse import quote, unquote

# One word -> its spellings in libraries; letters only, lower case.
SPELLINGS = {
    "query": "q qproj queryproj wq toq qlin linearq",
    "key": "k kproj keyproj wk tok klin lineark",
    "value": "v vproj valueproj wv tov vlin linearv",
    "qkv": "inproj cattn qkvproj querykeyvalue toqkv wqkv",
    "kv": "kvproj keyvalue tokv wkv",
    "out": "o oproj outproj proj projection outlin toout wo cproj",
    "attn": "attention selfattn selfattention mha multiheadattention multiheaddotproductattention multiheadselfattention",
    "dense": "linear lin fc cfc densegeneral",
    "conv": "convd convolution",
    "norm": "ln layernorm rmsnorm bn batchnorm batchnormd groupnorm instancenorm",
    "mlp": "ffn ff feedforward mlpblock",
    "block": "blocks layer layers h resblocks encoderblock decoderblock encoderlayer transformerblock residualblock",
    "embed": "embedding embeddings emb",
    "head": "classifier lmhead logits",
    "token": "tok tokens word words vocab",
    "position": "pos positional positions",
    "class": "cls",
    "token embed": "wte",
    "position embed": "wpe posembed posembedding positionembeddings",
    "query norm": "qn",
    "key norm": "kn",
    "shortcut": "downsample skip",
    "": "transformer model backbone net network module base d",  # words that tell nothing about the module
}
WORDS = {spelling: word for word, spellings in SPELLINGS.items() for spelling in spellings.split()}


@cache
def words(part: str) -> tuple[str, ...]:
    """Return the words of one name in a path, e.g. ("norm",) for "LayerNorm_0" and ("query",) for "q_proj"."""
    letters = re.sub(r"[^a-z]", "", part.lower())
    if letters in WORDS or letters in SPELLINGS:
        return tuple(WORDS.get(letters, letters).split())
    pieces = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)
    return tuple(word for piece in pieces for word in WORDS.get(piece.lower(), piece.lower()).split())


def numbers(path: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers in a path, in order."""
    return tuple(int(digits) for digits in re.findall(r"\d+", "/".join(path)))


@cache
def bag_of_words(path: tuple[str, ...]) -> Counter[str]:
    """Return the words of a path; the words of its last name count double, because they describe the module itself."""
    counts = Counter({word: 1 for part in path[:-1] for word in words(part)})
    for part in path[-1:]:
        counts |= Counter({word: 2 for word in words(part)})
    return counts


def similarity(a: tuple[str, ...], b: tuple[str, ...]) -> float:
    """Return the Dice coefficient of the words of two paths: 1 for the same words, 0 for none in common."""
    left, right = bag_of_words(a), bag_of_words(b)
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 0.0


def sameness(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Return how literally two paths are the same: 2 if one is the end of the other, 1 for the same last name, else 0.

    Case and punctuation do not count: "layers_0/norm2" is "layers.0.norm2".
    """
    left, right = (_plain_names(path) for path in (a, b))
    shared = min(len(left), len(right))
    return 2 if left[-shared:] == right[-shared:] else int(left[-1:] == right[-1:])


def _plain_names(path: tuple[str, ...]) -> list[str]:
    """Return the names of a path in lower case without punctuation; a number at the end of a name is one by itself."""
    names = (name for part in path for name in re.split(r"[_.](?=\d+$)", part.lower()))
    return [re.sub(r"[^a-z0-9]", "", name) for name in names]


_NOT_IN_LINES = re.compile(r"[\s\x00-\x1f\x7f|{}%]|<(?=->)|:(?=[0-9])")  # what separates the parts of a line of a mapping


def quote_key(key: str) -> str:
    """Return a key as the lines of a mapping write it: percent-encoded, as in my%20head.weight, where it is not plain."""
    return _NOT_IN_LINES.sub(lambda match: quote(match[0], safe=""), key)


def unquote_key(key: str) -> str:
    """Return the key that a line of a mapping writes like this; the inverse of `quote_key`."""
    return unquote(key)
