"""Adding a feature, as templates/README.md tells it: one field, one part, a line where it acts.

A toy, that scores of even keys gain a half, in a copy of the templates.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from support import REPO, SMALL_BWD, SMALL_FWD

from attngen import reference, render
from attngen import spec as specs
from attngen.config import BwdConfig, KernelConfig
from attngen.spec import AttentionSpec
from attngen.tuner import case, gate
from attngen.workload import Workload

README = (REPO / "templates" / "README.md").read_text()
STEPS = README.split("### A toy\n")[1].split("\n## ")[0]
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Toy(AttentionSpec):
    """The spec with one field more, and the two properties that it changes."""

    even_keys: bool = False

    @property
    def adds_to_scores(self) -> bool:
        return self.even_keys or super().adds_to_scores

    @property
    def has_score_terms(self) -> bool:
        return self.even_keys or super().has_score_terms


@pytest.fixture
def toy_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The templates with the steps of the README done, in place of the package's own."""
    folder = tmp_path / "templates"
    shutil.copytree(REPO / "templates", folder)
    part, include, line = re.findall(r"^```\n(.*?)^```", STEPS, re.DOTALL | re.MULTILINE)
    (folder / "parts" / "even_keys.py.jinja").write_text(part)
    for name in ("fwd.triton.py.jinja", "bwd.triton.py.jinja"):
        before(folder / name, '{% include "parts/score.py.jinja" %}\n', include)
    after(folder / "parts" / "score_terms.jinja", "{{ pad }}{{ to }} = s * score_unit\n", line)
    field = next(each for each in fields(Toy) if each.name == "even_keys")
    monkeypatch.setitem(specs.FIELDS, "even_keys", field)
    monkeypatch.setattr(render, "data_dir", lambda name: folder)
    render._environment.cache_clear()
    yield folder
    render._environment.cache_clear()


def before(path: Path, mark: str, text: str) -> None:
    old = path.read_text()
    assert old.count(mark) == 1
    path.write_text(old.replace(mark, text + mark))


def after(path: Path, mark: str, text: str) -> None:
    old = path.read_text()
    assert old.count(mark) == 1
    path.write_text(old.replace(mark, mark + text))


CONFIGS = [SMALL_FWD, SMALL_BWD, BwdConfig(**{**SMALL_BWD.as_dict(), "dq": "atomic"})]


@pytest.mark.usefixtures("toy_templates")
@pytest.mark.parametrize("more", [{}, {"causal": True, "softcap": 3.0}], ids=str)
def test_toy_feature_computes_what_the_oracle_says(more: dict[str, object]) -> None:
    spec = Toy(head_dim=16, dtype="float32", even_keys=True, **more)
    oracle = Toy(head_dim=16, dtype="float32", bias=True, **more)
    for config in CONFIGS:
        made = case.make(spec, Workload(1, 2, 1, 37, 45), "cpu", backward=config.direction == "bwd")
        bias = torch.where(torch.arange(45) % 2 == 0, HALF, 0.0).expand(1, 1, 37, 45)
        leaves = [x.detach().clone().requires_grad_() for x in (made.q, made.k, made.v)]
        out, lse = reference.attention(oracle, *leaves, bias=bias)
        wanted = {"out": out.detach(), "lse": lse.detach()}
        if made.do is not None:
            made.out.copy_(wanted["out"])
            made.lse.copy_(wanted["lse"])
            grads = reference.gradients(out, lse, tuple(leaves), made.do)
            wanted = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        gate.run(made, config, interpret=True)
        for name, found in made.results(config).items():
            right = wanted[name].float()
            torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-5, msg=lambda m, n=name: n)


@pytest.mark.usefixtures("toy_templates")
@pytest.mark.parametrize("config", [SMALL_FWD, SMALL_BWD], ids=["fwd", "bwd"])
def test_toy_feature_leaves_no_trace_where_it_is_off(config: KernelConfig) -> None:
    fields = {"head_dim": 16, "alibi": True}
    assert "even_keys" not in render.render(Toy(**fields), config)
    text = render.render(Toy(**fields, even_keys=True), config)
    assert text.count("def even_keys(") == 1 and "even_keys=true" in text
