"""Does a checkpoint hold exactly what the model needs? One error lists everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.checkpoint.reader import Checkpoint, Problems
from deepinfer.checkpoint.tensors import TensorSpec
from deepinfer.errors import CheckpointError

MAX_SHOWN = 20  # of each kind


def check(checkpoint: Checkpoint, needed: Iterable[TensorSpec], known: Iterable[TensorSpec] = ()) -> None:
    """Compare names, dtypes and shapes both ways, files and index included.

    needed: what must be there. known: what may be there besides (the layers that a cut leaves out).
    Raises CheckpointError with all problems, the first of each kind by name and how many there are.
    """
    problems = Problems({kind: list(things) for kind, things in checkpoint.problems.by_kind.items()})
    expected = {spec.name: spec for spec in needed}
    for name, spec in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            problems.add("missing tensors", f"{name} ({spec.dtype} {list(spec.shape)})")
            continue
        if stored.dtype != spec.dtype:
            problems.add("tensors of the wrong dtype", f"{name} (is {stored.dtype}, must be {spec.dtype})")
        if stored.shape != spec.shape:
            problems.add("tensors of the wrong shape", f"{name} (is {list(stored.shape)}, must be {list(spec.shape)})")
    allowed = expected.keys() | {spec.name for spec in known}
    for name in checkpoint.tensors.keys() - allowed:
        problems.add("unexpected tensors", name)
    if problems.by_kind:
        raise CheckpointError(_text(checkpoint, problems))


def _text(checkpoint: Checkpoint, problems: Problems) -> str:
    lines = [f"the weights in {checkpoint.folder} do not fit its config.json:"]
    for kind, things in problems.by_kind.items():
        listed = sorted(things)[:MAX_SHOWN]
        lines.append(f"  {len(things)} {kind}: {'; '.join(listed)}")
        if len(things) > len(listed):
            lines[-1] += f"; and {len(things) - len(listed)} more"
    lines.append("download the files again, or use the config.json that belongs to them")
    return "\n".join(lines)
