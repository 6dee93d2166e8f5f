"""Program that matches the keys of a file with a regular expression; `ignored_keys` runs it and limits its time.

It reads {"pattern": ..., "keys": [...]} from stdin, and writes the fields of `ignored_keys._Answer` to stdout as JSON.

    python -I -S ignored_keys_child.py < REQUEST
"""

import json
import re
import sys
import warnings


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    try:
        pattern = re.compile(request["pattern"])
    except (re.error, OverflowError) as error:
        json.dump({"error": str(error), "matches": [], "part": None}, sys.stdout)
        return
    keys = request["keys"]
    matches = [n for n, key in enumerate(keys) if pattern.fullmatch(key)]
    part = None if matches else next((n for n, key in enumerate(keys) if pattern.search(key)), None)
    json.dump({"error": "", "matches": matches, "part": part}, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # such as that a set may be nested in a future version of Python
    main()
