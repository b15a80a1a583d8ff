"""Facts of the machine for the report: versions, driver, CANN, processors."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from mindrlhf.backend.device import Device
from mindrlhf.files.printable import printable
from mindrlhf.units import GIB
from mindrlhf.version import __version__
from mindrlhf.workers.cores import usable_cores

PACKAGES = ("mindspore", "numpy")
ORACLE = "mindformers"
ROOT = Path("/usr/local/Ascend")
DRIVER = ("driver/version.info", "firmware/version.info")
# Below the folder of the toolkit, from the newest layout to the oldest.
TOOLKIT = ("compiler/version.info", "runtime/version.info", "version.cfg", "version.info")
TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SHOW = "npu-smi"
SHOW_S = 20
MOST_LINES = 40


def machine_facts(device: Device) -> dict[str, str]:
    """Collect the facts by name; what is not there is left out."""
    memory = psutil.virtual_memory().total / GIB
    facts = {
        "device": device.name,
        "operators": device.describe_operators(),
        "mindrlhf": __version__,
        "python": platform.python_version(),
    }
    facts |= {name: metadata.version(name) for name in PACKAGES}
    facts[ORACLE] = metadata.version(ORACLE) if find_spec(ORACLE) else "not installed: no second opinion"
    facts |= {"system": platform.platform(), "processor": _processor()}
    facts["cores and memory"] = f"{len(usable_cores())}, {memory:.1f} GiB"
    for name in DRIVER:
        facts |= _of_file(f"{name.partition('/')[0]} version", [ROOT / name])
    homes = [Path(os.environ[name]) for name in TOOLKIT_VARIABLES if os.environ.get(name)]
    homes.append(ROOT / "ascend-toolkit" / "latest")
    facts |= _of_file("CANN", [home / name for home in homes for name in TOOLKIT])
    if shutil.which(SHOW):
        facts[SHOW] = _shown()
    return facts


def _of_file(name: str, paths: Iterable[Path]) -> dict[str, str]:
    """Read the first of some small files that is there."""
    for path in paths:
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            return {name: printable("; ".join(kept[:MOST_LINES]))}
    return {}


def _processor() -> str:
    """Name the processor as the kernel does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _shown() -> str:
    """Quote what the devices' own program shows."""
    try:
        found = subprocess.run([SHOW, "info"], capture_output=True, text=True, timeout=SHOW_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{SHOW} info: {error}"
    return printable("\n".join(found.stdout.split("\n")[:MOST_LINES]), "\n")
