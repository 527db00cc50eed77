"""The commands and their flags; what they do is in the modules they call."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from torpor_cli.errors import CommandFailed
from torpor_cli.output import Format, print_json

app = App(
    name="torpor",
    help="Run hundreds of Kubernetes operators as Wasm guests that cost nothing while they sleep.",
    version="0.1.0",
)

MeshName = Annotated[str, Parameter(name=["--mesh"], help="Name of the mesh, where several run on this machine.")]
Output = Annotated[Format, Parameter(name=["--output", "-o"], help="table or json.")]
Kubeconfig = Annotated[
    Path | None, Parameter(name=["--kubeconfig"], help="Default: KUBECONFIG, the pod, ~/.kube/config.")
]
Context = Annotated[str, Parameter(name=["--context"], help="Context of the kubeconfig.")]
Devcluster = Annotated[bool, Parameter(name=["--devcluster"], negative="", help="Run against an in-memory cluster.")]
NoScheduler = Annotated[bool, Parameter(name=["--no-scheduler"], negative="", help="Hosts decide alone.")]
Runtime = Annotated[Path | None, Parameter(name=["--python-runtime"], help="CPython as a core module.")]
Modules = Annotated[Path | None, Parameter(name=["--modules"], help="Folder that spec.module.file is looked up in.")]


@app.command
def up(
    *,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
    devcluster: Devcluster = False,
    modules: Modules = None,
    no_scheduler: NoScheduler = False,
    python_runtime: Runtime = None,
    mesh: MeshName = "default",
) -> None:
    """Start cache, scheduler and host on this machine, until Ctrl-C.

    Example: torpor up --devcluster
    """
    from torpor_cli.up import run_mesh

    _run(run_mesh(_options(kubeconfig, context, devcluster, modules, no_scheduler, python_runtime, mesh), None))


@app.command
def run(
    folder: Path,
    /,
    *,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
    devcluster: Devcluster = False,
    no_scheduler: NoScheduler = False,
    python_runtime: Runtime = None,
    mesh: MeshName = "default",
) -> None:
    """Start the mesh and the operators whose YAML and modules lie in a folder, until Ctrl-C.

    Example: torpor run examples/ttl --devcluster
    """
    from torpor_cli.up import run_mesh

    _run(run_mesh(_options(kubeconfig, context, devcluster, folder, no_scheduler, python_runtime, mesh), folder))


@app.command
def ls(*, mesh: MeshName = "default", output: Output = "table") -> None:
    """List the operators.

    Example: torpor ls -o json
    """
    from torpor_cli import inspect_commands

    _run(inspect_commands.ls(mesh, output))


@app.command
def describe(operator: str, /, *, mesh: MeshName = "default", output: Output = "table") -> None:
    """Show all that is known of an operator: NAME, or NAMESPACE/NAME.

    Example: torpor describe databases/database
    """
    from torpor_cli import inspect_commands

    _run(inspect_commands.describe(operator, mesh, output))


@app.command
def top(
    *,
    count: Annotated[int | None, Parameter(help="Refreshes before it ends, 1 or more; default: until Ctrl-C.")] = None,
    mesh: MeshName = "default",
    output: Output = "table",
) -> None:
    """Watch the operators live: phase, last and next event, wakes, wake latency, memory.

    Example: torpor top
    """
    from torpor_cli import inspect_commands

    if output == "json":
        _run(inspect_commands.ls(mesh, output))
    else:
        _run(inspect_commands.top(mesh, count=count))


@app.command
def logs(
    operator: str | None = None,
    /,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Go on with new lines.")] = False,
    tail: Annotated[int, Parameter(help="Lines of the past; 0 for all that are kept.")] = 0,
    service: Annotated[str | None, Parameter(help="A service's own log: cache, host, scheduler, devcluster.")] = None,
    mesh: MeshName = "default",
    output: Output = "table",
) -> None:
    """Show the log of an operator, or of all.

    Example: torpor logs databases/database -f
    """
    from torpor_cli import inspect_commands

    _run(inspect_commands.logs(operator, mesh, follow=follow, tail=tail, service=service, output=output))


@app.command
def explain(operator: str, /, *, mesh: MeshName = "default", output: Output = "table") -> None:
    """Say why an operator is in memory or not, and when that will change.

    Example: torpor explain databases/database
    """
    from torpor_cli import inspect_commands

    _run(inspect_commands.explain(operator, mesh, output))


@app.command
def new(
    name: str,
    /,
    *,
    lang: Annotated[str, Parameter(help="python")] = "python",
    folder: Annotated[Path, Parameter(help="Where to make it.")] = Path(),
    output: Output = "table",
) -> None:
    """Make a folder with an operator that runs.

    Example: torpor new greeter --lang python && torpor run greeter --devcluster
    """
    from torpor_cli.new import create

    if lang != "python":
        raise CommandFailed(f"--lang {lang}: only python has a template; for zig, rust and go see examples/mirror")
    written = create(name, folder)
    if output == "json":
        print_json([str(path) for path in written])
        return
    for path in written:
        print(f"wrote {path}")
    print(f"try it: torpor run {written[0].parent} --devcluster")


@app.command(name="install-crds")
def install_crds(*, kubeconfig: Kubeconfig = None, context: Context = "", output: Output = "table") -> None:
    """Install the WasmOperator definition, and the accounts and rights of Torpor's services.

    Example: torpor install-crds --kubeconfig edge.kubeconfig
    """
    from torpor_cli.apply import install

    say = _quiet if output == "json" else print
    applied = _run(install(kubeconfig, context, say))
    if output == "json":
        print_json(applied)


@app.command
def apply(folder: Path, /, *, kubeconfig: Kubeconfig = None, context: Context = "", output: Output = "table") -> None:
    """Apply the operators of a folder to a cluster, checked first, without starting anything.

    Example: torpor apply examples/ttl --kubeconfig edge.kubeconfig
    """
    from torpor_cli.apply import apply_folder

    applied = _run(apply_folder(folder, kubeconfig, context, _quiet if output == "json" else print))
    if output == "json":
        print_json(applied)


@app.command
def demo(
    *,
    operators: Annotated[int, Parameter(help="How many, of the three examples.")] = 30,
    duration: Annotated[float, Parameter(name=["--seconds"], help="Seconds of load.")] = 60.0,
    output: Output = "table",
) -> None:
    """Show the mesh at work for a minute: an in-memory cluster, 30 operators, real objects.

    Example: torpor demo --operators 60
    """
    from torpor_cli.demo import run_demo

    sys.exit(_run(run_demo(operators, duration, output)))


def _options(
    kubeconfig: Path | None,
    context: str,
    devcluster: bool,
    modules: Path | None,
    no_scheduler: bool,
    python_runtime: Path | None,
    name: str,
) -> Any:
    from torpor_cli.mesh import MeshOptions, find_python_runtime

    if devcluster and kubeconfig:
        raise CommandFailed("--devcluster and --kubeconfig exclude each other")
    if modules is not None and not modules.is_dir():
        raise CommandFailed(f"{modules} is not a folder")
    return MeshOptions(
        name=name,
        kubeconfig=kubeconfig,
        context=context,
        devcluster=devcluster,
        scheduler=not no_scheduler,
        modules=modules,
        python_runtime=find_python_runtime(python_runtime),
    )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs it; SIGTERM and Ctrl-C cancel it, so that everything it started is stopped."""

    async def cancellable() -> Any:
        task = asyncio.current_task()
        assert task
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(130)


def _quiet(_: str) -> None:
    """Progress is not shown where the output is JSON."""


def _add_entry_points() -> None:
    """Commands of other distributions: entry points `torpor.commands`, each a `main(argv) -> int`."""
    for entry in entry_points(group="torpor.commands"):
        app.command(_passthrough(entry))


def _passthrough(entry: EntryPoint) -> App:
    """A command that hands all its arguments on, `--help` too."""
    command = App(name=entry.name, help=f"See: torpor {entry.name} --help", help_flags=[], version_flags=[])

    @command.default
    def call(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        sys.exit(entry.load()(list(arguments)))

    return command


_add_entry_points()
