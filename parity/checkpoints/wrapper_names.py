"""The words that training scripts put in front of the keys of a model, and what each of them is."""

from typing import NamedTuple


class Wrapper(NamedTuple):
    """A word in front of the keys of a model.

    Attributes:
        word: such as "model" in "model.cls_token" or in {"model": {"cls_token": ...}}.
        is_module: whether it is a module that does not change the function of the model in it, as of
            DistributedDataParallel.
        loops: the separators of the keys of the frameworks whose training loops have a dictionary of this name: "." of
            PyTorch, "/" of Flax.  Within a key of PyTorch, a word such as "model" names a module, and no dictionary.
        is_layer: whether a layer may be called so too: it has other weights only if these have a patch projection.
    """

    word: str
    is_module: bool = False
    loops: str = ""
    is_layer: bool = False


# In order of preference.  Averaged weights are preferred, because they are the weights that people evaluate, as in timm.
_TABLE = (
    Wrapper("state_dict_ema", loops="."),
    Wrapper("model_ema", loops="."),
    Wrapper("teacher"),
    Wrapper("ema", loops="."),
    Wrapper("ema_state_dict", loops=".", is_layer=True),
    Wrapper("ema_params", loops="./", is_layer=True),
    Wrapper("state_dict", loops="."),
    Wrapper("model_state_dict", loops="."),
    Wrapper("model_state", loops=".", is_layer=True),
    Wrapper("model", loops="."),
    Wrapper("module", is_module=True),
    Wrapper("_orig_mod", is_module=True),  # of torch.compile
    Wrapper("_fsdp_wrapped_module", is_module=True),
    Wrapper("_checkpoint_wrapped_module", is_module=True),
    Wrapper("params", loops="./"),
    Wrapper("weights", loops=".", is_layer=True),
    Wrapper("opt", loops="./"),
    Wrapper("optimizer", loops="./"),
    Wrapper("target", loops="./"),
    Wrapper("img"),
    Wrapper("backbone"),
    Wrapper("encoder"),
    Wrapper("vit", is_layer=True),
    Wrapper("timm_model"),  # in transformers' TimmWrapper
    Wrapper("net", loops="."),
    Wrapper("student"),
    # The weights beside averaged ones, in Lightning's callback WeightAveraging.
    Wrapper("current_model_state", loops=".", is_layer=True),
)
WRAPPERS = tuple(each.word for each in _TABLE)
PRIORITY = {word: n for n, word in enumerate(WRAPPERS)}
LAYER_NAMES = frozenset(each.word for each in _TABLE if each.is_layer)
LOOP_MODULES = tuple(each.word for each in _TABLE if each.is_module)
INNER_MODULES = tuple(word for word in LOOP_MODULES if word.startswith("_"))  # they wrap modules within a model too
LOOP_DICTIONARIES = {
    separator: frozenset(each.word for each in _TABLE if separator in each.loops) for separator in (".", "/")
}
