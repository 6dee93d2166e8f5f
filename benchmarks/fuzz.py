"""Damaged and hostile files, by the thousand: every one is read, or refused in one line, in little time and memory.

    python -m benchmarks.fuzz --seconds 600

Small valid files of every container are mutated (bits flipped, bytes replaced, runs cut out, doubled, zeroed or taken
from another file, lengths set to extremes), opened, read in full and converted.  So are .pth files around random programs
of pickle instructions, which repeat themselves through the memo.  What counts as a failure: any exception
but the project's own, an array of another shape than was declared, anything left behind, a file that takes longer than
five seconds or more than a gigabyte.
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
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint, translate
from parity.checkpoints.writing import write
from vit_spec import InputError, ViTConfig

# One that is inferred from its tensors too, for containers without room for a config.
CONFIG = ViTConfig(image_size=4, patch_size=2, width=64, depth=2, num_heads=1, mlp_dim=6, num_classes=3)
LIMIT_SECONDS, LIMIT_BYTES = 5.0, 1 << 30
PROGRAM = "pth, a random pickle"
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def seeds(folder: Path) -> dict[str, Path]:
    """Write one valid file or folder a container, and return them by its name."""
    rng = np.random.default_rng(0)
    arrays = {
        key: rng.standard_normal(layout.shape(CONFIG.sizes), np.float32)
        for layout in get("torch").layouts(CONFIG).values()
        for key in layout.keys(CONFIG.sizes)
    }
    found = {}
    for name in containers.containers():
        container = containers.get(name)
        for to in ("torch", "jax"):
            path = folder / f"{name}-{to}{container.suffixes[0] if container.suffixes else ''}"
            checkpoint = Checkpoint(CONFIG, "torch", arrays)
            write(checkpoint, path, to, container=name)
            found[f"{name}-{to}"] = path
    return found


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return damaged bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        if not out:
            break
        at, kind = rng.randrange(len(out)), rng.randrange(8)
        length = min(rng.choice([1, 2, 4, 8, 64, 512]), len(out) - at)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            out[at : at + length] = bytes(length)
        elif kind == 5:
            size = rng.choice([1, 2, 4, 8])
            value = rng.choice(EXTREMES) % 256**size
            out[at : at + size] = value.to_bytes(size, rng.choice(["little", "big"]))  # type: ignore[arg-type]
        elif kind == 6:
            start = rng.randrange(max(1, len(other)))
            out[at : at + length] = other[start : start + length]
        else:
            del out[at:]
    return bytes(out)


def program(rng: random.Random) -> bytes:
    """Return a random pickle: constants, containers, calls and the memo, many of them again and again."""
    names = (b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"ctorch\ndevice\n", b"c_codecs\nencode\n", b"cnumpy\ndtype\n")
    names += (b"ccollections\nOrderedDict\n", b"cargparse\nNamespace\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
    simple = (b"N", b"K\1", b")", b"]", b"}", b"(", b"X\3\0\0\0abc", b"G" + bytes(8), b"\x8a\x09" + b"\x7f" * 9, *names)
    acting = (b"\x85", b"\x86", b"\x87", b"t", b"l", b"R", b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"0", b"2")
    memo = [b"q%c" % place for place in range(4)] + [b"h%c" % place for place in range(4)] * 2
    starts = b"".join(b"(K\1]}X\1\0\0\0aq%c0" % place for place in range(4))
    body = [rng.choice(rng.choice((simple, acting, memo))) for _ in range(rng.choice((4, 16, 64)))]
    return b"\x80\x02" + starts + b"".join(body) * rng.choice((1, 1, 10, 1000)) + b"."


def programmed(target: Path, rng: random.Random) -> None:
    """Write what torch.save would have written around a random pickle."""
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("archive/data.pkl", program(rng))
        file.writestr("archive/data/0", bytes(16))


def damage(seed: Path, target: Path, other: bytes, rng: random.Random) -> None:
    """Write a damaged copy of a file, or of a folder in which one file is damaged."""
    if seed.is_dir():
        shutil.copytree(seed, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        victim = rng.choice(files)
        victim.write_bytes(mutated(victim.read_bytes(), other, rng))
    else:
        target.write_bytes(mutated(seed.read_bytes(), other, rng))


def attempt(path: Path, folder: Path) -> str:
    """Open, read and convert a file; return what came of it."""
    try:
        checkpoint = parity.load(path)
        for _, array in translate(checkpoint, "jax"):
            assert array.size < 1 << 20
        parity.convert(path, folder / "out.safetensors", "torch")
        return "read"
    except InputError as error:
        assert "\n" not in str(error), error
        return "refused"


def main() -> None:
    """Print a line a container: how many files, what came of them, the slowest and the largest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, folder = random.Random(given.seed), Path(tempfile.mkdtemp())
    outcomes: dict[str, Counter[str]] = {}
    slowest: Counter[str] = Counter()
    try:
        valid = seeds(folder)
        donors = [path.read_bytes() for path in valid.values() if path.is_file()]
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        end, before = time.monotonic() + given.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while time.monotonic() < end:
            name = rng.choice([*valid, PROGRAM])
            work = folder / "work"
            work.mkdir()
            if name == PROGRAM:
                target = work / "program.pth"
                programmed(target, rng)
            else:
                target = work / valid[name].name
                damage(valid[name], target, rng.choice(donors), rng)
            start = time.process_time()
            try:
                outcome = attempt(target, work)
            except Exception:
                outcome = "FAILED"
                kept = Path(tempfile.mkdtemp(prefix="fuzz-")) / target.name
                (shutil.copytree if target.is_dir() else shutil.copy)(target, kept)
                print(f"{name}: {kept}\n{traceback.format_exc(limit=-4)}", flush=True)
            seconds = time.process_time() - start
            left = {entry for entry in os.listdir(work) if entry.endswith((".partial", ".old"))}
            if seconds > LIMIT_SECONDS or left:
                outcome = "FAILED"
                print(f"{name}: {seconds:.1f} s, left {left or 'nothing'}", flush=True)
            outcomes.setdefault(name, Counter())[outcome] += 1
            slowest[name] = max(slowest[name], seconds)  # type: ignore[assignment]
            shutil.rmtree(work)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        for name, counts in sorted(outcomes.items()):
            told = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
            print(f"{name}: {sum(counts.values()):,} files: {told}; slowest {slowest[name]:.2f} s")
        print(f"memory grew by {peak >> 20} MiB{'' if peak < LIMIT_BYTES else ': TOO MUCH'}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
