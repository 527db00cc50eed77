"""What the README and the guides tell a reader to type is typed here, on a devcluster, and has the promised result."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
# A host's state folder belongs to one host: a mesh of whoever runs the tests must not be in the way.
MESH = "walkthrough"


@pytest.fixture
def shell(tmp_path, tmp_path_factory, kubernetes_assets):
    """A reader's terminal: an empty folder, `torpor`, `python` and `kubectl` on the path, no mesh running."""
    environment = {
        **os.environ,
        # Short: sockets lie below it.
        "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("r")),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(kubernetes_assets), os.environ["PATH"]]),
    }
    environment.pop("KUBECONFIG", None)
    return Shell(tmp_path, environment)


class Shell:
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.mesh: subprocess.Popen | None = None

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    def run_until(self, command: str, wanted: str) -> None:
        """A cluster takes its moment; what it says in the end counts."""
        deadline = time.monotonic() + PATIENCE_S
        said = ""
        while time.monotonic() < deadline:
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
            said = done.stdout + done.stderr
            if wanted in said:
                return
            time.sleep(0.2)
        raise AssertionError(f"{command}: {wanted!r} was not said, but {said!r}")

    def start(self, command: str, *, cwd: Path) -> None:
        """`torpor run`, until it says that the mesh is up; the kubeconfig it names becomes this shell's."""
        log = self.folder / "mesh.log"
        with log.open("w") as file:
            self.mesh = subprocess.Popen(command.split(), cwd=cwd, env=self.environment, stdout=file, stderr=file)
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"kubectl --kubeconfig (\S+)", log.read_text())):
            assert self.mesh.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.environment["KUBECONFIG"] = found[1]

    def stop(self) -> None:
        if self.mesh is not None:
            self.mesh.send_signal(signal.SIGINT)
            self.mesh.wait(60)


def section(page: Path, title: str) -> list[str]:
    """The fenced blocks without a language under a heading."""
    text = page.read_text().split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in found if not language]


def named(command: str) -> str:
    """The command, for this test's own mesh."""
    return re.sub(r"^torpor (run|ls|describe|logs|explain)\b.*", rf"\g<0> --mesh {MESH}", command.strip())


def commands(block: str) -> list[tuple[str, str]]:
    """(command, comment) a line, exports left out: those are this shell's environment."""
    lines = [line.partition("#") for line in block.splitlines() if line.strip()]
    return [(named(command), comment.strip()) for command, _, comment in lines if not command.startswith("export ")]


def test_the_five_minutes_of_the_readme(shell: Shell) -> None:
    make_and_run, look, change, again = section(ROOT / "README.md", "Your own operator in five minutes")
    (new, _), (run, _) = commands(make_and_run)
    shell.run(new)
    try:
        # From inside of the operator's folder: its operator.py must not be taken for the standard library's.
        assert run.split()[:3] == ["torpor", "run", "greeter"]
        shell.start(run.replace(" greeter ", " ../greeter "), cwd=shell.folder / "greeter")
        for command, _ in commands(look):
            shell.run_until(command, "greeter")
        for command, comment in commands(change):
            if comment.startswith("{"):
                shell.run_until(command, comment)
            elif command.startswith("torpor explain"):
                shell.run_until(command, "default/greeter")
            else:
                shell.run(command)
        (apply, _), *_ = commands(again)
        operator = shell.folder / "greeter" / "operator.py"
        operator.write_text(operator.read_text().replace('"hello "', '"good day "'))
        shell.run(apply)
        shell.run_until("kubectl get configmap greeter-sample -o jsonpath='{.data}'", "good day world")
    finally:
        shell.stop()


def test_the_guide_to_other_languages_with_zig(shell: Shell) -> None:
    page = (ROOT / "docs" / "guides" / "other-languages.md").read_text()
    for name in ("examples", "sdk"):
        (shell.folder / name).symlink_to(ROOT / name)
    build = re.search(r"<!-- tried: zig -->\n```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    declaration = re.search(r"<!-- tried: yaml -->\n```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert build and declaration
    (shell.folder / "mirror").mkdir()
    shell.run(build[1])
    (shell.folder / "mirror" / "mirror.yaml").write_text(declaration[1])
    run, change = section(ROOT / "docs" / "guides" / "other-languages.md", "Run it")
    try:
        shell.start(named(run), cwd=shell.folder)
        widget, get = change.strip().rsplit("\n", 1)
        shell.run(widget)
        shell.run_until(get, '"value":"hello"')
    finally:
        shell.stop()
