"""`hf://OWNER/NAME`, optionally with @REVISION and /FOLDER: a data set of the Hugging Face hub, read as Parquet.

The hub's listing decides which files belong to the data set; only those that the library's cache lacks are downloaded.
If the hub cannot be reached, the files in the cache are the data set.  Only Parquet files are read: for a data set in
another form, the hub itself makes them in a separate revision, hf://OWNER/NAME@~parquet.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.checkpoints.hub import CONNECT_TIMEOUT, LISTING_TIMEOUT, PREFIX, call_hub, is_reachable
from train.data.sources import parquet
from train.data.sources.examples import DatasetSplits
from train.data.sources.shards import group_by_split
from vit_spec import InputError

_NAME = re.compile(r"//([\w.-]+/[\w.-]+)(?:@([\w.-]+|~parquet))?((?:/[\w.+-]+)*)", re.ASCII)
_FORM = "hf://owner/name, hf://owner/name@revision or hf://owner/name/folder"
_CONVERTED = "refs/convert/parquet"


def open_splits(place: str, label: str | None = None, image: str | None = None) -> DatasetSplits:
    """Open a data set of the hub, or without a network the files of it that are in the cache.

    label, image: see `parquet.open_splits`.

    Raises:
        InputError: a malformed name, no such data set, no Parquet files in it, no network, or no huggingface_hub; and
            everything that `parquet.open_splits` raises.
    """
    name = f"{PREFIX}{place.removeprefix('//')}"
    match = _NAME.fullmatch(place)
    if not match or any(part.strip(".") == "" for part in re.split(r"[/@]", place.removeprefix("//"))):
        raise InputError(f"{name!r} is not the name of a data set on the hub: expected {_FORM}")
    repo, revision, inside = match[1], _CONVERTED if match[2] == "~parquet" else match[2], match[3].strip("/")
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError:
        raise InputError(f"{name}: to fetch from the hub, pip install huggingface_hub; or give parquet:PATH") from None

    if is_reachable():
        return parquet.open_splits(str(_download(hub, name, repo, revision, inside)), label, image)
    folder = _cached_path(hub, repo, revision, inside)
    if folder is None:
        raise InputError(f"{name} is not complete in the cache and the hub is out of reach: give parquet:PATH instead")
    found = parquet.open_splits(str(folder), label, image)
    return replace(found, notes=(*found.notes, f"the hub is out of reach: of {name} only the files in the cache are used"))


def _cached_path(hub: Any, repo: str, revision: str | None, inside: str) -> Path | None:
    """Return the path in the cache if it has Parquet files with no numbered shard missing, else None."""
    try:
        snapshot = Path(hub.snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, FileNotFoundError, ValueError):
        return None
    place = snapshot / inside
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place] if place.is_file() else []
    try:
        return place if files and group_by_split(snapshot, files) else None
    except InputError:
        return None


def _download(hub: Any, name: str, repo: str, revision: str | None, inside: str) -> Path:
    """Download the Parquet files that the cache lacks; return the path of the data set in the cache."""

    def ask(question: Callable[..., Any], **more: Any) -> Any:
        return call_hub(hub, name, "parquet:PATH", question, repo, repo_type="dataset", revision=revision, **more)

    files: list[str] = ask(hub.HfApi().list_repo_files, timeout=LISTING_TIMEOUT)
    wanted = [file for file in files if file.endswith(".parquet") and (file == inside or _is_in_folder(file, inside))]
    if not wanted:
        raise InputError(f"{name} has no Parquet files there, but {', '.join(files[:8])}: try hf://{repo}@~parquet")
    return Path(ask(hub.snapshot_download, allow_patterns=wanted, etag_timeout=CONNECT_TIMEOUT)) / inside


def _is_in_folder(file: str, folder: str) -> bool:
    return not folder or file.startswith(f"{folder}/")
