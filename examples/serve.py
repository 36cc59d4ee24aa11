"""
Serve a choice over HTTP
========================

Answer HTTP requests with probabilities and their uncertainty, several at a time.

::

    python examples/serve.py                                  # shows requests and answers, and ends
    python examples/serve.py --run runs/digits-mlp --port 8000
    curl -d '{"inputs": [[0, 0.5, ...]]}' localhost:8000/predict

The server is that of Python's standard library with a pool of threads. A predictor needs its model
for itself during a call, so each thread of the pool has a copy of the model. Put a server that
knows TLS, time limits and access rights in front of it before anybody else can reach it.
"""

import argparse
import copy
import json
import queue
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import afterdrop as ad

MOST_BYTES = 2**24  # of a request
SHOWN = ("confidence", "predictive_entropy", "expected_entropy", "disagreement")


class Service:
    """Answers requests with a choice: one copy of the model for each worker.

    Args:
        choice: How to predict.
        model: The model that it was made for.
        workers: Requests that are answered at the same time.
    """

    def __init__(self, choice: ad.Choice, model: nn.Module, workers: int) -> None:
        self.choice, self.workers = choice, workers
        self._free: queue.SimpleQueue[ad.Predictor] = queue.SimpleQueue()
        for _ in range(workers):
            predictor = choice.predictor(copy.deepcopy(model))
            if not isinstance(predictor, ad.Predictor):
                raise ValueError(f"a {type(predictor).__name__} cannot be served here")
            self._free.put(predictor)

    def answer(self, request: Any) -> dict[str, Any]:
        """The answer to {"inputs": [one list of numbers per example]}."""
        if not isinstance(request, dict) or "inputs" not in request:
            raise ValueError('a request is {"inputs": [one list of numbers per example]}')
        inputs = torch.tensor(request["inputs"], dtype=torch.float32)
        if not inputs.isfinite().all():
            raise ValueError("inputs must be finite numbers")
        predictor = self._free.get()
        try:
            found = predictor.uncertainty(inputs)
        finally:
            self._free.put(predictor)
        log_probs = found.log_probs
        return {
            "classes": log_probs.argmax(-1).tolist(),
            "probabilities": log_probs.exp().tolist(),
            "uncertainty": {name: getattr(found, name).tolist() for name in SHOWN},
            "errors": {name: getattr(found.errors, name).tolist() for name in SHOWN},
        }

    def about(self) -> dict[str, Any]:
        """What predicts here."""
        samples = 1 if self.choice.member.deterministic else self.choice.num_samples
        return {"member": str(self.choice.member), "samples": samples, "workers": self.workers}


class Handler(BaseHTTPRequestHandler):
    """POST /predict, and GET / for what predicts here."""

    server: "PooledServer"

    def do_GET(self) -> None:
        """What predicts here."""
        self._send(200, self.server.service.about())

    def do_POST(self) -> None:
        """Predictions, or why there are none."""
        if self.path != "/predict":
            self._send(404, {"error": "there is nothing but POST /predict and GET /"})
            return
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if not 0 < size <= MOST_BYTES:
                raise ValueError(f"give a Content-Length from 1 to {MOST_BYTES} bytes")
            answer = self.server.service.answer(json.loads(self.rfile.read(size)))
        except (ValueError, TypeError, RuntimeError) as error:  # inputs that the model refuses
            self._send(400, {"error": str(error)})
        else:
            self._send(200, answer)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class PooledServer(HTTPServer):
    """An HTTP server whose requests wait for a thread of a pool."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        super().__init__(address, Handler)
        self.service, self._pool = service, ThreadPoolExecutor(service.workers)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands a request to the pool."""
        self._pool.submit(self._process, request, client_address)

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # the client is gone
            pass
        finally:
            self.shutdown_request(request)

    def server_close(self) -> None:
        """Ends the pool, too."""
        super().server_close()
        self._pool.shutdown()


def post(url: str, inputs: list[list[float]]) -> dict[str, Any]:
    """The answer of a server."""
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return json.load(answer)


def made_up() -> tuple[ad.Choice, nn.Module, torch.Tensor]:
    """A choice on made-up data, as in the quick start, and inputs for it."""
    torch.manual_seed(0)
    centres = torch.randn(4, 10)
    y = torch.randint(4, (600,))
    x = centres[y] + 1.5 * torch.randn(600, 10)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimiser.zero_grad()
        cross_entropy(model(x[:100]), y[:100]).backward()
        optimiser.step()
    scores = ad.evaluate(model, [(x[100:], y[100:])], num_samples=32)
    return ad.select(scores), model.eval(), x


def show(service: Service, x: torch.Tensor) -> None:
    """Starts a server, asks it eight times at once, prints an answer, and stops it."""
    server = PooledServer(("127.0.0.1", 0), service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/predict"
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda some: post(url, some.tolist()), x[:16].split(2)))
    server.shutdown()
    server.server_close()
    print(f"{service.about()}\n{len(answers)} answers to requests at the same time. The first:")
    first, errors = answers[0]["uncertainty"], answers[0]["errors"]
    print(f"classes               {answers[0]['classes']}")
    for name in SHOWN:
        shown = ", ".join(f"{v:.3f} ± {e:.3f}" for v, e in zip(first[name], errors[name]))
        print(f"{name:<20}  {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a choice over HTTP.")
    parser.add_argument("--run", type=Path, help="a run with a choice; without it, a demonstration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.run is None:
        choice, model, x = made_up()
        show(Service(choice, model, options.workers), x)
        return
    run = ad.Run.open(options.run)
    service = Service(run.choice, run.model(), options.workers)
    print(f"http://{options.host}:{options.port}/predict: {service.about()}")
    PooledServer((options.host, options.port), service).serve_forever()


if __name__ == "__main__":
    main()
