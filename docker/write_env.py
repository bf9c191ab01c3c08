"""Writes `.env` for the machine it stands on, and the first API key. Standard library only.

Keeps what an existing `.env` says and adds what is missing, so that it can be run again. The key is
printed once; only its hash is stored.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

# Owner of the files inside the containers (docker/Dockerfile).
CONTAINER_USER = 10001


def main(root: Path) -> None:
    env_file = root / ".env"
    known = read(env_file)
    wanted = {**passwords(), **places(root), **memory(), **devices()}
    added = {name: value for name, value in wanted.items() if name not in known}
    known.update(added)
    models = Path(known["MODELS_DIR"])
    models.mkdir(parents=True, exist_ok=True)
    write_key(Path(known["API_KEYS_FILE"]))
    text = "".join(f"{name}={value}\n" for name, value in known.items())
    env_file.touch(mode=0o600)
    env_file.write_text(text, "utf-8")
    print(f"{env_file}: {len(added)} of {len(known)} values are new.")
    print(f"Base models are looked for below {models}.")


def read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    return {name: value for name, value in pairs}


def passwords() -> dict[str, str]:
    return {name: secrets.token_urlsafe(24) for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD")}


def places(root: Path) -> dict[str, str]:
    return {
        "MODELS_DIR": str(root / "models"),
        "API_KEYS_FILE": str(root / ".secrets" / "api_keys.json"),
    }


def memory() -> dict[str, str]:
    """Leave an eighth of the host to the system; the two workers never run at full size together."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = f"{max(2, total * 7 // 8 >> 30)}g"
    return {"TRAINER_MEMORY": limit, "DISTILLER_MEMORY": limit}


def devices() -> dict[str, str]:
    """Return what the overlay of this machine's accelerator needs; nothing on a plain CPU."""
    if Path("/dev/kfd").exists():
        groups = {name: group_number(group) for name, group in _GROUPS.items()}
        numbers = ",".join(str(i) for i in range(len(list(Path("/dev/dri").glob("renderD*")))))
        hyhal = next((p for p in ("/opt/hyhal", "/usr/local/hyhal") if Path(p).is_dir()), None)
        if hyhal is None:
            return {**groups, "ROCM_DEVICES": numbers}
        mkfd = "/dev/mkfd" if Path("/dev/mkfd").exists() else "/dev/null"
        return {**groups, "DCU_DEVICES": numbers, "HYHAL_PATH": hyhal, "DCU_MKFD": mkfd}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {"CUDA_DEVICES": ",".join(listed.split())}
    return {}


_GROUPS = {"VIDEO_GID": "video", "RENDER_GID": "render"}


def group_number(name: str) -> str:
    """Return the number of a group on this host; the owner of the render nodes stands in."""
    try:
        return str(grp.getgrnam(name).gr_gid)
    except KeyError:
        node = next(iter(sorted(Path("/dev/dri").glob("renderD*"))), Path("/dev/kfd"))
        return str(node.stat().st_gid)


def write_key(path: Path) -> None:
    """Make the first API key, unless there is a file of keys already."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    key = "sh_" + secrets.token_urlsafe(32)
    entry = {"sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": ["admin"]}
    path.write_text(json.dumps({"first": entry}) + "\n", "utf-8")
    # The container's user must read it: it holds hashes of random keys, nothing that opens a door.
    path.chmod(0o644)
    print(f"API key (shown once, only its hash is stored): {key}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path.cwd())
