"""Fuzz test of the checkpoint readers: each damaged file must be read, or refused in one line, in little time and memory.

    python -m benchmarks.fuzz --seconds 600

It prints the figures of the section "Fuzzing" of docs/measurements/conversion.md.  Small valid files of every container are
mutated: bits are flipped; bytes are replaced, removed, duplicated, zeroed or taken from another file; lengths are set to
extremes; files are truncated.  Other files are .pth files with random pickle programs.  These programs repeat their
instructions up to 1,000 times, on objects in the memo.  Each file is opened, read in full and converted.  A failure is an
exception other than `InputError`, an unexpectedly large array, a temporary file that is not removed, or a file that takes
more than five seconds of processor time.  Memory that grows by more than a gigabyte is reported.
"""

import argparse
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

import parity
from parity.checkpoints import containers
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from vit_spec import InputError, ViTConfig

# Can be inferred from the tensors, for containers that cannot store a config.
CONFIG = ViTConfig(image_size=4, patch_size=2, width=64, depth=2, num_heads=1, mlp_dim=6, num_classes=3)
LIMIT_SECONDS, LIMIT_BYTES = 5.0, 1 << 30
RANDOM_PICKLE = "pth, random pickle"
EXTREME_LENGTHS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def write_valid_files(folder: Path) -> dict[str, Path]:
    """Write valid files or folders of each container, and return their paths by name."""
    rng = np.random.default_rng(0)
    arrays = {
        key: rng.standard_normal(layout.shape(CONFIG.sizes), np.float32)
        for layout in get("torch").layouts(CONFIG).values()
        for key in layout.keys(CONFIG.sizes)
    }
    paths = {}
    for name in containers.names():
        container = containers.get(name)
        for to in ("torch", "jax"):
            path = folder / f"{name}-{to}{container.suffixes[0] if container.suffixes else ''}"
            checkpoint = Checkpoint(CONFIG, "torch", arrays)
            write(checkpoint, path, to, container=name)
            paths[f"{name}-{to}"] = path
    return paths


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return `data` with 1 to 16 random mutations; some splice in bytes of `other`."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        if not out:
            break
        offset, mutation = rng.randrange(len(out)), rng.randrange(8)
        length = min(rng.choice([1, 2, 4, 8, 64, 512]), len(out) - offset)
        if mutation == 0:
            out[offset] ^= 1 << rng.randrange(8)
        elif mutation == 1:
            out[offset : offset + length] = rng.randbytes(length)
        elif mutation == 2:
            del out[offset : offset + length]
        elif mutation == 3:
            out[offset:offset] = out[offset : offset + length]
        elif mutation == 4:
            out[offset : offset + length] = bytes(length)
        elif mutation == 5:
            size = rng.choice([1, 2, 4, 8])
            value = rng.choice(EXTREME_LENGTHS) % 256**size
            out[offset : offset + size] = value.to_bytes(size, rng.choice(["little", "big"]))  # type: ignore[arg-type]
        elif mutation == 6:
            start = rng.randrange(max(1, len(other)))
            out[offset : offset + length] = other[start : start + length]
        else:
            del out[offset:]
    return bytes(out)


def random_pickle(rng: random.Random) -> bytes:
    """Return a random pickle: constants, containers, calls and memo operations, repeated up to 1,000 times."""
    names = (b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"ctorch\ndevice\n", b"c_codecs\nencode\n", b"cnumpy\ndtype\n")
    names += (b"ccollections\nOrderedDict\n", b"cargparse\nNamespace\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
    constants = (b"N", b"K\1", b")", b"]", b"}", b"(", b"X\3\0\0\0abc", b"G" + bytes(8), b"\x8a\x09" + b"\x7f" * 9, *names)
    operations = (b"\x85", b"\x86", b"\x87", b"t", b"l", b"R", b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"0", b"2")
    memo = [b"q%c" % slot for slot in range(4)] + [b"h%c" % slot for slot in range(4)] * 2
    setup = b"".join(b"(K\1]}X\1\0\0\0aq%c0" % slot for slot in range(4))
    body = [rng.choice(rng.choice((constants, operations, memo))) for _ in range(rng.choice((4, 16, 64)))]
    return b"\x80\x02" + setup + b"".join(body) * rng.choice((1, 1, 10, 1000)) + b"."


def write_random_pth(target: Path, rng: random.Random) -> None:
    """Write a random pickle as a .pth file, a zip archive as torch.save writes it."""
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("archive/data.pkl", random_pickle(rng))
        file.writestr("archive/data/0", bytes(16))


def write_damaged_copy(source: Path, target: Path, other: bytes, rng: random.Random) -> None:
    """Write a damaged copy of a file, or a copy of a folder with one damaged file."""
    if source.is_dir():
        shutil.copytree(source, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        victim = rng.choice(files)
        victim.write_bytes(mutate(victim.read_bytes(), other, rng))
    else:
        target.write_bytes(mutate(source.read_bytes(), other, rng))


def try_reading(path: Path, folder: Path) -> str:
    """Open, read and convert a file; return "read", or "refused" if an InputError was raised."""
    try:
        checkpoint = parity.load(path)
        for _, array in converted_arrays(checkpoint, "jax"):
            assert array.size < 1 << 20
        parity.convert(path, folder / "out.safetensors", "torch")
        return "read"
    except InputError as error:
        assert "\n" not in str(error), error
        return "refused"


def main() -> None:
    """Print the outcomes and the slowest time of each container and format, then the growth of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    outcomes: dict[str, Counter[str]] = {}
    slowest: Counter[str] = Counter()
    try:
        valid = write_valid_files(folder)
        donors = [path.read_bytes() for path in valid.values() if path.is_file()]
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        deadline, before = time.monotonic() + args.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while time.monotonic() < deadline:
            name = rng.choice([*valid, RANDOM_PICKLE])
            work = folder / "work"
            work.mkdir()
            if name == RANDOM_PICKLE:
                target = work / "program.pth"
                write_random_pth(target, rng)
            else:
                target = work / valid[name].name
                write_damaged_copy(valid[name], target, rng.choice(donors), rng)
            start = time.process_time()
            try:
                outcome = try_reading(target, work)
            except Exception:
                outcome = "FAILED"
                saved_path = Path(tempfile.mkdtemp(prefix="fuzz-")) / target.name
                (shutil.copytree if target.is_dir() else shutil.copy)(target, saved_path)
                print(f"{name}: {saved_path}\n{traceback.format_exc(limit=-4)}", flush=True)
            seconds = time.process_time() - start
            leftovers = {entry for entry in os.listdir(work) if entry.endswith((".partial", ".old"))}
            if seconds > LIMIT_SECONDS or leftovers:
                outcome = "FAILED"
                print(f"{name}: {seconds:.1f} s, temporary files left: {leftovers or 'none'}", flush=True)
            outcomes.setdefault(name, Counter())[outcome] += 1
            slowest[name] = max(slowest[name], seconds)  # type: ignore[assignment]
            shutil.rmtree(work)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        for name, counts in sorted(outcomes.items()):
            counts_text = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
            print(f"{name}: {sum(counts.values()):,} files: {counts_text}; slowest {slowest[name]:.2f} s")
        print(f"memory grew by {peak >> 20} MiB{'' if peak < LIMIT_BYTES else ': TOO MUCH'}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
