"""Whether the model hub can be asked, decided within two seconds and before anything heavy is imported."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request

PROBE_SECONDS = 1.2


def hub_problem() -> str | None:
    """Why the Hugging Face hub cannot be used now, or None if it answers.

    Honours HF_HUB_OFFLINE, HF_ENDPOINT and the proxy variables. Takes at most PROBE_SECONDS: name resolution
    ignores socket time-outs, so the probe runs in a thread that is left behind when it does not come back.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: list[bool] = []
    probe = threading.Thread(target=lambda: answers.append(_answers(constants.ENDPOINT)), daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    return None if answers == [True] else f"the hub ({constants.ENDPOINT}) cannot be reached"


def _answers(endpoint: str) -> bool:
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # it answered, if only to refuse a HEAD
    except (OSError, http.client.HTTPException, ValueError):
        return False
