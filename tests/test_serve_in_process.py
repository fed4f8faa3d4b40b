"""The service layer runs where no web server is installed, and gives what generate() gives."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
from benchmarks.serve_in_process import measured
from faircopy import LLM, SamplingParams
from faircopy.testing import ByteTokenizer, TableModel

llm = LLM(TableModel(256, 512), "ngram", tokenizer=ByteTokenizer(), cache_memory="8MiB", drafter_per_request=True)
found = measured(llm, [[n, 2, 3] for n in range(1, 6)], [SamplingParams(max_tokens=40)] * 5, 2)
assert found["identical"] == found["of"] == 10, found
assert found["share_of_generate"] > 0 and found["first_ms_most"] > 0
"""


def test_jobs_of_the_service_without_http() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
