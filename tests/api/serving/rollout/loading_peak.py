"""Loads a student next to one that serves and prints the peak of anonymous memory it took.

python loading_peak.py FIRST SECOND
"""

import sys
import threading
from pathlib import Path

import psutil

from services.api.serving.promotion import Promotion
from services.api.serving.rollout.model_loader import load_student
from services.api.serving.settings import ServingDtype, ServingSettings

SETTINGS = ServingSettings(lanes=1, threads=1, batch_tokens=64, dtype=ServingDtype.FLOAT32)


def load(directory: str) -> object:
    return load_student(Promotion("prm", "default", "mdl", "m", "v", Path(directory)), SETTINGS)


def anonymous_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


serving = load(sys.argv[1])
before = peak = anonymous_bytes()
loading = threading.Thread(target=load, args=(sys.argv[2],))
loading.start()
while loading.is_alive():
    peak = max(peak, anonymous_bytes())
    loading.join(0.002)
print(peak - before)
