"""The viewer's server: who may ask, what may be asked for, and what it says when it cannot answer."""

import http.client
import json
import os
import socket
import threading

import numpy as np
import pytest

import tensortap as tt
from tensortap.store.names import RUN_JSON
from tensortap.view.server.app import hosts_for

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


@pytest.fixture
def client(make_run, serve, tmp_path):
    """One run, `exp1`, in a folder of runs."""
    make_run([({"a": X, "b": X * 2}, {"loss": 1.0})], name="runs/exp1")
    return serve(tmp_path / "runs")


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}"])
def test_this_machine_is_served_under_its_own_names(client, host):
    """A Host header that means this machine is answered."""
    assert client.get("/api/runs", Host=host.format(port=client.port)).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "0.0.0.0", "127.0.0.1@evil"]
)
def test_other_host_names_are_refused(client, host):
    """A page lured here by DNS carries its own name, and gets nothing."""
    answer = client.get("/api/runs", Host=host)
    assert answer.status in (400, 403)
    assert b"exp1" not in answer.body


def test_listening_everywhere_serves_addresses_but_no_strange_names(make_run, serve, tmp_path):
    """With --host 0.0.0.0 the machine answers under its numbers and its own name, and under no name DNS could forge."""
    make_run([({"a": X}, {})])
    client = serve(tmp_path / "run", hosts=hosts_for("0.0.0.0"))
    for host in ("192.168.1.7:6160", "[fe80::1]:6160", "localhost", socket.gethostname()):
        assert (host, client.get("/api/runs", Host=host).status) == (host, 200)
    for host in ("evil.example", "192.168.1.7.evil.example", "*"):
        assert (host, client.get("/api/runs", Host=host).status) == (host, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO"])
def test_nothing_but_get(client, method):
    """No method that could change anything, or ask whether it may, is answered."""
    answer = client.get("/api/runs", method)
    assert answer.status in (400, 405)
    assert b"exp1" not in answer.body


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "http://127.0.0.1:1"}],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(client, headers):
    """Neither a fetch nor an image of another origin gets an answer, and no CORS header invites one."""
    answer = client.get("/api/runs", **headers)
    assert answer.status == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_the_own_page_is_answered(client):
    """The page's own origin may ask."""
    assert client.get("/api/runs", Origin=f"http://127.0.0.1:{client.port}", Sec_Fetch_Site="same-origin").status == 200


NO_FILES = [
    "/../../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/assets/../../launch.py", "/assets",
    "/assets/", "//etc/passwd", "/static/index.html", "/index.html/..", "/run.json", "/exp1/run.json",
    "/\\..\\launch.py",
]  # fmt: skip


def test_no_file_but_the_page(make_run, tmp_path, serve):
    """No path leads to a file outside the page, or to a list of files."""
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("the page")
    (static / "assets" / "a.js").write_text("the script")
    make_run([({"a": X}, {})], name="runs/exp1")
    there = serve(tmp_path / "runs", static)
    assert there.get("/").body == b"the page"
    assert there.get("/assets/a.js").headers["content-type"].startswith("text/javascript")
    for path in NO_FILES:
        answer = there.get(path)
        assert (path, answer.status) == (path, 404)
        assert set(answer.json) == {"error", "hint"}


NO_RUNS = [
    "..", "../..", "../outside", "/", "%2e%2e/outside", "..%2Foutside", "exp1/../../outside", "exp1/", "./exp1",
    "exp1%00", "link", "C:\\",
]  # fmt: skip


@pytest.mark.parametrize("path", ["run", "heat", "site", "tensor", "events", "findings", "cost", "depth", "metrics"])
def test_no_run_outside_the_folder(client, make_run, tmp_path, path):
    """Whatever is given as `run`, only runs that were listed can be asked about."""
    make_run([({"hidden": X}, {})], name="outside")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    for run in NO_RUNS:
        answer = client.get(f"/api/{path}?run={run}&site=hidden%3Aoutput&step=0")
        assert (run, answer.status) == (run, 404)
        assert b"hidden:output" not in answer.body


def test_a_link_inside_a_run_that_leads_out_is_not_followed(client, make_run, tmp_path):
    """A run whose rank folder is a link to elsewhere is refused."""
    make_run([({"hidden": X}, {})], name="outside")
    (tmp_path / "runs" / "fake").mkdir()
    (tmp_path / "runs" / "fake" / RUN_JSON).write_text((tmp_path / "outside" / RUN_JSON).read_text())
    (tmp_path / "runs" / "fake" / "rank=0").symlink_to(tmp_path / "outside" / "rank=0")
    answer = client.get("/api/run?run=fake")
    assert answer.status == 400
    assert "leads out" in answer.json["error"]
    assert [r["state"] for r in client.get("/api/runs").json["runs"]] == ["finished", "unreadable"]


def test_every_answer_forbids_what_the_page_does_not_need(client):
    """Scripts only from here, no framing, no guessing of types, nothing kept of data."""
    for path in ("/api/runs", "/", "/nowhere"):
        headers = client.get(path).headers
        assert "script" not in headers["content-security-policy"].replace("default-src 'self'", "")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/runs").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/heat?stat=sdt", "Did you mean 'std'"),
        ("/api/heat?width=wide", "width must be a whole number, got 'wide'"),
        ("/api/heat?from=x", "from must be a step, got 'x'"),
        ("/api/heat?rows=a:b", "rows must be a range, got 'a:b'"),
        ("/api/heat?sites=zzz", "matches nothing"),
        ("/api/site?site=zzz", "no site 'zzz'"),
        ("/api/site?site=a:output&from=100", "no step was recorded"),
        ("/api/tensor?site=a:output&step=0", "no tensor was kept"),
        ("/api/tensor?site=a:output", "the number of a step"),
        ("/api/diff?a=exp1", "two runs must be named"),
        ("/api/nothing", "there is no 'api/nothing'"),
    ],
)
def test_what_cannot_be_answered_is_explained(client, path, said):
    """A bad request gets a sentence and what to do, never a traceback."""
    answer = client.get(path)
    assert answer.status in (400, 404)
    assert said in answer.json["error"]


def test_an_unbuilt_page_says_how_to_build_it(make_run, serve, tmp_path):
    """Without the page the server still answers, and says what is missing."""
    make_run([({"a": X}, {})])
    answer = serve(tmp_path / "run", tmp_path / "nothing").get("/")
    assert answer.status == 404
    assert "pip install" in answer.json["hint"]


def test_a_broken_run_does_not_hide_the_others(client, tmp_path):
    """What cannot be read is listed as such, with the reason."""
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / RUN_JSON).write_text("{")
    (tmp_path / "runs" / "newer").mkdir()
    (tmp_path / "runs" / "newer" / RUN_JSON).write_text(json.dumps({"schema": 99}))
    found = {run["id"]: run for run in client.get("/api/runs").json["runs"]}
    assert found["exp1"]["state"] == "finished"
    assert found["broken"]["state"] == found["newer"]["state"] == "unreadable"
    assert "schema 99" in found["newer"]["error"]
    assert client.get("/api/run?run=newer").status == 400


def test_a_run_that_vanishes_is_an_answer(client, tmp_path):
    """Deleting the folder under the server gives an error, not a crash."""
    assert client.get("/api/heat?run=exp1").status == 200
    os.rename(tmp_path / "runs" / "exp1", tmp_path / "elsewhere")  # noqa: PTH104
    assert client.get("/api/heat?run=exp1").status == 404
    assert client.get("/api/runs").json["runs"] == []


def events(port, path):
    """The data of server-sent events, one by one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_pages_hear_of_new_steps_while_training_runs(serve, tmp_path):
    """A listener is told of steps, and that the run has finished; a heat map asked for then has them."""
    with tt.watch(to=tmp_path / "live") as tap:
        tt.tap(X, "a")
        tap.step(loss=1.0)
        client = serve(tmp_path / "live")
        heard = events(client.port, "/api/events")
        first = next(heard)
        assert (first["state"], first["steps"]) == ("live", {"count": 1, "last": 0})
        assert client.get("/api/heat?stat=std").columns[1]["value"].shape == (1, 1)
        tt.tap(X, "a")
        tt.tap(X, "later")
        tap.step(loss=0.5)
        second = next(heard)
        assert second["steps"] == {"count": 2, "last": 1} and second["version"] != first["version"]
        header, columns = client.get("/api/heat?stat=std").columns
        assert header["version"] == second["version"]
        assert np.isnan(columns["value"]).tolist() == [[False, False], [True, False]]
        assert client.get("/api/metrics").columns[1]["m0.mean"].tolist() == [1.0, 0.5]
    assert next(heard)["state"] == "finished"
    heard.close()


def test_fifty_at_a_time_all_get_their_answer(bench, serve, tmp_path):
    """Different questions asked by fifty threads at once are all answered, and what is remembered stays bounded."""
    bench.build(tmp_path / "run", 100, 500, folded=False)
    client = serve(tmp_path / "run")
    client.api.grids.limit = 2_000_000
    heats = [f"/api/heat?from={n * 7}&to={n * 9 + 50}&width=200&stat=" for n in range(17)]
    paths = [heat + stat for heat in heats for stat in ("std", "mean", "zeros")]
    paths += ["/api/run", "/api/metrics", "/api/site?site=layers.0.norm%3Aoutput", "/api/depth?width=50"]
    got = {}
    threads = [threading.Thread(target=lambda p=path: got.update({p: client.get(p).status})) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(got.values()) == {200} and len(got) == len(paths)
    assert 0 < client.api.grids.held <= 2_000_000


def test_notes_are_written_by_the_page_itself_alone(client):
    """A POST with tags and a note needs the page's own origin and JSON; another page's changes nothing."""
    body = json.dumps({"run": "exp1", "tags": ["good"], "note": "why"})

    def post(**headers):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        connection.request("POST", "/api/notes", body, headers)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    own = {"Origin": f"http://127.0.0.1:{client.port}", "Content-Type": "application/json"}
    assert post(**{**own, "Origin": "http://evil.example"})[0] == 403
    assert post(**{"Content-Type": "application/json"})[0] == 403
    assert post(**{**own, "Content-Type": "text/plain"})[0] == 403
    assert json.loads(client.get("/api/runs").body)["runs"][0]["tags"] == []
    assert post(**own)[0] == 200
    assert json.loads(client.get("/api/runs").body)["runs"][0]["tags"] == ["good"]
