"""The example server answers concurrent requests as the predictor does, and refuses bad ones."""

import importlib.util
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def case(serve):
    choice, model, x = serve.made_up()
    assert not choice.member.deterministic
    return choice, model, x


@pytest.fixture
def server(serve, case):
    choice, model, _ = case
    found = serve.PooledServer(("127.0.0.1", 0), serve.Service(choice, model, workers=4))
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def url(server, path="/predict"):
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_concurrent_answers_are_those_of_the_predictor(serve, case, server):
    choice, model, x = case
    parts = x[:120].split(5)
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda some: serve.post(url(server), some.tolist()), parts))
    expected = choice.predictor(model).uncertainty(x[:120])
    found = torch.cat([torch.tensor(answer["probabilities"]) for answer in answers])
    torch.testing.assert_close(found, expected.log_probs.exp(), rtol=1e-4, atol=1e-5)
    for name in serve.SHOWN:
        values = torch.cat([torch.tensor(answer["uncertainty"][name]) for answer in answers])
        torch.testing.assert_close(values, getattr(expected, name), rtol=1e-3, atol=1e-5)
        assert all(len(answer["errors"][name]) == 5 for answer in answers)
    assert [c for answer in answers for c in answer["classes"]] == found.argmax(-1).tolist()


def test_requests_are_answered_at_the_same_time(serve, case, server, monkeypatch):
    together, answer = threading.Barrier(4), server.service.answer

    def waiting(request):
        together.wait(timeout=30)  # breaks unless four requests are here at once
        return answer(request)

    monkeypatch.setattr(server.service, "answer", waiting)
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda _: serve.post(url(server), case[2][:2].tolist()), range(4)))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/predict", b"", 400),
        ("/predict", b"no json", 400),
        ("/predict", b'{"input": 1}', 400),
        ("/predict", b'{"inputs": [[1, 2]]}', 400),
        ("/predict", b'{"inputs": [["a"]]}', 400),
        ("/predict", b'{"inputs": [[NaN]]}', 400),
        ("/elsewhere", b"{}", 404),
    ],
)
def test_bad_requests_get_a_reason_and_the_server_goes_on(serve, case, server, path, body, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url(server, path), body, method="POST"))
    with refused.value as answer:
        assert answer.code == status and json.load(answer)["error"]
    assert len(serve.post(url(server), case[2][:1].tolist())["classes"]) == 1
    with urllib.request.urlopen(url(server, "/")) as answer:
        assert json.load(answer)["workers"] == 4
