"""Fixtures of every test: where files go, seeds, and which tests need a GPU."""

from __future__ import annotations

import datetime
import os
import zlib
from pathlib import Path

import pytest
import torch

from attngen.store import Store

# Files with hundreds of calls in the interpreter: each day another tenth of their tests is quick,
# one at least, and the rest slow. Elsewhere `pytest.mark.rotating` says it of one test function.
ROTATING = {
    "test_append.py",
    "test_block_map.py",
    "test_bounds.py",
    "test_col_sums.py",
    "test_compile_only.py",
    "test_context_parallel.py",
    "test_decode.py",
    "test_distributed.py",
    "test_flash_attn.py",
    "test_flex_attention.py",
    "test_fp8_attention.py",
    "test_hopper.py",
    "test_hopper_decode.py",
    "test_hopper_packed.py",
    "test_hopper_packed_bwd.py",
    "test_jvp.py",
    "test_kv_cache.py",
    "test_out.py",
    "test_packed.py",
    "test_packed_terms.py",
    "test_score_functions.py",
    "test_scores.py",
    "test_sdpa.py",
    "test_seams.py",
    "test_second.py",
    "test_shared_kv.py",
    "test_side_outputs.py",
    "test_standalone.py",
    "test_structured_masks.py",
    "test_torch_backend.py",
    "test_tuner_workers.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    # Of the day there is one, also for workers that start at midnight; set it to repeat a run.
    today = datetime.datetime.now(datetime.timezone.utc).timetuple().tm_yday
    os.environ.setdefault("ATTNGEN_TEST_DAY", str(today))
    torch.set_num_threads(1)
    if not _gpu_run(config) and torch.cuda.is_available():
        os.environ["ATTNGEN_INTERPRET"] = "1"  # these tests hand in CPU tensors


def pytest_report_header() -> str:
    day = os.environ["ATTNGEN_TEST_DAY"]
    return f"ATTNGEN_TEST_DAY={day} picks a tenth of {len(ROTATING)} files and of rotating tests"


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests run only when asked for: interpreter and compiler do not share a process."""
    for group in _rotating(items):
        for item in group[1:]:
            if _days_from_now(item):
                item.add_marker(pytest.mark.slow)
    if _gpu_run(config):
        return
    wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


def _rotating(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each rotating file, and of each other rotating function, the next due first, and
    those last that never are quick."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.name in ROTATING:
            groups.setdefault(item.path.name, []).append(item)
        elif item.get_closest_marker("rotating") is not None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)

    def due(item: pytest.Item) -> tuple[bool, int]:
        never = any(item.get_closest_marker(name) for name in ("slow", "gpu"))
        return never, _days_from_now(item)

    return [sorted(group, key=due) for group in groups.values()]


def _days_from_now(item: pytest.Item) -> int:
    """In how many days a rotating test is quick next."""
    return (zlib.crc32(item.nodeid.encode()) - int(os.environ["ATTNGEN_TEST_DAY"])) % 10


def _gpu_run(config: pytest.Config) -> bool:
    return config.option.markexpr.replace("not gpu", "").find("gpu") >= 0


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of emitted kernels for the session, so that each is written once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_files(session_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache or database."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(session_cache))
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / "user.db"))
    monkeypatch.delenv("ATTNGEN_LOWERING", raising=False)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable lowering alone, here and in child processes."""
    monkeypatch.setenv("ATTNGEN_LOWERING", "triton")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def store(path: Path):
    with Store.open(path) as opened:
        yield opened
