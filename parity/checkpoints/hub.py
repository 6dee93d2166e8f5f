"""Models on the Hugging Face hub: find them in the local cache, or download the files that are needed."""

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from parity.checkpoints import containers
from parity.checkpoints.containers.shards import INDEX
from parity.terminal import print_note
from vit_spec import InputError

PREFIX = "hf://"

_NAME_FORMS = "hf://owner/name, hf://owner/name@revision or hf://owner/name/path/of/a/file"
_NAME = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?:/[\w.+-]+)*)", re.ASCII)
_COMPANION_FILES = [
    *("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json"),
    "adapter_config.json",  # its presence shows that the weights need an adapter; they are then refused
]
_FIRST_CHOICE = "model.safetensors"  # every library that reads this name prefers it to all others in the repository
CONNECT_TIMEOUT = 3.0  # seconds
LISTING_TIMEOUT = 30.0  # seconds for the list of files; the library alone would wait as long as a server asks it to


def resolve(name: str) -> Path:
    """Return the local path of a model on the hub, or of one file or folder in it: from the cache, or else downloaded.

    Of several weight files, the one that the model's library reads is downloaded; see `containers.find`.  The cache is used
    without asking the hub only if it has the file that every library reads first, or if the hub is out of reach.

    Args:
        name: hf://owner/name[@revision][/path/in/repo]

    Raises:
        InputError: a malformed name, no such model or file, no network, or huggingface_hub is not installed.
    """
    match = _NAME.fullmatch(name)
    dots_only = [part for part in re.split(r"[/@]", name.removeprefix(PREFIX)) if part.strip(".") == ""]
    if not match or dots_only:
        raise InputError(f"{name!r} is not the name of a model on the hub: expected {_NAME_FORMS}")
    repo, revision, inside = match[1], match[2], match[3].strip("/")
    try:
        import huggingface_hub.errors
    except ImportError:
        raise InputError(
            f"{name}: to fetch from the hub, pip install huggingface_hub; or give the path of a file"
        ) from None

    cached = _find_in_cache(huggingface_hub, repo, revision, inside)
    if cached is not None and (inside or _find_weights(cached) == cached / _FIRST_CHOICE):
        return cached
    if not is_reachable():
        if cached is not None:
            print_note(f"{name}: the hub is out of reach, so weights in the cache are read, maybe not its first choice")
            return cached
        raise InputError(
            f"{name} is not in the cache and the hub is out of reach: give the path of a file or folder instead"
        )
    return _download(huggingface_hub, name, repo, revision, inside)


def _find_in_cache(hub: Any, repo: str, revision: str | None, inside: str) -> Path | None:
    """Return the file or folder `inside` in the cache, or for "" a snapshot that has weights; None if there is none."""
    try:
        snapshot = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, FileNotFoundError, ValueError):
        return None
    if inside:
        return snapshot / inside if (snapshot / inside).exists() else None
    return snapshot if _find_weights(snapshot) != snapshot else None


def _find_weights(snapshot: Path) -> Path | None:
    """Return the weights in a snapshot, or `snapshot` itself if it has none; None if it has several candidates."""
    try:
        return containers.find(snapshot)
    except InputError:
        return None


def _download(hub: Any, name: str, repo: str, revision: str | None, inside: str) -> Path:
    """Download the weights of a model and the JSON files beside them, or only `inside`; return the local path."""

    def call(function: Callable[..., Any], **kwargs: Any) -> Any:
        return call_hub(hub, name, "the path of a file", function, repo, revision=revision, **kwargs)

    files = call(hub.HfApi().list_repo_files, timeout=LISTING_TIMEOUT)
    try:
        wanted = choose_files(files, inside)
    except InputError as error:
        raise InputError(f"{name} {error}, such as {name}/FILE") from None
    if not wanted:
        raise InputError(f"{name} has no {inside or 'weights of a known kind'}: it holds {', '.join(files[:20])}")
    snapshot = Path(call(hub.snapshot_download, allow_patterns=wanted, etag_timeout=CONNECT_TIMEOUT))
    return snapshot / inside


def choose_files(files: list[str], inside: str) -> list[str]:
    """Return the files of a repository to download: those at `inside`, or for "" the weights that its library reads.

    Raises:
        InputError: it is not clear which file has the weights; the message lists the candidates.
    """
    if inside in files:
        companions = [f"{inside.rpartition('/')[0]}/{name}".lstrip("/") for name in _COMPANION_FILES]
        return [inside, *(file for file in companions if file in files)]
    if inside:
        return [file for file in files if file.startswith(f"{inside}/")]
    top = [file for file in files if "/" not in file]
    chosen = containers.choose(top)
    if chosen is None:
        return []
    stem = chosen.removesuffix(INDEX)  # the names of the shards are in the index, so that all files are needed
    weights = [file for file in top if file == chosen or (stem != chosen and file.endswith(Path(stem).suffix))]
    return [*weights, *(file for file in (*_COMPANION_FILES, f"{chosen}.parity.json") if file in top)]


def call_hub(
    hub: Any, name: str, instead: str, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
) -> Any:
    """Call a function of huggingface_hub, and convert every failure into an InputError of one line.

    Args:
        hub: the library, as a module.
        name: name of the fetched model or data, for the message.
        instead: what the user can give instead of a name on the hub, for the message.
        function: the function to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        timeout: in seconds; None for calls that download files, which may take any time.

    Raises:
        InputError: says why `name` cannot be fetched.
    """
    try:
        with _safe_logging(quiet=timeout is not None):
            return _call_with_timeout(timeout, partial(function, *args, **kwargs))
    except hub.errors.GatedRepoError:
        raise InputError(
            f"{name} is only available to users who accepted its terms: do so on its page, then hf auth login"
        ) from None
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError):
        raise InputError(f"the hub has no {name}, or it is private: check the name, or hf auth login") from None
    except MemoryError:
        raise
    except _NoAnswer:
        raise InputError(f"{name}: the hub does not answer within {timeout:.0f} s: try later, or give {instead}") from None
    # The library does not validate responses, so an invalid response can raise any exception.  The exceptions of its HTTP
    # library are unknown too, because versions use different ones.
    except Exception as error:
        what = type(error).__name__
        raise InputError(f"{name} could not be fetched ({what}): try again, or give {instead}") from None


def _call_with_timeout(seconds: float | None, function: Callable[[], Any]) -> Any:
    """Call a function and return its result.

    Raises:
        _NoAnswer: the function takes longer than `seconds`; None means no limit.
    """
    if seconds is None:
        return function()
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=call, daemon=True).start()  # a daemon thread does not keep the process from ending
    if not wait([result], seconds).done:
        raise _NoAnswer
    return result.result()


class _NoAnswer(Exception):
    """The server does not answer in time."""


@contextmanager
def _safe_logging(quiet: bool) -> Iterator[None]:
    """Print the log of huggingface_hub as our notes, which escape control characters that a server sends.

    Progress bars of the library are hidden unless stderr is a terminal: in a file, each step would be another line.

    Args:
        quiet: print only critical records.
    """
    logger, handler = logging.getLogger("huggingface_hub"), _NoteHandler(logging.CRITICAL if quiet else logging.WARNING)
    handlers_before, propagate_before = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [handler], False
    utils = sys.modules.get("huggingface_hub.utils")
    hide_bars = utils is not None and not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    try:
        if utils is not None and hide_bars:
            utils.disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers, logger.propagate = handlers_before, propagate_before
        if utils is not None and hide_bars:
            utils.enable_progress_bars()


class _NoteHandler(logging.Handler):
    """Prints log records as notes, which escape control characters."""

    def emit(self, record: logging.LogRecord) -> None:
        print_note(record.getMessage())


def is_reachable() -> bool:
    """Return whether the hub, or the proxy in front of it, accepts connections.

    The library itself would try for half a minute.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or endpoint)
    try:
        socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), CONNECT_TIMEOUT
        ).close()
    except (OSError, ValueError):
        return False
    return True
