"""One rank under a real torchrun: RUN_DIR. Rank 1 kills itself once the file `die` exists; the others wait."""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    run, rank = Path(sys.argv[1]), os.environ["RANK"]
    (run / "ranks" / rank).mkdir(parents=True)
    (run / "ranks" / rank / "pid").write_text(str(os.getpid()))
    while True:
        if rank == "1" and (run / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
