"""Names of models on the Hugging Face hub, and where their files lie on this machine."""

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from parity.terminal import note
from vit_spec import InputError

PREFIX = "hf://"

_FORM = "hf://owner/name, hf://owner/name@revision or hf://owner/name/path/of/a/file"
_NAME = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.+-]+)*)", re.ASCII)
_BESIDE = [
    *("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json"),
    "adapter_config.json",  # because of which weights are refused
]
_SAFE = ["*.safetensors", "*.safetensors.index.json"]
_KINDS = [_SAFE, ["*.msgpack", "*.msgpack.index.json"], ["*.npz"], ["*.bin", "*.bin.index.json"], ["*.pth"]]
SECONDS = 3.0
PATIENCE = 30.0  # seconds for a list of files; the library waits for as long as a server tells it to


def resolve(name: str) -> Path:
    """Return the folder of a model of the hub, or one file or folder in it, from the cache or else from the network.

    Of the weights that a model has in several containers only the safest is fetched: safetensors, msgpack, npz, then
    pickles.

    name: hf://owner/name[@revision][/path/in/repo]

    Raises:
        InputError: a name of another form, no such model or file, no network, or no huggingface_hub.
    """
    match = _NAME.fullmatch(name)
    words = [part for part in re.split(r"[/@]", name.removeprefix(PREFIX)) if part.strip(".") == ""]
    if not match or words:
        raise InputError(f"{name!r} is no name of a model on the hub: expected {_FORM}")
    repo, revision, inside = match[1], match[2], match[3].strip("/")
    try:
        import huggingface_hub.errors
    except ImportError:
        raise InputError(
            f"{name}: to fetch from the hub, pip install huggingface_hub; or give the path of a file"
        ) from None

    kept = _cached(huggingface_hub, repo, revision, inside)
    if kept is not None:
        return kept
    if not reachable():
        raise InputError(
            f"{name} is not in the cache and the hub is out of reach: give the path of a file or folder instead"
        )
    return _fetched(huggingface_hub, name, repo, revision, inside)


def _cached(hub: Any, repo: str, revision: str | None, inside: str) -> Path | None:
    """Return what the cache has: the file or folder that is asked for, or a snapshot with any weights in it."""
    try:
        snapshot = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, FileNotFoundError, ValueError):
        return None
    if inside:
        return snapshot / inside if (snapshot / inside).exists() else None
    patterns = [pattern for kind in _KINDS for pattern in kind]
    return snapshot if any(fnmatch(file.name, pattern) for file in snapshot.iterdir() for pattern in patterns) else None


def _fetched(hub: Any, name: str, repo: str, revision: str | None, inside: str) -> Path:
    def ask(question: Callable[..., Any], **more: Any) -> Any:
        return answered(hub, name, "the path of a file", question, repo, revision=revision, **more)

    files = ask(hub.HfApi().list_repo_files, patience=PATIENCE)
    wanted = chosen(files, inside)
    if not wanted:
        raise InputError(f"{name} has no {inside or 'weights of a known kind'}: it holds {', '.join(files[:20])}")
    snapshot = Path(ask(hub.snapshot_download, allow_patterns=wanted, etag_timeout=SECONDS))
    return snapshot / inside


def chosen(files: list[str], inside: str) -> list[str]:
    """Return which of a repository's files are needed: of its first container, or those at `inside`."""
    if inside in files:
        beside = [f"{inside.rpartition('/')[0]}/{name}".lstrip("/") for name in _BESIDE]
        return [inside, *(file for file in beside if file in files)]
    if inside:
        return [file for file in files if file.startswith(f"{inside}/")]
    top = [file for file in files if "/" not in file]
    for kind in _KINDS:
        if weights := [file for file in top if any(fnmatch(file, pattern) for pattern in kind)]:
            return [*weights, *(file for file in _BESIDE if file in top)]
    return []


def answered(
    hub: Any, name: str, instead: str, question: Callable[..., Any], *about: Any, patience: float | None = None, **more: Any
) -> Any:
    """Return what the hub's library answers.

    instead: what can be given where the hub does not help.
    patience: seconds after which no answer is waited for; None: it may take as long as files take to come.

    Raises:
        InputError: in a line, why `name` is not to be had.
    """
    try:
        with _spoken_safely(quiet=patience is not None):
            return _within(patience, partial(question, *about, **more))
    except hub.errors.GatedRepoError:
        raise InputError(
            f"{name} is only given to those who accepted its terms: do so on its page, then hf auth login"
        ) from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError):
        raise InputError(f"the hub has no {name}, or it is private: check the name, or hf auth login") from None
    except MemoryError:
        raise
    except _Silence:
        raise InputError(f"{name}: the hub does not answer within {patience:.0f} s: try later, or give {instead}") from None
    # The library takes what a server says as it comes, and fails in any way where that is nonsense; besides, of the HTTP
    # library below, another one in each version, no errors are known.
    except Exception as error:
        what = type(error).__name__
        raise InputError(f"{name} could not be fetched ({what}): try again, or give {instead}") from None


def _within(seconds: float | None, question: Callable[[], Any]) -> Any:
    """Return what a question answers.

    Raises:
        _Silence: it takes longer.
    """
    if seconds is None:
        return question()
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()  # which does not keep the process from ending
    if not wait([answer], seconds).done:
        raise _Silence
    return answer.result()


class _Silence(Exception):
    """A server that does not answer."""


@contextmanager
def _spoken_safely(quiet: bool) -> Iterator[None]:
    """Print what the hub's library logs as any other line, or not at all: servers can put escape sequences into it.

    Its bars of progress are for terminals alone; in a file, each step of them would be one more line.
    """
    logger, safe = logging.getLogger("huggingface_hub"), _Notes(logging.CRITICAL if quiet else logging.WARNING)
    before, propagates = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [safe], False
    bars = sys.modules.get("huggingface_hub.utils")
    hidden = bars is not None and not sys.stderr.isatty() and not bars.are_progress_bars_disabled()
    try:
        if bars is not None and hidden:
            bars.disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers, logger.propagate = before, propagates
        if bars is not None and hidden:
            bars.enable_progress_bars()


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def reachable() -> bool:
    """Return whether the hub, or the proxy before it, answers at all: its library would try for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
