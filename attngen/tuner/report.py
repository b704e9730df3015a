"""What a tuning run says at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from attngen import config as configs
from attngen.records import Record
from attngen.workload import Bucket, Direction


@dataclass
class TuneReport:
    """One direction of a tuning run."""

    direction: Direction
    bucket: Bucket
    record: Record | None = None
    """The winner; None if the run was stopped before there was one."""
    tried: int = 0
    """Configs that this run took up, measured or not."""
    measured: int = 0
    """Configs that this run timed."""
    resumed: int = 0
    """Configs whose outcome an earlier run had stored."""
    others: int = 0
    """Configs whose outcome other workers of a shared search found meanwhile."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many configs could not run, by kind of reason."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(config, reason) of each config that should have run and did not."""
    stopped_by: str = ""
    """Why the search ended."""
    seconds: float = 0.0
    noise: float | None = None
    """How far apart two times of one config came out in the last comparison, as a fraction."""

    @property
    def confidence(self) -> str:
        """How far the winner stands above the noise, in words."""
        record = self.record
        if record is None:
            return "no winner"
        if record.median_us is None or record.default_us is None:
            return "predicted, not measured: tune again on the GPU itself"
        gain = 1 - record.median_us / record.default_us
        spread = (record.spread_us or 0.0) / record.median_us
        against = f"{gain:+.1%} against the default, spread {spread:.1%}, {record.rounds} rounds"
        if self.noise is not None:
            against += f", one config timed twice differs by {self.noise:.1%}"
        if gain <= 0:
            return f"nothing beat the default clearly ({against})"
        is_clear = gain > max(2 * spread, self.noise or 0.0)
        return f"{'clear' if is_clear else 'within the noise'}: {against}"

    def __str__(self) -> str:
        lines = [f"{self.bucket.key}: {self._winner()}", f"  {self.confidence}"]
        counts = f"  tried {self.tried}, measured {self.measured}, resumed {self.resumed}"
        if self.others:
            counts += f", others {self.others}"
        lines.append(f"{counts} in {self.seconds:.1f} s; {self.stopped_by or 'complete'}")
        for kind, count in self.skipped.most_common():
            lines.append(f"  skipped {count}: {kind}")
        for config, reason in self.failed:
            lines.append(f"  failed {config}: {reason.splitlines()[0] if reason else 'no reason'}")
        return "\n".join(lines)

    def _winner(self) -> str:
        if self.record is None:
            return "no winner"
        config = configs.from_dict(self.direction, self.record.config).key
        if self.record.median_us is None:
            return f"{config} (predicted)"
        return f"{config}, {self.record.median_us:.1f} us"
