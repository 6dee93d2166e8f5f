"""Make text from files safe to print: names in files can contain escape sequences, which a terminal would execute."""

import re
import unicodedata
from collections.abc import Iterable

MAX_MESSAGE_LENGTH = 8000  # characters; the middle of a longer message is omitted

# Unicode categories: control characters, format characters (which reorder or hide text), surrogates, private-use and
# unassigned characters, line and paragraph separators.
_ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}

# The mark of an omission; a message that quotes another message can contain it.
_OMISSION = re.compile(r" \.\.\. \((\d{1,3}(?:,\d{3}){0,4}) characters left out\) \.\.\. ")


def printable(text: str, *, keep: str = "", max_length: int | None = None) -> str:
    r"""Return the text with every character that can control a terminal replaced by an escape, such as \x1b.

    Args:
        text: any text.
        keep: characters that are not escaped, such as "\n".
        max_length: characters; the middle of a longer text is omitted, and the number of omitted characters is given.  None
            means no limit.
    """
    if not text.isprintable():
        text = "".join(each if each in keep or each.isprintable() else _escape(each) for each in text)
    if max_length is not None and len(text) > max_length:
        head, tail = max_length * 3 // 4, max_length // 4
        middle = text[head:-tail]
        earlier = [(int(each[1].replace(",", "")), len(each[0])) for each in _OMISSION.finditer(middle)]
        omitted = len(middle) + sum(count - length for count, length in earlier)
        text = f"{text[:head]} ... ({omitted:,} characters left out) ... {text[-tail:]}"
    return text


def _escape(character: str) -> str:
    if unicodedata.category(character) not in _ESCAPED_CATEGORIES:  # a space other than U+0020
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8; names of files that are not have lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_in_other_form(name: str, names: Iterable[str]) -> bool:
    """Return whether one of other names looks the same, but has accents as characters of their own, or `name` has."""
    return unicodedata.normalize("NFC", name) in {unicodedata.normalize("NFC", each) for each in names}


def escape_surrogates(text: str) -> str:
    r"""Return a text that UTF-8 can hold: lone surrogates, of names of files that are not UTF-8, become escapes: \udcff."""
    return text.encode(errors="backslashreplace").decode()
