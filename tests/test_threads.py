"""Several threads and one LLM, CPU threads, and memory that is used when it is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from faircopy import LLM, ConfigError, SamplingParams, threads
from faircopy.fair_lock import FairLock
from faircopy.layout.paged import lazy_zeros
from faircopy.testing import TableModel


def test_eight_threads_get_the_texts_they_would_get_alone(checkpoint: Callable[..., str]) -> None:
    llm = LLM(checkpoint("llama"), draft="ngram", k=4, dtype="float32", cache_memory="8MiB", max_batch=8)
    jobs = [
        ([n, n + 1, 7] * (1 + n % 5), SamplingParams(max_tokens=8 + n % 9, temperature=0.7 * (n % 2), seed=n))
        for n in range(40)
    ]
    alone = [llm.generate([prompt], params, progress=False)[0].token_ids for prompt, params in jobs]

    def ask(job: tuple[list[int], SamplingParams]) -> list[int]:
        prompt, params = job
        return llm.generate([prompt], params, progress=False)[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, jobs))
    assert together == alone
    assert llm.engine.tables.held() == 0 and not llm.engine.busy


def test_requests_of_different_threads_share_a_batch() -> None:
    llm = LLM(TableModel(), k=0, max_batch=8, cache_memory="1MiB")

    def ask(n: int) -> None:
        llm.generate([[n, n + 1]], SamplingParams(max_tokens=300, ignore_eos=True), progress=False)

    with ThreadPoolExecutor(4) as pool:
        with llm._lock:  # no thread adds its request before all of them are there
            asked = [pool.submit(ask, n) for n in range(4)]
            while len(llm._lock._waiting) < 4:
                time.sleep(0.001)
        for one in asked:
            one.result()
    assert llm.metrics()["steps"] == 300, "every step advanced the sequences of all threads"


def test_a_failure_in_one_thread_leaves_the_others_alone() -> None:
    llm = LLM(TableModel(), k=0, cache_memory="1MiB")
    wanted = llm.generate([[1, 2]], SamplingParams(max_tokens=60), progress=False)[0].token_ids

    def ask(n: int) -> list[int] | str:
        if n % 3 == 0:
            answer = llm.generate([[999999]], SamplingParams(max_tokens=5), progress=False, errors="return")[0]
            return type(answer.error).__name__
        return llm.generate([[1, 2]], SamplingParams(max_tokens=60), progress=False)[0].token_ids

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(12))) == [wanted if n % 3 else "RequestError" for n in range(12)]


def test_a_fair_lock_is_handed_over_in_order() -> None:
    lock, order = FairLock(), []

    def wait(n: int) -> None:
        with lock:
            order.append(n)

    with lock:
        waiting = []
        for n in range(5):
            waiting.append(threading.Thread(target=wait, args=(n,)))
            waiting[-1].start()
            while len(lock._waiting) <= n:
                time.sleep(0.001)
    with lock:  # comes last although it asks at once
        order.append(5)
    for thread in waiting:
        thread.join()
    assert order == [0, 1, 2, 3, 4, 5]


def test_threads_are_chosen_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_chosen", None)
    LLM(TableModel(), threads=2, cache_memory="1MiB")
    assert torch.get_num_threads() == 2
    LLM(TableModel(), threads=2, cache_memory="1MiB")
    with pytest.raises(ConfigError, match=r"threads = 3: another LLM of this process uses 2"):
        LLM(TableModel(), threads=3, cache_memory="1MiB")
    with pytest.raises(ConfigError, match="threads"):
        LLM(TableModel(), threads=0)


def test_waiting_threads_do_not_spin_unless_the_user_says_so() -> None:
    code = "import os, faircopy; print(os.environ.get('OMP_WAIT_POLICY'))"
    for given, seen in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={"PATH": "", **given},
            cwd=Path(__file__).parents[1],
        )
        assert run.stdout.strip() == seen, run.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_pool_takes_memory_when_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    pool = lazy_zeros((1 << 20, 2, 64), torch.float32, torch.device("cpu"))
    assert resident() - before < 32 << 20, "512 MiB were asked for, none is written"
    pool[: 1 << 17] = 1.0
    assert resident() - before > 32 << 20
    assert not pool[-1].any()
