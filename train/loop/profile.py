"""The profile of some steps of a run (`--profile`)."""

from pathlib import Path

from train.loop.engine import Engine


class Profile:
    """The profile of some steps of a run; of a run that resumes within them, of those that are left.

    folder: to write it to.
    steps: the numbers of the first and of the last step, from 1; None for no profile.
    """

    def __init__(self, engine: Engine, folder: Path, steps: tuple[int, int] | None) -> None:
        self._engine, self._folder = engine, folder
        self._first, self._last = steps or (0, 0)
        self._is_active = False

    def begins_at(self, number: int) -> bool:
        """Return whether the step of this number, which comes next, is the first one to profile.

        If so, call `begin` when all steps before are finished: parts of those that still run would be in the profile.
        """
        return not self._is_active and self._first <= number <= self._last

    def begin(self) -> None:
        """Start the profile."""
        self._engine.profile(self._folder)
        self._is_active = True

    def ends_at(self, number: int) -> bool:
        """Return whether the step of this number is the last one.  If so, call `close` when it is finished."""
        return number == self._last

    def close(self) -> None:
        """Write the profile if it was started and is not written yet."""
        if self._is_active:
            self._engine.profile(None)
            self._is_active = False
