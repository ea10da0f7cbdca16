"""The probe of the model hub."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from quantkit.hub import hub_problem
from tests.network import HUB_ANSWER_SECONDS, cut_network


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(405)

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's stderr clean."""


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a local server that refuses HEAD."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Refusing) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_any_answer_counts_as_reachable(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert hub_problem() is None


def test_hanging_network_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_network(monkeypatch)
    started = time.perf_counter()
    assert hub_problem() == "the hub (https://hub.invalid) cannot be reached"
    assert time.perf_counter() - started < HUB_ANSWER_SECONDS


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_arguments, **_options: pytest.fail("asked the network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_problem() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize("endpoint", ["garbage", "http://", "http://[", "file:///etc"])
def test_an_endpoint_that_is_no_address_is_out_of_reach(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert hub_problem() == f"the hub ({endpoint}) cannot be reached"
    assert capfd.readouterr().err == ""
