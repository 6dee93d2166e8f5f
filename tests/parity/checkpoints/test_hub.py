"""Models on the Hugging Face Hub: the cache works without a network, and the error for every failure is one line."""

import logging
import socket
import sys
import threading
import time
import warnings

import pytest

from parity.checkpoints import hub
from vit_spec import InputError

library = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")
constants = pytest.importorskip("huggingface_hub.constants")

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Make a cache with one model, as huggingface_hub stores it, and return the folder of its snapshot."""
    repo = tmp_path / "models--google--vit"
    snapshot = repo / "snapshots" / SHA
    (snapshot / "sub").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SHA)
    for name in ("config.json", "model.safetensors", "sub/model.npz"):
        (snapshot / name).write_bytes(b"")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return snapshot


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let every connection fail at once, and return the list of attempts."""
    attempts = []

    def refuse(*arguments, **options):
        attempts.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    return attempts


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("hf://google/vit", ""),
        (f"hf://google/vit@{SHA}", ""),
        ("hf://google/vit@main", ""),
        ("hf://google/vit/model.safetensors", "model.safetensors"),
        ("hf://google/vit@main/sub/model.npz", "sub/model.npz"),
        ("hf://google/vit/sub", "sub"),
    ],
)
def test_a_cached_model_is_found_without_a_network(cache, no_network, name, inside):
    assert hub.resolve(name) == cache / inside
    assert not no_network


@pytest.mark.parametrize("name", ["hf://google/other", "hf://google/vit@other", "hf://google/vit/other.npz"])
def test_without_a_network_the_error_comes_at_once_and_suggests_a_path(cache, no_network, monkeypatch, name):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s for a network"))
    with pytest.raises(InputError) as error:
        hub.resolve(name)
    assert (
        str(error.value)
        == f"{name} is not in the cache and the hub is out of reach: give the path of a file or folder instead"
    )
    assert len(no_network) <= 1


def test_a_cached_snapshot_without_weights_is_not_used(cache):
    (cache / "model.safetensors").unlink()
    with pytest.raises(InputError, match="is not in the cache"):
        hub.resolve("hf://google/vit")


def test_a_cache_with_other_weights_is_completed_from_the_hub_and_said_to_be_partial_without_it(
    cache, make_hub, monkeypatch, capfd
):
    (cache / "model.safetensors").rename(cache / "ema.safetensors")
    fake = make_hub(["model.safetensors", "ema.safetensors", "config.json"])
    monkeypatch.setattr(hub, "_find_in_cache", lambda *arguments: cache)
    assert hub.resolve("hf://google/vit") == fake.snapshot and fake.fetched == ["model.safetensors", "config.json"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.resolve("hf://google/vit") == cache
    assert "the hub is out of reach, so weights in the cache are read" in capfd.readouterr().err


def test_several_weight_files_of_no_library_are_listed(make_hub):
    make_hub(["a.pth", "b.npz"])
    with pytest.raises(InputError, match=r"^hf://google/vit holds 2 candidates .*: give the path of one, such as hf://goo"):
        hub.resolve("hf://google/vit")


def test_no_connection_is_made_with_HF_HUB_OFFLINE(cache, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="out of reach"):
        hub.resolve("hf://google/other")
    assert not no_network


@pytest.mark.parametrize(
    "name",
    [
        "hf://vit",
        "hf://",
        "hf://a/b/../c",
        "hf://../b",
        "hf://a/..",
        "hf://a/b@",
        "hf://a/b@x y",
        "hf://a//b",
        "a/b",
        "hf://a/b/\nc",
    ],
)
def test_a_malformed_name_is_refused(name):
    with pytest.raises(InputError) as error:
        hub.resolve(name)
    assert "expected hf://owner/name, " in str(error.value) and "\n" not in str(error.value)


def test_without_the_library_the_install_command_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="pip install huggingface_hub"):
        hub.resolve("hf://google/vit")


@pytest.mark.parametrize(
    ("files", "inside", "chosen"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin", "README.md"], "", ["model.safetensors", "config.json"]),
        (["a-1.safetensors", "a.safetensors.index.json", "a.md"], "", ["a-1.safetensors", "a.safetensors.index.json"]),
        (["flax_model.msgpack", "pytorch_model.bin"], "", ["pytorch_model.bin"]),
        (["pytorch_model.bin", "a.npz"], "", ["pytorch_model.bin"]),
        (["model.pth", "b.bin"], "", ["model.pth"]),
        (["a.pth", "onnx/model.safetensors"], "", ["a.pth"]),
        (["README.md"], "", []),
        (["a.npz", "b.npz", "config.json"], "b.npz", ["b.npz", "config.json"]),
        (["s/a.npz", "s/config.json", "config.json"], "s/a.npz", ["s/a.npz", "s/config.json"]),
        (["s/a.npz", "s/t/b", "c"], "s", ["s/a.npz", "s/t/b"]),
        (["a.npz"], "b.npz", []),
    ],
)
def test_only_the_files_that_the_library_of_the_model_reads_are_chosen(files, inside, chosen):
    assert hub.choose_files(files, inside) == chosen


class Hub:
    """A stand-in for the library huggingface_hub, with one model."""

    errors = errors

    def __init__(self, files, snapshot, failure=None):
        self.files, self.snapshot, self.failure = files, snapshot, failure
        self.fetched = []

    def HfApi(self):
        return self

    def list_repo_files(self, repo, revision=None):
        if self.failure:
            raise self.failure
        return self.files

    def snapshot_download(self, repo, *, revision=None, local_files_only=False, allow_patterns=(), etag_timeout=None):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        self.fetched = list(allow_patterns)
        return str(self.snapshot)


@pytest.fixture
def make_hub(monkeypatch, tmp_path):
    """Return a function that replaces the library by a stand-in with the given files or failure."""

    def make(files, failure=None):
        fake = Hub(files, tmp_path, failure)
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        monkeypatch.setattr(socket, "create_connection", lambda *arguments, **options: socket.socket())
        return fake

    return make


def test_only_the_needed_files_are_downloaded(make_hub, tmp_path):
    fake = make_hub(["model.safetensors", "pytorch_model.bin", "config.json"])
    assert hub.resolve("hf://google/vit") == tmp_path
    assert fake.fetched == ["model.safetensors", "config.json"]


def test_the_files_of_a_model_without_weights_are_listed(make_hub):
    make_hub(["README.md", "tokenizer.json"])
    with pytest.raises(InputError, match=r"has no weights of a known kind: it holds README.md, tokenizer.json"):
        hub.resolve("hf://google/vit")


@pytest.mark.parametrize(
    ("failure", "what"),
    [
        (OSError("reset\nby peer"), "could not be fetched .OSError."),
        (errors.HFValidationError("bad"), "the hub has no"),
        (type("Refused", errors.HfHubHTTPError.__bases__[:1], {})("403\nForbidden"), "could not be fetched .Refused."),
    ],
)
def test_a_failed_request_is_reported_in_one_line(make_hub, failure, what):
    make_hub([], failure)
    with pytest.raises(InputError, match=what) as error:
        hub.resolve("hf://google/vit")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("failure", [ValueError("a\nb"), TypeError(), RecursionError(), KeyError("sha"), TimeoutError()])
def test_an_invalid_response_is_reported_in_one_line(make_hub, failure):
    make_hub([], failure)
    with pytest.raises(InputError, match=f"could not be fetched .{type(failure).__name__}.: try again") as error:
        hub.resolve("hf://google/vit")
    assert "\n" not in str(error.value)


def test_a_hub_that_never_answers_times_out(make_hub, monkeypatch):
    ended = threading.Event()
    fake = make_hub(["model.safetensors"])
    monkeypatch.setattr(fake, "list_repo_files", lambda *arguments, **options: ended.wait(60), raising=False)
    monkeypatch.setattr(hub, "LISTING_TIMEOUT", 0.1)
    with pytest.raises(InputError, match="the hub does not answer within 0 s: try later, or give the path of a file"):
        hub.resolve("hf://google/vit")
    ended.set()


def test_escape_sequences_in_log_lines_of_the_library_are_escaped(make_hub, monkeypatch, capfd):
    def logging_download(*arguments, **options):
        logging.getLogger("huggingface_hub.file_download").warning("\x1b[31mwait\nor not")
        warnings.warn("\x1b[31mwait", stacklevel=1)
        return str(fake.snapshot)

    fake = make_hub(["model.safetensors"])
    monkeypatch.setattr(
        fake, "snapshot_download", lambda *a, local_files_only=False, **b: logging_download(), raising=False
    )
    monkeypatch.setattr(hub, "_find_in_cache", lambda *arguments: None)
    hub.resolve("hf://google/vit")
    assert capfd.readouterr().err == "\\x1b[31mwait or not\n"
