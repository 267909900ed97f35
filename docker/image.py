"""The image, built on any engine: with a network as a user would, without one from wheels that were fetched before.

Owns:      what an engine without a network needs: the base image and the wheels, kept in a folder for the next time.
Takes:     an `Engine`, the repository, that folder.
Gives:     the tag of an image that is in the engine.
Invariant: nothing in the Dockerfile knows of it: both ways build the same file with the same names.

The base is Docker's own python:3.11-slim-bookworm wherever it can be pulled. On a machine that reaches Debian's packages
alone it is made of them: Debian 12 has the same Python 3.11, at /usr/bin in place of /usr/local/bin.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from engine import Engine, Unavailable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
BASE = "python:3.11-slim-bookworm"
TAG = "shardmp:latest"
WHEELS = "shardmp-wheels"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"


def build(engine: Engine, folder: Path) -> str:
    """Build `TAG`, and return it.

    Args:
        folder: where the base image and the wheels are kept; only an engine without a network needs it.

    Raises:
        Unavailable: the base image or the wheels cannot be had here.
        RuntimeError: the build fails; the text has its output.
    """
    common = ["--tag", TAG, "--file", str(ROOT / "docker" / "Dockerfile"), "--build-arg", f"REVISION={_revision()}"]
    if engine.online:
        engine.docker("build", *common, str(ROOT), limit=1800)
        return TAG
    wheels = fetch_wheels(folder / "wheels")
    _load_base(engine, folder / "base.tar")
    if engine.kind == "podman":
        _podman_build(engine, [*common, "--build-context", f"wheels={wheels}"])
        return TAG
    source = _import_wheels(engine, wheels)
    engine.docker("build", "--network", "none", *common, "--build-arg", f"WHEELS={source}", str(ROOT), limit=900)
    # What had the tag before, and steps of builds long ago; this engine and its folder are ours.
    engine.docker("image", "prune", "--force")
    engine.docker("builder", "prune", "--force", "--keep-storage", "4GB", limit=300)
    return TAG


def _podman_build(engine: Engine, options: Sequence[str]) -> None:
    """Not through Docker's protocol, which has no named contexts. An image in OCI's format would have no health check."""
    options = ["--pull=never", "--network", "none", "--format", "docker", *options]
    options += ["--ignorefile", str(ROOT / "docker" / "Dockerfile.dockerignore")]
    command = [*engine.podman, "build", *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=engine.environment())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def _revision() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _import_wheels(engine: Engine, wheels: Path) -> str:
    """The folder as an image, for a BuildKit without named contexts. Made anew only where the files are others."""
    names = "\n".join(sorted(path.name for path in wheels.iterdir()))
    tag = f"{WHEELS}:{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if engine.docker("image", "inspect", tag, check=False).returncode:
        tar = subprocess.Popen(["tar", "-C", str(wheels), "-c", "."], stdout=subprocess.PIPE)
        assert tar.stdout is not None
        engine.docker("import", "-", tag, limit=300, stdin=tar.stdout.fileno())
        if tar.wait(10):
            raise RuntimeError(f"tar of {wheels} failed")
    return tag


def _load_base(engine: Engine, archive: Path) -> None:
    if engine.docker("image", "inspect", BASE, check=False).returncode == 0:
        return
    if not archive.exists():
        _make_base(archive)
    name = f"docker.io/library/{BASE}" if engine.kind == "podman" else BASE
    engine.docker("import", str(archive), name, limit=300)


def _make_base(archive: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise Unavailable(f"{BASE} cannot be pulled, and mmdebstrap (Debian's package) is not there to make it")
    part = archive.with_suffix(".part.tar")
    command = ["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise Unavailable(f"{BASE} cannot be pulled, and mmdebstrap failed:\n{done.stderr[-2000:]}")
    part.rename(archive)


def fetch_wheels(folder: Path) -> Path:
    """The Python packages for the base image's Python, torch in the version that is installed here, and tini."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [f"torch=={version('torch')}", *project["project"]["dependencies"], *project["build-system"]["requires"]]
    stamp = folder / ".complete"  # the last thing that is written: without it a download was broken off
    if stamp.exists() and stamp.read_text().split("\n") == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in (28, 27, 24, 17)]
    target = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *target, *wanted]
    _fetch(command, "the wheels")
    if shutil.which("apt-get") is None:
        raise Unavailable("tini's package for an image without a network comes from apt-get, which is not there")
    _fetch(["apt-get", "download", "--quiet", "tini"], "tini", folder)
    stamp.write_text("\n".join(wanted))
    return folder


def _fetch(command: list[str], what: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=folder)
    if done.returncode:
        raise Unavailable(f"{what} cannot be fetched: {' '.join(command)}\n{done.stderr[-2000:]}")
