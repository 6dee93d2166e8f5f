"""What is asked of the file system: which files there are, what is in them, and why it gives none."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from vit_spec import InputError, bounded_json

_REMEDIES = {
    errno.EACCES: "let this user read it",
    errno.EPERM: "let this user read it",
    errno.ENOENT: "put it back, or take it out of the data",
    errno.EISDIR: "a file was expected there",
    errno.ELOOP: "mend the link",
    errno.EMFILE: "raise the limit of open files, ulimit -n",
    errno.ENFILE: "raise the limit of open files, ulimit -n",
}
_DAMAGE = (None, errno.EINVAL)  # EINVAL: what the file holds points to where no file reaches


_DEEPEST = 100  # folders in one another


class Unavailable(InputError):
    """A file that the system does not give.  It may be whole, so that nobody may leave it out as a damaged one."""


def unless_damaged(error: BaseException, name: object) -> None:
    """Raise `Unavailable` for an error of the system; return where it is what the file holds that is wrong."""
    if not isinstance(error, OSError) or error.errno in _DAMAGE:
        return
    reason = "is not there" if error.errno == errno.ENOENT else f"cannot be read ({os.strerror(error.errno)})"
    remedy = _REMEDIES.get(error.errno, "look at the disk it is on")
    raise Unavailable(f"{name} {reason}: {remedy}") from None


def below(folder: str, suffixes: tuple[str, ...], others: list[str] | None = None) -> Iterator[str]:
    """Yield the paths of files below a folder, relative to it and sorted, without asking for each file's kind.

    Names that begin with a dot are ignored.  Links to folders are followed, to each folder once: links to folders of links
    could lead to the same files in more ways than can be gone.

    suffixes: what the names end in, in any case.
    others: takes the paths of files that end in none of these.

    Raises:
        InputError: a link that leads back to a folder above it, or to where another one led; or folders too deep.
    """
    yield from _below(folder, suffixes, others, (), set(), 0)


def _below(
    folder: str, suffixes: tuple[str, ...], others: list[str] | None, links: tuple[str, ...], led: set[str], depth: int
) -> Iterator[str]:
    """Yield what `below` does.

    links: where the links lie that were followed to come here.
    led: takes where links lead.
    depth: folders between here and where it began.
    """
    if depth > _DEEPEST:
        raise InputError(f"{folder} lies more than {_DEEPEST} folders deep: move it up")
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        if entry.name.lower().endswith(suffixes):
            yield entry.name
        elif entry.is_dir():
            followed = (*links, _ahead(entry.path, links, led)) if entry.is_symlink() else links
            for name in _below(entry.path, suffixes, others, followed, led, depth + 1):
                yield f"{entry.name}/{name}"
        elif others is not None:
            others.append(entry.path)


def _ahead(link: str, links: tuple[str, ...], led: set[str]) -> str:
    """Return the folder that a link lies in; refuse a link from which one would come to it, or to those before, again.

    led: where other links led, to which this one is added.
    """
    here, there = os.path.realpath(os.path.dirname(link)), os.path.realpath(link)
    if any(os.path.commonpath([before, there]) == there for before in (*links, here)):
        raise InputError(f"{link} leads back to {there}, which it lies in: remove the link")
    if there in led:
        raise InputError(f"{link} leads to {there}, as another link does: remove one of them")
    led.add(there)
    return here


def content(path: Path, longest: int = 1 << 20) -> bytes:
    """Read a file of at most `longest` bytes; a pipe, of which one would wait for the writer, is none.

    Raises:
        InputError: another thing than a file, or a longer one.
    """
    try:
        return bounded_json.read_bytes(path, longest=longest)
    except InputError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        unless_damaged(error, path)
        raise


def stretch(path: str, start: int, size: int) -> bytes:
    """Read so many bytes of a file.

    Raises:
        EOFError: it ends before.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        if start + size > os.fstat(file).st_size:  # before memory is taken for it
            raise EOFError("it is cut short")
        data = os.pread(file, size, start)
    finally:
        os.close(file)
    if len(data) != size:
        raise EOFError("it is cut short")
    return data
