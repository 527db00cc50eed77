"""Reading a folder of operators: order, and errors that name file and problem."""

import json
from pathlib import Path

import pytest
from torpor_cli.errors import CommandFailed
from torpor_cli.manifests import read_file, read_folder, torpor_objects
from torpor_cli.new import create

OPERATOR = """
apiVersion: torpor.dev/v1alpha1
kind: WasmOperator
metadata: {name: a}
spec:
  module: {file: a.py}
  serviceAccountName: a
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_others_stand_on_comes_first(tmp_path):
    written(tmp_path, "a.yaml", OPERATOR + "---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: a}\n")
    written(tmp_path, "b.yml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: n}\n")
    assert [obj["kind"] for obj in read_folder(tmp_path)] == ["Namespace", "ServiceAccount", "WasmOperator"]


def test_samples_are_left_alone_and_lists_are_taken_apart(tmp_path):
    written(tmp_path, "sample.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n")
    items = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in "ab"]
    written(tmp_path, "list.yaml", json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    assert [obj["metadata"]["name"] for obj in read_folder(tmp_path)] == ["a", "b"]


def test_an_operator_without_a_namespace_is_in_default(tmp_path):
    (operator,) = read_file(written(tmp_path, "a.yaml", OPERATOR))
    assert operator["metadata"]["namespace"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- 1", "no Kubernetes object"),
        ("kind: Secret", "Secret: apiVersion and metadata.name are needed"),
        (OPERATOR.replace("module:", "modul:"), "spec.modul: unknown field"),
        (OPERATOR.replace("serviceAccountName: a", "concurrency: many"), "spec.serviceAccountName: is missing"),
        ("a: &a [*a]", "no Kubernetes object"),
        ("\x00", "cannot be read as YAML"),
        ("[" * 5000, "cannot be read as YAML"),
        ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_problem(tmp_path, text, says):
    path = written(tmp_path, "bad.yaml", text)
    with pytest.raises(CommandFailed) as refused:
        read_folder(tmp_path)
    assert str(path) in str(refused.value) and says in str(refused.value)


def test_an_empty_folder_and_no_folder_are_said(tmp_path):
    with pytest.raises(CommandFailed, match=r"holds no \.yaml file"):
        read_folder(tmp_path)
    with pytest.raises(CommandFailed, match="is not a folder"):
        read_folder(tmp_path / "none")


def test_torpors_own_objects_begin_with_the_namespace_and_the_definition():
    kinds = [obj["kind"] for obj in torpor_objects()]
    assert kinds[:2] == ["Namespace", "CustomResourceDefinition"] and "ClusterRoleBinding" in kinds


def test_the_template_is_a_folder_that_can_be_run(tmp_path):
    create("greeter", tmp_path)
    kinds = [obj["kind"] for obj in read_folder(tmp_path / "greeter")]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "WasmOperator"]
    compile((tmp_path / "greeter" / "operator.py").read_text(), "operator.py", "exec")


@pytest.mark.parametrize("name", ["", "Upper", "../x", "a/b", "-a", "a" * 60])
def test_a_name_that_kubernetes_would_refuse_is_refused(tmp_path, name):
    with pytest.raises(CommandFailed, match="is not a name"):
        create(name, tmp_path)


def test_an_existing_folder_is_not_written_to(tmp_path):
    create("greeter", tmp_path)
    with pytest.raises(CommandFailed, match="exists already"):
        create("greeter", tmp_path)


def test_a_module_file_of_the_folder_is_named_with_its_hash(tmp_path):
    from torpor_cli.apply import _pinned_objects

    written(tmp_path, "a.yaml", OPERATOR)
    assert "sha256" not in _pinned_objects(tmp_path)[0]["spec"]["module"]
    written(tmp_path, "a.py", "x = 1")
    first = _pinned_objects(tmp_path)[0]["spec"]["module"]["sha256"]
    written(tmp_path, "a.py", "x = 2")
    assert first != _pinned_objects(tmp_path)[0]["spec"]["module"]["sha256"]
