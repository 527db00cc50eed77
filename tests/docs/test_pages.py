"""The pages say what is true: links lead somewhere, paths exist, messages, commands and settings are the code's."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from torpor_services import crd

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Folders of the checkout: a path in prose that begins with one of these is meant to exist.
FOLDERS = ("bench", "cache", "cli", "devcluster", "docs", "examples", "host", "proto", "scheduler", "sdk", "services",
           "tests", "tools")  # fmt: skip
SOURCES = ("cache", "cli", "devcluster", "host", "scheduler", "sdk/python", "services")


def pages(*, generated: bool = True):
    chosen = [page for page in PAGES if generated or page.parent.name != "reference"]
    return pytest.mark.parametrize("page", chosen, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^( *)```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages()
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = page if not path else (page.parent / path).resolve()
        assert found.exists() and found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


@pages()
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w./~-])((?:{'|'.join(FOLDERS)})/[\w./-]+\w)", page.read_text()))
    # An operator's own folder in an example may be called as one of ours; a file with such an ending may not.
    ours = {".py", ".md", ".rs", ".go", ".zig", ".toml", ".proto", ".wit"}
    assert not [path for path in named if Path(path).suffix in ours and not (ROOT / path).exists()]


@pages(generated=False)
def test_every_page_is_reached_by_a_link(page: Path) -> None:
    if page.name == "README.md" and page.parent == ROOT:
        return
    linked = {
        (other.parent / target.partition("#")[0]).resolve()
        for other in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(other))
        if other != page
    }
    assert page in linked, "no other page leads here"


def test_the_reference_is_what_the_code_says() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_a_stale_reference_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    monkeypatch.setattr(generate, "REFERENCE", tmp_path / "reference")
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    with (tmp_path / "reference" / "settings.md").open("a") as file:
        file.write("by hand\n")
    assert generate.main(["--check"]) == 1
    assert "docs/reference/settings.md" in capsys.readouterr().err


@pages(generated=False)
def test_every_torpor_command_and_make_target_exists(page: Path) -> None:
    from torpor_cli.app import app

    text = page.read_text()
    shown = re.findall(r"(?:^|`|&& |\()torpor ([a-z][a-z-]*)", text, re.MULTILINE)
    # The devcluster's command is an entry point of its own distribution.
    known = {name for name in app if not name.startswith("-")}
    assert set(shown) <= known, set(shown) - known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets


@pages(generated=False)
def test_every_flag_of_torpor_exists(page: Path) -> None:
    from torpor_cli.app import app

    for command, rest in re.findall(r"(?:^|`|&& |\()torpor ([a-z][a-z-]*)([^`\n#|&]*)", page.read_text(), re.MULTILINE):
        if command == "devcluster":
            continue
        names = {name for argument in app[command].assemble_argument_collection() for name in argument.names}
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest)) <= names, f"torpor {command}{rest}"


@pages()
def test_every_torpor_variable_is_one_that_is_read(page: Path) -> None:
    code = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    for variable in re.findall(r"\bTORPOR_[A-Z_]*[A-Z]\b", page.read_text()):
        assert variable in code, variable


@pages(generated=False)
def test_yaml_blocks_are_yaml_and_wasm_operators_have_only_fields_that_there_are(page: Path) -> None:
    for block in re.findall(r"^( *)```yaml\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for obj in yaml.safe_load_all(re.sub(rf"^{block[0]}", "", block[1], flags=re.MULTILINE)):
            if isinstance(obj, dict) and obj.get("kind") == crd.KIND:
                assert crd.violations(obj) == []


@pages(generated=False)
def test_python_blocks_compile(page: Path) -> None:
    for indent, code in re.findall(r"^( *)```python\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        body = "\n".join("    " + line for line in lines)
        compile(f"async def fragment():\n{body}\n    ...\n".replace("test_…", "test_x"), str(page), "exec")


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """What stands between two dots of omission, when it is long enough to be a message, is somewhere in the sources."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    code = "".join(path.read_text() for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # adjacent literals
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and line.count("|") >= 3]
    pieces = [
        piece.strip()
        for row in rows
        for cell in row[1:-2]
        for message in re.findall(r"`([^`]+)`", cell)
        for piece in message.split("…")
        if piece.strip().count(" ") >= 2
    ]
    assert len(pieces) > 25
    examples = ("TORPOR_HOST_WORKERS: 0 is below 1", "Watching False Forbidden", "Watching False NotFound")
    missing = [piece for piece in pieces if piece not in joined and piece not in examples]
    assert not missing


def test_the_picture_is_well_formed_and_has_a_dark_side() -> None:
    picture = (ROOT / "docs" / "mesh.svg").read_text()
    root = ElementTree.fromstring(picture)
    assert root.get("aria-labelledby") == "title desc"
    assert "prefers-color-scheme: dark" in picture
    light, dark = picture.split("@media", 1)
    classes = set(re.findall(r"\.([a-z]+) \{ (?:fill|stroke): #", light))
    assert classes <= set(re.findall(r"\.([a-z]+) \{", dark)), "every coloured class has a dark colour"


@pages()
def test_no_page_names_this_machine_or_a_package_registry(page: Path) -> None:
    assert not re.search(r"/(?:home|root|work)/\w|pypi\.org|proxy\.golang|crates\.io|npmjs", page.read_text())
