"""`torpor logs --service`: what is shown of a file that a service writes."""

import asyncio
import json

import pytest
from torpor_cli.errors import CommandFailed
from torpor_cli.rundir import RunDir
from torpor_cli.service_logs import service_log

LINES = '{"level": "info", "message": "began"}\nno JSON\n'


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = RunDir.named("test")
    run_dir.create()
    path = run_dir.logs / "host.log"
    path.write_text(LINES)
    return path


async def show(**options):
    await service_log("test", "host", **{"follow": False, "tail": 0, "output": "table", **options})


async def test_lines_are_shown_as_they_were_written(log, capsys):
    await show()
    assert capsys.readouterr().out == LINES
    await show(tail=1)
    assert capsys.readouterr().out == "no JSON\n"


async def test_as_json_each_line_names_its_service(log, capsys):
    await show(output="json", tail=2)
    decoder, text = json.JSONDecoder(), capsys.readouterr().out
    first, end = decoder.raw_decode(text)
    second, _ = decoder.raw_decode(text[end:].lstrip())
    assert first == {"service": "host", "level": "info", "message": "began"}
    assert second == {"service": "host", "text": "no JSON"}


async def test_followed_it_goes_on_with_whole_new_lines_also_in_a_file_begun_anew(log, capsys):
    shown = ""

    async def until(expected):
        nonlocal shown
        async with asyncio.timeout(10):
            while shown != expected:
                shown += capsys.readouterr().out
                await asyncio.sleep(0.01)

    task = asyncio.create_task(show(follow=True, tail=1))
    try:
        await until("no JSON\n")
        with log.open("a") as file:
            file.write("more\nha")
        await until("no JSON\nmore\n")
        with log.open("a") as file:
            file.write("lf\n")
        await until("no JSON\nmore\nhalf\n")
        log.write_text("anew\n")
        await until("no JSON\nmore\nhalf\nanew\n")
    finally:
        task.cancel()


async def test_a_name_is_one_of_the_services(log):
    with pytest.raises(CommandFailed, match="is none of cache"):
        await service_log("test", "../host", follow=False, tail=0, output="table")
