"""The weight files of a run folder, the newest and the best: kept correct after interruptions and failed writes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.loop.engine import Engine
from train.loop.loop_state import LoopState
from train.loop.progress import ProgressDisplay
from train.loop.run_folder import RunFolder
from train.loop.write_files import convert_write_errors, file_sha256
from vit_spec import InputError


@dataclass
class WeightFiles:
    """Writes the engine's weights to the weight files of a run, and restores files of best weights.

    recorded: by the name of a file of best weights, the "step" of its weights and the file's "sha256".  Each checkpoint
        stores it.
    """

    engine: Engine
    run: RunFolder
    display: ProgressDisplay
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    _has_checkpoint: bool = False  # whether a checkpoint of this run is complete

    def set_has_checkpoint(self) -> None:
        """Record that a checkpoint of the run is complete."""
        if not self._has_checkpoint:
            self._has_checkpoint = True
            self.run.mark_first_checkpoint_finished()

    def write_newest(self) -> None:
        """Write the engine's weights as the newest; if there is an EMA, write it and, separately, the weights themselves.

        Raises:
            InputError: a file cannot be written.
        """
        self._write(self.run.weights)
        if self.engine.has_ema:
            self._write(self.run.weights_raw, raw=True)

    def write_best(self, path: Path, step: int, *, raw: bool = False) -> None:
        """Write the engine's weights to a file of best weights, and record the file.

        path: `best` or `best_raw` of the run folder.
        step: number of steps after which the engine has these weights.
        raw: if there is an EMA, write the weights themselves.

        Raises:
            InputError: the file cannot be written.
        """
        self._write(path, raw=raw)
        # Only the main process knows that the file is complete, and only its record is stored in checkpoints.
        self.recorded[path.name] = {"step": step, "sha256": file_sha256(path) if self.engine.is_main else None}

    def restore_best(
        self, path: Path, done: int, *, is_newest: bool, is_best: Callable[[LoopState], bool], raw: bool = False
    ) -> bool:
        """Rewrite a file of best weights if it is missing or its weights are not those recorded.

        If no checkpoint has the recorded weights either, the file is moved aside: it has other weights.

        All processes decide by what the main one reads of the file.

        path, raw: see `write_best`.
        done: number of steps done.  The engine has the weights after these steps, before and after this call.
        is_newest: whether the engine's weights are the best.  Used for checkpoints of older versions, which record no step.
        is_best: whether a checkpoint has the best weights, given its loop state.

        Returns:
            True if the file has the best weights; False if they are lost: neither the file nor a checkpoint has them.

        Raises:
            InputError: the file cannot be written, or the checkpoint of step `done` cannot be read again.
        """
        file = self.recorded.get(path.name, {"step": done if is_newest else -1})
        if file["step"] == done:
            self.write_best(path, done, raw=raw)
            return True
        sha256 = self.engine.from_main(file_sha256(path) if self.engine.is_main else None)
        if sha256 is not None and file.get("sha256", sha256) == sha256:
            return True
        # The checkpoint may be another run's: its arrays and its step do not tell.
        is_restored = False
        if (restored := self.engine.restore_checkpoint(file["step"])) is not None:
            if is_restored := restored.loop_state is not None and is_best(restored.loop_state):
                self.write_best(path, file["step"], raw=raw)
                self.display.print_line(f"{path} is restored from the checkpoint of step {file['step']:,}")
            if self.engine.restore_checkpoint(done) is None:
                raise InputError(f"the checkpoint of step {done} changed while it was read: give the same --run again")
        if not is_restored:
            moved = self.run.move_aside(path)
            what = f"; {path.name} has other weights and is moved to {moved}" if moved else ""
            self.display.print_line(
                f"the best weights, of {path}, are lost: neither that file nor a checkpoint has them{what}"
            )
        return is_restored

    def _write(self, path: Path, *, raw: bool = False) -> None:
        if not self._has_checkpoint:
            self.run.mark_first_checkpoint_unfinished()
        with convert_write_errors(path, self.run.path):
            self.engine.save_weights(path, raw=raw)
