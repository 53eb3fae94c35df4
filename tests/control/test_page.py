"""The viewer and the MCP server control live runs only where that was allowed, and only for those who may."""

import anyio
import numpy as np
import pytest
from starlette.testclient import TestClient

import tensortap as tt
from tensortap.view.agent.server import server
from tensortap.view.api.service import Api
from tensortap.view.server.app import app_for
from tensortap.view.server.control import PATH, PageControl
from tensortap.view.server.launch import view

HOST = "http://127.0.0.1:6160"


@pytest.fixture
def live(tmp_path):
    """A live run, `exp1`, that waits at a step; the folder and the tap."""
    with tt.watch(to=tmp_path / "runs" / "exp1") as tap:
        tt.tap(np.ones(3), "x")
        tap.step()
        yield tmp_path / "runs", tap


def clients(folder):
    """A page without control, one with it, and the token."""
    api = Api(str(folder))
    control = PageControl(api.found.where)
    made = [TestClient(app_for(api, control=each), base_url=HOST) for each in (None, control)]
    return *made, control.token, api


def test_the_page_controls_where_it_may(live):
    """A POST with the token from the same origin acts; any other, and any without --control, is refused."""
    folder, tap = live
    reading, controlling, token, api = clients(folder)
    good = {"origin": HOST, "x-tensortap-token": token}
    note = {"run": "exp1", "action": "note", "text": "from the page", "wait": 0}
    assert reading.post(PATH, json=note, headers=good).status_code == 405
    assert reading.get(PATH, headers=good).status_code == 404
    other = {"origin": "http://evil.example"}
    wrong = [{}, {"origin": HOST}, {"x-tensortap-token": token}, {**good, "x-tensortap-token": token[:-1]}]
    wrong += [{**good, **other}, {**good, "host": "evil.example"}, {**good, "sec-fetch-site": "cross-site"}]
    for bad in wrong:
        assert controlling.post(PATH, json=note, headers=bad).status_code == 403, bad
    assert controlling.post("/api/runs", json=note, headers=good).status_code == 403
    assert controlling.delete(PATH, headers=good).status_code == 405
    assert controlling.get(PATH).status_code == 403
    assert controlling.post(PATH, json=[1], headers=good).status_code == 400
    assert controlling.post(PATH, content=b"x" * 70_000, headers=good).status_code == 413
    assert controlling.post(PATH, json={**note, "run": "../exp1"}, headers=good).status_code == 409
    assert controlling.post(PATH, json={**note, "action": "x"}, headers=good).status_code == 409
    status = controlling.get(PATH, params={"run": "exp1"}, headers=good).json()
    assert status["live"] and status["answers"][0]["state"] == "recording"
    assert controlling.post(PATH, json=note, headers=good).json()["answers"][0]["waiting"]
    tap.step()
    assert [e["name"] for e in tap.run.events().to_pylist()] == ["note"]
    api.close()


def test_the_page_controls_this_machine_only(live):
    """--control is refused beside a --host that others can reach."""
    with pytest.raises(tt.TensortapError, match="this machine only"):
        view(str(live[0]), host="0.0.0.0", control=True)


def test_agents_control_where_they_may(live):
    """The MCP server has the tools of control with --control only."""
    folder, _ = live

    async def names(made):
        return {tool.name for tool in await made.list_tools()}

    assert "capture" not in anyio.run(names, server(str(folder)))
    assert {"capture", "pause", "resume", "note", "status"} <= anyio.run(names, server(str(folder), control=True))
