from __future__ import annotations

import time

from services.shared.jobs.run_directory import LayerSize
from services.shared.training.prepare import measure_matmuls


def test_both_formats_are_measured_within_a_second() -> None:
    size = LayerSize(hidden=96, intermediate=192)
    started = time.process_time()
    found = measure_matmuls(size)
    assert time.process_time() - started < 4  # all threads together, on a machine under load
    assert found.size == size
    assert found.float32_seconds > 0
    assert found.bfloat16_seconds > 0
    assert found.gain == found.float32_seconds / found.bfloat16_seconds
