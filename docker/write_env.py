"""Writes `.env` for this machine, and the first API key. Standard library only.

Idempotent: values of an existing `.env` are kept, missing ones added. The key is printed once; only its
hash is stored.
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

# Files that mark a Hygon host; AMD shares /dev/kfd with it. The last is the driver itself.
_HYGON = ("dev/mkfd", "opt/dtk", "usr/local/hyhal", "opt/hyhal")
_CONTAINER_GROUP = "10001"  # docker/Dockerfile
_GIB = 2**30


def main(root: Path) -> None:
    """Complete root/.env and print a summary."""
    env_file = root / ".env"
    known = read(env_file)
    detected = {**passwords(), **paths(root), **memory(), **devices()}
    added = {name: value for name, value in detected.items() if name not in known}
    append(env_file, added)
    known.update(added)
    models = Path(known["MODELS_DIR"])
    models.mkdir(parents=True, exist_ok=True)
    keys_file = Path(known["API_KEYS_FILE"])
    if not keys_file.exists():
        key = new_key()
        write_key(keys_file, key)
        print(f"API key (shown once, only its hash is stored): {key}")
    print(f"{env_file}: {len(added)} new values, {len(known) - len(added)} kept.")
    print(f"Base models are read from {models}.")
    files = known.get("COMPOSE_FILE", "compose.yaml")
    print(f"docker compose reads {files}.")
    for image, of in (("DCU_IMAGE", "compose.dcu.yaml"), ("ROCM_IMAGE", "compose.rocm.yaml")):
        if of in files and image not in known:
            print(f"Still missing: {image}=..., the vendor's PyTorch image, by digest if you can.")


def read(path: Path) -> dict[str, str]:
    """Return the variables of an env file; {} where there is none."""
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text("utf-8").splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            found[name] = value
    return found


def append(path: Path, values: dict[str, str]) -> None:
    """Append variables to an env file that only its owner may read."""
    path.touch(mode=0o600)
    text = path.read_text("utf-8")
    if text and not text.endswith("\n"):
        text += "\n"
    path.write_text(text + "".join(f"{name}={value}\n" for name, value in values.items()), "utf-8")


def passwords() -> dict[str, str]:
    """Return new passwords; hexadecimal, so that they need no quoting in a URL or a shell."""
    return {name: secrets.token_hex(24) for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD")}


def paths(root: Path) -> dict[str, str]:
    return {
        "MODELS_DIR": str(root / "models"),
        "API_KEYS_FILE": str(root / ".secrets" / "api_keys.json"),
    }


def memory() -> dict[str, str]:
    """Return seven eighths of the host for each worker: teacher and student are rarely large at once."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"WORKER_MEMORY": f"{max(2, total * 7 // 8 // _GIB)}GiB"}


def devices(root: Path = Path("/")) -> dict[str, str]:
    """Return the variables of the overlay for this machine's accelerator; none on a plain CPU."""
    if (root / "dev/kfd").exists():
        cards = ",".join(str(i) for i in range(len(list((root / "dev/dri").glob("renderD*")))))
        hygon = [path for path in _HYGON if (root / path).exists()]
        if not hygon:
            return {**overlay("rocm"), **groups(root), "ROCM_DEVICES": cards}
        # Named even where it is absent: compose then refuses to start instead of starting without the driver.
        hyhal = hygon[-1] if hygon[-1].endswith("hyhal") else "opt/hyhal"
        mkfd = "/dev/mkfd" if "dev/mkfd" in hygon else "/dev/null"
        found = {"DCU_DEVICES": cards, "HYHAL_PATH": f"/{hyhal}", "DCU_MKFD": mkfd}
        return {**overlay("dcu"), **groups(root), **found}
    if (root / "dev/nvidiactl").exists() and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {**overlay("cuda"), "CUDA_DEVICES": ",".join(listed.split())}
    return {}


def overlay(kind: str) -> dict[str, str]:
    return {"COMPOSE_FILE": f"compose.yaml:compose.{kind}.yaml"}


def groups(root: Path) -> dict[str, str]:
    video, render = group(root, "video"), group(root, "render")
    # Compose refuses the same group twice; the containers' user is in its own group anyway.
    return {"VIDEO_GID": video, "RENDER_GID": render if render != video else _CONTAINER_GROUP}


def group(root: Path, name: str) -> str:
    """Return the id of a group on this host, or else the group that owns the first render node."""
    try:
        return str(grp.getgrnam(name).gr_gid)
    except KeyError:
        nodes = sorted((root / "dev/dri").glob("renderD*"))
        return str((nodes[0] if nodes else root / "dev/kfd").stat().st_gid)


def new_key() -> str:
    return "sh_" + secrets.token_urlsafe(32)


def write_key(path: Path, key: str) -> None:
    """Write a key file with the hash of this key and all scopes."""
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    entry = {"sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": ["admin"]}
    path.write_text(json.dumps({"first": entry}) + "\n", "utf-8")
    # Readable by the container's user; hashes of random keys are no secrets.
    path.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path.cwd())
