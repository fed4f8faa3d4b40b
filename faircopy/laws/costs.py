"""What a prediction needs to know of a device: the target's passes, a draft's levels, training; measured or assumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from faircopy.config import EngineConfig
from faircopy.costs import CostTable, Curve
from faircopy.errors import CheckpointError
from faircopy.laws.plan import name_of
from faircopy.laws.points import Result
from faircopy.laws.predict import Costs, Seconds, head_parameters, training_operations, training_seconds
from faircopy.laws.timing import ROWS, level_times
from faircopy.measured_costs import cost_table
from faircopy.model.base import Model, ModelShape
from faircopy.model.loader import load_model
from faircopy.model.shape import shape_of_checkpoint, shape_of_model
from faircopy.planning.devices import Device, named_device
from faircopy.planning.roofline import Roofline

T = TypeVar("T")
EFFICIENCY = 0.3  # of a device's matrix rate, assumed for training where none was measured


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a head will serve."""

    target: str
    context: int  # tokens per sequence
    depths: tuple[int, ...]
    gpu: str | None = None  # None: this machine
    costs: Path | None = None  # files to read instead of measuring
    times: Path | None = None


def costs_for(serving: Serving, results: Sequence[Result]) -> tuple[Costs, bool]:
    """What things cost, and whether the results are of this very target."""
    device = named_device(serving.gpu)
    model = None if _on_paper(serving) else load_model(serving.target, None, device.torch_device, True)
    shape = _shape(serving, device) if model is None else shape_of_model(model)
    same = name_of(serving.target) == results[0].target
    target, passes = _target(serving, shape, device, model)
    level, levels = _levels(serving, shape, device, model)
    train, training = _training(shape, device, results, same)
    answers = max(result.answers for result in results)
    sources = [passes, levels, training]
    return Costs(target=target, level=level, train=train, answers=answers, sources=sources), same


def _on_paper(serving: Serving) -> bool:
    """Whether nothing has to be measured here."""
    return serving.gpu is not None or (serving.costs is not None and serving.times is not None)


def _shape(serving: Serving, device: Device) -> ModelShape:
    return shape_of_checkpoint(serving.target, None, device.torch_device)


def _target(serving: Serving, shape: ModelShape, device: Device, model: Model | None) -> tuple[Seconds, str]:
    if serving.costs is not None:
        curve = _from_file(serving.costs, lambda rows: _checked(CostTable.of_json(rows[0]).target))
        return (lambda seqs, rows: curve(rows)), f"Target's passes: {serving.costs}."
    if model is None:
        roof = Roofline(shape, device, serving.context)
        return roof.seconds, f"Target's passes: roofline of {device.name}, no overheads."
    curve = _measured(model, serving.context)
    return (lambda seqs, rows: curve(rows)), "Target's passes: measured on this machine."


def _measured(model: Model, context: int) -> Curve:
    if model.device.type == "cuda":
        from faircopy.bench.steps import pass_ms  # needs Triton

        return Curve(tuple((rows, 1e-3 * pass_ms(model, rows, 1, context)) for rows in ROWS))
    table = cost_table(model, None, EngineConfig(device="cpu", max_batch=64, k=16))
    assert table is not None, "passes on a CPU are measured"
    return table.target


def _levels(serving: Serving, shape: ModelShape, device: Device, model: Model | None) -> tuple[dict[int, Curve], str]:
    """Seconds of one level of the draft by rows, for every depth."""
    if serving.times is not None:
        curves = _from_file(serving.times, lambda rows: _curves(rows, serving.depths))
        return curves, f"Draft's levels: {serving.times}."
    if model is not None:
        rows = level_times(serving.target, model.token_weights(), serving.depths, model.device)
        return _curves(rows, serving.depths), "Draft's levels: measured on this machine."
    curves = {layers: _paper_level(shape, layers, device) for layers in serving.depths}
    return curves, f"Draft's levels: roofline of {device.name}, no overheads."


def _paper_level(shape: ModelShape, layers: int, device: Device) -> Curve:
    numbers = head_parameters(shape, layers) + shape.vocab * shape.hidden
    read = numbers * shape.dtype.itemsize / device.bandwidth
    return Curve(tuple((rows, max(read, 2.0 * rows * numbers / device.rate)) for rows in ROWS))


def _curves(rows: Sequence[dict[str, Any]], depths: Sequence[int]) -> dict[int, Curve]:
    found = {layers: [row for row in rows if row["layers"] == layers] for layers in depths}
    if not any(found.values()):
        raise ValueError(f"no times of {', '.join(map(str, depths))} layers")
    return {
        layers: _checked(Curve(tuple(sorted((row["rows"], 1e-3 * row["ms"]) for row in mine))))
        for layers, mine in found.items()
        if mine
    }


def _checked(curve: Curve) -> Curve:
    if not curve.valid:
        raise ValueError("not times of passes")
    return curve


def _training(
    shape: ModelShape, device: Device, results: Sequence[Result], same: bool
) -> tuple[Callable[[int], float], str]:
    if same:
        return training_seconds(results), f"Training: as measured on {results[0].origin.get('device')}."
    speed = EFFICIENCY * device.rate
    said = f"Training: assumed at {EFFICIENCY:.0%} of the matrix rate of {device.name}, the target's pass included."
    return (lambda layers: training_operations(shape, layers) / speed), said


def _from_file(file: Path, read: Callable[[list[dict[str, Any]]], T]) -> T:
    """What the rows of a result file say."""
    try:
        return read(json.loads(file.read_text())["rows"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError("results", str(file), f"cannot be read ({error})", "pass a result file") from error
