"""What the check and the diagnosis say of a planted fault."""

import re
from typing import Any

import numpy as np

from parity.checkpoints.weights import held
from parity.comparison import diagnosis
from parity.comparison.diagnosis import Diagnosis
from parity.comparison.forward_backward import JaxTwin, Subject, TorchTwin
from parity.comparison.report import Report
from parity.comparison.tolerances import Error
from parity.comparison.twins import compare
from tests.faults.planting import Fault, planted

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}  # each fault is compiled anew
STEPS = 50


def checked(fault: Fault, *, backward: bool = True, steps: int = STEPS) -> Report:
    """Compare the twins, one of them with the fault."""
    params, images = fault.params(), None if fault.level == "train" else fault.images()
    with planted(fault):
        return compare(
            fault.config,
            params,
            images=images,
            level=fault.level,  # type: ignore[arg-type]
            backward=backward or fault.part.endswith("on the way back"),
            steps=steps,
            xla_options=QUICK,
        )


def named(fault: Fault, report: Report) -> bool:
    """Whether a report names the right part."""
    return not report.passed and re.fullmatch(fault.part, str(report.part)) is not None


def diagnosed(fault: Fault) -> Diagnosis:
    """Ask why right weights do not give the outputs of a model that has the fault."""
    checkpoint, images = held(fault.params(), fault.config, "jax"), fault.images()
    subject = Subject(checkpoint, images)
    right = _outputs(TorchTwin(subject, "explicit"))
    with planted(fault):
        found = [_outputs(TorchTwin(subject)), _outputs(TorchTwin(subject, "explicit"))]
        if fault.file.startswith("vit_jax"):
            found.append(_outputs(JaxTwin(subject, QUICK)))
    wrong = max(found, key=lambda logits: Error.of(logits, right).relative_rms())
    return diagnosis.diagnose(checkpoint, diagnosis.expected(images, wrong, fault.config))


def explained(fault: Fault, found: Diagnosis) -> bool:
    """Whether a diagnosis names the right cause, first of all."""
    return bool(found.matched) and re.fullmatch(fault.cause or "", str(found.matched[0])) is not None


def _outputs(twin: TorchTwin | JaxTwin) -> np.ndarray:
    return twin.run(backward=False).values["logits"]
