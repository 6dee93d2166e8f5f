"""The files of weights in a run folder: the newest and the best, right after every interruption and failed write."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.loop.engine import Engine
from train.loop.progress import ProgressDisplay
from train.loop.run_folder import RunFolder, convert_write_errors, file_sha256
from vit_spec import InputError


@dataclass
class WeightFiles:
    """Writes the engine's weights to the files of a run.

    recorded: by the name of a file of best weights, its "step" and its "sha256".  Each checkpoint stores it.
    """

    engine: Engine
    run: RunFolder
    display: ProgressDisplay
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    _has_checkpoint: bool = False  # whether a checkpoint of this run is complete

    def set_has_checkpoint(self) -> None:
        """Call this when a checkpoint of the run is complete."""
        if not self._has_checkpoint:
            self._has_checkpoint = True
            self.run.mark_first_checkpoint_finished()

    def write_newest(self) -> None:
        """Write the newest weights; if there is an EMA, write it and the weights themselves.

        Raises:
            InputError: a file cannot be written.
        """
        self._write(self.run.weights)
        if self.engine.has_ema:
            self._write(self.run.weights_raw, raw=True)

    def write_best(self, path: Path, step: int, *, raw: bool = False) -> None:
        """Write the engine's weights, those of `step`, as the best weights.

        raw: if there is an EMA, write the weights themselves.

        Raises:
            InputError: the file cannot be written.
        """
        self._write(path, raw=raw)
        # Only the main process knows that the file is complete.  Its record is the one that a checkpoint stores.
        self.recorded[path.name] = {"step": step, "sha256": file_sha256(path) if self.engine.is_main else None}

    def restore_best(self, path: Path, done: int, *, is_newest: bool, raw: bool = False) -> bool:
        """Rewrite a file of best weights that is missing or has other weights than those recorded.

        All processes must decide the same: no process writes the file before all have read it.

        done: number of steps done; the engine has the weights after them, also afterwards.
        is_newest: whether these are the best weights.  Used for checkpoints of older versions, which record no step.
        raw: see `write_best`.

        Returns:
            False if the weights are lost: neither the file nor a checkpoint has them.

        Raises:
            InputError: the file cannot be written, or the checkpoint of step `done` cannot be read again.
        """
        file = self.recorded.get(path.name, {"step": done if is_newest else -1})
        if file["step"] == done:
            self.write_best(path, done, raw=raw)
            return True
        sha256 = file_sha256(path)
        if sha256 is not None and file.get("sha256", sha256) == sha256:
            return True
        if self.engine.restore_checkpoint(file["step"]) is None:
            self.display.print_line(f"the best weights, of {path}, are lost: neither that file nor a checkpoint has them")
            return False
        self.write_best(path, file["step"], raw=raw)
        self.display.print_line(f"{path} is restored from the checkpoint of step {file['step']:,}")
        if self.engine.restore_checkpoint(done) is None:
            raise InputError(f"the checkpoint of step {done} changed while it was read: give the same --run again")
        return True

    def _write(self, path: Path, *, raw: bool = False) -> None:
        if not self._has_checkpoint:
            self.run.mark_first_checkpoint_unfinished()
        with convert_write_errors(path):
            self.engine.save_weights(path, raw=raw)
