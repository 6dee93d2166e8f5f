"""Print the table "Against other implementations" of docs/measurements/parity.md: what each golden file proves.

The last column says how well.

    python -m tests.goldens.table

The difference is the largest relRMS between an output of the peer and that of either twin, in float64.
"""

from tests.goldens.golden import names, read
from tests.test_goldens import TWINS, relative_errors


def main() -> None:
    """Print a row for each golden file."""
    print("| file | what is compared | with | float64 |\n| --- | --- | --- | --- |")
    for name in names():
        golden = read(name)
        found = [max(relative_errors(golden, outputs(golden, golden.config)).values()) for outputs in TWINS.values()]
        text = " ".join(golden.provenance["anchors"].split())
        print(f"| `{name}` | {text} | {golden.provenance['peer']} | {max(found):.1e} |", flush=True)


if __name__ == "__main__":
    main()
