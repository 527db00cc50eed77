"""Operators of several files and libraries: a zip of pure Python, imported from memory."""

import io
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
from torpor_sdk import OperatorError, _frames, _guest

MAIN = """
from torpor_sdk import Operator
from shoplib import naming

op = Operator(for_="v1/pods")

@op.reconcile
def reconcile(request, kube):
    raise ValueError(naming.of(request.name))
"""
NAMING = "def of(name):\n    return f'db-{name}'\n"


def zipped(files: dict[str, str | bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def clean(host: Any) -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("shoplib", "yamlish", "broken")]:
        del sys.modules[name]


def load(files: dict[str, str | bytes]) -> None:
    _guest.load("zip", "operator.zip", zipped(files))


def error_of_a_reconcile() -> str:
    return _frames.decode(_guest.reconcile(_frames.encode("a", "b")))[2].decode()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_main_imports_its_neighbours(compression: int) -> None:
    files: dict[str, str | bytes] = {"main.py": MAIN, "shoplib/__init__.py": "", "shoplib/naming.py": NAMING}
    _guest.load("zip", "operator.zip", zipped(files, compression))
    assert error_of_a_reconcile().endswith("ValueError: db-b")


def test_main_may_be_a_package() -> None:
    load({"main/__init__.py": MAIN.replace("from shoplib", "from ."), "main/naming.py": NAMING})
    assert error_of_a_reconcile().endswith("ValueError: db-b")


def test_a_folder_without_init_is_a_namespace_package() -> None:
    load({"main.py": MAIN, "shoplib/naming.py": NAMING})
    assert error_of_a_reconcile().endswith("ValueError: db-b")


def test_tracebacks_show_lines_from_inside_the_zip() -> None:
    load({"main.py": MAIN, "shoplib/naming.py": "def of(name):\n    return name.nothing  # here\n"})
    message = error_of_a_reconcile()
    assert 'File "operator.zip/main.py", line 9, in reconcile' in message
    assert 'File "operator.zip/shoplib/naming.py", line 2, in of' in message
    assert "return name.nothing  # here" in message


def test_an_import_that_comes_late_still_finds_the_zip() -> None:
    late = MAIN.replace("from shoplib import naming\n", "").replace(
        "    raise", "    from shoplib import naming\n    raise"
    )
    load({"main.py": late, "shoplib/naming.py": NAMING})
    assert error_of_a_reconcile().endswith("ValueError: db-b")


def test_files_beside_the_code_are_resources() -> None:
    library = (
        "import pkgutil\nfrom importlib.resources import files\n"
        "def of(name): return files(__package__).joinpath('data/greeting.txt').read_text() + "
        "pkgutil.get_data(__package__, 'data/greeting.txt').decode()"
    )
    load({"main.py": MAIN, "shoplib/__init__.py": "", "shoplib/naming.py": library, "shoplib/data/greeting.txt": "hi"})
    assert error_of_a_reconcile().endswith("ValueError: hihi")


def test_a_library_finds_its_own_version() -> None:
    library = "from importlib.metadata import version\ndef of(name): return version('yaml-ish')"
    metadata = "Metadata-Version: 2.1\nName: yaml-ish\nVersion: 4.5\n"
    load({"main.py": MAIN, "shoplib/naming.py": library, "yaml_ish-4.5.dist-info/METADATA": metadata})
    assert error_of_a_reconcile().endswith("ValueError: 4.5")


def test_a_native_extension_is_an_import_error_that_says_so() -> None:
    with pytest.raises(ImportError, match=r"shoplib._fast is a native extension \(shoplib/_fast.cpython-313.so"):
        load({"main.py": "import shoplib._fast", "shoplib/__init__.py": "", "shoplib/_fast.cpython-313.so": b"\x7fELF"})


def test_an_optional_native_extension_is_done_without() -> None:
    library = "try:\n    from . import _fast\nexcept ImportError:\n    _fast = None\ndef of(name): return _fast"
    load({"main.py": MAIN, "shoplib/__init__.py": "", "shoplib/naming.py": library, "shoplib/_fast.so": b"\x7fELF"})
    assert error_of_a_reconcile().endswith("ValueError: None")


def test_a_module_that_the_standard_library_would_hide_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"operator.py in operator.zip could never be imported.*rename it"):
        load({"main.py": MAIN, "shoplib/naming.py": NAMING, "operator.py": ""})


def test_a_zip_without_main_is_refused_with_what_it_has() -> None:
    with pytest.raises(OperatorError, match=r"no main.py at its top \(but myoperator\)"):
        load({"myoperator/main.py": MAIN})


def test_what_is_no_zip_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"operator.zip is no zip archive"):
        _guest.load("zip", "operator.zip", b"PK\x03\x04 not really")


def test_a_zip_that_would_fill_the_memory_is_refused_unread() -> None:
    with pytest.raises(OperatorError, match="unpacks to 65 MiB"):
        load({"main.py": MAIN, "zeros": bytes(65 << 20)})


def test_the_sdk_in_a_zip_does_not_replace_the_runtimes_own() -> None:
    load({"main.py": MAIN, "shoplib/naming.py": NAMING, "torpor_sdk/__init__.py": "raise SystemExit"})
    assert error_of_a_reconcile().endswith("ValueError: db-b")


def test_a_zip_that_fails_leaves_nothing_behind() -> None:
    finders = len(sys.meta_path)
    with pytest.raises(ZeroDivisionError):
        load({"main.py": "import shoplib.naming\n1 / 0", "shoplib/naming.py": NAMING})
    assert len(sys.meta_path) == finders
    assert "main" not in sys.modules
    assert "shoplib.naming" not in sys.modules
