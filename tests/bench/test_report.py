"""The shape of what is written, which other programs read."""

import json

from torpor_bench.figures import Figures
from torpor_bench.machine import machine, versions
from torpor_bench.report import Report


def report(**values):
    figures = Figures()
    for key, value in values.items():
        figures.add(key, value, samples=7)
    return Report("wake", True, {"cores": 2}, {"python": "3"}, figures)


def test_a_report_has_the_six_fields_of_its_shape():
    content = json.loads(report(python_p50_ms=0.5).to_json())
    assert content == {
        "name": "wake",
        "quick": True,
        "machine": {"cores": 2},
        "versions": {"python": "3"},
        "figures": {"python_p50_ms": 0.5},
        "samples": {"python_p50_ms": 7},
    }


def test_notes_are_added_only_where_there_are_some():
    with_note = report()
    with_note.figures.note("without a scheduler")
    assert json.loads(with_note.to_json())["notes"] == ["without a scheduler"]


def test_the_table_says_which_aims_are_met_either_way_round():
    lines = list(report(python_p50_ms=1.5, reconciles_per_s_drain=2600.0, path_p50_ms=9.0).table())
    assert ["MISSED" in line for line in lines] == [True, False, False]
    assert ["met" in line for line in lines] == [False, True, False]


def test_it_is_written_under_its_name(tmp_path):
    path = report(python_p50_ms=0.5).write(tmp_path / "out")
    assert path.name == "wake.json"
    assert json.loads(path.read_text())["name"] == "wake"


def test_machine_and_versions_say_what_was_measured_on():
    assert machine().keys() >= {"processor", "cores", "cores_worth", "memory_mb", "kernel", "load_1m"}
    assert machine()["memory_mb"] > 0
    assert versions().keys() >= {"python", "torpor", "grpcio", "wasmtime"}
