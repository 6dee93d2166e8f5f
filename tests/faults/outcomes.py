"""The answers of the check and of the diagnosis to a planted fault, and whether they are right."""

import re
from typing import Any

import numpy as np

from parity.checkpoints.weights import as_checkpoint
from parity.comparison import diagnosis
from parity.comparison.diagnosis import Diagnosis
from parity.comparison.forward_backward import JaxTwin, PassInputs, TorchTwin
from parity.comparison.report import Report
from parity.comparison.tolerances import ErrorNorms
from parity.comparison.twins import compare
from tests.faults.planting import Fault, plant_fault

# Options for XLA: every fault is compiled separately, and optimization would cost more time than it saves.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
STEPS = 50


def run_check(fault: Fault, *, backward: bool = True, steps: int = STEPS) -> Report:
    """Compare the twins while the fault is planted in one of them.

    backward: whether to compare gradients; they are always compared if the fault is in the backward pass.
    steps: number of optimizer steps, for a fault in an optimizer.
    """
    params, images = fault.params(), None if fault.level == "train" else fault.images()
    with plant_fault(fault):
        return compare(
            fault.config,
            params,
            images=images,
            level=fault.level,  # type: ignore[arg-type]
            backward=backward or fault.part.endswith("in the backward pass"),
            steps=steps,
            xla_options=QUICK,
        )


def names_part(fault: Fault, report: Report) -> bool:
    """Return whether a report fails and names the right part."""
    return not report.passed and re.fullmatch(fault.part, str(report.part)) is not None


def run_diagnosis(fault: Fault) -> Diagnosis:
    """Diagnose a correct checkpoint, given the outputs of a model with the fault.

    If fused and explicit attention, or the two twins, give different outputs, the outputs with the largest error are given.
    """
    checkpoint, images = as_checkpoint(fault.params(), fault.config, "jax"), fault.images()
    subject = PassInputs(checkpoint, images)
    correct = _outputs(TorchTwin(subject, "explicit"))
    with plant_fault(fault):
        outputs = [_outputs(TorchTwin(subject)), _outputs(TorchTwin(subject, "explicit"))]
        if fault.file.startswith("vit_jax"):
            outputs.append(_outputs(JaxTwin(subject, QUICK)))
    faulty = max(outputs, key=lambda logits: ErrorNorms.of(logits, correct).relative_rms())
    return diagnosis.diagnose(checkpoint, diagnosis.expected_outputs(images, faulty, fault.config))


def names_cause(fault: Fault, result: Diagnosis) -> bool:
    """Return whether a diagnosis names the right cause first."""
    return bool(result.matched) and re.fullmatch(fault.cause or "", str(result.matched[0])) is not None


def _outputs(twin: TorchTwin | JaxTwin) -> np.ndarray:
    return twin.run(backward=False).values["logits"]
