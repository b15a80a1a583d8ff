"""Cache of compiled graphs on disk, for restarted processes: `--enable_compile_cache True`.

MindSpore's own cache finds a graph by the number of graphs compiled before it: runs that compile in another order would
run each other's code. Here its cache is opened for one compilation at a time, in a folder with only this graph, found
by a digest (`GraphCache.key`), or no graph. A loaded graph finds its parameters by name in its Cells
(`parameters_dict`): a graph with other parameters is not stored. Tested on CPU only.
"""

import functools
import hashlib
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import mindspore
from mindspore import Tensor, communication, nn
from mindspore.graph import api

from mindrlhf.backend.native import library
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.owned_folder import owned_folder
from mindrlhf.files.user_cache import private_folder

GRAPHS = "graphs"  # folder in `user_cache`
PACKAGE = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)

# Free space that MindSpore needs to write a graph; with less, an incomplete graph would be stored.
ROOM_BYTES = 2**27

# Of all graphs together; the least recently used ones are deleted first.
LIMIT_BYTES = 2**30


class GraphCache:
    """Compiled graphs of a folder, as `<key>-<digest of the content>.mindir`.

    settings: returns the job's settings that a graph of this name depends on, and the job's size. limit: bytes. loaded,
    stored, left_out: numbers of graphs that were found, built and stored, or built without being stored. Processes may
    share a folder. A damaged graph is built again.
    """

    _opened = 0  # how often this process has opened MindSpore's cache, which numbers its files by it

    def __init__(self, folder: Path, rank: int, settings: Callable[[str], str] = str, limit: int = LIMIT_BYTES):
        self._folder = private_folder(Path(folder))
        self._rank = rank
        self._settings = settings
        self._limit = limit
        self._compiled: WeakKeyDictionary[nn.Cell, set[tuple]] = WeakKeyDictionary()
        self.loaded = self.stored = self.left_out = 0
        # Otherwise MindSpore compares the main script's sources with the first run's, and checks no other sources.
        os.environ["MS_DEV_FORCE_USE_COMPILE_CACHE"] = "1"
        api.entry_script_path = os.devnull  # it is read nevertheless; a notebook and `python -c` have no such file

    def __str__(self) -> str:
        counts = f"{self.loaded} from {self._folder}, {self.stored} built and kept there"
        return f"compiled graphs: {counts}" + (f", {self.left_out} built that cannot be kept" if self.left_out else "")

    def key(self, graph: nn.Cell, shapes: tuple) -> str:
        """Digest all that determines a compiled graph: code, settings, names and shapes."""
        parameters = [(one.name, one.shape, str(one.dtype), one.requires_grad) for one in graph.get_parameters()]
        parts = (self._code, self._settings(graph.name), self._rank, graph.name, graph.constants, parameters, shapes)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @functools.cached_property
    def _code(self) -> str:
        """Digest of all code, made when the first graph is compiled.

        A user's loss may change between two runs in one process.
        """
        return code_digest()

    @contextmanager
    def depending_on(self, settings: str) -> Iterator[None]:
        """Find the graphs of the body by these settings, in place of the job's."""
        own = self._settings
        self._settings = lambda name: settings
        try:
            yield
        finally:
            self._settings = own

    @contextmanager
    def around(self, graph: nn.Cell, inputs: tuple) -> Iterator[None]:
        """Load or store the graph that the body compiles, if any."""
        compiled = self._compiled.setdefault(graph, set())
        shapes = tuple((i.shape, str(i.dtype)) if isinstance(i, Tensor) else repr(i) for i in inputs)
        if shapes in compiled:
            yield
            return
        compiled.add(shapes)
        try:
            key = self.key(graph, shapes)
            file = self._exchanged()
            content = self._read(key)
            if content is not None:
                file.write_bytes(content)
        except OSError as reason:
            if not self.left_out:
                _log.warning("a graph is built without the cache of compiled graphs (%s)", reason)
            self.left_out += 1
            yield
            return
        mindspore.set_context(enable_compile_cache=True, compile_cache_path=_exchange().name)
        try:
            yield
        finally:
            mindspore.set_context(enable_compile_cache=False)
            GraphCache._opened += 1
        made = file.read_bytes() if file.is_file() else None
        file.unlink(missing_ok=True)
        if content is not None and made == content:
            self.loaded += 1
        elif made and _owns_its_parameters(graph) and self._write(key, made):
            self.stored += 1
        else:
            self.left_out += 1

    def _exchanged(self) -> Path:
        """File that MindSpore uses for the next graph; OSError without disk space."""
        joined = communication.GlobalComm.INITED  # several ranks through MindSpore's library
        role, rank = (os.environ["MS_ROLE"], self._rank) if joined else ("", 0)
        name = f"{role}compile_cache_{self._opened}.mindir"
        folder = Path(_exchange().name) / f"rank_{rank}" / "graph_cache"
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < ROOM_BYTES:
            raise OSError(f"{folder} has {free / 2**20:.0f} MiB left, and {ROOM_BYTES / 2**20:.0f} are needed")
        return folder / name

    def _read(self, key: str) -> bytes | None:
        for path in self._folder.glob(f"{key}-*.mindir"):
            with suppress(OSError):
                content = path.read_bytes()
                if path.name == _name(key, content):
                    os.utime(path)
                    return content
                path.unlink()
        return None

    def _write(self, key: str, content: bytes) -> bool:
        """Write a graph; returns False if that fails."""
        try:
            with atomic_file(self._folder / _name(key, content), durable=False) as temporary:
                temporary.write_bytes(content)
        except UserError:
            return False
        found = []
        for path in self._folder.glob("*.mindir"):
            with suppress(OSError):  # another process may have removed it
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > self._limit:
                path.unlink(missing_ok=True)
        return True


def code_digest() -> str:
    """Digest all code: this package and its operators, MindSpore, Python, a user's modules."""
    digest = hashlib.sha256(f"{mindspore.__version__} {sys.version} {library().path}".encode())
    for path in sorted({*PACKAGE.rglob("*.py"), *_user_modules()}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _user_modules() -> Iterator[Path]:
    """List loaded modules that are not installed: a user's loss, and its imports."""
    installed = [Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "-").resolve()
        if path.suffix == ".py" and path.is_file() and not any(path.is_relative_to(folder) for folder in installed):
            yield path


@functools.cache
def _exchange() -> tempfile.TemporaryDirectory:
    """Folder of MindSpore's cache; MindSpore keeps the first folder it gets."""
    return owned_folder("mindrlhf-graphs-")


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.mindir"


def _owns_its_parameters(graph: nn.Cell) -> bool:
    own = graph.parameters_dict()
    read = api._cell_graph_executor._graph_executor.get_params(graph.current_phase)
    return all(own.get(name) is parameter for name, parameter in read.items())
