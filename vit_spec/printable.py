"""Text from files, made safe to print: names in files can hold escape sequences, which a terminal would obey."""

import re
import unicodedata

LONGEST = 8000  # characters of a message; a longer one loses its middle

# Control characters, format characters (which reorder or hide text), halves of surrogate pairs, private and unassigned
# characters, separators of lines and of paragraphs.
_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}

_LEFT_OUT = re.compile(r" \.\.\. \((\d{1,3}(?:,\d{3}){0,4}) characters left out\) \.\.\. ")  # of a message in this one


def printable(text: str, *, keep: str = "", longest: int | None = None) -> str:
    r"""Return text with every character that a terminal may obey written as an escape, such as \x1b.

    keep: characters to leave as they are, such as "\n".
    longest: length above which the middle of the text is left out; None: any.
    """
    if not text.isprintable():
        text = "".join(each if each in keep or each.isprintable() else _escaped(each) for each in text)
    if longest is not None and len(text) > longest:
        head, tail = longest * 3 // 4, longest // 4
        middle = text[head:-tail]
        before = [(int(each[1].replace(",", "")), len(each[0])) for each in _LEFT_OUT.finditer(middle)]
        left = len(middle) + sum(count - length for count, length in before)
        text = f"{text[:head]} ... ({left:,} characters left out) ... {text[-tail:]}"
    return text


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _ESCAPED:  # a space of another width
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
