"""Shared fixtures: tiny checkpoints on disk, and one thread unless a test asks for more."""

from __future__ import annotations

import os

os.environ["FAIRCOPY_CACHE"] = ""  # tests measure for themselves, whatever this machine has kept
os.environ["HF_HUB_OFFLINE"] = "1"  # tests need no network, and must not find out by waiting
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two processes on two cores: threads that spin stop the others

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Whoever only hands tests to other processes needs none of what they import."""
    if config.getoption("numprocesses", None):
        return
    import torch
    from hypothesis import HealthCheck, settings
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # for what is made once per file; before each test see below
    calm = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("any machine", calm)
    settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def interpreted_kernels() -> Iterator[None]:
    """See triton_interpreter.py."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is not None:
            from tests import triton_interpreter

            triton_interpreter.install(patch)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """A test that switched them off for the whole process would fail the tests of training behind it."""
    import torch

    yield
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on, "this test left gradients switched off: use torch.no_grad()"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folder of a tiny random model of the zoo, written once."""
    from tests.zoo import build

    made: dict[tuple[str, int], str] = {}

    def folder(name: str, seed: int = 0) -> str:
        if (name, seed) not in made:
            path = tmp_path_factory.mktemp(name)
            build(name, seed=seed).save_pretrained(path)
            made[name, seed] = str(path)
        return made[name, seed]

    return folder


@pytest.fixture
def shared() -> Path:
    """Real prompts and weights, where a checkout has them beside it."""
    if not SHARED.is_dir():
        pytest.skip("no shared data beside this checkout")
    return SHARED
