"""The JSON files with which a library describes the models of a format, and the folders of weights that it opens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vit_spec import ViTConfig


def _no_files(config: ViTConfig) -> Mapping[str, Any]:
    """Return no files: the default of a format whose library needs no JSON file beside the weights."""
    return {}


@dataclass(frozen=True)
class LibraryFiles:
    """The files of a format's library.

    Attributes:
        contents: config -> the JSON files, by name, that the library needs beside the weights to open a folder.  Raises
            InputError if they cannot express the config.
        model_types: the values of `model_type` in config.json that name the models of the format, in Hugging Face
            transformers.
        config_file: the name of the JSON file in which the library describes a model.
        config_key: a key that the library's config.json has instead of `model_type`; "" if it always has `model_type`.
        one_layout: whether the library opens a folder with these files only if its keys are those of the default variant.
        opens_shards: whether the library opens a folder whose weights are in several files.
    """

    contents: Callable[[ViTConfig], Mapping[str, Any]] = _no_files
    model_types: tuple[str, ...] = ()
    config_file: str = "config.json"
    config_key: str = ""
    one_layout: bool = False
    opens_shards: bool = True

    @property
    def has_files(self) -> bool:
        """Whether the library needs JSON files beside the weights."""
        return self.contents is not _no_files

    def describes_model(self, notes: Mapping[str, Any]) -> bool:
        """Return whether the library's JSON file is among `notes` and describes a model of the format.

        A config.json describes one if its `model_type` is in `model_types`, or if it has `config_key` and no `model_type`.
        A JSON file of another name describes one whenever it is not empty.

        Args:
            notes: parsed JSON files by their names, as in `Evidence.notes`.
        """
        config = notes.get(self.config_file) or {}
        if self.config_file != "config.json":
            return bool(config)
        if "model_type" in config:
            return config["model_type"] in self.model_types
        return bool(self.config_key) and self.config_key in config
