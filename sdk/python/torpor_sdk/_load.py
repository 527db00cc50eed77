"""An operator's code, from memory: one file, or a zip of pure Python. There are no files in a guest.

Either way the entry is the module `main`: the file itself, or `main.py` (or the package `main/`) at the top of the
zip. (`operator.py` in a zip could never be imported: the standard library has an `operator`.) The importer stands
last on `sys.meta_path`, so nothing in a zip hides the standard library or the SDK; names that would be hidden by
them are refused at load, with the way out. Files that are no Python are reached by `importlib.resources` and
`pkgutil.get_data`. Sources stay readable, so that tracebacks and `inspect` show the operator's lines.
"""

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from .errors import OperatorError

if TYPE_CHECKING:
    import zipfile

ENTRY = "main"
# Unpacked; a small zip may promise gigabytes.
UNPACKED_BYTES_MAX = 64 << 20
_NATIVE = (".so", ".pyd", ".dylib")


def load_source(filename: str, content: bytes) -> ModuleType:
    """Runs one file as the module `main`. What it raises goes through."""
    module = ModuleType(ENTRY)
    module.__file__ = filename
    source = _decoded(content, filename)
    # Without a modification time linecache keeps it and never looks for a file.
    linecache.cache[filename] = (len(content), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec", dont_inherit=True)
    sys.modules[ENTRY] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        sys.modules.pop(ENTRY, None)
        raise
    return module


def load_zip(filename: str, content: bytes) -> ModuleType:
    """Imports `main` from a zip, which stays importable. What it raises goes through."""
    importer = ZipImporter(filename, content)
    importer.refuse_hidden_names()
    if importer.find_spec(ENTRY) is None:
        raise OperatorError(
            f"{filename} has no main.py at its top (but {', '.join(sorted(importer.top_level())[:8]) or 'nothing'}); "
            "the module that defines the Operator must be main.py or main/__init__.py"
        )
    sys.meta_path.append(importer)
    try:
        return importlib.import_module(ENTRY)
    except BaseException:
        importer.withdraw()
        raise


def _decoded(content: bytes, filename: str) -> str:
    """Python's own rule for source: UTF-8, or what the coding line says."""
    try:
        return importlib.util.decode_source(content)
    except (UnicodeDecodeError, LookupError, SyntaxError) as exc:
        raise OperatorError(f"{filename} is no Python source: {exc}") from None


class ZipImporter:
    """Finds and loads modules in a zip that is held in memory."""

    def __init__(self, filename: str, content: bytes) -> None:
        self.filename = filename
        self._zip = _opened(filename, content)
        self._names = frozenset(self._zip.namelist())
        self._folders = _folders(self._names)

    # ---- what is in it

    def top_level(self) -> set[str]:
        return {name.split("/")[0] for name in self._names}

    def refuse_hidden_names(self) -> None:
        """Raises `OperatorError` for a module that the standard library would hide."""
        for name in sorted(self.top_level()):
            module = name.removesuffix(".py")
            if self._where(module) is None or module not in sys.stdlib_module_names:
                continue
            if importlib.util.find_spec(module) is not None:
                raise OperatorError(
                    f"{name} in {self.filename} could never be imported: Python's own module {module!r} comes "
                    "first; rename it"
                )

    def withdraw(self) -> None:
        """Forgets everything that came from this zip."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                del sys.modules[name]

    def _where(self, module: str) -> tuple[str, bool] | None:
        """The file of a module and whether it is a package; None if the zip has neither."""
        path = module.replace(".", "/")
        if f"{path}/__init__.py" in self._names:
            return f"{path}/__init__.py", True
        if f"{path}.py" in self._names:
            return f"{path}.py", False
        return None

    # ---- importlib's protocols

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = self._where(fullname)
        folder = fullname.replace(".", "/")
        if found is not None:
            file, is_package = found
            spec = ModuleSpec(fullname, self, origin=f"{self.filename}/{file}", is_package=is_package)  # type: ignore[arg-type]
            spec.has_location = True
            if is_package:
                spec.submodule_search_locations = [f"{self.filename}/{folder}"]
            return spec
        self._refuse_native(fullname, folder)
        if folder in self._folders:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [f"{self.filename}/{folder}"]
            return spec
        return None

    def _refuse_native(self, fullname: str, path: str) -> None:
        for name in self._names:
            if name.startswith(f"{path}.") and name.endswith(_NATIVE):
                raise ImportError(
                    f"{fullname} is a native extension ({name} in {self.filename}): a guest runs pure Python only",
                    name=fullname,
                )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)

    def is_package(self, fullname: str) -> bool:
        return self._must_find(fullname)[1]

    def get_filename(self, fullname: str) -> str:
        return f"{self.filename}/{self._must_find(fullname)[0]}"

    def get_source(self, fullname: str) -> str:
        return _decoded(self._zip.read(self._must_find(fullname)[0]), self.get_filename(fullname))

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), self.get_filename(fullname), "exec", dont_inherit=True)

    def get_data(self, path: str) -> bytes:
        """A file by its path as modules see it (`__file__` and beside it). Raises `OSError` if there is none."""
        name = path.removeprefix(f"{self.filename}/")
        if name not in self._names:
            raise FileNotFoundError(f"{path} is not in {self.filename}")
        return self._zip.read(name)

    def get_resource_reader(self, fullname: str) -> "_Resources":
        import zipfile

        return _Resources(zipfile.Path(self._zip, self._must_find(fullname)[0].rpartition("/")[0] + "/"))

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        """`importlib.metadata`: packages ask for their own version."""
        import zipfile
        from importlib.metadata import PathDistribution

        wanted = getattr(context, "name", None)
        for name in sorted(self.top_level()):
            project, dot, suffix = name.rpartition(".")
            if not dot or suffix not in ("dist-info", "egg-info"):
                continue
            if wanted is None or _normal(project.split("-")[0]) == _normal(wanted):
                yield PathDistribution(zipfile.Path(self._zip, f"{name}/"))

    def _must_find(self, fullname: str) -> tuple[str, bool]:
        found = self._where(fullname)
        if found is None:
            raise ImportError(f"{self.filename} has no module {fullname}", name=fullname)
        return found


class _Resources:
    """`importlib.resources` over a folder of the zip."""

    def __init__(self, folder: "zipfile.Path") -> None:
        self._folder = folder

    def files(self) -> "zipfile.Path":
        return self._folder


def _opened(filename: str, content: bytes) -> "zipfile.ZipFile":
    import io
    import zipfile

    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile as exc:
        raise OperatorError(f"{filename} is no zip archive: {exc}") from None
    size = sum(info.file_size for info in archive.infolist())
    if size > UNPACKED_BYTES_MAX:
        raise OperatorError(f"{filename} unpacks to {size >> 20} MiB; at most {UNPACKED_BYTES_MAX >> 20} are taken")
    return archive


def _folders(names: Iterable[str]) -> frozenset[str]:
    """Every folder that holds Python, at any depth."""
    folders: set[str] = set()
    for name in names:
        if name.endswith(".py"):
            parts = name.split("/")[:-1]
            folders.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return frozenset(folders)


def _normal(project: str) -> str:
    return project.lower().replace("-", "_").replace(".", "_")
