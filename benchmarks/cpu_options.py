"""Options of XLA and of the system that a process gets at its start: their effect on a step of both trainers, on CPUs.

Run `python -m benchmarks.cpu_options`.  It prints the table of docs/performance.md.  Each option has a process of its own.
The processes take turns, and times are divided by those of the process without options in the same turn.
"""

from benchmarks.conversion import format_spread
from benchmarks.trainer_steps import Case, take_turns

MODEL, BATCH_SIZE, TURNS = "vit_s16", 8, 5
YNN = "--xla_cpu_experimental_ynn_fusion_type"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
OPTIONS: dict[str, dict[str, dict[str, str]]] = {
    "train.jax": {
        "none": {},
        "no YNN": {"XLA_FLAGS": f"{YNN}="},
        "YNN without reductions": {"XLA_FLAGS": f"{YNN}=-reduce"},
        "YNN without single products": {"XLA_FLAGS": f"{YNN}=-individual_dot"},
        "vectors of 512 bits": {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"},
        "huge pages": HUGE_PAGES,
    },
    "train.torch": {"none": {}, "huge pages": HUGE_PAGES},
}


def main() -> None:
    """Print the table."""
    print("| trainer | option | step / step without | evaluation / evaluation without |\n|---|---|---|---|")
    for trainer in OPTIONS:
        cases = {
            name: Case(trainer, MODEL, BATCH_SIZE, variables=variables) for name, variables in OPTIONS[trainer].items()
        }
        turns = take_turns(cases, TURNS)
        for name, measured in turns.items():
            pairs = list(zip(measured, turns["none"], strict=True))
            cells = (format_spread([own[i] / other[i] for own, other in pairs]) for i in range(2))
            print(f"| {trainer} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
