"""`hf://OWNER/NAME`, with @REVISION and /FOLDER if wanted: a data set of the Hugging Face hub, fetched and read as Parquet.

What a data set holds is what the hub lists; of that, only what the library's cache does not have is fetched.  Where the
hub is out of reach, the files in the cache are the data set.  Only Parquet files count: a data set in another form has them
in the revision that the hub makes itself, hf://OWNER/NAME@~parquet.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.checkpoints.hub import PATIENCE, PREFIX, SECONDS, answered, reachable
from train.data.sources import parquet
from train.data.sources.shards import by_split
from train.data.sources.splitting import Found
from vit_spec import InputError

_NAME = re.compile(r"//([\w.-]+/[\w.-]+)(?:@([\w.-]+|~parquet))?((?:/[\w.+-]+)*)", re.ASCII)
_FORM = "hf://owner/name, hf://owner/name@revision or hf://owner/name/folder"
_CONVERTED = "refs/convert/parquet"


def find(place: str, label: str | None = None, image: str | None = None) -> Found:
    """Look into a data set of the hub, or without a network into what the cache has of it.

    Raises:
        InputError: a name of another form, no such data set, no Parquet files in it, no network, or no huggingface_hub; and
            what `parquet.find` raises.
    """
    name = f"{PREFIX}{place.removeprefix('//')}"
    match = _NAME.fullmatch(place)
    if not match or any(part.strip(".") == "" for part in re.split(r"[/@]", place.removeprefix("//"))):
        raise InputError(f"{name!r} is no name of a data set on the hub: expected {_FORM}")
    repo, revision, inside = match[1], _CONVERTED if match[2] == "~parquet" else match[2], match[3].strip("/")
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors
    except ImportError:
        raise InputError(f"{name}: to fetch from the hub, pip install huggingface_hub; or give parquet:PATH") from None

    if reachable():
        return parquet.find(str(_fetched(hub, name, repo, revision, inside)), label, image)
    folder = _cached(hub, repo, revision, inside)
    if folder is None:
        raise InputError(f"{name} is not whole in the cache and the hub is out of reach: give parquet:PATH instead")
    found = parquet.find(str(folder), label, image)
    return replace(found, notes=(*found.notes, f"the hub is out of reach: of {name} only the files in the cache are used"))


def _cached(hub: Any, repo: str, revision: str | None, inside: str) -> Path | None:
    """Return what the cache has, if it has Parquet files there and no numbered one is missing."""
    try:
        snapshot = Path(hub.snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, FileNotFoundError, ValueError):
        return None
    place = snapshot / inside
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place] if place.is_file() else []
    try:
        return place if files and by_split(snapshot, files) else None
    except InputError:
        return None


def _fetched(hub: Any, name: str, repo: str, revision: str | None, inside: str) -> Path:
    def ask(question: Callable[..., Any], **more: Any) -> Any:
        return answered(hub, name, "parquet:PATH", question, repo, repo_type="dataset", revision=revision, **more)

    files: list[str] = ask(hub.HfApi().list_repo_files, patience=PATIENCE)
    wanted = [file for file in files if file.endswith(".parquet") and (file == inside or _below(file, inside))]
    if not wanted:
        raise InputError(f"{name} has no Parquet files there, but {', '.join(files[:8])}: try hf://{repo}@~parquet")
    return Path(ask(hub.snapshot_download, allow_patterns=wanted, etag_timeout=SECONDS)) / inside


def _below(file: str, folder: str) -> bool:
    return not folder or file.startswith(f"{folder}/")
